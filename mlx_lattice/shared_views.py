"""Views that threads share: one thread at a time builds them, all others read them.

MLX computes an array on a stream of the thread that made it, and another thread cannot
wait for that stream. So a view becomes visible to other threads when it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from threading import RLock, get_ident

from .geometry import sync


class Building:
    """A block in which one thread builds views, and other builders wait.

    Views that the outermost block built are computed together when it ends, and are
    visible to other threads after that. Until then the building thread alone sees them.
    """

    def __init__(self):
        self._lock, self._depth, self._thread = RLock(), 0, 0
        self.open: list[SharedViews] = []

    @property
    def is_here(self) -> bool:
        """Whether this thread is inside the block."""
        return self._thread == get_ident()

    def __enter__(self):
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._thread = get_ident()

    def __exit__(self, error: type | None, *_: object) -> None:
        try:
            if self._depth == 1 and self.open:
                self._finish(error is None)
        finally:
            self._depth -= 1
            if not self._depth:
                self._thread = 0
            self._lock.release()

    def _finish(self, is_built: bool) -> None:
        """Publish the views of the block; after an error forget them."""
        begun, self.open = self.open, []
        is_complete = False
        try:
            if is_built:
                sync.complete([list(views.unpublished.values()) for views in begun])
            is_complete = is_built
        finally:
            for views in begun:
                if is_complete:
                    views.update(views.unpublished)
                views.unpublished.clear()


# One lock for all: views of several managers can be built in one block.
building = Building()


def built_by_one(function: Callable) -> Callable:
    """Wrap a function that builds what threads share: one thread at a time calls it."""

    @wraps(function)
    def build(*args, **kwargs):
        with building:
            return function(*args, **kwargs)

    return build


class SharedViews(dict):
    """Computed views by name. ``find`` also returns those that this thread builds."""

    def __init__(self):
        super().__init__()
        self.unpublished: dict[Hashable, object] = {}

    def find(self, name: Hashable):
        """Return a view, or None."""
        if self.unpublished and building.is_here and name in self.unpublished:
            return self.unpublished[name]
        return self.get(name)

    def build(self, name: Hashable, make: Callable):
        """Return a view, which ``make()`` builds unless another thread has."""
        with building:
            view = self.find(name)
            if view is None:
                view = make()
                self._add(name, view)
            return view

    def add(self, name: Hashable, view: object) -> None:
        """Add a view; other threads see it when it is computed."""
        with building:
            self._add(name, view)

    def _add(self, name: Hashable, view: object) -> None:
        self.unpublished[name] = view
        building.open.append(self)

    def drop(self, name: Hashable) -> None:
        """Remove a view."""
        with building:
            self.unpublished.pop(name, None)
            self.pop(name, None)

    def everything(self) -> list[tuple]:
        """Return (name, view) of all views; the caller is inside ``building``."""
        return list({**self, **self.unpublished}.items())

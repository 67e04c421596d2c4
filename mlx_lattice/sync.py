"""When the device computes: every wait of a relation, and the start of its views."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from threading import RLock, get_ident
from typing import Any, TypeVar

import mlx.core as mx

from .devices import extension

View = TypeVar("View")
Builder = TypeVar("Builder", bound=Callable[..., Any])


_unfollow = getattr(extension, "unfollow", lambda arrays: None)
# Has arrays computed, and waits for nothing.
start_all: Callable[[Sequence[mx.array]], None] = getattr(
    extension, "start", lambda arrays: mx.async_eval(*arrays)
)
# Whether MLX follows this thread's operations: for gradients, vmap or a compilation.
# MLX's Python does not say it; without the extension it may do so at any time.
is_transforming: Callable[[], bool] = getattr(
    extension, "is_transforming", lambda: True
)
_KNOWS = hasattr(extension, "is_differentiating")
# Whether a gradient may be taken: on a GPU MLX says so, by how it plans attention; on a
# CPU any transformation may.
is_differentiating: Callable[[], bool] = getattr(
    extension, "is_differentiating", lambda: True
)


def is_known_to_differentiate() -> bool:
    """Whether the extension is there and says that a gradient may be taken."""
    return _KNOWS and is_differentiating()


class TracedError(ValueError):
    """Values are read of what MLX traces, which has none."""

    def __init__(self):
        super().__init__(
            "which rows there are depends on values (of coordinates, points, masks, "
            "scores or edges) that are not known here: mx.compile, ml.compile or "
            "mx.vmap traces them. Make the tensor outside of the function, and give it "
            "features for its rows, as x.replace(feats) takes them; ml.compile takes "
            "the tensor itself"
        )


def is_of_tracing(error: Exception) -> bool:
    """Whether an error says that what MLX traces was read."""
    # MLX's "[eval] ..." and "[async_eval] ..." have no type of their own.
    return isinstance(error, TracedError) or (
        isinstance(error, (ValueError, RuntimeError)) and "eval] " in str(error)
    )


_process = os.getpid()  # in which MLX computes
PROBE_SECONDS = 10


def _check_fork() -> None:
    """Raise a RuntimeError in a forked process in which MLX hangs or fails.

    A process forked from this one computes a number. It hangs as this one would, until
    an alarm ends it.
    """
    global _process
    probe = os.fork()
    if not probe:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PROBE_SECONDS)
        with suppress(Exception):
            mx.eval(mx.zeros((1,)) + 1)
            os._exit(0)
        os._exit(1)
    if os.waitpid(probe, 0)[1]:
        raise RuntimeError(
            "MLX cannot compute in this process, which was forked from one in which "
            "MLX had computed. Start processes by spawn: "
            "multiprocessing.get_context('spawn'), or for PyTorch "
            "DataLoader(..., multiprocessing_context='spawn')"
        )
    _process = os.getpid()


@contextmanager
def values() -> Iterator[None]:
    """Say what to do if MLX cannot compute what the block reads.

    Raises:
        TracedError: MLX traces the arrays.
        RuntimeError: another thread made the arrays, or this process was forked from
            one in which MLX had computed.
    """
    if _process != os.getpid():
        _check_fork()
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if "There is no Stream" in str(error):
            raise RuntimeError(
                "another thread made these arrays and did not compute them, and MLX "
                "computes an array only in the thread that made it. Call x.eval() on "
                "tensors and mx.eval on arrays in that thread, before another thread "
                "or process gets them"
            ) from error
        if isinstance(error, TracedError) or not is_of_tracing(error):
            raise
        raise TracedError from error


def read(*arrays: mx.array) -> list[Any]:
    """Return arrays as lists of Python values. Waits for the device, once.

    CUDA reads arrays of up to 8 bytes in place, many times faster than larger ones.
    """
    with values():
        mx.eval(*arrays)
    return [array.tolist() for array in arrays]


def compute(arrays: Sequence[mx.array]) -> None:
    """Compute arrays that are cached for later calls, and wait for them.

    MLX follows arrays that a vjp rule makes for ever, unless they are unfollowed.
    """
    with values():
        mx.eval(*arrays)
        # The second time MLX drops what it waited by, which no other thread may do.
        mx.eval(*arrays)
    _unfollow(arrays)


def complete(view: View) -> View:
    """Compute a view that threads will share, wait for it, and return it.

    What depends on what MLX traces is left as it is: one trace uses it.
    """
    arrays = arrays_in(view)
    try:
        compute(arrays)
    except TracedError:
        if len(arrays) > 1:
            for array in arrays:
                complete(array)
    return view


def start(view: object) -> None:
    """Have the arrays of a view computed, and wait for nothing.

    A graph that ``mx.compile`` traces would compute it at every call.
    """
    if arrays := arrays_in(view):
        with suppress(ValueError):  # which MLX raises within a vjp
            start_all(arrays)


def arrays_in(view: object) -> list[mx.array]:
    """Return the arrays of a view: itself, parts of a tuple, or its ``arrays``."""
    if isinstance(view, mx.array):
        return [view]
    if not isinstance(view, (tuple, list)):
        view = getattr(view, "arrays", ())
    arrays = []
    for part in view:
        if type(part) is mx.array:
            arrays.append(part)
        elif type(part) not in (int, bool):
            arrays += arrays_in(part)
    return arrays


class Building:
    """A block in which one thread builds views, and other builders wait.

    Views of the outermost block are computed, then published, when it ends.
    """

    def __init__(self):
        self._lock, self._depth, self._thread = RLock(), 0, 0
        self.open: list[SharedViews] = []

    @property
    def is_here(self) -> bool:
        """Whether this thread is inside the block."""
        return self._thread == get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._thread = get_ident()

    def __exit__(self, error: type[Any] | None, *_: object) -> None:
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
                complete([v for views in begun for v in views.unpublished.values()])
            is_complete = is_built
        finally:
            for views in begun:
                if is_complete:
                    views.update(views.unpublished)
                views.unpublished.clear()


# One lock for all: views of several managers can be built in one block.
building: Building = Building()


def built_by_one(function: Builder) -> Builder:
    """Wrap a function that builds what threads share: one thread at a time calls it."""

    @wraps(function)
    def build(*args, **kwargs) -> Any:
        with building:
            return function(*args, **kwargs)

    return build


class SharedViews(dict[Hashable, Any]):
    """Computed views by name. ``find`` also returns those that this thread builds."""

    def __init__(self):
        super().__init__()
        self.unpublished: dict[Hashable, object] = {}

    def find(self, name: Hashable) -> Any:
        """Return a view, or None."""
        if self.unpublished and building.is_here and name in self.unpublished:
            return self.unpublished[name]
        return self.get(name)

    def build(self, name: Hashable, make: Callable[..., Any]) -> Any:
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
        if not self.unpublished:
            building.open.append(self)
        self.unpublished[name] = view

    def drop(self, name: Hashable) -> None:
        """Remove a view."""
        with building:
            self.unpublished.pop(name, None)
            self.pop(name, None)

    def everything(self) -> list[tuple[Hashable, Any]]:
        """Return (name, view) of all views; the caller is inside ``building``."""
        return list({**self, **self.unpublished}.items())

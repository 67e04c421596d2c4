"""What a relation and its transpose share: sizes, and views that are built once."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType

import mlx.core as mx

from .geometry import sync
from .problem import Problem


class KeptViews:
    """The shared data of a relation and its transpose.

    Args:
        n_in, n_out, volume: sizes of the relation as it was built.
    """

    def __init__(self, n_in: int, n_out: int, volume: int):
        self.n_in, self.n_out, self.volume = n_in, n_out, volume
        self.back: Callable | None = None
        self.family: ReferenceType | None = None
        self.counted: int | None = None if n_in and n_out else 0
        self.views: dict[tuple[str, bool], object] = {}
        self.building = 0  # views, one for another
        # What makes tables again that are held in another form.
        self.again: dict[bool, Callable[[], mx.array]] = {}
        self.held: set[bool] = set()  # tables that routes read
        # What routes read of it, in that order: (of the transpose, view); and the
        # problems that are planned so, but for the rows.
        self.reads: dict[tuple[bool, Callable | None], dict[Problem, None]] = {}

    @property
    def has_table(self) -> bool:
        """Whether the table was made, so that its edges were counted with it."""
        return ("table", False) in self.views or False in self.again

    def make(self, key: tuple[str, bool], build: Callable):
        """Build a view, keep it and start it; with it those that it needs."""
        self.building += 1
        try:
            view = self.views[key] = build()
        finally:
            self.building -= 1
        if not self.building:
            sync.start(view)
        return view

    def release_table(self, swapped: bool, again: Callable[[], mx.array]) -> None:
        """Drop a table that no route holds; ``again()`` makes it."""
        if swapped not in self.held:
            self.again[swapped] = where_it_was_given(again)
            self.views.pop(("table", swapped), None)

    def release(self) -> None:
        """Drop views that hold arrays; they are built again where they are asked for.

        Numbers stay: they are facts that plans depend on.
        """
        kept = {k: v for k, v in self.views.items() if not arrays_in(v)}
        self.views, self.again = kept, {}
        self.held.clear()


def where_it_was_given(made: Callable) -> Callable:
    """Return a function of a backend that runs on the device that is current now.

    Its kernels run there alone, and a view may be asked for on another device.
    """
    device = mx.default_device()

    def run(*given):
        if mx.default_device() == device:
            return made(*given)
        with mx.stream(device):
            return made(*given)

    return run


def arrays_in(view: object) -> list[mx.array]:
    """Return the arrays of a view: itself, or parts of a tuple."""
    parts = view if isinstance(view, (tuple, list)) else (view,)
    return [part for part in parts if isinstance(part, mx.array)]

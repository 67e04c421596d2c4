"""What a relation and its transpose share: the search, sizes, tables and views."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType

import mlx.core as mx

from .backends import registry
from .geometry import edge_lists, lattice, sync
from .geometry.keys import Offsets
from .geometry.protocol import Keep, SearchedRows
from .kernel_spec import KernelSpec
from .shared_views import SharedViews, building


class Search(NamedTuple):
    """What makes the neighbour table of a relation between two sets.

    Attributes:
        source, target: the sets; or places among several that are given beside it, so
            that scans share it.
        transposed: whether ``out = in * stride + offset_k``, not
            ``in = out * stride + offset_k``.
        spec: the kernel.
        mirrored: whether the edge (i, o, k) implies (o, i, K - 1 - k).
        identity: whether each row is fed by itself alone.
    """

    source: SearchedRows | int
    target: SearchedRows | int
    transposed: bool
    spec: KernelSpec
    mirrored: bool = False
    identity: bool = False

    @classmethod
    def of(cls, kind: str, source, target, spec: KernelSpec) -> Search:
        """Return that of a relation of a kind (see ``Relation``)."""
        identity = spec.is_pointwise and source == target
        mirrored = identity or (kind == "submanifold" and spec.is_symmetric)
        transposed = kind in ("transposed", "generative")
        return cls(source, target, transposed, spec, mirrored, identity)

    @property
    def offsets(self) -> Offsets:
        """The K offsets."""
        return self.spec.offsets

    @property
    def stride(self) -> tuple[int, ...]:
        """Lattice step."""
        return self.spec.stride

    def turned(self) -> Search:
        """Return what makes the table of the transpose, where it is not mirrored."""
        ends = self.target, self.source
        return Search(*ends, not self.transposed, *self[3:])

    def cells(self) -> mx.array:
        """Return (N, 1) int32: the cell of each of the finer rows, or -1.

        Of a kernel that fills its cell.
        """
        ends = self.source, self.target
        coarse, fine = ends if self.transposed else ends[::-1]
        return coarse.lookup.find(lattice.cells(fine.coords, self.stride))[:, None]

    def __call__(self, keep: Keep, wanted: str | None) -> mx.array:
        """Return the table, searched for between sets."""
        rows = len(self.source.coords)
        if self.identity and rows:  # of no rows nothing is launched
            return mx.arange(rows, dtype=mx.int32)[:, None]
        return self.source.lookup.table(
            self.target,
            self.offsets,
            self.stride,
            transposed=self.transposed,
            mirrored=self.mirrored,
            keep=keep,
            wanted=wanted,
        )


class KeptViews:
    """The shared data of a relation and its transpose; arguments as for ``Relation``.

    Views are kept by name and whether they are of the transpose: ``swapped``.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        volume: int,
        table: Callable[[Keep, str | None], mx.array] | None = None,
        back: Callable[[], Search] | None = None,
        family: ReferenceType | None = None,
        mirrored: bool = False,
    ):
        self.n_in, self.n_out, self.volume = n_in, n_out, volume
        self.search = WhereGiven(table) if table else None
        self._turned, self._back = back, None
        self.family, self.mirrored = family, mirrored
        self.counted: int | None = None if n_in and n_out else 0
        self.views = SharedViews()
        # What makes tables again that are held in another form.
        self.again: dict[bool, Callable[[], mx.array]] = {}
        self.held: set[bool] = set()  # tables that routes read

    @property
    def back(self) -> WhereGiven | None:
        """What makes the transposed table, as ``search`` makes the table."""
        if self._back is None and self._turned is not None:
            self._back = WhereGiven(self._turned(), self.search.device)
        return self._back

    @property
    def has_table(self) -> bool:
        """Whether the table was made, so that its edges were counted with it."""
        return self.views.find(("table", False)) is not None or False in self.again

    def is_table(self, swapped: bool) -> bool:
        """Whether no two edges share a row of the table and an offset."""
        if self.search is not None:
            return True

        def build() -> bool:
            column, n = (0 if swapped else 1), self._rows(swapped)
            edges = self.views.find(("edges", False))
            return not edge_lists.repeat(edges, column, n)

        return self.views.build(("has_table", swapped), build)

    def make_table(self, swapped: bool, wanted: str | None = None) -> mx.array:
        """Return the (rows, K) int32 neighbour table, which is to be kept.

        A backend may keep a view that is wanted too.
        """
        if again := self.again.get(swapped):
            return again()
        if self.search is not None and not swapped:
            return self.search(partial(self._keep, False), wanted)
        if not self.is_table(swapped):
            raise ValueError(
                "this relation has several edges with one output row and offset, "
                "so it has no neighbour table; read its edges or a CSR instead"
            )
        if self.search is not None and self.mirrored:
            # In memory once: a kernel would copy a reversed view at every launch.
            return mx.contiguous(self._searched()[:, ::-1])
        geometry = registry.geometry()
        if self.back is not None and geometry.counts_edges:
            return self.back(partial(self._keep, True), wanted)
        if self.search is not None:
            return geometry.transpose_table(self._searched(), self.n_in)
        columns = (1, 0) if swapped else (0, 1)
        shape = self._rows(swapped), self.volume
        return edge_lists.table(self.views.find(("edges", False)), columns, shape)

    def _searched(self) -> mx.array:
        return self.views.build(("table", False), lambda: self.make_table(False))

    def _rows(self, swapped: bool) -> int:
        return self.n_in if swapped else self.n_out

    def _keep(self, swapped: bool, name: str, value: object) -> None:
        self.views.add((name, swapped), value)

    def release_table(self, swapped: bool, again: Callable[[], mx.array]) -> None:
        """Drop a table that no route holds; ``again()`` makes it."""
        with building:
            if swapped not in self.held:
                self.again[swapped] = WhereGiven(again)
                self.views.drop(("table", swapped))

    def release(self) -> None:
        """Drop views that hold arrays; they are built again where they are asked for.

        Numbers stay: they are facts that plans depend on.
        """
        with building:
            for name in [n for n, view in self.views.items() if sync.arrays_in(view)]:
                self.views.drop(name)
            self.again = {}
            self.held.clear()


class KeepsViews:
    """What backends and routes keep views in: a relation, or its transpose."""

    _data: KeptViews
    _swapped: bool  # whether it sees the data from the other end
    _own: bool  # whether it is the transpose that it is called after

    def view(self, name: str, build: Callable, swapped: bool | None = None):
        """Return the view of a name, built by ``build()`` on first use and kept."""
        key = name, self._swapped if swapped is None else swapped
        view = self._data.views.get(key)
        return self._data.views.build(key, build) if view is None else view

    def keep(self, name: str, value: object) -> None:
        """Keep a view that was built elsewhere."""
        self._data.views.add((name, self._swapped), value)

    def kept(self, name: str):
        """Return a view if it was built already, else None."""
        return self._data.views.find((name, self._swapped))

    @property
    def built(self) -> dict[tuple[object, bool], object]:
        """What was built so far, by name and whether it is of the transpose."""
        return {
            (name, swapped != self._own): view
            for (name, swapped), view in list(self._data.views.items())
        }

    @property
    def _search(self) -> Search | None:
        """What it is searched by, if it is between two sets."""
        made = self._data.search and self._data.search.made
        return made if type(made) is Search else None

    @property
    def fills_cells(self) -> bool:
        """Whether each row of one end has one edge, to the cell that it lies in."""
        return self._search is not None and self._search.spec.fills_cell

    @property
    def is_to_cells(self) -> bool:
        """Whether outputs are the cells, where it ``fills_cells``."""
        return self._search.transposed == self._swapped

    @property
    def cells(self) -> mx.array:
        """(N, 1) int32: the cell of each row, or -1, where it ``fills_cells``."""
        find = WhereGiven(self._search.cells, self._data.search.device)
        return self.view("cells", find, False)

    def cell_order(self) -> tuple[mx.array, ...]:
        """Return ``Reductions.order`` of ``cells``."""

        def build() -> tuple[mx.array, ...]:
            data = self._data
            rows = data.n_in if self._search.transposed else data.n_out
            return registry.reductions().order(self.cells, rows, data.volume)

        return self.view("cell_order", build, False)

    def release_table(self, again: Callable[[], mx.array]) -> None:
        """Keep ``out_in`` no longer; where it is asked for, ``again()`` returns it.

        For a backend whose other views hold the same entries. A held table stays.
        """
        self._data.release_table(self._swapped, again)


class WhereGiven:
    """A function of a backend that runs on the device that was current at first.

    Its kernels run there alone, and a view may be asked for on another device.
    """

    __slots__ = "device", "made"

    def __init__(self, made: Callable, device: mx.Device | None = None):
        self.made, self.device = made, device or mx.default_device()

    def __call__(self, *given):
        """Call the function there."""
        if mx.default_device() == self.device:
            return self.made(*given)
        with mx.stream(self.device):
            return self.made(*given)

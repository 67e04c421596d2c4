"""Relation: the kernel map, a set of edges (input row, output row, kernel offset).

A relation and its transpose share one ``RelationData``: search, sizes and views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import mlx.core as mx

from . import registry, sync
from .checks import whole
from .coordinate_set import CoordinateKey, CoordinateSet
from .geometry import lattice, tables
from .geometry.lattice import mask_words
from .geometry.tables import Coverage, Csr, Keep, SearchedRows, SortedRows
from .kernel_spec import KernelSpec
from .scene import html_table
from .sync import SharedViews, building


class Search(NamedTuple):
    """A search for the neighbour table of a relation between two sets."""

    source: SearchedRows
    target: SearchedRows
    transposed: bool
    spec: KernelSpec
    mirrored: bool = False
    identity: bool = False

    @classmethod
    def of(
        cls, kind: str, source: SearchedRows, target: SearchedRows, spec: KernelSpec
    ) -> Search:
        """Return the search for a relation of this kind (see ``Relation.kind``)."""
        identity = spec.is_pointwise and source == target
        mirrored = identity or (kind == "submanifold" and spec.is_symmetric)
        transposed = kind in ("transposed", "generative")
        return cls(source, target, transposed, spec, mirrored, identity)

    def cells(self) -> mx.array:
        """Return (N, 1) int32: the coarse row of each finer row's cell, or -1."""
        ends = self.source, self.target
        coarse, fine = ends if self.transposed else ends[::-1]
        return coarse.lookup.find(lattice.cells(fine.coords, self.spec.stride))[:, None]

    def __call__(self, keep: Keep, wanted: str | None) -> mx.array:
        """Search for the edges, and return them as a table."""
        rows = len(self.source.coords)
        if self.identity and rows:  # no launch without rows
            return mx.arange(rows, dtype=mx.int32)[:, None]
        return self.source.lookup.table(
            self.target,
            self.spec.offsets,
            self.spec.stride,
            transposed=self.transposed,
            mirrored=self.mirrored,
            keep=keep,
            wanted=wanted,
        )


class RelationData:
    """The shared data of a relation and its transpose; arguments as for ``Relation``.

    Views are cached by (name, swapped); ``swapped`` views are the transpose's.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        volume: int,
        table: Callable[[Keep, str | None], mx.array] | None = None,
        family: ReferenceType[Any] | None = None,
        mirrored: bool = False,
    ):
        self.n_in: int = n_in
        self.n_out: int = n_out
        self.volume: int = volume
        self.search: Callable[[Keep, str | None], mx.array] | None = table
        self.family: ReferenceType[Any] | None = family
        self.mirrored: bool = mirrored
        self.counted: int | None = None if n_in and n_out else 0
        self.views: SharedViews = SharedViews()
        self._device = mx.default_device()

    def on_device(self, function: Callable[..., Any], *arguments: object) -> mx.array:
        """Call a backend's function on the device on which the relation was made."""
        if mx.default_device() == self._device:
            return function(*arguments)
        with mx.stream(self._device):
            return function(*arguments)

    @property
    def has_table(self) -> bool:
        """Whether the table is built, and its edges counted with it."""
        return self.views.find(("table", False)) is not None

    def is_table(self, swapped: bool) -> bool:
        """Whether no two edges share a row of the table and an offset."""
        if self.search is not None:
            return True

        def build() -> bool:
            column, n = (0 if swapped else 1), self._rows(swapped)
            edges = self.views.find(("edges", False))
            return not tables.has_repeat(edges, column, n)

        return self.views.build(("has_table", swapped), build)

    def make_table(self, swapped: bool, wanted: str | None = None) -> mx.array:
        """Build the (rows, K) table; a backend may cache the view ``wanted`` too."""

        def keep(name: str, value: object) -> None:
            self.views.add((name, False), value)

        if self.search is not None and not swapped:
            return self.on_device(self.search, keep, wanted)
        if not self.is_table(swapped):
            raise ValueError(
                "this relation has several edges with one output row and offset, "
                "so it has no neighbour table; read its edges or a CSR instead"
            )
        if self.search is not None and self.mirrored:
            # Copied once: a kernel would copy a reversed view at every launch.
            return mx.contiguous(self._searched()[:, ::-1])
        if self.search is not None:
            return registry.geometry().transpose_table(self._searched(), self.n_in)
        columns = (1, 0) if swapped else (0, 1)
        shape = self._rows(swapped), self.volume
        return tables.edge_table(self.views.find(("edges", False)), columns, shape)

    def _searched(self) -> mx.array:
        return self.views.build(("table", False), lambda: self.make_table(False))

    def _rows(self, swapped: bool) -> int:
        return self.n_in if swapped else self.n_out

    def release(self) -> None:
        """Drop views that hold arrays; numbers, which plans depend on, stay."""
        with building:
            for name in [n for n, view in self.views.items() if sync.arrays_in(view)]:
                self.views.drop(name)


class Relation:
    """Hold edges (i, o, k): input row i feeds output row o through kernel offset k.

    Relations are made by a ``CoordinateManager`` or by ``Relation.from_edges``. The
    primary form is the neighbour table ``out_in``; other views are built on first use
    and cached.

    Attributes:
        kind: one of "forward", "target", "submanifold", "transposed", "generative",
            "general".
        spec: the kernel, if there is one.
        in_coords: (N_in, 1 + D) int32, if known.
        out_coords: (N_out, 1 + D) int32, if known.
        mirrored: whether the edge (i, o, k) implies (o, i, K - 1 - k), so that the
            transposed table is a flip.
        sets: the input and output sets, if a manager made the relation.

    Examples:
        >>> relation = ml.Relation.from_edges([0, 1], [0, 0], [0, 1], 2, 1, 2)
        >>> relation.out_in.tolist()  # the input row at each offset
        [[0, 1]]
    """

    def __init__(
        self,
        kind: str,
        volume: int,
        n_in: int,
        n_out: int,
        table: Callable[[Keep, str | None], mx.array] | None,
        *,
        family: ReferenceType[Any] | None = None,
        spec: KernelSpec | None = None,
        in_coords: mx.array | None = None,
        out_coords: mx.array | None = None,
        mirrored: bool = False,
        sets: tuple[CoordinateSet, CoordinateSet] | None = None,
    ):
        self.kind: str = kind
        self.spec: KernelSpec | None = spec
        self.mirrored: bool = mirrored
        self.in_coords: mx.array | None = in_coords
        self.out_coords: mx.array | None = out_coords
        self.sets: tuple[CoordinateSet, CoordinateSet] | None = sets
        self._data = RelationData(n_in, n_out, volume, table, family, mirrored)
        self._base_swapped = False  # the orientation that it was made in
        self._start(False)

    @classmethod
    def from_edges(
        cls,
        in_rows: mx.array | Sequence[int],
        out_rows: mx.array | Sequence[int],
        offsets: mx.array | Sequence[int],
        n_in: int,
        n_out: int,
        K: int,
    ) -> Relation:
        """Make a general relation from its edges, in any order.

        Args:
            in_rows: (E,) integers in [0, n_in).
            out_rows: (E,) integers in [0, n_out).
            offsets: (E,) integers in [0, K): the kernel offset of each edge.
            n_in: number of input rows.
            n_out: number of output rows.
            K: number of kernel offsets.

        Raises:
            ValueError: lengths differ, or a value lies outside its range.
        """
        n_in, n_out, K = whole(n_in, "n_in"), whole(n_out, "n_out"), whole(K, "K")
        edges = tables.checked_edges(in_rows, out_rows, offsets, (n_in, n_out, K))
        relation = cls("general", K, n_in, n_out, None)
        relation.cache_view("edges", edges)
        relation.set_counted(len(edges))
        return relation

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Relation cannot be copied or pickled. Copy its tensors, which rebuild "
            "it on first use, or pass its edges to Relation.from_edges"
        )

    def release(self) -> None:
        """Drop all views; they are built again on their next use."""
        if not self.lists_edges:  # edges without a search cannot be rebuilt
            self._data.release()
            self.plans, self._transpose = {}, None

    @property
    def is_transposed(self) -> bool:
        """Whether this is the transpose of the relation that was built."""
        return self._swapped != self._base_swapped

    @property
    def n_in(self) -> int:
        """Number of input rows."""
        return self._data.n_out if self._swapped else self._data.n_in

    @property
    def n_out(self) -> int:
        """Number of output rows."""
        return self._data.n_in if self._swapped else self._data.n_out

    @property
    def volume(self) -> int:
        """Number of kernel offsets, K."""
        return self._data.volume

    @property
    def keys(self) -> tuple[CoordinateKey, CoordinateKey] | None:
        """The keys of the input and output sets, if a manager made the relation."""
        return self.sets and (self.sets[0].key, self.sets[1].key)

    @property
    def out_key(self) -> CoordinateKey:
        """The manager's key of the output set."""
        return self.sets[1].key

    @property
    def is_identity(self) -> bool:
        """Whether each row has one edge, from itself, through a single offset."""
        return (
            self.spec is not None
            and self.spec.is_pointwise
            and self.in_coords is self.out_coords
        )

    @property
    def T(self) -> Relation:
        """The same edges with inputs and outputs swapped; all views are shared."""
        other = self._transpose
        if isinstance(other, ReferenceType):
            other = other()
        if other is None:
            other = self._oriented(not self._swapped)
            # A weak reference one way: a reference cycle would keep arrays alive.
            other._transpose, self._transpose = ref(self), other
        return other

    def _oriented(self, swapped: bool) -> Relation:
        other, straight = Relation.__new__(Relation), swapped == self._swapped
        other.kind, other.spec, other.mirrored = self.kind, self.spec, self.mirrored
        ends = self.in_coords, self.out_coords
        other.in_coords, other.out_coords = ends if straight else ends[::-1]
        other.sets = self.sets if straight or not self.sets else self.sets[::-1]
        other._data, other._base_swapped = self._data, self._base_swapped
        other._start(swapped)
        return other

    def _start(self, swapped: bool) -> None:
        self._swapped = swapped
        self._transpose: Relation | ReferenceType[Relation] | None = None
        # The cache of contractions, by the facts of a call and `settings.version`.
        self.plans: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def transposed(self, kind: str) -> Relation:
        """Return ``T`` as a relation of its own kind; all views are shared."""
        other = self._oriented(not self._swapped)
        other.kind, other._base_swapped = kind, other._swapped
        return other

    def view(
        self, name: str, build: Callable[[], Any], swapped: bool | None = None
    ) -> Any:
        """Return a view by name, built by ``build()`` on first use and cached."""
        key = name, self._swapped if swapped is None else swapped
        view = self._data.views.get(key)
        return self._data.views.build(key, build) if view is None else view

    def cache_view(self, name: str, value: object) -> None:
        """Cache a view that was built elsewhere."""
        self._data.views.add((name, self._swapped), value)

    def cached_view(self, name: str) -> Any:
        """Return a view from the cache, or None if it is not built."""
        return self._data.views.find((name, self._swapped))

    @property
    def built(self) -> dict[tuple[object, bool], object]:
        """The views built so far, by name and whether they are the transpose's."""
        return {
            (name, swapped != self._base_swapped): view
            for (name, swapped), view in list(self._data.views.items())
        }

    @property
    def _search(self) -> Search | None:
        """The search, or None if the relation is not between two sets."""
        search = self._data.search
        return search if type(search) is Search else None

    @property
    def fills_cells(self) -> bool:
        """Whether each row of the finer end has one edge, to its coarse cell."""
        return self._search is not None and self._search.spec.fills_cell

    @property
    def is_to_cells(self) -> bool:
        """Whether the outputs are the coarse cells, for ``fills_cells``."""
        return self._search.transposed == self._swapped

    @property
    def cells(self) -> mx.array:
        """(N, 1) int32: the coarse cell of each row, or -1, for ``fills_cells``."""
        find = partial(self._data.on_device, self._search.cells)
        return self.view("cells", find, False)

    def cell_order(self) -> tuple[mx.array, ...]:
        """Return ``Reductions.order`` of ``cells``."""

        def build() -> tuple[mx.array, ...]:
            data = self._data
            rows = data.n_in if self._search.transposed else data.n_out
            return registry.reductions().order(self.cells, rows, data.volume)

        return self.view("cell_order", build, False)

    @property
    def has_table(self) -> bool:
        """Whether no two edges share an (output row, offset), so out_in exists."""
        return self._data.is_table(self._swapped)

    @property
    def out_in(self) -> mx.array:
        """(N_out, K) int32 neighbour table: the input row of each edge, or -1."""
        return self._table(self._swapped)

    def table_with(self, wanted: str) -> mx.array:
        """Return ``out_in``; a backend may cache the view ``wanted`` with it."""
        return self._table(self._swapped, wanted)

    @property
    def in_out(self) -> mx.array:
        """(N_in, K) int32 transposed table: the output row of each edge, or -1."""
        return self._table(not self._swapped)

    def _table(self, swapped: bool, wanted: str | None = None) -> mx.array:
        build = partial(self._data.make_table, swapped, wanted)
        return self.view("table", build, swapped)

    @property
    def lists_edges(self) -> bool:
        """Whether the relation was made from edges, without a search."""
        return self._data.search is None

    @property
    def edges(self) -> mx.array:
        """(E, 3) int32 rows (i, o, k), sorted by (k, o)."""
        return self._edges(self._swapped)

    def _edges(self, swapped: bool) -> mx.array:
        """Return the edges of the relation as it was built, or of its transpose."""

        def build() -> mx.array:
            of = self if swapped == self._swapped else self.T
            if not self.lists_edges:
                return registry.geometry().edges(of.out_in, of)
            edges = self._edges(False)[:, mx.array([1, 0, 2])]
            return edges[tables.lexicographic(edges, (2, 1, 0), of._limits())]

        return self.view("edges", build, swapped)

    def _limits(self) -> tuple[int, int, int]:
        return self.n_in, self.n_out, self.volume

    @property
    def counts(self) -> mx.array:
        """(K,) int32: the number of edges of each offset."""

        def build() -> mx.array:
            return tables.counts(self._edges(False), 2, self.volume)

        return self.view("counts", build, False)

    @property
    def edge_counts(self) -> tuple[int, ...]:
        """The counts as Python integers. Reads K values, once."""

        def build() -> tuple[int, ...]:
            return tuple(sync.read(self.counts)[0])

        return self.view("edge_counts", build, False)

    @property
    def n_edges(self) -> int:
        """Number of edges, E.

        The first use reads it from the device. The same read counts the edges of the
        manager's other relations whose tables are built.
        """
        known = self.known_edges
        if known is not None:
            return known

        def build() -> int:
            base = self.T if self._swapped else self
            counted = registry.geometry().edge_count(base)
            if counted is None:
                return len(base.edges)
            others = self._relatives()
            counts = [registry.geometry().edge_count(each) for each in others]
            edges, *more = sync.read(counted, *counts)
            for other, count in zip(others, more, strict=True):
                other.cache_view("n_edges", count[0])
            return edges[0]

        return self.view("n_edges", build, False)

    def _relatives(self) -> list[Relation]:
        """Return the manager's other relations that have a table and no count."""
        family = self._data.family and self._data.family()
        found = {id(each._data): each for each in family.relations} if family else {}
        found.pop(id(self._data), None)
        return [
            each._oriented(False)
            for each in found.values()
            if each.known_edges is None and each._data.has_table
        ]

    @property
    def counted(self) -> int | None:
        """The number of edges if it was counted when the relation was made."""
        return self._data.counted

    def set_counted(self, edges: int) -> None:
        """Set the number of edges, while the relation is built."""
        self._data.counted = edges

    @property
    def known_edges(self) -> int | None:
        """The number of edges if it has been counted already, else None."""
        edges = self._data.views.find(("edges", False))
        if edges is not None:
            return edges.shape[0]
        counted = self._data.views.find(("n_edges", False))
        return self._data.counted if counted is None else counted

    def _csr(self, name: str, order: tuple[int, ...], groups: int) -> Csr:
        def build() -> Csr:
            return tables.grouped(self.edges, order, self._limits(), groups)

        return self.view(name, build)

    @property
    def output_csr(self) -> Csr:
        """Edges grouped by output row, in order of (o, k, i)."""
        return self._csr("output_csr", (1, 2, 0), self.n_out)

    @property
    def input_csr(self) -> Csr:
        """Edges grouped by input row, in order of (i, k, o)."""
        return self._csr("input_csr", (0, 2, 1), self.n_in)

    @property
    def kernel_csr(self) -> Csr:
        """Edges grouped by kernel offset, in order of (k, o, i)."""
        return self._csr("kernel_csr", (2, 1, 0), self.volume)

    @property
    def sorted(self) -> SortedRows:
        """Output rows by Gray-code rank of their mask, with a mask per 16 rows."""

        def build() -> SortedRows:
            table = self.out_in
            rows = registry.geometry().gray_order(table)
            table = table[rows]
            return SortedRows(rows, table, mask_words(table >= 0, 16), 16)

        return self.view("sorted", build)

    def coverage(self) -> Coverage:
        """Count the edges of every row. Reads the histograms."""
        return Coverage.of(self.edges, *self._limits())

    def __repr__(self) -> str:
        kernel = f"{self.spec}" if self.spec else f"{self.volume} offsets"
        edges = "" if self.known_edges is None else f", {self.known_edges:,} edges"
        return (
            f"Relation({self.kind} {kernel}: {self.n_in:,} -> {self.n_out:,} rows"
            f"{edges}{', transposed view' if self.is_transposed else ''})"
        )

    def _repr_html_(self) -> str:
        """Return a table of facts; a notebook shows it. Counts no edges."""
        facts = {
            "kernel": self.spec or f"{self.volume} offsets",
            "input rows": f"{self.n_in:,}",
            "output rows": f"{self.n_out:,}",
        }
        if self.known_edges is not None:
            facts["edges"] = f"{self.known_edges:,}"
            facts["edges per row"] = f"{self.known_edges / max(1, self.n_out):.1f}"
        kind = f"{self.kind}{', transposed view' if self.is_transposed else ''}"
        return html_table(f"Relation, {kind}", (), facts.items())


def expect_relation(relation: object) -> None:
    """Raise a TypeError unless ``relation`` is a Relation."""
    if not isinstance(relation, Relation):
        raise TypeError(
            f"relation must be a Relation, from a CoordinateManager or "
            f"Relation.from_edges; got {type(relation).__name__}"
        )

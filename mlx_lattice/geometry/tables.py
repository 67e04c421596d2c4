"""Neighbour tables, what a backend builds of rows and tables, and lists of edges.

``Geometry`` and ``RowIndex`` are what a backend fulfils. ``SortedIndex`` finds rows by
binary search in sorted keys, in MLX operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from .. import sync
from ..checks import INT32_LIMIT, array_of
from . import lattice
from .lattice import (
    KEY_LIMIT,
    Bounds,
    Curve,
    MaskedRows,
    Offsets,
    Rule,
    UniqueRows,
    bounds_of,
    cell_count,
    column_weights,
    device_keys,
    grow,
    join,
    negated,
    packed_keys,
    row_keys,
    scale,
    scaled,
    shifted,
    true_positions,
)

# Called with the name and the value of a view that a backend makes beside a table.
Keep = Callable[[str, object], None]

# Classes that are imported after geometry. A ``CoordinateSet`` has (N, 1 + D) int32
# ``coords``, a ``box`` that holds them and a ``lookup``; ``BoxedRows`` are Rows too.
Rows = SearchedRows = Any
RelationViews = Any  # a ``Relation``


class BoxedRows(NamedTuple):
    """Coordinate rows, and the box that holds them if it is known."""

    coords: mx.array
    box: Bounds | None


class RowIndex(ABC):
    """Finds the rows of one coordinate set by value; of equal rows the first."""

    is_sorted = False

    @property
    @abstractmethod
    def arrays(self) -> Sequence[mx.array]:
        """The arrays that ``find`` and ``table`` read."""

    @abstractmethod
    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``, launched but not waited for."""

    @abstractmethod
    def settle(self, facts: list[Any]) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        out = BoxedRows(rows, bounds)
        return self.table(out, [(0,) * dims], (1,) * dims)[:, 0]

    @abstractmethod
    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge.

        ``transposed``: ``out = in * stride + offset_k``, not ``in = out * stride +
        offset_k``. ``mirrored``: the output rows are the set itself and the offsets
        point-symmetric, so half of them need no search. ``keep`` takes views that a
        backend makes beside the table, such as the ``wanted`` one.
        """


class StartedLevels(Protocol):
    """Levels of a set that were launched, and whose sizes are not read."""

    @property
    def counts(self) -> Sequence[mx.array]:
        """Small arrays to read."""

    def rows(self, counts: list[Any], boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level; None if the launched keys were too narrow."""


class Geometry(ABC):
    """What a backend builds of coordinate rows and of neighbour tables.

    ``coords`` are (N, 1 + D) int32 rows, ``offsets`` the K kernel offsets, ``stride``
    is the lattice step, ``table`` a (N, K) int32 neighbour table, ``box`` int32 bounds
    that hold the rows. What is None is not known yet, and is read.
    """

    @abstractmethod
    def bounds(self, coords: mx.array) -> Bounds:
        """Return the least and greatest value of each column; zeros for no rows."""

    @abstractmethod
    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows, and the place of each row among them."""

    @abstractmethod
    def rule_rows(
        self,
        rule: Rule,
        coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        box: Bounds,
        count: int | None = None,
    ) -> mx.array:
        """Return the rows that a rule derives, sorted, unique and within a box."""

    def start_masked(self, mask: mx.array, coords: mx.array) -> MaskedRows:
        """Launch the selection of rows by a mask, (N,) bool. N is at least 1."""
        return MaskedRows(mask, coords)

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch for each stride the sorted unique int32 rows ``floor(in / stride)``.

        Each stride is a multiple of the one before it. None: make one after another.
        """
        return None

    def levels(
        self,
        coords: mx.array,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds],
    ) -> list[mx.array]:
        """Return the cells of each stride, each level made of the one before."""
        before = (1,) * (coords.shape[1] - 1)
        made, still = [], [(0,) * len(before)]
        for stride, box in zip(strides, boxes, strict=True):
            step = tuple(s // b for s, b in zip(stride, before, strict=True))
            coords, before = self.rule_rows(Rule.CELL, coords, still, step, box), stride
            made.append(coords)
        return made

    @abstractmethod
    def index(self, coords: mx.array, box: Bounds | None = None) -> RowIndex:
        """Return the look-up of rows, launched; without a box settle it first."""

    @abstractmethod
    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) int32: the row of ``table`` that holds each entry, or -1."""

    @abstractmethod
    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o)."""

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) int32 order of rows by the Gray-code rank of their mask."""
        return lattice.by_region(lattice.gray_order(table >= 0), region)

    @abstractmethod
    def curve_order(self, coords: mx.array, curve: Curve) -> mx.array:
        """Return the (N,) int32 order of unique rows, at least one, along a curve."""

    def edge_count(self, relation: RelationViews) -> mx.array | None:
        """Return the (1,) number of edges, unread; None if listing them needs none."""
        return (relation.out_in >= 0).sum().reshape(1)

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build the views that the backend will read of a new relation, unevaluated.

        Returns the number of edges, still on the device, if the backend counts them.
        """
        return None


# In MLX operations


class SortedIndex(RowIndex):
    """Finds rows of a set by a binary search, in MLX operations; see ``RowIndex``."""

    def __init__(self, order: mx.array, ordered: mx.array, bounds: Bounds | None):
        self.order: mx.array = order
        self.ordered: mx.array = ordered
        self.bounds: Bounds | None = bounds

    @classmethod
    def of(cls, coords: mx.array, box: Bounds | None = None) -> SortedIndex:
        """Sort coordinates into an index; without a box, settle it before a search."""
        if box is None and coords.shape[0] == 0:
            box = bounds_of(coords)
        keys = device_keys(coords) if box is None else row_keys(coords, box)
        order = mx.argsort(keys).astype(mx.int32)
        return cls(order, coords[order], box)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that ``find`` and ``table`` read."""
        return self.order, self.ordered

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``: bounds, whether and which rows repeat."""
        equal = mx.all(self.ordered[1:] == self.ordered[:-1], axis=1)
        low, high = self.ordered.min(axis=0), self.ordered.max(axis=0)
        if not equal.size:
            return [low, high]
        later = mx.maximum(self.order[1:], self.order[:-1])
        at = mx.argmin(mx.where(equal, later, INT32_LIMIT - 1))
        return [low, high, equal[at], self.order[at], self.order[at + 1]]

    def settle(self, facts: list[Any]) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        low, high, *repeat = facts
        bounds = tuple(low), tuple(high)
        if self.bounds is None:
            self.bounds = bounds
            if cell_count(bounds) >= KEY_LIMIT:
                # The device's keys were too long: sort again by ranks, and look again.
                coords = mx.zeros_like(self.ordered)
                coords[self.order] = self.ordered
                other = SortedIndex.of(coords, bounds)
                self.order, self.ordered = other.order, other.ordered
                return self.settle(sync.read(*self.facts()))
        if not repeat or not repeat[0]:
            return bounds, None
        return bounds, (min(repeat[1:]), max(repeat[1:]))

    def scaled(self, stride: Sequence[int]) -> SortedIndex:
        """Return the index of the same rows on a lattice finer by ``stride``."""
        bounds = scale(self.bounds, stride)
        return SortedIndex(self.order, scaled(self.ordered, stride), bounds)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) rows its (Q,) int32 place, or -1."""
        n, q = self.ordered.shape[0], rows.shape[0]
        if n == 0 or q == 0:
            return mx.full((q,), -1, dtype=mx.int32)
        both = join(self.bounds, bounds or bounds_of(rows))
        if cell_count(both) < KEY_LIMIT:
            weights = column_weights(both)
            keys = packed_keys(self.ordered, both[0], weights)
            return self._search(keys, packed_keys(rows, both[0], weights))
        # Ranks mean something only within one set, so rank both together.
        keys = row_keys(mx.concatenate([self.ordered, rows]), both)
        return self._search(keys[:n], keys[n:])

    def _search(self, keys: mx.array, wanted: mx.array) -> mx.array:
        place = mx.minimum(mx.searchsorted(keys, wanted), keys.size - 1)
        return mx.where(keys[place] == wanted, self.order[place], -1)

    def columns(
        self, rows: mx.array, bounds: Bounds, offsets: Offsets
    ) -> list[mx.array]:
        """Return for each offset k the (Q,) places of ``rows + offset_k``, or -1."""
        n, q = self.ordered.shape[0], rows.shape[0]
        if n == 0 or q == 0 or not offsets:
            return [mx.full((q,), -1, dtype=mx.int32) for _ in offsets]
        both = join(self.bounds, grow(bounds, offsets))
        if cell_count(both) >= KEY_LIMIT:
            return [
                self.find(shifted(rows, offset), grow(bounds, [offset]))
                for offset in offsets
            ]
        # Within joint bounds a key is linear in its row: an offset is one addition.
        weights = column_weights(both)
        keys = packed_keys(self.ordered, both[0], weights)
        base = packed_keys(rows, both[0], weights)
        steps = [
            sum(v * w for v, w in zip(offset, weights[1:], strict=True))
            for offset in offsets
        ]
        return [self._search(keys, base + step) for step in steps]

    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge."""
        rows = out.coords
        if mirrored:
            return self._mirrored_table(rows, offsets)
        box = out.box or bounds_of(rows)
        if transposed:
            # On the fine lattice, where the rule is a plain shift: of the rows times
            # the stride, those off the lattice simply are not found.
            fine = self if set(stride) == {1} else self.scaled(stride)
            return mx.stack(fine.columns(rows, box, negated(offsets)), axis=1)
        rows, box = scaled(rows, stride), scale(box, stride)
        return mx.stack(self.columns(rows, box, offsets), axis=1)

    def _mirrored_table(self, coords: mx.array, offsets: Offsets) -> mx.array:
        """Return the (N, K) table of a point-symmetric kernel over the set itself."""
        # Half of them are searched: edge (i, o, k) gives (o, i, K - 1 - k); FlexGEMM.
        n, half = coords.shape[0], len(offsets) // 2
        found = self.columns(coords, self.bounds, offsets[:half])
        rows = mx.arange(n, dtype=mx.int32)
        columns = list(found)
        if len(offsets) % 2:
            columns.append(rows)
        for column in reversed(found):
            mirrored = mx.full((n + 1,), -1, dtype=mx.int32)
            mirrored[mx.where(column >= 0, column, n)] = rows
            columns.append(mirrored[:n])
        return mx.stack(columns, axis=1)


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``table`` that holds each entry, or -1."""
    n_out, volume = table.shape
    flat = mx.full((n_in * volume + 1,), -1, dtype=mx.int32)
    k = mx.arange(volume, dtype=mx.int64)
    place = mx.where(table >= 0, table.astype(mx.int64) * volume + k, n_in * volume)
    rows = mx.arange(n_out, dtype=mx.int32)[:, None]
    flat[place.flatten()] = mx.broadcast_to(rows, table.shape).flatten()
    return flat[: n_in * volume].reshape(n_in, volume)


def table_edges(table: mx.array) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of an (N_out, K) table by (k, o)."""
    n = max(1, table.shape[0])
    flat = table.T.flatten()
    at = true_positions(flat >= 0)
    out, k = (at % n).astype(mx.int32), (at // n).astype(mx.int32)
    return mx.stack([flat[at], out, k], axis=1)


# Views of a relation


class Csr(NamedTuple):
    """Edges by one column: group g's are ``edges[indptr[g] : indptr[g + 1]]``."""

    indptr: mx.array  # (groups + 1,) int32
    edges: mx.array  # (E, 3) int32 rows (input row, output row, offset)


class SortedRows(NamedTuple):
    """Output rows ordered by the Gray-code rank of their occupancy mask."""

    rows: mx.array  # (N_out,) int32: the output row at each sorted place
    table: mx.array  # (N_out, K) int32: the neighbour table in sorted order
    masks: mx.array  # (blocks, words) uint32: offsets that any row of a block uses
    block: int  # rows of a block

    def tile_offsets(self, tile: int) -> list[list[int]]:
        """Return for each tile of ``tile`` rows the offsets that any of them uses."""
        if tile % self.block:
            raise ValueError(f"tile must be a multiple of {self.block}; got {tile}")
        blocks, step = self.masks.tolist(), tile // self.block
        lists = []
        for start in range(0, len(blocks), step):
            used = 0
            for mask in blocks[start : start + step]:
                used |= sum(word << 32 * w for w, word in enumerate(mask))
            volume = self.table.shape[1]
            lists.append([k for k in range(volume) if used >> k & 1])
        return lists


@dataclass(frozen=True)
class Coverage:
    """What a relation reaches and what it leaves out.

    Attributes:
        n_in, n_out, volume, edges: the relation's sizes.
        out_degrees: number of output rows with 0, 1, ... edges.
        in_degrees: number of input rows with 0, 1, ... edges.
        unused_inputs: (U,) int32 input rows with no edge: their features are lost.
        empty_outputs: (V,) int32 output rows with no edge: they hold the bias alone.
    """

    n_in: int
    n_out: int
    volume: int
    edges: int
    out_degrees: tuple[int, ...]
    in_degrees: tuple[int, ...]
    unused_inputs: mx.array
    empty_outputs: mx.array

    @classmethod
    def of(cls, edges: mx.array, n_in: int, n_out: int, volume: int) -> Coverage:
        """Return the report on (E, 3) edges. Reads the histograms."""
        degrees = counts(edges, 0, n_in), counts(edges, 1, n_out)
        of_in, of_out = map(_histogram, degrees)
        unused, empty = (true_positions(degree == 0) for degree in degrees)
        return cls(n_in, n_out, volume, len(edges), of_out, of_in, unused, empty)

    def __str__(self) -> str:
        """Return the report as a person reads it."""
        per_row = self.edges / self.n_out if self.n_out else 0.0
        filled = self.edges / (self.n_out * self.volume) if self.n_out else 0.0
        lines = [
            f"{self.edges:,} edges from {self.n_in:,} to {self.n_out:,} rows: "
            f"{per_row:.1f} a row, {filled:.0%} of {self.volume} offsets",
            f"inputs with no edge   {self.unused_inputs.size:,}",
            f"outputs with no edge  {self.empty_outputs.size:,}",
            "edges: output rows    "
            + ", ".join(f"{d}: {n:,}" for d, n in enumerate(self.out_degrees) if n),
            "edges: input rows     "
            + ", ".join(f"{d}: {n:,}" for d, n in enumerate(self.in_degrees) if n),
        ]
        return "\n".join(lines)


def _histogram(degree: mx.array) -> tuple[int, ...]:
    if degree.size == 0:
        return ()
    bins = mx.zeros((sync.read(degree.max())[0] + 1,), dtype=mx.int32)
    return tuple(sync.read(bins.at[degree].add(1))[0])


# Lists of edges


def checked_edges(
    in_rows: mx.array | Sequence[int],
    out_rows: mx.array | Sequence[int],
    offsets: mx.array | Sequence[int],
    limits: tuple[int, int, int],
) -> mx.array:
    """Return (E, 3) int32 edges by offset, output row and input row."""
    names = "in_rows", "out_rows", "offsets"
    columns = list(map(_vector, (in_rows, out_rows, offsets), names))
    sizes = [c.size for c in columns]
    if len(set(sizes)) != 1:
        raise ValueError(
            "in_rows, out_rows and offsets must have one entry an edge; got "
            f"lengths {sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    for column, name, limit in zip(columns, names, limits, strict=True):
        if column.size == 0:
            continue
        low, high = sync.read(column.min(), column.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} must lie in [0, {limit}); got {low} to {high}")
    edges = mx.stack([c.astype(mx.int32) for c in columns], axis=1)
    # Ties by input row too, so that the given order does not matter.
    return edges[lexicographic(edges, (2, 1, 0), limits)]


def _vector(values: object, name: str) -> mx.array:
    array = array_of(values, name)
    if array.size == 0:
        return mx.zeros((0,), dtype=mx.int32)
    if array.ndim != 1 or not mx.issubdtype(array.dtype, mx.integer):
        raise ValueError(
            "edges must be given as 1-D integer arrays; got shape "
            f"{tuple(array.shape)} of {array.dtype}"
        )
    return array


def lexicographic(
    edges: mx.array, order: Sequence[int], limits: Sequence[int]
) -> mx.array:
    """Return the order of edge rows by the named columns, the first leading."""
    bounds = (0,) * 3, tuple(max(1, limits[column]) - 1 for column in order)
    return mx.argsort(row_keys(edges[:, mx.array(order)], bounds))


def grouped(
    edges: mx.array, order: tuple[int, ...], limits: tuple[int, ...], groups: int
) -> Csr:
    """Return the edges by the columns of ``order``, with where each group begins."""
    if order[0] != 2:
        edges = edges[lexicographic(edges, order, limits)]
    starts = mx.arange(groups + 1, dtype=mx.int32)
    indptr = mx.searchsorted(edges[:, order[0]], starts)
    return Csr(indptr.astype(mx.int32), edges)


def has_repeat(edges: mx.array, column: int, n: int) -> bool:
    """Return whether two edges share an offset and a row of n. Reads one value."""
    if edges.shape[0] < 2:
        return False
    keys = edges[:, 2].astype(mx.int64) * n + edges[:, column].astype(mx.int64)
    keys = mx.sort(keys)
    return sync.read((keys[1:] == keys[:-1]).any())[0]


def edge_table(
    edges: mx.array, columns: tuple[int, int], shape: tuple[int, int]
) -> mx.array:
    """Return the (rows, K) int32 table of edges, -1 if there is none."""
    source, at, k = (edges[:, c] for c in (*columns, 2))
    flat = mx.full((shape[0] * shape[1],), -1, dtype=mx.int32)
    if source.size:
        flat[at.astype(mx.int64) * shape[1] + k.astype(mx.int64)] = source
    return flat.reshape(shape)


def counts(edges: mx.array, column: int, n: int) -> mx.array:
    """Return (n,) int32: how many edges have each value of a column."""
    zeros = mx.zeros((n,), dtype=mx.int32)
    return zeros.at[edges[:, column]].add(1) if edges.shape[0] else zeros

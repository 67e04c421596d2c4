"""Rows near others by cells: candidates of a query come from the 3^D cells around it.

Points are put into the cells of a lattice, whose look-up is that of every relation. A
query's candidates become one row of 64-bit keys (distance, row), so that one sort
gives the order that is promised. Queries go in blocks of a bounded number of keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..backends import registry
from . import sync
from .keys import INT32_LIMIT, join
from .lattice import floor_divide
from .protocol import BoxedRows
from .unique import running_sums
from .voxelize import segment_counts

# Candidates that are looked at together, and queries whose cells are looked up at once.
SLOTS = 1 << 20
QUERIES = 1 << 17
# A key that no pair has: it sorts behind all.
NONE = (1 << 63) - 1
# Rounding of float32 cells and faces, as a part of the points' extent.
SLACK = 2.0**-20


class Lattice:
    """Integer positions: squared distances are exact.

    Args:
        points, queries: (N, 1 + D), (Q, 1 + D) int32 rows, neither of them empty.
        limit: greatest distance that counts, or infinity.

    Attributes:
        bits: how many a row takes in a key.
        extent: how far apart points lie on an axis.
        least: the least edge of a cell.
        enough: an edge that needs no cells but those around a query.
        most: the greatest square that counts.
    """

    least = 1

    def __init__(self, points: mx.array, queries: mx.array, limit: float):
        self.points, self.queries = points, queries
        geometry = registry.geometry()
        self._low, self._high = (bound[1:] for bound in geometry.bounds(points))
        low, high = join(geometry.bounds(points), geometry.bounds(queries))
        span = max(_spans(low[1:], high[1:]))
        self.extent = max(_spans(self._low, self._high))
        self.bits = points.shape[0].bit_length()
        bound = min(limit, math.sqrt(len(self._low)) * (span + 1))
        # What its root in doubles says, so that a radius of sqrt(3) finds a corner.
        self.most = int(bound * bound) + 1
        while math.sqrt(self.most) > bound:
            self.most -= 1
        if self.most.bit_length() + self.bits > 62:
            raise ValueError(
                f"squared distances of {points.shape[0]} rows that span {span} cells "
                "do not fit into 62 bits beside a row; give a smaller radius"
            )
        self._reach = min(math.floor(bound), span)
        self.enough = max(1, min(self._reach, self.extent + 1))

    def edge(self, size: float) -> int:
        """Return the edge of a cell that is nearest to ``size`` from above."""
        return max(self.least, math.ceil(size))

    def _outermost(self, size: int, dtype: mx.Dtype) -> list[mx.array]:
        ends = (self._low, self._high)
        return [mx.array([v // size for v in end], dtype) for end in ends]

    def cells(self, rows: mx.array, size: int) -> mx.array:
        """Return (M, 1 + D) int32 cells; those of far rows are the outermost ones."""
        at = mx.clip(floor_divide(rows[:, 1:], size), *self._outermost(size, mx.int32))
        return mx.concatenate([rows[:, :1], at], axis=1)

    def covered(self, queries: mx.array, cells: mx.array, size: int) -> mx.array:
        """Return (Q,) int64 squares that all points of other cells reach at least."""
        at, cell = (rows[:, 1:].astype(mx.int64) for rows in (queries, cells))
        low, high = self._outermost(size, mx.int64)
        far = mx.array(1 << 31, mx.int64)  # its square is beyond every one that counts
        below = mx.where(cell - 1 > low, at - (cell - 1) * size + 1, far)
        above = mx.where(cell + 1 < high, (cell + 2) * size - at, far)
        least = mx.minimum(mx.minimum(below, above).min(axis=1), far)
        return least * least

    def measured(self, points: mx.array, queries: mx.array):
        """Return int64 squared distances of rows, and whether they count."""
        apart = mx.abs(points[..., 1:].astype(mx.int64) - queries[..., 1:])
        near = mx.all(apart <= self._reach, axis=-1)
        squares = (apart * apart).sum(axis=-1)
        return squares, near & (squares <= self.most)

    def distances(self, measured: mx.array) -> mx.array:
        """Return float32 distances of what ``measured`` returned."""
        return mx.sqrt(measured.astype(mx.float32))


class Points:
    """Positions in float32, whose distances compare by their bits; see ``Lattice``."""

    def __init__(self, points: mx.array, queries: mx.array, limit: float):
        self.points, self.queries = points, queries
        low, high = sync.read(points[:, 1:].min(axis=0), points[:, 1:].max(axis=0))
        self._spans = _spans(low, high)
        self._corner = mx.array(low)
        self.extent = max(self._spans)
        self.bits = points.shape[0].bit_length()
        self._limit = limit
        self.most = self._bits(mx.array(limit)) - 1
        self.least = max(self.extent * SLACK, 1e-30)
        self.enough = min(limit, self.extent + self.least) + self.least

    def edge(self, size: float) -> float:
        """Return the edge of a cell that is nearest to ``size`` from above."""
        return max(self.least, size)

    def _last(self, size: float) -> mx.array:
        return mx.floor(mx.array(self._spans) / size)

    def cells(self, rows: mx.array, size: float) -> mx.array:
        """Return (M, 1 + D) int32 cells; those of far rows are the outermost ones."""
        at = mx.floor((rows[:, 1:] - self._corner) / size)
        at = mx.clip(at, 0, self._last(size))
        return mx.concatenate([rows[:, :1], at], axis=1).astype(mx.int32)

    def covered(self, queries: mx.array, cells: mx.array, size: float) -> mx.array:
        """Return (Q,) int64 bits of distances that points of other cells exceed."""
        at, cell = queries[:, 1:] - self._corner, cells[:, 1:].astype(mx.float32)
        below = mx.where(cell > 1, at - (cell - 1) * size, math.inf)
        above = mx.where(cell + 1 < self._last(size), (cell + 2) * size - at, math.inf)
        least = mx.minimum(below, above).min(axis=1)
        least = least * (1 - SLACK) - self.extent * SLACK
        return self._bits(mx.maximum(least, 0))

    def measured(self, points: mx.array, queries: mx.array):
        """Return the int64 bits of distances, and whether they count."""
        apart = points[..., 1:] - queries[..., 1:]
        far = mx.sqrt((apart * apart).sum(axis=-1))
        return self._bits(far), far <= self._limit

    @staticmethod
    def _bits(distances: mx.array) -> mx.array:
        return distances.view(mx.int32).astype(mx.int64)

    def distances(self, measured: mx.array) -> mx.array:
        """Return float32 distances of what ``measured`` returned."""
        return measured.astype(mx.int32).view(mx.float32)


def _spans(low: Sequence[float], high: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(low, high, strict=True)]


Space = Lattice | Points


class CellGrid:
    """Points by the cells of one edge length.

    Args:
        space: the positions.
        size: edge of a cell.
        rows: (P,) int32: the points that are held, by default all.
    """

    def __init__(self, space: Space, size: float, rows: mx.array | None = None):
        self.space, self.size = space, size
        points = space.points if rows is None else space.points[rows]
        geometry = registry.geometry()
        unique = geometry.unique_rows(space.cells(points, size))
        self.counts = segment_counts(unique.inverse, unique.rows.shape[0])
        self.starts = running_sums(self.counts) - self.counts
        n = points.shape[0]
        order = mx.argsort(
            unique.inverse.astype(mx.int64) * n + mx.arange(n, dtype=mx.int64)
        )
        self.rows = order.astype(mx.int32) if rows is None else rows[order]
        self.points = points[order]
        self.index = geometry.index(unique.rows, geometry.bounds(unique.rows))
        self._inverse = unique.inverse

    def crowd(self) -> float:
        """Return how many points share a point's cell, on average. Reads it."""
        shared = self.counts[self._inverse].astype(mx.float32)
        return sync.read(shared.mean())[0]

    def keys(self, queries: mx.array) -> Iterator[tuple[mx.array, mx.array]]:
        """Yield (B,) int32 places among the queries with (B, M) int64 sorted keys.

        A key is ``distance << bits | row``, or ``NONE``. Each query comes once.
        """
        for first in range(0, queries.shape[0], QUERIES):
            yield from self._keys(queries[first : first + QUERIES], first)

    def _keys(self, queries: mx.array, first: int):
        geometry, n = registry.geometry(), queries.shape[0]
        cells = geometry.unique_rows(self.space.cells(queries, self.size))
        around = list(itertools.product((-1, 0, 1), repeat=queries.shape[1] - 1))
        out = BoxedRows(cells.rows, geometry.bounds(cells.rows))
        table = self.index.table(out, around, (1,) * len(around[0]))
        sizes = mx.where(table >= 0, self.counts[mx.maximum(table, 0)], 0)
        total = sizes.sum(axis=1)[cells.inverse]
        # Queries of equal numbers of candidates, up to the next power of two.
        powers = mx.array([1 << j for j in range(31)], mx.int32)
        level = mx.searchsorted(powers, total).astype(mx.int64)
        keyed = mx.sort(level * n + mx.arange(n, dtype=mx.int64))
        order = (keyed % n).astype(mx.int32)
        ends = sync.read(mx.searchsorted(keyed // n, mx.arange(1, 33)))[0]
        start = 0
        for exponent, end in enumerate(ends):
            step = max(1, SLOTS >> exponent)
            for at in range(start, end, step):
                places = order[at : min(at + step, end)]
                cell = cells.inverse[places]
                keys = self._sorted(queries[places], table[cell], sizes[cell], exponent)
                mx.eval(keys)
                yield places + first, keys
            start = end

    def _sorted(self, queries, cells, sizes, exponent: int) -> mx.array:
        """Return the (B, 2^exponent) sorted keys of queries from their (B, K) cells."""
        b, width = queries.shape[0], 1 << exponent
        begins = running_sums(sizes, axis=1) - sizes
        begins = (begins + mx.arange(b, dtype=mx.int32)[:, None] * width).flatten()
        slots = mx.arange(b * width, dtype=mx.int32)
        segment = mx.searchsorted(begins, slots, side="right").astype(mx.int32) - 1
        within = slots - begins[segment]
        there = within < sizes.flatten()[segment]
        cell = mx.maximum(cells.flatten()[segment], 0)
        place = mx.where(there, self.starts[cell] + within, 0).reshape(b, width)
        bits, near = self.space.measured(self.points[place], queries[:, None])
        keys = (bits << self.space.bits) | self.rows[place].astype(mx.int64)
        keys = mx.where(there.reshape(b, width) & near, keys, NONE)
        return mx.sort(keys, axis=1)


def first_of_repeats(points: mx.array, k: int) -> mx.array:
    """Return the int32 rows of points that at most k - 1 earlier rows equal."""
    rows = points
    if mx.issubdtype(points.dtype, mx.floating):
        rows = (points + 0.0).view(mx.int32)  # -0 becomes 0
    n = points.shape[0]
    inverse = registry.geometry().unique_rows(rows).inverse.astype(mx.int64)
    keyed = mx.sort(inverse * n + mx.arange(n, dtype=mx.int64))
    run, row = keyed // n, (keyed % n).astype(mx.int32)
    rank = mx.arange(n, dtype=mx.int32) - mx.searchsorted(run, run).astype(mx.int32)
    keep = mx.sort(mx.where(rank < k, row, INT32_LIMIT - 1))
    return keep[: sync.read((rank < k).sum())[0]]

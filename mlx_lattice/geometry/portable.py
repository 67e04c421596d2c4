"""Coordinate sets in MLX operations: order, uniqueness, look-up, neighbour tables.

The portable builders. They sort and search 64-bit keys that keep lexicographic order,
so every result is the same on every backend. Native builders stand behind the same
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from . import sync

# Keys stay below this, so that a sum of a key and an offset never overflows 64 bits.
KEY_LIMIT = 1 << 62
INT32_LIMIT = 1 << 31

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


class UniqueRows(NamedTuple):
    """Sorted unique rows and how the given rows map onto them."""

    rows: mx.array  # (M, 1 + D) int32, sorted lexicographically
    inverse: mx.array  # (N,) int32: the place of each given row among them


def floor_divide(a: mx.array, by: int) -> mx.array:
    """Return ``floor(a / by)`` for integers, whichever way the backend truncates."""
    if by == 1:
        return a
    # 64 bits, since the multiple below -2^31 may not be an int32.
    wide = a.astype(mx.int64)
    remainder = ((wide % by) + by) % by
    return ((wide - remainder) // by).astype(a.dtype)


def true_positions(mask: mx.array) -> mx.array:
    """Return the int64 positions where a flat mask is true. Reads one size."""
    if mask.size == 0:
        return mx.zeros((0,), dtype=mx.int64)
    # A mask may come from features; positions have no derivative.
    mask = mx.stop_gradient(mask)
    ends = mx.cumsum(mask.astype(mx.int64))
    # A sum, since MLX on CUDA reads a slice by moving the whole array to the host.
    count = sync.read(ends[-1] + 0)[0]
    # MLX's GPU backends cannot scatter 64-bit integers.
    kind = mx.int32 if mask.size <= INT32_LIMIT else mx.int64
    positions = mx.zeros((count + 1,), dtype=kind)
    # False entries all write into the spare last slot.
    slots = mx.where(mask, ends - 1, count)
    positions[slots] = mx.arange(mask.size, dtype=kind)
    return positions[:count].astype(mx.int64)


def bounds_of(coords: mx.array) -> Bounds:
    """Return the least and greatest value of every column. Reads 2 (1 + D) values."""
    # Imported here, since the backends are written in terms of this file.
    from .. import backends

    if coords.shape[0] == 0:
        zeros = (0,) * coords.shape[1]
        return zeros, zeros
    native = backends.native()
    if coords.dtype == mx.int32 and hasattr(native, "bounds"):
        return native.bounds(coords)
    low, high = sync.read(coords.min(axis=0), coords.max(axis=0))
    return tuple(low), tuple(high)


def _span(bounds: Bounds) -> int:
    span = 1
    for low, high in zip(*bounds, strict=True):
        span *= high - low + 1
    return span


def weights_of(bounds: Bounds) -> list[int]:
    """Return the weight of each column in a packed key, the last column's being 1."""
    weights = [1]
    for low, high in zip(bounds[0][:0:-1], bounds[1][:0:-1], strict=True):
        weights.insert(0, weights[0] * (high - low + 1))
    return weights


def _linear_keys(coords: mx.array, low: Sequence[int], weights: list[int]) -> mx.array:
    keys = mx.zeros((coords.shape[0],), dtype=mx.int64)
    for axis, weight in enumerate(weights):
        keys = keys + (coords[:, axis].astype(mx.int64) - low[axis]) * weight
    return keys


def _own_keys(coords: mx.array) -> mx.array:
    """Return keys within the rows' own bounds, which stay on the device.

    They wrap where the box has more than 2^63 cells.
    """
    rows = coords.astype(mx.int64)
    low = rows.min(axis=0)
    extents = rows.max(axis=0) - low + 1
    after = mx.concatenate([extents[1:], mx.ones((1,), dtype=mx.int64)])
    return ((rows - low) * mx.cumprod(after, reverse=True)).sum(axis=1)


def _rank(keys: mx.array) -> mx.array:
    """Replace keys by order-keeping numbers below their count."""
    return mx.searchsorted(mx.sort(keys), keys).astype(mx.int64)


def row_keys(coords: mx.array, bounds: Bounds) -> mx.array:
    """Return int64 keys that compare as the rows do.

    Boxes of up to 2^62 cells pack at once; wider ones replace the leading columns by
    their rank first, so that no range is refused.
    """
    if _span(bounds) < KEY_LIMIT:
        return _linear_keys(coords, bounds[0], weights_of(bounds))
    keys, span = mx.zeros((coords.shape[0],), dtype=mx.int64), 1
    for axis, (low, high) in enumerate(zip(*bounds, strict=True)):
        extent = high - low + 1
        if span * extent >= KEY_LIMIT:
            keys, span = _rank(keys), coords.shape[0]
        keys = keys * extent + (coords[:, axis].astype(mx.int64) - low)
        span *= extent
    return keys


def run_starts(sorted_keys: mx.array) -> mx.array:
    """Return where a run of equal keys starts."""
    first = mx.ones((min(1, sorted_keys.size),), dtype=mx.bool_)
    return mx.concatenate([first, sorted_keys[1:] != sorted_keys[:-1]])


def unique_rows(coords: mx.array) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32 coordinates."""
    n = coords.shape[0]
    if n == 0:
        return UniqueRows(coords, mx.zeros((0,), dtype=mx.int32))
    keys = row_keys(coords, bounds_of(coords))
    order = mx.argsort(keys)
    first = run_starts(keys[order])
    starts = true_positions(first).astype(mx.int32)
    inverse = mx.zeros((n,), dtype=mx.int32)
    inverse[order] = mx.cumsum(first.astype(mx.int32)) - 1
    return UniqueRows(coords[order[starts]], inverse)


class RowIndex:
    """Finds the rows of one coordinate set by value.

    Args:
        order: (N,) int32: the set's rows in lexicographic order.
        ordered: (N, 1 + D) integers: the rows in that order.
        bounds: least and greatest value of every column; None until settled.
    """

    def __init__(self, order: mx.array, ordered: mx.array, bounds: Bounds):
        self.order, self.sorted, self.bounds = order, ordered, bounds

    @classmethod
    def of(cls, coords: mx.array, bounds: Bounds | None = None) -> RowIndex:
        """Sort (N, 1 + D) int32 coordinates into an index.

        Without bounds the device sorts by its own, and the index is to be settled
        before it is searched.
        """
        keys = _own_keys(coords) if bounds is None else row_keys(coords, bounds)
        order = mx.argsort(keys).astype(mx.int32)
        return cls(order, coords[order], bounds)

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``: bounds, whether and which rows repeat."""
        equal = mx.all(self.sorted[1:] == self.sorted[:-1], axis=1)
        low, high = self.sorted.min(axis=0), self.sorted.max(axis=0)
        if not equal.size:
            return [low, high]
        later = mx.maximum(self.order[1:], self.order[:-1])
        at = mx.argmin(mx.where(equal, later, INT32_LIMIT - 1))
        return [low, high, equal[at], self.order[at], self.order[at + 1]]

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        low, high, *repeat = facts
        bounds = tuple(low), tuple(high)
        if self.bounds is None:
            self.bounds = bounds
            if _span(bounds) >= KEY_LIMIT:
                # The device's keys were too long: sort again by ranks, and look again.
                coords = mx.zeros_like(self.sorted)
                coords[self.order] = self.sorted
                other = RowIndex.of(coords, bounds)
                self.order, self.sorted = other.order, other.sorted
                return self.settle(sync.read(*self.facts()))
        if not repeat or not repeat[0]:
            return bounds, None
        return bounds, (min(repeat[1:]), max(repeat[1:]))

    def scaled(self, stride: Sequence[int]) -> RowIndex:
        """Return the index of the same rows on a lattice finer by ``stride``."""
        bounds = scale_bounds(self.bounds, stride)
        return RowIndex(self.order, scaled(self.sorted, stride), bounds)

    def first_duplicate(self) -> tuple[int, int] | None:
        """Return the earliest pair of equal rows, or None. Reads once."""
        return self.settle(sync.read(*self.facts()))[1] if self.order.size else None

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each row its (Q,) int32 place in the set, or -1."""
        n, q = self.sorted.shape[0], rows.shape[0]
        if n == 0 or q == 0:
            return mx.full((q,), -1, dtype=mx.int32)
        joint = _join(self.bounds, bounds or bounds_of(rows))
        if _span(joint) < KEY_LIMIT:
            weights = weights_of(joint)
            keys = _linear_keys(self.sorted, joint[0], weights)
            return self._search(keys, _linear_keys(rows, joint[0], weights))
        # Ranks mean something only within one set, so rank both together.
        keys = row_keys(mx.concatenate([self.sorted, rows]), joint)
        return self._search(keys[:n], keys[n:])

    def _search(self, keys: mx.array, wanted: mx.array) -> mx.array:
        place = mx.minimum(mx.searchsorted(keys, wanted), keys.size - 1)
        return mx.where(keys[place] == wanted, self.order[place], -1)

    def columns(
        self, rows: mx.array, bounds: Bounds, offsets: Sequence[Sequence[int]]
    ) -> list[mx.array]:
        """Return for each offset k the places of ``rows + offset_k``, or -1.

        Args:
            rows: (Q, 1 + D) integers; they may lie beyond int32.
            bounds: the bounds of ``rows``.
            offsets: D integers each.
        """
        n, q = self.sorted.shape[0], rows.shape[0]
        if n == 0 or q == 0 or not offsets:
            return [mx.full((q,), -1, dtype=mx.int32) for _ in offsets]
        joint = _join(self.bounds, grow(bounds, offsets))
        if _span(joint) >= KEY_LIMIT:
            return [
                self.find(shifted(rows, offset), grow(bounds, [offset]))
                for offset in offsets
            ]
        # Within joint bounds a key is linear in its row: an offset is one addition.
        weights = weights_of(joint)
        keys = _linear_keys(self.sorted, joint[0], weights)
        base = _linear_keys(rows, joint[0], weights)
        steps = [
            sum(v * w for v, w in zip(offset, weights[1:], strict=True))
            for offset in offsets
        ]
        return [self._search(keys, base + step) for step in steps]


def shifted(rows: mx.array, offset: Sequence[int]) -> mx.array:
    """Return int64 rows moved by a spatial offset, the batch column kept."""
    return rows.astype(mx.int64) + mx.array([0, *offset], dtype=mx.int64)


def scaled(rows: mx.array, stride: Sequence[int]) -> mx.array:
    """Return int64 rows with each spatial column multiplied by its stride."""
    return rows.astype(mx.int64) * mx.array([1, *stride], dtype=mx.int64)


def cells(rows: mx.array, stride: Sequence[int]) -> mx.array:
    """Return rows with each spatial column floor-divided by its stride."""
    if set(stride) == {1}:
        return rows
    columns = [rows[:, 0]]
    columns += [floor_divide(rows[:, 1 + a], s) for a, s in enumerate(stride)]
    return mx.stack(columns, axis=1)


def _join(a: Bounds, b: Bounds) -> Bounds:
    low = tuple(min(u, v) for u, v in zip(a[0], b[0], strict=True))
    high = tuple(max(u, v) for u, v in zip(a[1], b[1], strict=True))
    return low, high


def grow(bounds: Bounds, offsets: Sequence[Sequence[int]]) -> Bounds:
    """Return the bounds of all rows moved by all offsets."""
    least = [0, *(min(axis) for axis in zip(*offsets, strict=True))]
    most = [0, *(max(axis) for axis in zip(*offsets, strict=True))]
    low = tuple(v + d for v, d in zip(bounds[0], least, strict=True))
    high = tuple(v + d for v, d in zip(bounds[1], most, strict=True))
    return low, high


def scale_bounds(bounds: Bounds, stride: Sequence[int]) -> Bounds:
    """Return the bounds of ``scaled(rows, stride)``."""
    factors = (1, *stride)
    low = tuple(v * f for v, f in zip(bounds[0], factors, strict=True))
    high = tuple(v * f for v, f in zip(bounds[1], factors, strict=True))
    return low, high


def negated(offsets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return every offset with its sign turned."""
    return tuple(tuple(-v for v in offset) for offset in offsets)


def forward_table(
    index: RowIndex,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
) -> mx.array:
    """Return (N_out, K) int32 places of ``in = out * stride + offset_k``, or -1."""
    rows, bounds = scaled(out_coords, stride), scale_bounds(out_bounds, stride)
    return mx.stack(index.columns(rows, bounds, offsets), axis=1)


def submanifold_table(
    index: RowIndex, coords: mx.array, offsets: Sequence[Sequence[int]]
) -> mx.array:
    """Return the (N, K) table of a point-symmetric kernel over its own rows.

    Searches half of the offsets; the edge (i, o, k) gives (o, i, K - 1 - k), as in
    FlexGEMM.
    """
    n, half = coords.shape[0], len(offsets) // 2
    found = index.columns(coords, index.bounds, offsets[:half])
    rows = mx.arange(n, dtype=mx.int32)
    columns = list(found)
    if len(offsets) % 2:
        columns.append(rows)
    for column in reversed(found):
        mirrored = mx.full((n + 1,), -1, dtype=mx.int32)
        mirrored[mx.where(column >= 0, column, n)] = rows
        columns.append(mirrored[:n])
    return mx.stack(columns, axis=1)


def transposed_table(
    index: RowIndex,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
) -> mx.array:
    """Return (N_out, K) int32 places of the in with ``out = in * stride + offset_k``.

    The input set is searched on the fine lattice (its rows times ``stride``), where
    the rule is a plain shift: rows off the lattice simply are not found.
    """
    fine = index if set(stride) == {1} else index.scaled(stride)
    return mx.stack(fine.columns(out_coords, out_bounds, negated(offsets)), axis=1)


def as_int32(rows: mx.array, what: str) -> mx.array:
    """Return int64 rows as int32, or raise with the range that does not fit."""
    low, high = bounds_of(rows)
    if min(low) < -INT32_LIMIT or max(high) >= INT32_LIMIT:
        raise ValueError(
            f"{what} would reach coordinates {min(low)} to {max(high)}, beyond int32; "
            "move the input nearer to the origin or use a smaller stride"
        )
    return rows.astype(mx.int32)


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

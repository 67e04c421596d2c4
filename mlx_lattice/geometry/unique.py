"""Rows by what they are, in MLX operations: unique, masked, greatest, active.

Running sums turn a mask into positions; everything else here stands on them.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import mlx.core as mx

from .. import sync
from ..checks import AXES, INT32_LIMIT, array_of
from .keys import Bounds, bounds_of, row_keys


class KeptRows(NamedTuple):
    """Rows that a mask keeps, in their order."""

    rows: mx.array  # (M,) int32: which they are
    places: mx.array  # (N,) int32: where each row stands among them, or -1
    coords: mx.array  # (M, 1 + D) int32


def none_of(coords: mx.array, places: mx.array) -> KeptRows:
    """Return no rows at all of some, whose ``places`` are -1."""
    return KeptRows(mx.zeros((0,), dtype=mx.int32), places, coords[:0])


class StartedRows:
    """Rows that a mask keeps, launched; see ``geometry.protocol.StartedRows``."""

    def __init__(self, mask: mx.array, coords: mx.array):
        self._mask, self._coords = mask, coords
        self._ends = running_sums(mask.astype(mx.int32))
        # A sum, since MLX on CUDA reads a slice by moving the whole array to the CPU.
        self.count = self._ends[-1:] + 0

    def kept(self, count: int) -> KeptRows:
        """Return them."""
        rows = positions_of(self._mask, self._ends, count)
        places = mx.where(self._mask, self._ends - 1, -1)
        return KeptRows(rows, places, self._coords[rows])


def positions_of(mask: mx.array, ends: mx.array, count: int) -> mx.array:
    """Return the (count,) positions where a flat mask is true."""
    # MLX's GPU backends cannot scatter 64-bit integers.
    kind = mx.int32 if mask.size <= INT32_LIMIT else mx.int64
    positions = mx.zeros((count + 1,), dtype=kind)
    # False entries all write into an extra last slot.
    slots = mx.where(mask, ends - 1, count)
    positions[slots] = mx.arange(mask.size, dtype=kind)
    return positions[:count]


class UniqueRows(NamedTuple):
    """Sorted unique rows and how the given rows map onto them."""

    rows: mx.array  # (M, 1 + D) int32, sorted lexicographically
    inverse: mx.array  # (N,) int32: the place of each given row among them


def true_positions(mask: mx.array, count: int | None = None) -> mx.array:
    """Return the positions where a flat mask is true. Reads ``count`` if it is None.

    They are int32, or int64 of a mask that is longer than that holds.
    """
    kind = mx.int32 if mask.size <= INT32_LIMIT else mx.int64
    if mask.size == 0:
        return mx.zeros((0,), dtype=kind)
    # A mask may come from features; positions have no derivative.
    mask = mx.stop_gradient(mask)
    ends = running_sums(mask.astype(kind))
    if count is None:
        # A sum, since MLX on CUDA reads a slice by moving the whole array to the CPU.
        count = sync.read(ends[-1] + 0)[0]
    return positions_of(mask, ends, count)


def first_of_equals(sorted_keys: mx.array) -> mx.array:
    """Return (N,) bool: whether a key is the first of those that equal it."""
    first = mx.ones((min(1, sorted_keys.size),), dtype=mx.bool_)
    return mx.concatenate([first, sorted_keys[1:] != sorted_keys[:-1]])


def unique_rows(
    coords: mx.array, box: Bounds | None = None, count: int | None = None
) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32 coordinates.

    Reads the bounds and one size, but for what is given. See ``Geometry``.
    """
    n = coords.shape[0]
    if n == 0:
        return UniqueRows(coords, mx.zeros((0,), dtype=mx.int32))
    keys = row_keys(coords, box or bounds_of(coords))
    order = mx.argsort(keys)
    first = first_of_equals(keys[order])
    starts = true_positions(first, count)
    inverse = mx.zeros((n,), dtype=mx.int32)
    inverse[order] = running_sums(first.astype(mx.int32)) - 1
    return UniqueRows(coords[order[starts]], inverse)


BITS = 32  # of a key that a row's number has, and a score
# The bits of infinity, and of how wide words, in each dtype that kernels rank.
INFINITE = {
    mx.float32: (0x7F800000, mx.uint32),
    mx.float16: (0x7C00, mx.uint16),
    mx.bfloat16: (0x7F80, mx.uint16),
}


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return which rows are the best of their element; see ``Geometry``."""
    n, low = len(coords), (1 << BITS) - 1
    rows = mx.arange(n, dtype=mx.int64)
    keys = falling(scores).astype(mx.int64) << BITS | rows
    ordered = mx.sort(keys)
    if batches[0] == batches[1]:
        return keys <= ordered[k - 1]
    # Once more by elements, which with the scores' bits would be too many.
    order = ordered & low
    keys = mx.sort(coords[:, 0][order].astype(mx.int64) << BITS | rows)
    element, order = keys >> BITS, order[keys & low]
    kept = mx.zeros((n,), dtype=mx.bool_)
    # Of an element's rows each but the first k has another of it k places before.
    first = mx.ones((k,), dtype=mx.bool_)
    kept[order] = mx.concatenate([first, element[k:] != element[:-k]])
    return kept


def falling(scores: mx.array) -> mx.array:
    """Return (N,) int32 that are less of a greater score; a NaN has the greatest."""
    negative = 0 - scores.astype(mx.float32)  # of both zeros 0
    bits = negative.view(mx.int32)
    ordered = bits ^ (bits >> 31 & INT32_LIMIT - 1)
    return mx.where(mx.isnan(negative), INT32_LIMIT - 1, ordered)


def running_sums(values: mx.array, axis: int = 0) -> mx.array:
    """Return the sums of integers up to and with each of an axis, in their dtype."""
    # MLX's GPU kernels take the stride of an axis of one element for its columns:
    # of a row out of a matrix they read and write past the end.
    return values if values.shape[axis] == 1 else mx.cumsum(values, axis=axis)


def active_cells(
    array: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array, tuple[int, ...]]:
    """Find the active cells of a dense (B, spatial..., C) array.

    Raises:
        ValueError: see ``SparseTensor.from_dense``.
    """
    array = array_of(array, "array")
    if array.ndim - 2 not in AXES:
        raise ValueError(
            "a dense array must have shape (B, spatial..., C) with 1 to 4 spatial "
            f"axes; got {tuple(array.shape)}"
        )
    grid = tuple(array.shape[:-1])
    if mask is None:
        mask = mx.any(array != 0, axis=-1)
    mask = array_of(mask, "mask")
    if tuple(mask.shape) != grid or mask.dtype != mx.bool_:
        raise ValueError(
            f"mask must have shape {grid}, bool; got {tuple(mask.shape)} of "
            f"{mask.dtype}"
        )
    at = true_positions(mask.flatten())
    columns, rest = [], at
    for extent in reversed(grid):
        columns.insert(0, (rest % max(1, extent)).astype(mx.int32))
        rest = rest // max(1, extent)
    feats = array.reshape(prod(grid), array.shape[-1])[at]  # of no channels too
    return mx.stack(columns, axis=1), feats, grid


def places_in(grid: tuple[int, ...], coords: mx.array, bounds: Bounds) -> mx.array:
    """Return (N,) int64: the place of each row among the cells of a grid, in order.

    Raises:
        ValueError: a coordinate lies outside the grid.
    """
    (_, *low), (_, *high) = bounds
    shape = grid[1:]
    if min(low) < 0 or any(h >= n for h, n in zip(high, shape, strict=True)):
        raise ValueError(
            f"coordinates {tuple(low)} to {tuple(high)} do not fit a dense grid of "
            f"shape {shape} that starts at 0; move them or pass spatial_shape="
        )
    flat = mx.zeros((len(coords),), dtype=mx.int64)
    for axis, extent in enumerate(grid):
        flat = flat * extent + coords[:, axis].astype(mx.int64)
    return flat

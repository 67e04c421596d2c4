"""Bounds of coordinate rows, and 64-bit keys that compare as the rows do.

Sorting and searching keys gives one order of rows, and the same bits, on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import sync

# Keys stay below this, so that a sum of a key and an offset never overflows 64 bits.
KEY_LIMIT = 1 << 62

# The least and the greatest value of every column.
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
Offsets = Sequence[Sequence[int]]


def bounds_of(coords: mx.array) -> Bounds:
    """Return the least and greatest value of every column. Reads 2 (1 + D) values."""
    if coords.shape[0] == 0:
        zeros = (0,) * coords.shape[1]
        return zeros, zeros
    low, high = sync.read(coords.min(axis=0), coords.max(axis=0))
    return tuple(low), tuple(high)


def cell_count(bounds: Bounds) -> int:
    """Return the number of cells within bounds, batch index included."""
    cells = 1
    for low, high in zip(*bounds, strict=True):
        cells *= high - low + 1
    return cells


def join(a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of all rows within either bounds."""
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))


def grow(bounds: Bounds, offsets: Offsets) -> Bounds:
    """Return the bounds of all rows moved by all offsets."""
    least = [0, *(min(axis) for axis in zip(*offsets, strict=True))]
    most = [0, *(max(axis) for axis in zip(*offsets, strict=True))]
    low = tuple(v + d for v, d in zip(bounds[0], least, strict=True))
    high = tuple(v + d for v, d in zip(bounds[1], most, strict=True))
    return low, high


def scale(bounds: Bounds, stride: Sequence[int]) -> Bounds:
    """Return the bounds of rows whose spatial columns are multiplied by a stride."""
    factors = (1, *stride)
    low = tuple(v * f for v, f in zip(bounds[0], factors, strict=True))
    high = tuple(v * f for v, f in zip(bounds[1], factors, strict=True))
    return low, high


def column_weights(bounds: Bounds) -> list[int]:
    """Return the weight of each column in a packed key, the last column's being 1."""
    weights = [1]
    for low, high in zip(bounds[0][:0:-1], bounds[1][:0:-1], strict=True):
        weights.insert(0, weights[0] * (high - low + 1))
    return weights


def packed_keys(coords: mx.array, low: Sequence[int], weights: list[int]) -> mx.array:
    """Return (N,) int64: the weighted sum of the columns, counted from ``low``."""
    keys = mx.zeros((coords.shape[0],), dtype=mx.int64)
    for axis, weight in enumerate(weights):
        keys = keys + (coords[:, axis].astype(mx.int64) - low[axis]) * weight
    return keys


def device_keys(coords: mx.array) -> mx.array:
    """Return keys within the rows' own bounds, which stay on the device.

    They wrap where the box has more than 2^63 cells.
    """
    rows = coords.astype(mx.int64)
    low = rows.min(axis=0)
    extents = rows.max(axis=0) - low + 1
    after = mx.concatenate([extents[1:], mx.ones((1,), dtype=mx.int64)])
    return ((rows - low) * mx.cumprod(after, reverse=True)).sum(axis=1)


def row_keys(coords: mx.array, bounds: Bounds) -> mx.array:
    """Return (N,) int64 keys that compare as the rows do.

    Boxes of up to 2^62 cells pack at once; wider ones replace the leading columns by
    their rank first, so that no range is refused.
    """
    if cell_count(bounds) < KEY_LIMIT:
        return packed_keys(coords, bounds[0], column_weights(bounds))
    keys, cells = mx.zeros((coords.shape[0],), dtype=mx.int64), 1
    for axis, (low, high) in enumerate(zip(*bounds, strict=True)):
        column, extent = coords[:, axis].astype(mx.int64) - low, high - low + 1
        if cells * extent >= KEY_LIMIT:
            keys, cells = ranks(keys), coords.shape[0]
        if cells * extent >= KEY_LIMIT:  # rows times a huge stride
            column, extent = ranks(column), coords.shape[0]
        keys = keys * extent + column
        cells *= extent
    return keys


def ranks(keys: mx.array) -> mx.array:
    """Return (N,) int64 numbers below N that compare as the keys do."""
    return mx.searchsorted(mx.sort(keys), keys).astype(mx.int64)

"""Sorted unique rows in MLX operations, and the positions where a mask is true."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from . import sync
from .kept_rows import positions_of
from .keys import INT32_LIMIT, Bounds, bounds_of, row_keys
from .scans import running_sums


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

"""The rows that a rule makes of others, in MLX operations: cells, reach, expansion.

ITSELF   in
CELL     floor(in / stride)
REACH    every out with some in = out * stride + offset_k
EXPAND   every in * stride + offset_k
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import mlx.core as mx

from . import portable
from .portable import INT32_LIMIT, KEY_LIMIT, Bounds

ITSELF, CELL, REACH, EXPAND = "ITSELF", "CELL", "REACH", "EXPAND"

# What an error calls the maker of rows.
WHAT = {REACH: "the convolution", EXPAND: "the generative convolution"}


def box_of(
    rule: str,
    bounds: Bounds,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
) -> Bounds:
    """Return bounds of the rows that a rule makes of rows within ``bounds``."""
    low, high = [bounds[0][0]], [bounds[1][0]]
    for axis, step in enumerate(stride):
        least, most = bounds[0][1 + axis], bounds[1][1 + axis]
        reach = [offset[axis] for offset in offsets] or [0]
        if rule == EXPAND:
            least, most = least * step + min(reach), most * step + max(reach)
        elif rule != ITSELF:
            least, most = (least - max(reach)) // step, (most - min(reach)) // step
        low.append(least)
        high.append(most)
    return tuple(low), tuple(high)


def cut(box: Bounds, spatial_shape: Sequence[int] | None) -> Bounds:
    """Return the part of a box in the dense grid ``[0, spatial_shape)``."""
    if spatial_shape is None:
        return box
    (batch, *low), (last, *high) = box
    low = (max(v, 0) for v in low)
    high = (min(v, n - 1) for v, n in zip(high, spatial_shape, strict=True))
    return (batch, *low), (last, *high)


def is_empty(box: Bounds) -> bool:
    """Whether no row lies in a box."""
    return any(low > high for low, high in zip(*box, strict=True))


def fits_int32(box: Bounds) -> bool:
    """Whether all rows of a box are int32."""
    return min(box[0]) >= -INT32_LIMIT and max(box[1]) < INT32_LIMIT


def candidates(
    coords: mx.array,
    rule: str,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
) -> tuple[mx.array, mx.array | None]:
    """Return (M, 1 + D) int64 rows with repeats, and which count (all: None)."""
    if rule == ITSELF:
        return coords.astype(mx.int64), None
    if rule == CELL:
        return portable.cells(coords.astype(mx.int64), stride), None
    if rule == EXPAND:
        base = portable.scaled(coords, stride)
        return mx.concatenate([portable.shifted(base, v) for v in offsets]), None
    rows = [portable.shifted(coords, v) for v in portable.negated(offsets)]
    rows = mx.concatenate(rows)
    steps = mx.array([1, *stride], dtype=mx.int64)
    return portable.cells(rows, stride), mx.all(rows % steps == 0, axis=1)


def made_rows(
    coords: mx.array,
    rule: str,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    box: Bounds,
) -> mx.array:
    """Return the sorted unique int32 rows that a rule makes within a box.

    Reads one size. More where the box has 2^62 cells: then keys need their ranks.
    """
    if coords.shape[0] == 0 or not offsets or is_empty(box):
        return mx.zeros((0, coords.shape[1]), dtype=mx.int32)
    rows, counts = candidates(coords, rule, offsets, stride)
    low, high = (mx.array(list(v), dtype=mx.int64) for v in box)
    inside = mx.all((rows >= low) & (rows <= high), axis=1)
    inside = inside if counts is None else inside & counts
    extents = [b - a + 1 for a, b in zip(*box, strict=True)]
    cells = prod(extents)
    if cells >= KEY_LIMIT:
        rows = rows[portable.true_positions(inside)].astype(mx.int32)
        return portable.unique_rows(rows).rows
    weights = portable.weights_of(box)
    keys = ((rows - low) * mx.array(weights, dtype=mx.int64)).sum(axis=1)
    keys = mx.sort(mx.where(inside, keys, cells))
    starts = portable.run_starts(keys) & (keys < cells)
    keys = keys[portable.true_positions(starts)]
    columns = [
        keys // weight % extent for weight, extent in zip(weights, extents, strict=True)
    ]
    return (mx.stack(columns, axis=1) + low).astype(mx.int32)

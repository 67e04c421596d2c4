"""The rows that a rule makes of others: cells, reach, expansion; in which box they lie.

The one place that knows the rules; a backend's ``made_rows`` gets the box from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import mlx.core as mx

from ..checks import INT32_LIMIT
from .keys import KEY_LIMIT, Bounds, Offsets, cell_count, column_weights
from .lattice import as_int32, cells, negated, scaled, shifted
from .unique import first_of_equals, true_positions, unique_rows


class Rule(IntEnum):
    """How a row makes others; kernels know the names and the numbers.

    ITSELF   in
    CELL     floor(in / stride)
    REACH    every out with some in = out * stride + offset_k
    EXPAND   every in * stride + offset_k
    """

    ITSELF = 0
    CELL = 1
    REACH = 2
    EXPAND = 3


# What an error calls the maker of rows.
MAKERS = {
    Rule.CELL: "the convolution",
    Rule.REACH: "the convolution",
    Rule.EXPAND: "the generative convolution",
}


def box_of(
    rule: Rule, bounds: Bounds, offsets: Offsets, stride: Sequence[int]
) -> Bounds:
    """Return bounds of the rows that a rule makes of rows within ``bounds``."""
    low, high = [bounds[0][0]], [bounds[1][0]]
    for axis, step in enumerate(stride):
        least, most = bounds[0][1 + axis], bounds[1][1 + axis]
        reach = [offset[axis] for offset in offsets] or [0]
        if rule == Rule.EXPAND:
            least, most = least * step + min(reach), most * step + max(reach)
        elif rule != Rule.ITSELF:
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


def int32_box(
    rule: Rule,
    coords: mx.array,
    bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
) -> Bounds:
    """Return bounds of the rows that a rule makes of a set, all of them int32.

    Reads nothing, unless the box reaches beyond int32: then it looks at every row.

    Args:
        rule: which rows are made.
        coords: (N, 1 + D) int32.
        bounds: bounds of ``coords``, or of a box that holds them.
        offsets: the K offsets.
        stride: lattice step.

    Raises:
        ValueError: a row would lie beyond int32.
    """
    box = box_of(rule, bounds, offsets, stride)
    if not len(coords) or (min(box[0]) >= -INT32_LIMIT and max(box[1]) < INT32_LIMIT):
        return box
    rows, counts = candidates(coords, rule, offsets, stride)
    if counts is not None:
        rows = rows[true_positions(counts)]
    if rows.size:
        as_int32(rows, MAKERS[rule])
    least, most = -INT32_LIMIT, INT32_LIMIT - 1
    return tuple(tuple(min(max(v, least), most) for v in end) for end in box)


def candidates(
    coords: mx.array, rule: Rule, offsets: Offsets, stride: Sequence[int]
) -> tuple[mx.array, mx.array | None]:
    """Return (M, 1 + D) int64 rows with repeats, and which count (all: None)."""
    if rule == Rule.ITSELF:
        return coords.astype(mx.int64), None
    if rule == Rule.CELL:
        return cells(coords.astype(mx.int64), stride), None
    if rule == Rule.EXPAND:
        base = scaled(coords, stride)
        return mx.concatenate([shifted(base, v) for v in offsets]), None
    rows = mx.concatenate([shifted(coords, v) for v in negated(offsets)])
    steps = mx.array([1, *stride], dtype=mx.int64)
    return cells(rows, stride), mx.all(rows % steps == 0, axis=1)


def levels(
    geometry: object,
    coords: mx.array,
    strides: Sequence[Sequence[int]],
    boxes: Sequence[Bounds],
) -> list[mx.array]:
    """Return the cells of each stride, each level made of the one before.

    Reads their numbers, one by one.
    """
    before = (1,) * (coords.shape[1] - 1)
    made, still = [], [(0,) * len(before)]
    for stride, box in zip(strides, boxes, strict=True):
        step = tuple(s // b for s, b in zip(stride, before, strict=True))
        coords = geometry.made_rows(Rule.CELL, coords, still, step, box, False)
        before = stride
        made.append(coords)
    return made


def made_rows(
    rule: Rule,
    coords: mx.array,
    offsets: Offsets,
    stride: Sequence[int],
    box: Bounds,
    count: int | None = None,
) -> mx.array:
    """Return the sorted unique int32 rows that a rule makes within a box.

    Reads one size, unless that is given. More where the box has 2^62 cells: then keys
    need their ranks.
    """
    if coords.shape[0] == 0 or not offsets or is_empty(box):
        return mx.zeros((0, coords.shape[1]), dtype=mx.int32)
    rows, counts = candidates(coords, rule, offsets, stride)
    low, high = (mx.array(list(v), dtype=mx.int64) for v in box)
    inside = mx.all((rows >= low) & (rows <= high), axis=1)
    inside = inside if counts is None else inside & counts
    beyond = cell_count(box)
    if beyond >= KEY_LIMIT:
        return unique_rows(rows[true_positions(inside)].astype(mx.int32)).rows
    weights = column_weights(box)
    keys = ((rows - low) * mx.array(weights, dtype=mx.int64)).sum(axis=1)
    keys = mx.sort(mx.where(inside, keys, beyond))
    keys = keys[true_positions(first_of_equals(keys) & (keys < beyond), count)]
    columns = [
        keys // weight % (last - first + 1)
        for weight, first, last in zip(weights, *box, strict=True)
    ]
    return (mx.stack(columns, axis=1) + low).astype(mx.int32)

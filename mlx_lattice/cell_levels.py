"""The cells of a coordinate set at several strides, one level made of the other."""

from __future__ import annotations

from collections.abc import Sequence
from operator import floordiv
from typing import NamedTuple

import mlx.core as mx

from .backends import registry
from .coordinate_set import CoordinateSet, coarser, settle
from .geometry import output_rows
from .geometry.keys import Bounds
from .kernel_spec import cells_of


class Level(NamedTuple):
    """Rows of a level.

    Attributes:
        rows: (M, 1 + D) int32, sorted and unique.
        box: bounds that hold them.
        stride: the size of their lattice cell on each axis.
        spatial_shape: extents of the dense grid of cells, or None.
    """

    rows: mx.array
    box: Bounds
    stride: tuple
    spatial_shape: tuple[int, ...] | None


def levels(source: CoordinateSet, strides: Sequence[tuple[int, ...]]) -> list[Level]:
    """Return the levels that strided convolutions make of a set, one after another.

    Reads their sizes, at once where the backend can; with them what is not known yet
    of the set, which it checks.

    Args:
        source: the set.
        strides: of the convolutions.

    Raises:
        ValueError: what is wrong with the set.
    """
    steps, sizes, shapes = [], [], []
    step, size, shape = (1,) * len(strides[0]), source.stride, source.spatial_shape
    for stride in strides:
        step = tuple([a * b for a, b in zip(step, stride, strict=True)])
        size = coarser(size, stride)
        if shape is not None:
            shape = cells_of(shape, stride)
        steps.append(step), sizes.append(size), shapes.append(shape)
    rows = _rows(source, steps)
    return [Level(*each) for each in zip(*rows, sizes, shapes, strict=True)]


def _rows(
    source: CoordinateSet, steps: Sequence[tuple[int, ...]]
) -> tuple[list[mx.array], list[Bounds]]:
    """Return the rows of each level, and their boxes."""
    geometry, was_settled = registry.geometry(), source.settled
    boxes = _boxes(source.box, steps) if was_settled else None
    started = geometry.start_levels(source, steps, boxes)
    unsettled = [] if was_settled else [source]
    counts = settle(unsettled, *(started.counts if started else ()))
    if not was_settled:
        boxes = _boxes(source.box, steps)
    rows = started and started.rows(counts, boxes)
    if rows is None and not was_settled:
        return _rows(source, steps)  # what that takes is known now
    return rows or output_rows.levels(geometry, source.coords, steps, boxes), boxes


def _boxes(box: Bounds, steps: Sequence[tuple[int, ...]]) -> list[Bounds]:
    """Return the boxes of a box's cells at each step; as int32 as its own rows."""
    return [
        tuple([tuple(map(floordiv, end, (1, *step))) for end in box]) for step in steps
    ]

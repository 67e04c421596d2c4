"""The cells of a coordinate set at several strides, one level made of the other."""

from __future__ import annotations

from collections.abc import Sequence
from operator import floordiv
from typing import NamedTuple

import mlx.core as mx

from .backends import registry
from .coordinate_set import CoordinateSet, exact_ratio, settle
from .geometry.keys import Bounds


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

    Reads their sizes, at once where the backend can.

    Args:
        source: the set, which is checked.
        strides: of the convolutions.
    """
    if not source.settled:
        settle([source])
    steps, boxes, sizes, shapes = [], [], [], []
    step, size, shape = (1,) * len(strides[0]), source.stride, source.spatial_shape
    box = source.box
    for stride in strides:
        step = tuple([a * b for a, b in zip(step, stride, strict=True)])
        size = tuple([exact_ratio(a * b, 1) for a, b in zip(size, stride, strict=True)])
        if shape is not None:
            shape = tuple([-(-n // s) for n, s in zip(shape, stride, strict=True)])
        # Cells of cells, which are int32 as their rows are.
        each = 1, *stride
        box = tuple([tuple(map(floordiv, end, each)) for end in box])
        steps.append(step), boxes.append(box), sizes.append(size), shapes.append(shape)
    rows = registry.geometry().levels(source.coords, steps, boxes)
    return [Level(*each) for each in zip(rows, boxes, sizes, shapes, strict=True)]

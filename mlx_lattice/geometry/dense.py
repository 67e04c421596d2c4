"""Dense grids of cells from 0: which are active, and where rows stand in them."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from ..arrays import array_of
from ..checks import AXES
from .keys import Bounds
from .unique import true_positions


def active_cells(
    array: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array, tuple[int, ...]]:
    """Find the active cells of a dense (B, spatial..., C) array.

    Returns:
        (N, 1 + D) int32 sorted unique coordinates, (N, C) features, and the grid
        (B, spatial...).

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

    Args:
        grid: (B, spatial...); batch indices are known to be below B.
        coords: (N, 1 + D) int32, of one row or more.
        bounds: least and greatest value of every column.

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

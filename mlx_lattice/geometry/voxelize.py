"""From points to voxels: floor, merge, reduce."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..arrays import array_of, positions_of, single_or_double, stream_of
from ..backends import registry
from ..checks import AXES, one_of, real_axes
from . import sync
from .keys import INT32_LIMIT
from .points import NO_CELL, Numbers, cells_of, in_cells
from .segments import reduce_segments

REDUCTIONS = ("mean", "sum", "max", "first")


def voxelize(
    points: mx.array,
    feats: mx.array | None,
    voxel_size: float | Sequence[float],
    batch: mx.array | None = None,
    origin: float | Sequence[float] = 0.0,
    reduce: str = "mean",
) -> tuple[mx.array, mx.array, mx.array]:
    """Merge points of one cell ``floor((point - origin) / voxel_size)``.

    Returns:
        (M, 1 + D) int32 sorted unique coordinates, (M, C) features, and (P,) int32
        the row that each point went to.

    Raises:
        TypeError, ValueError: see ``SparseTensor.from_points``.
    """
    points = positions_of(points, "points")
    if points.ndim != 2 or points.shape[1] not in AXES:
        raise ValueError(
            f"points must have shape (P, D), D from 1 to 4; got {tuple(points.shape)}"
        )
    one_of(reduce, REDUCTIONS, "reduce")
    n, dims = points.shape
    feats = mx.ones((n, 1)) if feats is None else feats
    feats = array_of(feats, "feats")
    if feats.ndim != 2 or feats.shape[0] != n:
        raise ValueError(
            f"feats must have shape (P, C) with P = {n}, the points; got "
            f"{tuple(feats.shape)}"
        )
    if feats.dtype == mx.bool_ and reduce != "first":
        raise TypeError(
            f"bool features have no {reduce}: pass reduce='first', or cast them with "
            ".astype(mx.float32)"
        )
    size = real_axes(voxel_size, dims, "voxel_size")
    if min(size) <= 0:
        raise ValueError(f"voxel_size must be positive; got {voxel_size}")
    moved = real_axes(origin, dims, "origin")
    batch = mx.zeros((n,), dtype=mx.int32) if batch is None else batch_of(batch, n)
    # Doubles stay so: at map coordinates float32 cannot tell voxels apart.
    points = single_or_double(points)
    moved = moved if any(moved) else None
    coords = cells_of(points, batch, moved, size)
    box = None
    if n:
        box = low, _ = registry.geometry().bounds(coords)
        if NO_CELL in low[1:]:
            _expect_cells(points, moved, size)
        if low[0] < 0:
            raise ValueError(f"batch indices must be 0 or more; got {low[0]}")
    unique = registry.geometry().unique_rows(coords, box)
    if n == 0:
        return unique.rows, feats, unique.inverse
    if reduce == "first":
        # The earliest point of each run, whatever the sort does with ties.
        first = mx.full((unique.rows.shape[0],), n, dtype=mx.int32)
        first = first.at[unique.inverse].minimum(mx.arange(n, dtype=mx.int32))
        return unique.rows, feats[first], unique.inverse
    reduced = reduce_segments(feats, unique.inverse, unique.rows.shape[0], reduce)
    return unique.rows, reduced, unique.inverse


def batch_of(batch: mx.array, points: int) -> mx.array:
    """Return (P,) int32 batch indices. Of wider integers it reads the bounds.

    Raises:
        ValueError: they are no integers, not one a point, or beyond int32.
    """
    batch = array_of(batch, "batch")
    integral = mx.issubdtype(batch.dtype, mx.integer) or not batch.size
    if tuple(batch.shape) != (points,) or not integral:
        raise ValueError(
            f"batch must be ({points},) integers, one a point; got "
            f"{tuple(batch.shape)} of {batch.dtype}"
        )
    if batch.size and batch.dtype in (mx.int64, mx.uint32, mx.uint64):
        low, high = sync.read(batch.min(), batch.max())
        if low < -INT32_LIMIT or high >= INT32_LIMIT:
            raise ValueError(f"batch indices must be below 2^31; got {low} to {high}")
    return batch.astype(mx.int32)


def _expect_cells(points: mx.array, moved: Numbers, size: Numbers) -> None:
    """Raise unless int32 holds the cells of all points, of which there are some."""
    with stream_of(points):
        cells = mx.floor(in_cells(points, moved, size))
        with sync.values():
            mx.eval(cells)
        if not mx.isfinite(cells).all().item():
            bad = mx.argmin(mx.isfinite(cells).all(axis=1)).item()
            raise ValueError(
                f"points must be finite; point {bad} is {tuple(points[bad].tolist())}"
            )
        least, most = cells.min().item(), cells.max().item()
    if least < -INT32_LIMIT or most >= INT32_LIMIT:
        raise ValueError(
            f"voxels would reach {least:g} to {most:g}, beyond int32; use a larger "
            "voxel_size or an origin nearer to the points"
        )

"""Points into voxels: cells of points, and reductions of rows into segments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from .. import registry, sync
from ..checks import (
    AXES,
    FLOATS,
    INT32_LIMIT,
    array_of,
    dtype_text,
    one_of,
    positions_of,
    real_axes,
    single_or_double,
    stream_of,
    whole,
)
from ..reductions import averaged, greatest, scattered
from ..transformations import Function

NO_CELL = -INT32_LIMIT  # stands where a cell is not finite, or beyond int32

Numbers = tuple[float, ...] | None


def cells_of(
    points: mx.array,
    batch: mx.array | None = None,
    origin: Numbers = None,
    size: Numbers = None,
) -> mx.array:
    """Return (P, 1 + D) int32 ``floor((points - origin) / size)``; no derivative.

    What int32 does not hold becomes ``NO_CELL``. Of float64 nothing is rounded.
    """
    with stream_of(points):
        points = mx.stop_gradient(points)
        at = mx.floor(in_cells(points, origin, size))
        held = (at >= -INT32_LIMIT) & (at < INT32_LIMIT)
        # What is not held is not converted either: that has no one result.
        cells = mx.where(held, mx.where(held, at, 0).astype(mx.int32), NO_CELL)
    return cells if batch is None else mx.concatenate([batch[:, None], cells], axis=1)


def in_cells(points: mx.array, origin: Numbers, size: Numbers) -> mx.array:
    """Return ``(points - origin) / size``; arguments and dtype as of ``cells_of``."""
    if origin is not None:
        points = points - mx.array(origin, dtype=points.dtype)
    return points if size is None else points / mx.array(size, dtype=points.dtype)


def corners_of(dims: int) -> list[tuple[int, ...]]:
    """Return the offsets of the 2^D cells from a point's own on, last axis fastest."""
    return list(itertools.product((0, 1), repeat=dims))


def corner_weights(
    points: mx.array,
    cells: mx.array | None,
    table: mx.array,
    renormalise: bool,
    size: Numbers = None,
) -> mx.array:
    """Return the (P, 2^D) float32 weights of the cells around points.

    Products over the axes; absent cells have 0. Differentiable in the points, whose
    last D columns count from their ``cells``, or from nothing if these are None.
    ``table`` has the rows of the cells, and ``size`` is a cell's, in the points' units.
    """

    def composed(points: mx.array) -> mx.array:
        return _composed(points, cells, table, renormalise, size)

    kernels = registry.points()
    if kernels is None or not table.size:
        return composed(points)
    return Function(
        lambda points: kernels.corner_weights(points, size, cells, table, renormalise),
        vjp=lambda points, dy, _: mx.vjp(composed, [points], [dy])[1][0],
        jvp=lambda points, dx: mx.jvp(composed, [points], [dx])[1][0],
    )(points)


def _composed(points, cells, table, renormalise, size) -> mx.array:
    """Return ``corner_weights`` in MLX operations."""
    dims = table.shape[1].bit_length() - 1
    beyond = in_cells(points, None, size)[:, -dims:]
    if cells is not None:
        beyond = beyond - cells[:, 1:].astype(mx.float32)
    # Of each axis what it leaves to the lower cell, and the share of the upper one.
    shares = mx.stack([1 - beyond, beyond], axis=2)
    weights = (table >= 0).astype(mx.float32).reshape(-1, *(2,) * dims)
    for axis in range(dims):
        shape = [-1, *(2 if a == axis else 1 for a in range(dims))]
        weights = weights * shares[:, axis].reshape(shape)
    weights = weights.reshape(table.shape)
    if renormalise:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / mx.where(total > 0, total, 1)
    return weights


def segment_counts(rows: mx.array, segments: int) -> mx.array:
    """Return (segments,) int32: how many rows each segment has."""
    counts = mx.zeros((segments,), dtype=mx.int32)
    return counts.at[rows].add(1) if rows.size else counts


def reduce_segments(
    values: mx.array, rows: mx.array, segments: int, reduce: str
) -> mx.array:
    """Reduce (N, C) values into (segments, C), accumulated in float32."""
    table = rows.astype(mx.int32)[:, None]
    if reduce == "max":
        find = partial(registry.reductions().scatter_max, table=table, rows=segments)
        return greatest(values, find, lambda: table)[0]
    if reduce == "sum":
        return scattered(values, table, segments)
    return averaged(values, table, segments)


REDUCTIONS = ("mean", "sum", "max", "first")


def voxelize(
    points: mx.array,
    feats: mx.array | None,
    voxel_size: float | Sequence[float],
    batch: mx.array | None = None,
    origin: float | Sequence[float] = 0.0,
    reduce: str = "mean",
) -> tuple[mx.array, mx.array, mx.array]:
    """Merge points of one cell ``floor((point - origin) / voxel_size)``."""
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
            f"{tuple(feats.shape)}. Labels (P,) are passed as labels="
        )
    if feats.dtype not in FLOATS and reduce != "first":
        raise TypeError(
            f"{dtype_text(feats)} features have no {reduce}: cast them with "
            ".astype(mx.float32), or pass reduce='first'. Labels are voted on if they "
            "are given as labels="
        )
    size = real_axes(voxel_size, dims, "voxel_size")
    if min(size) <= 0:
        raise ValueError(f"voxel_size must be positive; got {voxel_size}")
    moved = real_axes(origin, dims, "origin")
    batch = mx.zeros((n,), dtype=mx.int32) if batch is None else batch
    batch = integers_of(batch, n, "batch")
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
        first = first_points(unique.inverse, unique.rows.shape[0])
        return unique.rows, feats[first], unique.inverse
    reduced = reduce_segments(feats, unique.inverse, unique.rows.shape[0], reduce)
    return unique.rows, reduced, unique.inverse


def first_points(inverse: mx.array, voxels: int) -> mx.array:
    """Return (voxels,) int32: the earliest point of each voxel, or P if it has none."""
    points = inverse.shape[0]
    first = mx.full((voxels,), points, dtype=mx.int32)
    if not points or not voxels:
        return first
    return first.at[inverse].minimum(mx.arange(points, dtype=mx.int32))


def majority(
    labels: mx.array,
    inverse: mx.array,
    voxels: int,
    *,
    ignore_label: int = -1,
    ignore_ties: bool = False,
) -> mx.array:
    """Return the most frequent label among the points of each voxel.

    Args:
        labels: (P,) integers, one a point. Points with ``ignore_label`` do not vote.
        inverse: (P,) integers: the voxel of each point. Points with -1 do not vote.
        voxels: number V of voxels.
        ignore_label: the label of voxels without votes.
        ignore_ties: whether a voxel with several most frequent labels gets
            ``ignore_label``. By default it gets the smallest of these labels.

    Returns:
        (V,) int32.

    Raises:
        ValueError: shapes do not fit, an array has no integers, or a label is beyond
            int32.

    Examples:
        >>> labels, inverse = mx.array([7, 3, 7, -1]), mx.array([0, 0, 0, 1])
        >>> ops.majority(labels, inverse, voxels=2)
        array([7, -1], dtype=int32)
    """
    inverse = array_of(inverse, "inverse")
    points = inverse.shape[0] if inverse.ndim else 0
    labels = integers_of(labels, points, "labels")
    inverse = integers_of(inverse, points, "inverse")
    voxels = whole(voxels, "voxels")
    ignore = whole(ignore_label, "ignore_label", -INT32_LIMIT)
    if not points or not voxels:
        return mx.full((voxels,), ignore, dtype=mx.int32)
    # The last voxel takes the points of none, and is cut off.
    inverse = mx.where(inverse < 0, voxels, inverse)
    pairs = registry.geometry().unique_rows(mx.stack([inverse, labels], axis=1))
    voxel, label = pairs.rows[:, 0], pairs.rows[:, 1]
    count = pairs.rows.shape[0]
    votes = mx.zeros((count,), dtype=mx.int32)
    votes = votes.at[pairs.inverse].add((labels != ignore).astype(mx.int32))
    most = mx.zeros((voxels + 1,), dtype=mx.int32).at[voxel].maximum(votes)
    is_winner = votes == most[voxel]
    # Pairs are sorted by voxel and label, so the smallest label is the earliest pair.
    earliest = mx.where(is_winner, mx.arange(count, dtype=mx.int32), count)
    first = mx.full((voxels + 1,), count, dtype=mx.int32).at[voxel].minimum(earliest)
    is_known = most > 0
    if ignore_ties:
        winners = mx.zeros((voxels + 1,), dtype=mx.int32)
        winners = winners.at[voxel].add(is_winner.astype(mx.int32))
        is_known = is_known & (winners == 1)
    elected = label[mx.minimum(first, count - 1)]
    return mx.where(is_known, elected, ignore)[:voxels]


def integers_of(
    values: mx.array, count: int, name: str, each: str = "point"
) -> mx.array:
    """Return (count,) int32, one for each point. Reads the bounds of wider integers."""
    values = array_of(values, name)
    integral = mx.issubdtype(values.dtype, mx.integer) or not values.size
    if tuple(values.shape) != (count,) or not integral:
        raise ValueError(
            f"{name} must be ({count},) integers, one for each {each}; got "
            f"{tuple(values.shape)} of {dtype_text(values)}"
        )
    if values.size and values.dtype in (mx.int64, mx.uint32, mx.uint64):
        low, high = sync.read(values.min(), values.max())
        if low < -INT32_LIMIT or high >= INT32_LIMIT:
            raise ValueError(f"{name} must fit int32; got {low} to {high}")
    return values.astype(mx.int32)


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

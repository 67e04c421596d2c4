"""Reductions of rows into segments: voxelising and global pooling stand on these."""

from __future__ import annotations

import mlx.core as mx


def segment_counts(rows: mx.array, segments: int) -> mx.array:
    """Return (segments,) int32: how many rows each segment has."""
    counts = mx.zeros((segments,), dtype=mx.int32)
    return counts.at[rows].add(1) if rows.size else counts


def reduce_segments(
    values: mx.array, rows: mx.array, segments: int, reduce: str
) -> mx.array:
    """Reduce (N, C) values into (segments, C), accumulated in float32.

    Differentiable in ``values``. An empty segment gives zeros.

    Args:
        values: (N, C) floating.
        rows: (N,) integers: the segment of each row.
        segments: number of segments.
        reduce: "sum", "mean" or "max".
    """
    shape = segments, values.shape[1]
    if rows.size == 0:
        return mx.zeros(shape, dtype=values.dtype)
    if reduce == "max":
        least = mx.full(shape, -mx.inf, dtype=values.dtype)
        most = least.at[rows].maximum(values)
        empty = segment_counts(rows, segments) == 0
        return mx.where(empty[:, None], mx.zeros_like(most), most)
    total = mx.zeros(shape).at[rows].add(values.astype(mx.float32))
    if reduce == "mean":
        total = total / mx.maximum(segment_counts(rows, segments), 1)[:, None]
    return total.astype(values.dtype)

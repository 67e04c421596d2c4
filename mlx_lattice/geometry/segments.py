"""Reductions of rows into segments: voxelising stands on these."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from ..backends import registry
from ..reductions import averaged, greatest, scattered


def segment_counts(rows: mx.array, segments: int) -> mx.array:
    """Return (segments,) int32: how many rows each segment has."""
    counts = mx.zeros((segments,), dtype=mx.int32)
    return counts.at[rows].add(1) if rows.size else counts


def reduce_segments(
    values: mx.array, rows: mx.array, segments: int, reduce: str
) -> mx.array:
    """Reduce (N, C) values into (segments, C), accumulated in float32.

    Differentiable to any order in ``values``; the gradient of a maximum goes to the
    first row that has it. An empty segment gives zeros.

    Args:
        values: (N, C) float32, float16 or bfloat16.
        rows: (N,) integers: the segment of each row.
        segments: number of segments.
        reduce: "sum", "mean" or "max".
    """
    table = rows.astype(mx.int32)[:, None]
    if reduce == "max":
        find = partial(registry.reductions().scatter_max, table=table, rows=segments)
        return greatest(values, find, lambda: table)[0]
    if reduce == "sum":
        return scattered(values, table, segments)
    return averaged(values, table, segments)

"""Lists of edges: checked, and put in order."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import sync

Rows = mx.array | Sequence[int]


def checked_edges(
    in_rows: Rows, out_rows: Rows, offsets: Rows, limits: tuple[int, int, int]
) -> mx.array:
    """Return (E, 3) int32 edges by offset, output row and input row.

    Args:
        in_rows, out_rows, offsets: (E,) integers, of which there is one an edge.
        limits: what each must lie below.

    Raises:
        ValueError: lengths differ, or a value lies outside its range.
    """
    columns = [_vector(c) for c in (in_rows, out_rows, offsets)]
    sizes = [c.size for c in columns]
    if len(set(sizes)) != 1:
        raise ValueError(
            "in_rows, out_rows and offsets must have one entry an edge; got "
            f"lengths {sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    names = "in_rows", "out_rows", "offsets"
    for column, name, limit in zip(columns, names, limits, strict=True):
        if column.size == 0:
            continue
        low, high = sync.read(column.min(), column.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} must lie in [0, {limit}); got {low} to {high}")
    edges = mx.stack([c.astype(mx.int32) for c in columns], axis=1)
    # Ties by input row too, so that the order given does not matter.
    return edges[lexicographic(edges, (2, 1, 0), limits)]


def _vector(values) -> mx.array:
    array = values if isinstance(values, mx.array) else mx.array(values)
    if array.size == 0:
        return mx.zeros((0,), dtype=mx.int32)
    if array.ndim != 1 or not mx.issubdtype(array.dtype, mx.integer):
        raise ValueError(
            "edges must be given as 1-D integer arrays; got shape "
            f"{tuple(array.shape)} of {array.dtype}"
        )
    return array


def lexicographic(edges: mx.array, order, limits) -> mx.array:
    """Return the order of edge rows by the named columns, the first leading."""
    key = mx.zeros((edges.shape[0],), dtype=mx.int64)
    for column in order[:2]:
        key = key * max(1, limits[column]) + edges[:, column].astype(mx.int64)
    last = edges[:, order[2]].astype(mx.int64)
    if (limits[0] or 1) * (limits[1] or 1) * limits[2] < 1 << 62:
        return mx.argsort(key * max(1, limits[order[2]]) + last)
    key = mx.searchsorted(mx.sort(key), key).astype(mx.int64)
    return mx.argsort(key * max(1, limits[order[2]]) + last)

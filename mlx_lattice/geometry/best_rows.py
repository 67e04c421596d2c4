"""Rows of greatest score of each batch element, in MLX operations."""

from __future__ import annotations

import mlx.core as mx

from .keys import INT32_LIMIT

BITS = 32  # of a key that a row's number has, and a score
# The bits of infinity, and of how wide words, in each dtype that kernels rank.
INFINITE = {
    mx.float32: (0x7F800000, mx.uint32),
    mx.float16: (0x7C00, mx.uint16),
    mx.bfloat16: (0x7F80, mx.uint16),
}


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return which rows are the best of their element; see ``Geometry``."""
    n, low = len(coords), (1 << BITS) - 1
    rows = mx.arange(n, dtype=mx.int64)
    keys = falling(scores).astype(mx.int64) << BITS | rows
    ordered = mx.sort(keys)
    if batches[0] == batches[1]:
        return keys <= ordered[k - 1]
    # Once more by elements, which with the scores' bits would be too many.
    order = ordered & low
    keys = mx.sort(coords[:, 0][order].astype(mx.int64) << BITS | rows)
    element, order = keys >> BITS, order[keys & low]
    kept = mx.zeros((n,), dtype=mx.bool_)
    # Of an element's rows each but the first k has another of it k places before.
    first = mx.ones((k,), dtype=mx.bool_)
    kept[order] = mx.concatenate([first, element[k:] != element[:-k]])
    return kept


def falling(scores: mx.array) -> mx.array:
    """Return (N,) int32 that are less of a greater score; a NaN has the greatest.

    Args:
        scores: (N,) of any dtype that float32 holds.
    """
    negative = 0 - scores.astype(mx.float32)  # of both zeros 0
    bits = negative.view(mx.int32)
    ordered = bits ^ (bits >> 31 & INT32_LIMIT - 1)
    return mx.where(mx.isnan(negative), INT32_LIMIT - 1, ordered)

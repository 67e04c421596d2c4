"""What the queries, keys and values of every attention must be of each other."""

from __future__ import annotations

import mlx.core as mx

from ..dtypes import dtype_name


def heads_fit(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the last two axes of each, (heads, D), go together.

    There are heads of some channels; keys have as many channels as queries, and as many
    heads as values, which divide those of queries.
    """
    heads, channels = q.shape[-2:]
    held = k.shape[-2]
    if min(heads, channels, held) == 0 or channels != k.shape[-1]:
        return False
    return held == v.shape[-2] and heads % held == 0


def check_dtypes(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raise TypeError unless all are of one floating dtype."""
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    dtype_name(q.dtype)

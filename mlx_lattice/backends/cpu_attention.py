"""Attention on the CPU, by the C++ extension: groups of any length, no padding."""

from __future__ import annotations

import mlx.core as mx

from .cpu_extension import extension

KERNEL = "attention"


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    groups: tuple[mx.array, ...],
    scale: float,
) -> tuple[mx.array, mx.array]:
    """Return (N, heads, D_v), and (N, heads) float32 logarithms of sums.

    Args:
        q, k, v: (N, heads, D), (N, kv_heads, D), (N, kv_heads, D_v) of one dtype.
        groups: (S,) int32 rows, group after group; (G + 1,) where each begins; (G,)
            how many of its first rows are queries. Every row is one once. With two
            more, (N,) rows of q and (G,) where each group's begin, those are its
            queries, and k and v may have other rows than q; no keys give 0.
        scale: factor of the scores.
    """
    return extension.attention(q, k, v, *groups, scale=scale)


def gradient(
    dy: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    y: mx.array,
    sums: mx.array,
    groups: tuple[mx.array, ...],
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return dq by row, and dk and dv by place in the groups' rows: (S, heads, D).

    Args:
        dy: (N, heads, D_v), the result's gradient.
        y, sums: what ``attention`` returned.
        q, k, v, groups, scale: as there.
    """
    return extension.attention_gradient(dy, q, k, v, y, sums, *groups, scale=scale)

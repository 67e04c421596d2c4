"""Attention by the CPU's kernel, with derivatives of every order."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..backends import cpu_attention
from ..transformations import Function, differentiable
from ..transformations import filled as filled_tangents
from .attended import Tell


def by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lists: tuple[mx.array, ...],
    scale: float,
    *,
    gather: Callable[[mx.array], mx.array],
    again: Callable[..., mx.array],
    tell: Tell,
) -> mx.array:
    """Attend by the kernel; derivatives of the gradient are MLX operations'.

    Args:
        q, k, v, lists, scale: as of ``cpu_attention.attention``.
        gather: from (S, C), what is by place in the groups' rows, to the rows of k.
        again: the same attention of (q, k, v) in MLX operations.
        tell: told of each pass.
    """

    def forward(q, k, v):
        return cpu_attention.attention(q, k, v, lists, scale)

    def back(dy, q, y, sums, k, v):
        dq, *rest = cpu_attention.gradient(dy, q, k, v, y, sums, lists, scale)
        # A row may be a key of two groups.
        flat = (gather(a.reshape(len(a), a[0].size)) for a in rest)
        return dq, *(a.reshape(b.shape) for a, b in zip(flat, (k, v), strict=True))

    def vjp(primals, cotangents, outputs):
        tell("backward", 1, 1)
        q, k, v = primals
        return differentiable(back, again, 2)(cotangents[0], q, *outputs, k, v)

    def jvp(at, by):
        (moved,) = mx.jvp(again, list(at), filled_tangents(at, by))[1]
        return moved, mx.zeros(moved.shape[:2])

    tell("forward", 1, 1)
    function = Function(forward)
    function.vjp(vjp)
    function.jvp(jvp)
    return function(q, k, v)[0]

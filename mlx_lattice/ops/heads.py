"""Heads before attention: normalised by their root mean square, turned by positions.

Where the device has a kernel both are one launch, of queries, keys and values in one
array, which attention then moves together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..backends import registry
from ..backends.gpu_heads import GpuHeads
from ..channel_kernels import column_sums
from ..transformations import Function, of_kernels

EPS = 1e-12  # added to the mean square

Angles = Sequence[mx.array]  # the cosine and the sine of every pair, or nothing
Given = tuple[mx.array, mx.array | None, mx.array | None]


def turned_heads(
    qkv: mx.array, scales: Sequence[mx.array] = (), angles: Angles = ()
) -> Given:
    """Return queries, keys and values as ``full_attention`` takes them.

    Args:
        qkv: (N, 3, heads, D).
        scales: (heads, D) of queries and of keys, which are normalised first; or none.
        angles: (N, 1, D / 2) float32 cosine and sine, or none.

    Raises:
        ValueError: a scale has another shape.
    """
    _expect_scales(qkv, scales)
    kernel = registry.heads()
    if kernel is not None and kernel.takes(qkv):
        return _by_kernel(kernel, qkv, 2, scales, angles), None, None
    q, k, v = (a.squeeze(1) for a in mx.split(qkv, 3, axis=1))
    of_q, of_k = scales if scales else (None, None)
    return _composed(q, of_q, angles), _composed(k, of_k, angles), v


def turned_head(
    x: mx.array, scale: mx.array | None = None, angles: Angles = ()
) -> mx.array:
    """Return (N, heads, D) queries, or keys; arguments are as of ``turned_heads``."""
    scales = () if scale is None else (scale,)
    _expect_scales(x, scales)
    kernel, part = registry.heads(), x[:, None]
    if kernel is None or not kernel.takes(part):
        return _composed(x, scale, angles)
    return _by_kernel(kernel, part, 1, scales, angles).squeeze(1)


def _expect_scales(x: mx.array, scales: Sequence[mx.array]) -> None:
    """Raise unless scales are of these heads: a kernel would read beyond them."""
    heads = x.shape[-2:]
    for scale in scales:
        if scale.shape != heads:
            raise ValueError(
                f"the scale of {heads[0]} heads of {heads[1]} channels must have shape "
                f"{heads}; got {scale.shape}"
            )


def _composed(x: mx.array, scale: mx.array | None, angles: Angles) -> mx.array:
    """Return (N, heads, D) in MLX operations, float32 inside."""
    if not x.size:  # of which MLX's CUDA kernels cannot be launched
        return x
    y = x.astype(mx.float32)
    if scale is not None:
        y = mx.fast.rms_norm(y, None, EPS) * scale
    if angles:
        cos, sin = angles
        pairs = y.reshape(*x.shape[:2], x.shape[2] // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        y = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return y.astype(x.dtype)


def _by_kernel(
    kernel: GpuHeads,
    x: mx.array,
    turned: int,
    scales: Sequence[mx.array],
    angles: Angles,
) -> mx.array:
    kinds = {a.dtype for a in scales}
    if len(kinds) > 1:
        scales = [a.astype(mx.float32) for a in scales]
    function = _function(kernel, turned, len(scales), bool(angles))
    return function(x, *scales, *angles)


@lru_cache(maxsize=64)
def _function(kernel: GpuHeads, turned: int, scaled: int, turns: bool) -> Function:
    """Return a function of heads, scales and angles; those have no gradient."""

    def cut(rest: Sequence[mx.array]) -> tuple[Sequence[mx.array], Sequence[mx.array]]:
        return rest[:scaled], rest[scaled:]

    def composed(x, *rest):
        scales, angles = cut(rest)
        parts = [a.squeeze(1) for a in mx.split(x, x.shape[1], axis=1)]
        for i in range(turned):
            parts[i] = _composed(parts[i], scales[i] if scaled else None, angles)
        return mx.stack(parts, axis=1)

    def forward(x, *rest):
        return kernel.turned(mx.contiguous(x), turned, *cut(rest))

    def back(dy, x, *rest):
        scales, angles = cut(rest)
        dy, x = mx.contiguous(dy), mx.contiguous(x)
        dx, lines = kernel.gradient(dy, x, turned, scales, angles)
        found = []
        if scaled:
            total = column_sums(lines, scales[0]).reshape(turned, *x.shape[2:])
            found = [a.squeeze(0) for a in mx.split(total, turned)]
        return dx, *found, *[mx.zeros_like(a) for a in angles]

    return of_kernels(forward, back, composed, 1 + scaled + 2 * turns)

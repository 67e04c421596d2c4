"""Rows of several arrays side by side, as skip connections join them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .backends import registry
from .transformations import Function, filled

WORDS = mx.uint64, mx.uint32, mx.uint16


def beside(parts: Sequence[mx.array]) -> mx.array:
    """Return (N, C) rows of arrays of one dtype, the channels of each after another's.

    By a kernel where the device has one, for which MLX has no rule of ``mx.vmap``; else
    in MLX operations, int8 in the widest words that fit, since MLX copies parts of rows
    number by number.
    """
    kernels = registry.joins()
    if kernels is not None and kernels.takes(parts):
        return _joined(*parts)
    if parts[0].dtype == mx.int8 and parts[0].size:
        channels = [each.shape[1] for each in parts]
        for word in WORDS:
            if not any(c % word.size for c in channels):
                words = [each.view(word) for each in parts]
                return mx.concatenate(words, axis=1).view(mx.int8)
    return mx.concatenate(parts, axis=1)


@Function
def _joined(a: mx.array, b: mx.array) -> mx.array:
    return registry.joins().join(a, b)


@_joined.vjp
def _joined_vjp(primals, cotangent, _):
    channels = primals[0].shape[1]
    return cotangent[:, :channels], cotangent[:, channels:]


@_joined.jvp
def _joined_jvp(primals, tangents):
    return mx.concatenate(filled(primals, tangents), axis=1)

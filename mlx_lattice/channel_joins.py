"""Rows of several arrays side by side, as skip connections join them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .backends import registry
from .transformations import Function, filled

WORDS = mx.uint64, mx.uint32, mx.uint16


def beside(parts: Sequence[mx.array]) -> mx.array:
    """Return (N, C) rows of arrays of one dtype, the channels of each after another's.

    Two of them by a kernel where the device has one, and so are their gradients; else
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
    return _split(primals[0].shape[1])(cotangent)


@_joined.jvp
def _joined_jvp(primals, tangents):
    return mx.concatenate(filled(primals, tangents), axis=1)


@_joined.vmap
def _joined_vmap(parts, axes):
    def joined(*each: mx.array) -> mx.array:
        return mx.concatenate(each, axis=1)

    return mx.vmap(joined, in_axes=tuple(axes))(*parts), 0


@lru_cache(maxsize=256)
def _split(c_a: int) -> Function:
    """Return what takes rows of which ``c_a`` channels are the first array's apart."""

    def views(y: mx.array) -> tuple[mx.array, mx.array]:
        return y[:, :c_a], y[:, c_a:]

    split = Function(lambda y: tuple(registry.joins().split(y, c_a)))
    split.vjp(lambda _, parts, __: _joined(*parts))
    split.jvp(lambda _, y: views(y))
    split.vmap(lambda y, axis: (mx.vmap(views, in_axes=axis)(y), (0, 0)))
    return split

"""The product of features and a packed linear weight, and its derivatives."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from . import backends, devices
from .backends import mlx_ops
from .contraction import same_dtype
from .devices import CPU, Device
from .dtypes import dtype_name
from .problem import Problem
from .quantized import QuantizedWeight
from .routes.plan import Plan
from .routes.selection import named
from .transformations import Function, Linear, constant


def packed_linear(x: mx.array, w: QuantizedWeight) -> mx.array:
    """Return ``x @ W[0]`` for (..., C_in) features and a packed linear weight.

    Raises:
        TypeError: dtypes differ or are not floating.
        ValueError: the channels are not those of the weight.
    """
    dtype_name(x.dtype)
    if x.ndim < 1 or x.shape[-1] != w.in_channels:
        raise ValueError(
            f"features of shape {tuple(x.shape)} do not fit a packed weight of "
            f"{w.in_channels} input channels"
        )
    same_dtype(x, w, "the weight")
    y = _packed_linear(x.reshape(-1, w.in_channels), w, False)
    return y.reshape(*x.shape[:-1], w.shape[2])


class _PackedLinear(Linear):
    """``x @ W[0]`` of (x, words, scales, biases), or ``x @ W[0].T``, and its rules."""

    __slots__ = "transposed", "w"

    def __init__(self, w: QuantizedWeight, transposed: bool):
        super().__init__()
        self.w, self.transposed = w, transposed

    def __call__(self, x, *packed) -> mx.array:
        return _launched(x, self.w.holding(*packed), self.transposed)

    def linear(self, x, *packed) -> mx.array:
        return _packed_linear(x, self.w.holding(*packed), self.transposed)

    def vjp(self, primals, dy, _):
        packed = primals[1:]
        dx = _packed_linear(dy, self.w.holding(*packed), not self.transposed)
        return dx, *[mx.zeros_like(a) for a in packed]


def _packed_linear(x, w: QuantizedWeight, transposed: bool) -> mx.array:
    product = _PackedLinear(w, transposed)
    return Function(product, rules=product)(x, *constant(*w.arrays))


def _launched(x: mx.array, w: QuantizedWeight, transposed: bool) -> mx.array:
    """Return x @ W[0], or x @ W[0].T: without a relation there is one route."""
    if transposed or not x.shape[0]:
        return mlx_ops.packed_matmul(x, w, transpose=not transposed)
    name = dtype_name(x.dtype)
    problem = Problem.linear(x.shape[0], w.shape[1], w.shape[2], name, w.bits)
    return _linear(problem, devices.current(), backends.missing(CPU))(None, x, w)


@lru_cache(maxsize=1024)
def _linear(problem: Problem, device: Device, absent: str | None) -> Plan:
    del absent  # part of the cache's key: the plan depends on it
    return named("quantized_pointwise").plan(problem, device)

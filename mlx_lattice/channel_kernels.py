"""Sums, activations and joins of channels, by kernels where the device has them.

Kernels of norms serve with a mean of 0 and a variance of 1, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import mlx.core as mx

from . import devices, registry, sync
from .backends.cuda.norms import CudaColumnSums
from .backends.gpu import norms as gpu_norms
from .checks import FLOATS
from .epilogue import NONE, SLOPE, Activation, composed
from .registry import Fit, Norms
from .transformations import Function, Gradient, Rules, elementwise, filled, of_kernels

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


def _split(c_a: int) -> Function:
    """Return what takes rows of which ``c_a`` channels are the first array's apart."""

    def views(y: mx.array) -> tuple[mx.array, mx.array]:
        return y[:, :c_a], y[:, c_a:]

    split = Function(lambda y: tuple(registry.joins().split(y, c_a)))
    split.vjp(lambda _, parts, __: _joined(*parts))
    split.jvp(lambda _, y: views(y))
    return split


def activation(x: mx.array, act: Activation) -> mx.array:
    """Return an activation in one launch; its derivative is one, too.

    MLX's own are several each within a transformation, where it compiles nothing.
    Elsewhere a GPU's ReLU is MLX's, which writes over what nobody else reads.
    """
    kernels = registry.norms() if x.ndim > 1 and x.size else None
    if kernels is None or x.dtype not in FLOATS:
        return composed(act)(x)
    of_mlx = act.kind == SLOPE and not sync.is_transforming()
    if of_mlx and devices.current().backend != devices.CPU:
        return composed(act)(x)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    fit = _alone(act, rows.shape[1])
    back = _back(kernels, fit)
    y = elementwise(lambda x: kernels.normalize(x, fit), back, composed(act))(rows)
    return y if x.ndim == 2 else y.reshape(x.shape)


def activation_gradient(dy: mx.array, x: mx.array, act: Activation) -> mx.array:
    """Return ``dy`` times the derivative of an activation at ``x``, in one launch."""
    kernels = registry.norms() if x.size else None
    if kernels is None or x.dtype not in FLOATS:
        return mx.vjp(composed(act), [x], [dy])[1][0]
    back = _back(kernels, _alone(act, x.shape[1]))
    return Gradient(lambda dy, x: (back(dy, x),), composed(act))(dy, x)[0]


def activated_sum(
    x: mx.array,
    act: Activation,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return ``act(x + bias + residual)`` in one launch, and one back.

    x and residual are (N, C) of one dtype, bias is (C,).
    """
    if not x.size:  # of which MLX's compiled activations on CUDA divide by zero
        return x if residual is None else x + residual
    kernels = registry.norms() if x.dtype in FLOATS else None
    arrays = [a for a in (bias, residual) if a is not None]
    there = bias is not None, residual is not None
    if kernels is None:
        return _sum_of(act, there, x, *arrays)
    return _activated_sum(act, there, kernels, x.shape[1])(x, *arrays)


def column_sums(x: mx.array, like: mx.array) -> mx.array:
    """Return the (C,) sums over the rows of (N, C), in the dtype of ``like``.

    One launch or two on CUDA, one pass on the CPU, by all threads. Float32 inside. The
    gradient of a bias is one.
    """
    kernels = _summing(x)
    if like.dtype not in FLOATS or kernels is None:
        return x.sum(axis=0).astype(like.dtype)
    return _ColumnSums(kernels, like.dtype)(x)


def sums_columns(x: mx.array) -> bool:
    """Whether kernels sum the columns of an array: not on Metal, nor of few rows."""
    return _summing(x) is not None


def _summing(x: mx.array) -> Norms | CudaColumnSums | None:
    """Return the kernels that sum the columns of an array, if any do."""
    if x.ndim != 2 or x.shape[0] < gpu_norms.COLUMN_SUM_ROWS:
        return None
    if not x.size or x.dtype not in FLOATS:
        return None
    backend = registry.serving()
    if backend == devices.METAL:
        return None
    return registry.COLUMN_SUMS.get(backend) or registry.NORMS.get(backend)


def _spread(there: tuple[bool, bool], arrays: Sequence[mx.array]):
    rest = iter(arrays)
    return [next(rest) if each else None for each in there]


def _sum_of(act: Activation, there: tuple[bool, bool], x, *rest) -> mx.array:
    """Return ``activated_sum`` in MLX operations."""
    # Once x: gradients that are one array would have one cotangent in MLX's vjp.
    y = sum((a.astype(mx.float32) for a in rest), 1.0 * x.astype(mx.float32))
    return composed(act)(y).astype(x.dtype)


def _activated_sum(
    act: Activation, there: tuple[bool, bool], kernels: Norms, channels: int
) -> Function:
    alone = _alone(act, channels)

    def forward(x, *rest):
        bias, residual = _spread(there, rest)
        return kernels.normalize(x, alone._replace(bias=bias), residual)

    def back(dy, x, *rest):
        bias, residual = _spread(there, rest)
        fit, dy = alone._replace(bias=bias), mx.contiguous(dy)
        dx, dresidual = kernels.gradient(dy, x, fit, residual)
        sums = [] if bias is None else [column_sums(dx, bias)]
        return dx, *sums, *[dresidual] * there[1]

    summed = partial(_sum_of, act, there)
    return of_kernels(forward, back, summed, 1 + sum(there))


def _alone(act: Activation, channels: int) -> Fit:
    mean, var, _ = standard(channels)
    return Fit(mean, var, None, None, 0.0, act)


def _back(kernels: Norms, fit: Fit) -> Callable[[mx.array, mx.array], mx.array]:
    return lambda dy, x: kernels.gradient(mx.contiguous(dy), x, fit)[0]


class _ColumnSums(Rules):
    """Sums over the rows of (N, C), in the dtype ``kind``."""

    __slots__ = "kernels", "kind"

    def __init__(self, kernels: Norms | CudaColumnSums, kind: mx.Dtype):
        self.kernels, self.kind = kernels, kind

    def forward(self, x: mx.array) -> mx.array:
        x = mx.contiguous(x)
        if isinstance(self.kernels, CudaColumnSums):
            return self.kernels.sums(x, kind=self.kind)
        mean, var, shift = standard(x.shape[1], self.kind)
        fit = Fit(mean, var, None, shift, 0.0, NONE)
        return self.kernels.gradient_sums(x, x, fit)[3].reshape(-1)

    def by_mlx(self, x: mx.array) -> mx.array:
        return x.sum(axis=0).astype(self.kind)

    def vjp(self, x, by, _):
        return mx.broadcast_to(by, x.shape).astype(x.dtype)

    def jvp(self, x, by):
        return self.by_mlx(by)

    def vmap(self, x, axis):
        return mx.vmap(self.by_mlx, in_axes=(axis,))(x), 0


@lru_cache(maxsize=256)
def standard(
    channels: int, kind: mx.Dtype = mx.float32, lines: int = 1
) -> tuple[mx.array, mx.array, mx.array]:
    """Return (lines, C) means of 0 and variances of 1, and a (C,) shift of 0, computed.

    By them kernels of norms change no bit.
    """
    line = lines, channels
    found = mx.zeros(line), mx.ones(line), mx.zeros((channels,), dtype=kind)
    sync.compute(found)
    return found

"""Activations of mlx.nn on the features of a tensor; rows and key are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps

import mlx.core as mx
import mlx.nn

from ..backends import registry
from ..backends.norms_protocol import ACTIVATIONS, Activation
from ..channel_kernels import activation
from ..epilogue import gelu_tanh
from ..pending import Pending
from ..problem import FLOATS
from ..tensor import SparseTensor, features_of
from ..transformations import elementwise

__all__ = [
    "celu", "elu", "gelu", "gelu_approx", "gelu_fast_approx", "glu", "hard_tanh",
    "hardswish", "leaky_relu", "log_sigmoid", "log_softmax", "mish", "on_features",
    "prelu", "relu", "relu2", "relu6", "selu", "sigmoid", "silu", "softmax", "softplus",
    "softsign", "tanh",
]  # fmt: skip


def on_features(function: Callable, x: SparseTensor | mx.array, *args, **kwargs):
    """Apply a function of (N, C) features, which keeps N, to a tensor or an array."""
    y = function(features_of(x), *args, **kwargs)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def by_rows(function: Callable) -> Callable:
    """Return a function of each row by itself that takes (0, C) too.

    MLX's activations are compiled, and of nothing its compiled kernels on CUDA divide
    by zero: the result of a row, without the row, stands in.
    """

    @wraps(function)
    def of_rows(feats, *args, **kwargs):
        if feats.size:
            return function(feats, *args, **kwargs)
        row = mx.zeros((1, *feats.shape[1:]), feats.dtype)
        return function(row, *args, **kwargs)[:0]

    return of_rows


def _of_features(function: Callable, name: str = "") -> Callable:
    """Return an activation of tensors; ``name``: of an epilogue that computes it."""
    rows = by_rows(function)

    @wraps(function)
    def activation(x, *args, **kwargs):
        if name and type(x) is Pending:
            made = x.activated(name, rows)
            if made is not None:
                return made
        return on_features(rows, x, *args, **kwargs)

    return activation


def _by_kernel(x: mx.array, name: str, composed: Callable) -> mx.array:
    """Return an activation of MLX's, by a kernel where the device has one."""
    kernels = registry.activations()
    if kernels is None:
        return activation(x, ACTIVATIONS[name], composed)
    if x.dtype not in FLOATS:
        return composed(x)
    return _of_kernel(kernels[name], composed)(x)


@lru_cache(maxsize=64)
def _of_kernel(kernel: Callable, composed: Callable) -> Callable:
    return elementwise(kernel, lambda dy, x: kernel(x, dy), composed)


def _relu(x: mx.array) -> mx.array:
    """ReLU: ``max(x, 0)``."""
    return activation(x, ACTIVATIONS["relu"], mlx.nn.relu)


def _leaky_relu(x: mx.array, negative_slope: float = 0.01) -> mx.array:
    """Leaky ReLU: ``max(negative_slope * x, x)``."""
    slope = float(negative_slope)
    if not 0 <= slope <= 1:
        return mlx.nn.leaky_relu(x, slope)
    return activation(x, Activation("LeakyReLU", slope=slope), _leaky(slope))


@lru_cache(maxsize=64)
def _leaky(slope: float) -> Callable:
    return partial(mlx.nn.leaky_relu, negative_slope=slope)


def _gelu(x: mx.array) -> mx.array:
    """GELU by the error function: ``x * Phi(x)``."""
    return _by_kernel(x, "gelu", mlx.nn.gelu)


def _gelu_approx(x: mx.array) -> mx.array:
    """GELU by tanh: ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``."""
    return _by_kernel(x, "gelu_tanh", gelu_tanh)


def _silu(x: mx.array) -> mx.array:
    """SiLU: ``x * sigmoid(x)``."""
    return _by_kernel(x, "silu", mlx.nn.silu)


celu = _of_features(mlx.nn.celu)
elu = _of_features(mlx.nn.elu)
gelu = _of_features(_gelu, "gelu")
gelu_approx = _of_features(_gelu_approx, "gelu_tanh")
gelu_fast_approx = _of_features(mlx.nn.gelu_fast_approx)
glu = _of_features(mlx.nn.glu)
hard_tanh = _of_features(mlx.nn.hard_tanh)
hardswish = _of_features(mlx.nn.hardswish)
leaky_relu = _of_features(_leaky_relu)
log_sigmoid = _of_features(mlx.nn.log_sigmoid)
log_softmax = _of_features(mlx.nn.log_softmax)
mish = _of_features(mlx.nn.mish)
prelu = _of_features(mlx.nn.prelu)
relu = _of_features(_relu, "relu")
relu2 = _of_features(mlx.nn.relu2)
relu6 = _of_features(mlx.nn.relu6)
selu = _of_features(mlx.nn.selu)
sigmoid = _of_features(mlx.nn.sigmoid)
silu = _of_features(_silu, "silu")
softmax = _of_features(mlx.nn.softmax)
softplus = _of_features(mlx.nn.softplus)
softsign = _of_features(mlx.nn.softsign)
tanh = _of_features(mlx.nn.tanh)

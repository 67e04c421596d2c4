"""Activations of mlx.nn on the features of a tensor; rows and key are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import mlx.core as mx
import mlx.nn

from ..tensor import SparseTensor, features_of

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


def _of_features(function: Callable) -> Callable:
    @wraps(function)
    def activation(x, *args, **kwargs):
        return on_features(function, x, *args, **kwargs)

    return activation


celu = _of_features(mlx.nn.celu)
elu = _of_features(mlx.nn.elu)
gelu = _of_features(mlx.nn.gelu)
gelu_approx = _of_features(mlx.nn.gelu_approx)
gelu_fast_approx = _of_features(mlx.nn.gelu_fast_approx)
glu = _of_features(mlx.nn.glu)
hard_tanh = _of_features(mlx.nn.hard_tanh)
hardswish = _of_features(mlx.nn.hardswish)
leaky_relu = _of_features(mlx.nn.leaky_relu)
log_sigmoid = _of_features(mlx.nn.log_sigmoid)
log_softmax = _of_features(mlx.nn.log_softmax)
mish = _of_features(mlx.nn.mish)
prelu = _of_features(mlx.nn.prelu)
relu = _of_features(mlx.nn.relu)
relu2 = _of_features(mlx.nn.relu2)
relu6 = _of_features(mlx.nn.relu6)
selu = _of_features(mlx.nn.selu)
sigmoid = _of_features(mlx.nn.sigmoid)
silu = _of_features(mlx.nn.silu)
softmax = _of_features(mlx.nn.softmax)
softplus = _of_features(mlx.nn.softplus)
softsign = _of_features(mlx.nn.softsign)
tanh = _of_features(mlx.nn.tanh)

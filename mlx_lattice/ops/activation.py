"""Activations of features, and which layers and functions kernels compute instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import mlx.core as mx
import mlx.nn

from .. import epilogue
from ..channel_kernels import activation
from ..checks import array_of, real
from ..epilogue import ACTIVATIONS, NONE, Activation, named
from ..tensor import SparseTensor, features_of
from ..transformations import zeros_of

__all__ = [
    "celu", "elu", "gelu", "gelu_approx", "gelu_fast_approx", "glu", "hard_tanh",
    "hardswish", "leaky_relu", "log_sigmoid", "log_softmax", "mish", "on_features",
    "prelu", "relu", "relu2", "relu6", "selu", "sigmoid", "silu", "softmax", "softplus",
    "softsign", "tanh",
]  # fmt: skip


Features = SparseTensor | mx.array
# MLX's digits, of Klambauer et al., "Self-Normalizing Neural Networks", 2017.
SELU_ALPHA, SELU_SCALE = 1.67326, 1.0507


def on_features(function: Callable, x: Features, *args, **kwargs):
    """Apply a function of (N, C) features, which keeps N, to a tensor or an array."""
    y = function(features_of(x), *args, **kwargs)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def by_rows(function: Callable) -> Callable:
    """Return a function of separate rows that also takes (0, C).

    MLX's compiled kernels on CUDA divide by zero for empty arrays. The result of one
    row of zeros tells the shape and dtype of an empty result.
    """

    @wraps(function)
    def of_rows(feats, *args, **kwargs):
        if feats.size:
            return function(feats, *args, **kwargs)
        row = function(mx.zeros((1, *feats.shape[1:]), feats.dtype), *args, **kwargs)
        return zeros_of([feats], (0, *row.shape[1:]), row.dtype)

    return of_rows


def _of_features(function: Callable) -> Callable:
    rows = by_rows(function)

    @wraps(function)
    def activation(x, *args, **kwargs):
        return on_features(rows, x, *args, **kwargs)

    return activation


def activated(x: Features, act: Activation) -> Features:
    """Return an activation that kernels compute, of a tensor or an array."""
    return on_features(activation, x, act)


def elu(x: Features, alpha: float = 1.0) -> Features:
    """ELU: ``x`` above zero, ``alpha * (exp(x) - 1)`` below."""
    alpha = real(alpha, "alpha")
    act = epilogue.elu(alpha)
    return _elu(x, alpha) if act is None else activated(x, act)


def gelu(x: Features) -> Features:
    """GELU by the error function: ``x * Phi(x)``."""
    return activated(x, ACTIVATIONS["gelu"])


def gelu_approx(x: Features) -> Features:
    """GELU by tanh: ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``."""
    return activated(x, ACTIVATIONS["gelu_tanh"])


def leaky_relu(x: Features, negative_slope: float = 0.01) -> Features:
    """Leaky ReLU: ``max(negative_slope * x, x)``."""
    negative_slope = real(negative_slope, "negative_slope")
    act = epilogue.leaky_relu(negative_slope)
    return _leaky_relu(x, negative_slope) if act is None else activated(x, act)


def relu(x: Features) -> Features:
    """ReLU: ``max(x, 0)``."""
    return activated(x, ACTIVATIONS["relu"])


def selu(x: Features) -> Features:
    """SELU: 1.0507 times an ELU with an alpha of 1.67326.

    MLX's has NaN for a slope where ``exp(x)`` overflows: in half from 11.1 on.
    """
    return elu(x, SELU_ALPHA) * SELU_SCALE


def silu(x: Features) -> Features:
    """SiLU: ``x * sigmoid(x)``."""
    return activated(x, ACTIVATIONS["silu"])


def prelu(x: Features, alpha: mx.array) -> Features:
    """PReLU: ``max(0, x) + alpha * min(0, x)``, with an alpha of one or a channel.

    Raises:
        ValueError: alpha has the shape of neither.
    """
    feats, alpha = features_of(x), array_of(alpha, "alpha")
    # MLX's is compiled for any shapes, and reads beyond what does not broadcast.
    if alpha.shape != feats.shape[-1:] and (alpha.size != 1 or alpha.ndim > feats.ndim):
        raise ValueError(
            f"alpha must have shape (1,) or {feats.shape[-1:]}, one value a channel; "
            f"got {tuple(alpha.shape)}"
        )
    return _prelu(x, alpha)


# Of parameters that kernels do not take.
_prelu = _of_features(mlx.nn.prelu)
_elu, _leaky_relu = _of_features(mlx.nn.elu), _of_features(mlx.nn.leaky_relu)
celu = _of_features(mlx.nn.celu)
gelu_fast_approx = _of_features(mlx.nn.gelu_fast_approx)
glu = _of_features(mlx.nn.glu)
hard_tanh = _of_features(mlx.nn.hard_tanh)
hardswish = _of_features(mlx.nn.hardswish)
log_sigmoid = _of_features(mlx.nn.log_sigmoid)
log_softmax = _of_features(mlx.nn.log_softmax)
mish = _of_features(mlx.nn.mish)
relu2 = _of_features(mlx.nn.relu2)
relu6 = _of_features(mlx.nn.relu6)
sigmoid = _of_features(mlx.nn.sigmoid)
softmax = _of_features(mlx.nn.softmax)
softplus = _of_features(mlx.nn.softplus)
softsign = _of_features(mlx.nn.softsign)
tanh = _of_features(mlx.nn.tanh)


Layer = TypeVar("Layer", bound=type[mlx.nn.Module])
BY_TANH = "precise", "tanh"  # what GELU by tanh is called

_FUNCTIONS = {
    id(function): ACTIVATIONS[name]
    for name, functions in {
        "relu": (relu, mlx.nn.relu),
        "silu": (silu, mlx.nn.silu),
        "gelu": (gelu, mlx.nn.gelu),
        "gelu_tanh": (gelu_approx, mlx.nn.gelu_approx),
        "leaky_relu": (leaky_relu, mlx.nn.leaky_relu),
        "elu": (elu, mlx.nn.elu),
    }.items()
    for function in functions
}


def _gelu(layer: mlx.nn.GELU) -> Activation | None:
    by = "gelu_tanh" if layer._approx in BY_TANH else "gelu"
    return None if layer._approx == "fast" else ACTIVATIONS[by]


# By the class itself: a subclass may mean something else.
_LAYERS: dict[type, Callable[..., Activation | None]] = {
    mlx.nn.ReLU: lambda _: ACTIVATIONS["relu"],
    mlx.nn.SiLU: lambda _: ACTIVATIONS["silu"],
    mlx.nn.GELU: _gelu,
    mlx.nn.LeakyReLU: lambda layer: epilogue.leaky_relu(layer._negative_slope),
    mlx.nn.ELU: lambda layer: epilogue.elu(layer._alpha),
}


def as_its_base(kind: Layer) -> Layer:
    """Decorate a layer that computes what its base class in mlx.nn computes."""
    _LAYERS[kind] = _LAYERS[kind.__base__]
    return kind


def fused_activation(layer: object) -> Activation | None:
    """Return the activation that a layer or function computes; None for others."""
    function = _FUNCTIONS.get(id(layer))  # each is held by its module
    if function is not None:
        return function
    find = _LAYERS.get(type(layer))
    return None if find is None else find(layer)


def activation_of(activation: str | Activation | Callable | None) -> Activation:
    """Return an activation by its name, or that of a layer or function.

    Raises:
        TypeError: the argument has another type, or no kernel computes it.
        ValueError: no activation of the kernels has this name.
    """
    if activation is None:
        return NONE
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        return named(activation)
    known = fused_activation(activation)
    if known is None:
        raise TypeError(
            f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, or a "
            f"layer or function of these in nn, ops or mlx.nn; got {activation!r}. "
            "Call another on the result"
        )
    return known

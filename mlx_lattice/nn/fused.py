"""Norms with the sum and the activation that follow them, in one call of the norm.

Layers are fused where they are exactly those of this package or of mlx.nn: a subclass
may mean something else, so it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn

from ..backends.norms_protocol import Activation
from ..ops import activation, on_features
from ..ops.channel_norms import ACTIVATIONS
from ..tensor import SparseTensor, features_of
from . import activations
from .normalization import BatchNorm, GroupNorm, InstanceNorm

# Norms whose calls take ``residual`` and ``activation``; a file with a norm of its own
# that takes them adds it.
FUSING: set[type] = {BatchNorm, GroupNorm, InstanceNorm}
_LAYERS = {
    kind: ACTIVATIONS[name]
    for name, title in (("relu", "ReLU"), ("silu", "SiLU"))
    for kind in (getattr(mlx.nn, title), getattr(activations, title))
}
_FUNCTIONS = {
    id(function): ACTIVATIONS[name]
    for name in ("relu", "silu", "gelu")
    for function in (getattr(mlx.nn, name), getattr(activation, name))
}
Features = SparseTensor | mx.array


def fused_activation(layer: Callable) -> Activation | None:
    """Return what a norm computes instead of a layer or function, or None."""
    kind = type(layer)
    if kind in _LAYERS:
        return _LAYERS[kind]
    if kind in (mlx.nn.GELU, activations.GELU) and layer._approx == "none":
        return ACTIVATIONS["gelu"]
    if kind in (mlx.nn.LeakyReLU, activations.LeakyReLU):
        slope = float(layer._negative_slope)
        if 0 <= slope <= 1:
            return Activation("LeakyReLU", slope=slope)
    return _FUNCTIONS.get(id(layer))


def normalized(
    norm: Callable,
    x: Features,
    activation: Callable | None = None,
    residual: Features | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, in one call of the norm if it can be.

    Args:
        norm: a layer, of any kind.
        x: tensor or features.
        activation: a layer or function of features, or None.
        residual: what is added; tensors of other rows are aligned as by ``+``.
    """
    act = None if activation is None else fused_activation(activation)
    computes = activation is None or act is not None
    if type(norm) in FUSING and computes and _adds(x, residual):
        return norm(x, residual=residual, activation=act)
    y = norm(x)
    y = y if residual is None else y + residual
    return y if activation is None else called(activation, y)


def called(layer: Callable, x: Features) -> Features:
    """Call a layer: those of MLX itself, which know no tensors, on the features."""
    # Of an instance this is its class's module, so subclasses elsewhere are not MLX's.
    of_mlx = str(getattr(layer, "__module__", "")).startswith("mlx.")
    return on_features(layer, x) if of_mlx else layer(x)


def _adds(x: Features, residual: Features | None) -> bool:
    """Whether a residual lies on the rows of ``x``, in its dtype and channels."""
    if residual is None:
        return True
    if isinstance(x, SparseTensor) != isinstance(residual, SparseTensor):
        return False
    if isinstance(x, SparseTensor) and x.key != residual.key:
        return False
    a, b = features_of(x), features_of(residual)
    return a.shape == b.shape and a.dtype == b.dtype

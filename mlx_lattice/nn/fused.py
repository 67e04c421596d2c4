"""Norms with the sum and the activation that follow them, in one call of the norm; or,
where their statistics are fixed, in the call of the convolution before them.

Layers are fused where they are exactly those of this package or of mlx.nn: a subclass
may mean something else, so it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import mlx.nn

from ..backends.norms_protocol import ACTIVATIONS, Activation
from ..epilogue import Epilogue
from ..ops import activation, fusion, on_features
from ..tensor import SparseTensor, features_of
from . import activations, convolution
from .normalization import BatchNorm, GroupNorm, InstanceNorm

# Norms whose calls take ``residual`` and ``activation``; a file with a norm of its own
# that takes them adds it.
FUSING: set[type] = {BatchNorm, GroupNorm, InstanceNorm}
# Of these, those that have fixed statistics in evaluation.
FIXED: set[type] = {BatchNorm}
CONVOLUTIONS = frozenset(
    kind
    for kind in vars(convolution).values()
    if isinstance(kind, type) and issubclass(kind, convolution._Convolution)
)
_EPILOGUES = {ACTIVATIONS[name]: name for name in ("relu", "gelu", "silu")}
_EPILOGUES[None] = ""
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


_apart: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def apart() -> Iterator[None]:
    """Give convolutions nothing of what follows them, inside the block."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


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


def convolved(
    conv: Callable,
    norm: Callable,
    x: SparseTensor,
    *coordinates,
    activation: Callable | None = None,
    residual: SparseTensor | None = None,
) -> SparseTensor:
    """Return ``activation(norm(conv(x)) + residual)``, in one call if it can be.

    Args:
        conv, norm: layers, of any kind.
        x: tensor.
        *coordinates: what the convolution takes besides.
        activation: a layer or function of features, or None.
        residual: what is added; tensors of other rows are aligned as by ``+``.
    """
    after = None
    able = type(conv) in CONVOLUTIONS and isinstance(x, SparseTensor)
    if able and not _apart.get():
        after = _epilogue(conv, norm, x, activation, residual)
    if after is None:
        return normalized(norm, conv(x, *coordinates), activation, residual)
    y = conv(x, *coordinates, epilogue=after)
    with fusion.inside(norm):
        fusion.teller(lambda: after.facts.parts, True, y.feats)("forward", 0)
    return y


def _epilogue(conv, norm, x: SparseTensor, activation, residual) -> Epilogue | None:
    """Return what a convolution computes instead of what follows it, or None."""
    act = None if activation is None else fused_activation(activation)
    if type(norm) not in FIXED or norm.training or not norm.track_running_stats:
        return None
    if act not in _EPILOGUES or (act is None and activation is not None):
        return None
    if residual is not None:
        keeps = isinstance(conv, convolution.SubmConv)  # the rows of its input
        keeps = keeps and isinstance(residual, SparseTensor) and residual.key == x.key
        if (
            not keeps
            or residual.dtype != x.dtype
            or residual.channels != norm.num_features
        ):
            return None
        residual = residual.feats
    after = Epilogue(
        norm.get("weight"),
        norm.get("bias"),
        residual,
        _EPILOGUES[act],
        norm.running_mean,
        norm.running_var,
        norm.eps,
        "BatchNorm",
    )
    dtypes = {mx.float32, x.dtype}
    return after if all([a.dtype in dtypes for a in after.arrays]) else None


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

"""Norms of each row over its channels, which share nothing with other rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from .. import devices
from ..activations import Activation
from ..arrays import arrays_of
from ..backends import registry
from ..backends.cuda_row_norms import CudaRowNorms
from ..checks import real
from ..tensor import SparseTensor, features_of
from ..transformations import Function, of_kernels
from . import activation as activations
from .fusion import observed
from .known_activations import activation_of
from .norm import Features, expect_lines, residual_of
from .norm_rules import Given, Layer

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(
    x: Features,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: Features | None = None,
    activation: str | Activation | Callable | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, each row normalised over its channels.

    On CUDA this is one launch, and two backward, if the channels fill 16 bytes and take
    at most 2 KB.

    Args:
        x: tensor, its (N, C) features, or an array of more axes, over its last one.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
        residual, activation: as of ``batch_norm``.
    """
    feats, eps = features_of(x), real(eps, "eps", 0.0)
    weight, bias = arrays_of(weight=weight, bias=bias)
    expect_lines("weight and bias", feats.shape[-1], weight, bias)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x if residual is None else _replace(x, feats + residual_of(x, residual))
    kernels = registry.row_norms()
    if kernels is not None and not kernels.takes(feats, weight, bias):
        kernels = None
    given = residual_of(x, residual), activation
    return _replace(x, _normalized(feats, weight, bias, eps, kernels, *given))


def _normalized(
    feats: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    eps: float,
    kernels: CudaRowNorms | None,
    residual: mx.array | None = None,
    activation: str | Activation | Callable | None = None,
) -> mx.array:
    layer = Layer("LayerNorm", eps, activation_of(activation))
    if residual is not None and residual.dtype != feats.dtype:
        residual = residual.astype(feats.dtype)
    arrays = weight, bias, residual
    there = tuple([a is not None for a in arrays])
    given = Given(there, kernels)
    if kernels and observed():
        given.observe(feats, layer)
    if kernels is None:
        return _composed(feats, layer, *arrays)
    if given.is_told:
        function = _function(layer, given)
    else:
        function = _untold(layer, there, kernels)
    return function(feats, *[a for a in arrays if a is not None])


@lru_cache(maxsize=256)
def _untold(
    layer: Layer, there: tuple[bool, bool, bool], kernels: CudaRowNorms
) -> Function:
    return _function(layer, Given(there, kernels))


def _function(layer: Layer, given: Given) -> Function:
    """Return a function of rows and what there is; second derivatives are composed."""
    kernels, act = given.kernels, (layer.eps, layer.act)

    def composed(feats, *rest):
        return _composed(feats, layer, *given.spread(rest))

    def forward(feats, *rest):
        return kernels.layer_norm(mx.contiguous(feats), *given.spread(rest), *act)

    def back(dy, feats, *rest):
        dy, feats = mx.contiguous(dy), mx.contiguous(feats)
        found = kernels.layer_norm_gradient(dy, feats, *given.spread(rest), *act)
        given.tell("backward", 2 if any(given.there[:2]) else 1)
        return tuple([a for a in found if a is not None])

    given.tell("forward", 1)
    return of_kernels(forward, back, composed, 1 + sum(given.there))


def _composed(
    feats: mx.array,
    layer: Layer,
    weight: mx.array | None,
    bias: mx.array | None,
    residual: mx.array | None,
) -> mx.array:
    """Return it by MLX's kernel, and what follows that."""
    if feats.shape[-1] % 4 and devices.current().backend == devices.CUDA:
        # The gradient of MLX's kernel is wrong there for channels not a multiple of 4.
        wide = feats.astype(mx.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        var = mx.square(centred).mean(axis=-1, keepdims=True)
        y = _affine(centred * mx.rsqrt(var + layer.eps), weight, bias)
    else:
        y = mx.fast.layer_norm(feats, *_like(feats, weight, bias), layer.eps)
    y = y.astype(feats.dtype)
    y = y if residual is None else y + residual
    return activations.activated(y, layer.act) if layer.act.changes else y


def rms_norm(
    x: Features, weight: mx.array | None = None, eps: float = 1e-5
) -> Features:
    """Divide each row by the root mean square of its channels.

    Args:
        x: tensor, or its (N, C) features.
        weight: (C,) scale.
        eps: added to the mean square.
    """
    feats, eps = features_of(x), real(eps, "eps", 0.0)
    (weight,) = arrays_of(weight=weight)
    expect_lines("weight and bias", feats.shape[-1], weight)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x
    return _replace(x, mx.fast.rms_norm(feats, *_like(feats, weight), eps))


def _replace(x: Features, feats: mx.array) -> Features:
    return x.replace(feats) if isinstance(x, SparseTensor) else feats


def _like(feats: mx.array, *parameters: mx.array | None) -> list[mx.array | None]:
    # Of float32 parameters MLX would make a float32 copy of half features.
    return [p if p is None else p.astype(feats.dtype) for p in parameters]


def _affine(y: mx.array, weight: mx.array | None, bias: mx.array | None) -> mx.array:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias

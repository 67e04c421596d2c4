"""Norms over active rows: statistics in float32, results in the input's dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ..activations import Activation
from ..arrays import arrays_of
from ..checks import real, whole
from ..dtypes import dtype_name
from ..tensor import SparseTensor, expect_tensor, features_of
from . import channel_norms
from .batch_lines import apart, check_values
from .channel_norms import Layer
from .global_pool import batch_rows, batch_spread, batch_sum
from .known_activations import activation_of
from .norm_statistics import SegmentStatistics

__all__ = ["batch_norm", "batch_stats", "group_norm", "instance_norm"]

Features = SparseTensor | mx.array


def batch_stats(feats: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 mean and biased variance of each channel over all rows.

    Args:
        feats: (N, C) floating.

    Returns:
        Two (C,) arrays; zeros where N = 0.
    """
    feats = features_of(feats)
    expect_rows(feats)
    return channel_norms.batch_stats(feats)


def batch_norm(
    x: Features,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: Features | None = None,
    activation: str | Activation | Callable | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, each channel normalised.

    Computed in float32 and rounded once; one launch where ``mean`` and ``var`` are
    given, three for the statistics of the rows.

    Args:
        x: tensor, or its (N, C) features.
        mean, var: (C,) statistics; by default those of the rows. Both or neither.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
        residual: features of the same rows.
        activation: "relu", "gelu", "silu", "gelu_tanh", "leaky_relu", "elu", or with
            another slope "leaky_relu(0.2)", "elu(0.5)"; or a layer or function of
            these, such as ``nn.ReLU()``; by default none.

    Raises:
        TypeError: the features are not floating.
        ValueError: one of ``mean`` and ``var`` was given without the other, the
            activation has another name, or an array another shape.
    """
    if (mean is None) != (var is None):
        raise ValueError("mean and var go together: give both, or neither")
    mean, var, weight, bias = arrays_of(mean=mean, var=var, weight=weight, bias=bias)
    act, eps = activation_of(activation), real(eps, "eps", 0.0)
    feats, layer = features_of(x), Layer("BatchNorm", eps, act)
    expect_rows(feats, mean, var, weight, bias)
    added = residual_of(x, residual)
    if mean is None:
        y = channel_norms.batch_norm(feats, layer, weight, bias, added)[0]
    else:
        y = channel_norms.fixed_norm(feats, layer, mean, var, weight, bias, added)
    return x.replace(y) if isinstance(x, SparseTensor) else y


def expect_rows(feats: mx.array, *lines: mx.array | None) -> None:
    """Raise unless features are (N, C) floats and each line has one value a channel."""
    dtype_name(feats.dtype)
    if feats.ndim != 2:
        raise ValueError(f"features must have shape (N, C); got {tuple(feats.shape)}")
    expect_lines("mean, var, weight and bias", feats.shape[1], *lines)


def expect_lines(names: str, channels: int, *lines: mx.array | None) -> None:
    """Raise unless each line has one value a channel; ``names`` is what they are."""
    shape = (channels,)
    for line in lines:
        if line is not None and line.shape != shape:
            raise ValueError(
                f"{names} must have shape {shape}, one value a channel; got "
                f"{line.shape}"
            )


def residual_of(x: Features, residual: Features | None) -> mx.array | None:
    """Return the features of a residual of the rows of ``x``.

    Raises:
        ValueError: it has other rows or channels.
    """
    if residual is None:
        return None
    both = isinstance(x, SparseTensor) and isinstance(residual, SparseTensor)
    if both and x.key != residual.key:
        raise ValueError(
            "a residual must lie on the rows of x, by the same key; add tensors of "
            "other rows with +"
        )
    feats = features_of(residual)
    if feats.shape != features_of(x).shape:
        raise ValueError(
            f"a residual must have the shape of x, {tuple(features_of(x).shape)}; got "
            f"{tuple(feats.shape)}"
        )
    return feats


def group_norm(
    x: SparseTensor,
    groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: SparseTensor | None = None,
    activation: str | Activation | Callable | None = None,
) -> SparseTensor:
    """Normalise the rows of each batch element over each group of channels.

    Groups are neighbouring channels, as in PyTorch. The statistics of an
    element are those of its active rows alone; empty elements are legal.

    Args:
        x: tensor.
        groups: number of groups, a divisor of the channels.
        weight, bias: (C,) scale and shift; or (B, C), those of each batch element.
        eps: added to the variance.
        residual, activation: added and applied in the same launch, as in
            ``batch_norm``.

    Raises:
        ValueError: ``groups`` does not divide the channels, or shapes do not fit.
    """
    expect_tensor(x)
    groups, eps = whole(groups, "groups", 1), real(eps, "eps", 0.0)
    weight, bias = arrays_of(weight=weight, bias=bias)
    if x.channels % groups:
        raise ValueError(
            f"groups must divide the {x.channels} channels; got {groups} groups"
        )
    for line in (weight, bias):
        if line is not None and tuple(line.shape) != (x.channels,):
            check_values(x, line)
    rows = batch_rows(x)
    add, spread = partial(batch_sum, rows=rows), partial(batch_spread, rows=rows)
    statistics = SegmentStatistics(rows.segments, groups, add, spread)
    name = "InstanceNorm" if groups == x.channels else "GroupNorm"
    layer = Layer(name, eps, activation_of(activation))
    lines = apart(weight, bias, lambda: rows.size)
    given = *lines, residual_of(x, residual)
    return x.replace(channel_norms.group_norm(x.feats, layer, statistics, *given))


def instance_norm(
    x: SparseTensor,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: SparseTensor | None = None,
    activation: str | Activation | Callable | None = None,
) -> SparseTensor:
    """Normalise each channel over the rows of each batch element.

    Arguments are those of ``group_norm``, with one channel a group.
    """
    expect_tensor(x)
    more = {"residual": residual, "activation": activation}
    return group_norm(x, x.channels, weight, bias, eps, **more)

"""Normalisation of active rows: statistics in float32, results in the input's dtype."""

from __future__ import annotations

import mlx.core as mx

from .. import devices
from ..backends.mlx_reductions import row_sum
from ..tensor import SparseTensor, expect_tensor, features_of
from .global_pool import batch_rows, batch_spread, batch_sum

__all__ = [
    "batch_norm", "batch_stats", "group_norm", "instance_norm", "layer_norm",
    "rms_norm",
]  # fmt: skip


def batch_stats(feats: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 mean and biased variance of each channel over all rows.

    Args:
        feats: (N, C) floating.

    Returns:
        Two (C,) arrays; zeros where N = 0.
    """
    x = features_of(feats).astype(mx.float32)
    rows = max(1, x.shape[0])
    mean = row_sum(x) / rows
    return mean, row_sum(mx.square(x - mean)) / rows


def batch_norm(
    x: SparseTensor | mx.array,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> SparseTensor | mx.array:
    """Normalise each channel by ``mean`` and ``var``, by default those of the rows.

    Args:
        x: tensor, or its (N, C) features.
        mean, var: (C,) statistics; both or neither.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.

    Raises:
        ValueError: one of ``mean`` and ``var`` was given without the other.
    """
    if (mean is None) != (var is None):
        raise ValueError("mean and var go together: give both, or neither")
    feats = features_of(x)
    if mean is None:
        mean, var = batch_stats(feats)
    y = (feats.astype(mx.float32) - mean) * mx.rsqrt(var + eps)
    return _replace(x, _affine(y, weight, bias).astype(feats.dtype))


def layer_norm(
    x: SparseTensor | mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> SparseTensor | mx.array:
    """Normalise each row over its channels.

    Args:
        x: tensor, or its (N, C) features.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
    """
    feats = features_of(x)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x
    if feats.shape[1] % 4 and devices.current().backend == devices.CUDA:
        # The gradient of MLX's kernel is wrong there for channels not a multiple of 4.
        wide = feats.astype(mx.float32)
        centred = wide - wide.mean(axis=1, keepdims=True)
        var = mx.square(centred).mean(axis=1, keepdims=True)
        y = _affine(centred * mx.rsqrt(var + eps), weight, bias)
    else:
        y = mx.fast.layer_norm(feats, weight, bias, eps)
    return _replace(x, y.astype(feats.dtype))


def rms_norm(
    x: SparseTensor | mx.array, weight: mx.array | None = None, eps: float = 1e-5
) -> SparseTensor | mx.array:
    """Divide each row by the root mean square of its channels.

    Args:
        x: tensor, or its (N, C) features.
        weight: (C,) scale.
        eps: added to the mean square.
    """
    feats = features_of(x)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x
    return _replace(x, mx.fast.rms_norm(feats, weight, eps).astype(feats.dtype))


def group_norm(
    x: SparseTensor,
    groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> SparseTensor:
    """Normalise the rows of each batch element over each group of channels.

    Groups are neighbouring channels, as in PyTorch. The statistics of an
    element are those of its active rows alone; empty elements are legal.

    Args:
        x: tensor.
        groups: number of groups, a divisor of the channels.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.

    Raises:
        ValueError: ``groups`` does not divide the channels.
    """
    expect_tensor(x)
    if groups < 1 or x.channels % groups:
        raise ValueError(
            f"groups must divide the {x.channels} channels; got {groups} groups"
        )
    rows, width = batch_rows(x), x.channels // groups
    feats = x.feats.astype(mx.float32)

    def mean(values: mx.array) -> mx.array:
        """Return (N, C): for each row the mean over its element and group."""
        sums = batch_sum(values, rows) / rows.counts
        means = sums.reshape(-1, groups, width).mean(axis=2, keepdims=True)
        means = mx.broadcast_to(means, (*means.shape[:2], width))
        return batch_spread(means.reshape(sums.shape), rows)

    centred = feats - mean(feats)
    y = centred * mx.rsqrt(mean(mx.square(centred)) + eps)
    return x.replace(_affine(y, weight, bias).astype(x.dtype))


def instance_norm(
    x: SparseTensor,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
) -> SparseTensor:
    """Normalise each channel over the rows of each batch element.

    Arguments are those of ``group_norm``, with one channel a group.
    """
    expect_tensor(x)
    return group_norm(x, x.channels, weight, bias, eps)


def _replace(x: SparseTensor | mx.array, feats: mx.array) -> SparseTensor | mx.array:
    return x.replace(feats) if isinstance(x, SparseTensor) else feats


def _affine(y: mx.array, weight: mx.array | None, bias: mx.array | None) -> mx.array:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias

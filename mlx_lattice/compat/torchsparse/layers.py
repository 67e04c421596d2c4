"""Layers on features, pooling over batch elements, and cropping; of both versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .tensor import Sparse

__all__ = [
    "BatchNorm", "GlobalAvgPool", "GlobalMaxPool", "GroupNorm", "InstanceNorm",
    "LeakyReLU", "ReLU", "SiLU", "SparseCrop", "fapply", "global_avg_pool",
    "global_max_pool", "leaky_relu", "relu", "silu", "spcrop",
]  # fmt: skip


def fapply(
    input: Sparse, fn: Callable[..., Any], *args: object, **kwargs: object
) -> Sparse:
    """Return a tensor with a function of the features on the same rows."""
    return input._like(fn(input.feats, *args, **kwargs))


def relu(input: Sparse, inplace: bool = True) -> Sparse:
    """Apply ``torch.nn.functional.relu`` to the features."""
    return fapply(input, functional.relu, inplace=inplace)


def leaky_relu(
    input: Sparse, negative_slope: float = 0.1, inplace: bool = True
) -> Sparse:
    """Apply ``torch.nn.functional.leaky_relu`` to the features."""
    return fapply(input, functional.leaky_relu, negative_slope, inplace)


def silu(input: Sparse, inplace: bool = True) -> Sparse:
    """Apply ``torch.nn.functional.silu`` to the features."""
    return fapply(input, functional.silu, inplace=inplace)


class ReLU(nn.ReLU):
    """``torch.nn.ReLU`` on features."""

    def forward(self, input: Sparse) -> Sparse:
        """Return other features on the same rows."""
        return fapply(input, super().forward)


class LeakyReLU(nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` on features."""

    def forward(self, input: Sparse) -> Sparse:
        """Return other features on the same rows."""
        return fapply(input, super().forward)


class SiLU(nn.SiLU):
    """``torch.nn.SiLU`` on features."""

    def forward(self, input: Sparse) -> Sparse:
        """Return other features on the same rows."""
        return fapply(input, super().forward)


class BatchNorm(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` on features."""

    def forward(self, input: Sparse) -> Sparse:
        """Return other features on the same rows."""
        return fapply(input, super().forward)


class InstanceNorm(nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` on features, as torchsparse applies it."""

    def forward(self, input: Sparse) -> Sparse:
        """Return other features on the same rows."""
        return fapply(input, super().forward)


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` on the features of each batch element."""

    def forward(self, input: Sparse) -> Sparse:
        """Return other features on the same rows."""
        batch, feats = input.batch, input.feats
        made = torch.zeros_like(feats)
        for element in torch.unique(batch).tolist():
            rows = (batch == element).nonzero()[:, 0]
            normed = super().forward(feats[rows].T[None])[0].T
            made = made.index_copy(0, rows, normed)
        return input._like(made)


def _pooled(x: Sparse, reduction: str) -> torch.Tensor:
    batch = x.batch
    count = int(batch.max()) + 1
    made = x.feats.new_zeros((count, x.feats.shape[1]))
    index = batch[:, None].expand_as(x.feats)
    return made.scatter_reduce(0, index, x.feats, reduction, include_self=False)


def global_avg_pool(inputs: Sparse) -> torch.Tensor:
    """Return the (B, C) means of each batch element."""
    return _pooled(inputs, "mean")


def global_max_pool(inputs: Sparse) -> torch.Tensor:
    """Return the (B, C) maxima of each batch element."""
    return _pooled(inputs, "amax")


class GlobalAvgPool(nn.Module):
    """Returns the (B, C) means of each batch element."""

    def forward(self, input: Sparse) -> torch.Tensor:
        """Return a tensor of PyTorch."""
        return global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """Returns the (B, C) maxima of each batch element."""

    def forward(self, input: Sparse) -> torch.Tensor:
        """Return a tensor of PyTorch."""
        return global_max_pool(input)


def spcrop(
    input: Sparse,
    coords_min: Sequence[int] | None = None,
    coords_max: Sequence[int] | None = None,
) -> Sparse:
    """Return the rows from least coordinates on and below greatest ones."""
    first = 1 - input.batch_column // 3
    coords = input.coords[:, first : first + 3]
    kept = torch.ones(len(coords), dtype=torch.bool, device=coords.device)
    if coords_min is not None:
        kept &= (coords >= coords.new_tensor(coords_min)).all(1)
    if coords_max is not None:
        kept &= (coords < coords.new_tensor(coords_max)).all(1)
    return input._of(input.feats[kept], input.coords[kept], input.stride)


class SparseCrop(nn.Module):
    """Keeps the rows from least coordinates on and below greatest ones.

    Args:
        coords_min, coords_max: x, y, z, or None.
    """

    def __init__(
        self,
        coords_min: Sequence[int] | None = None,
        coords_max: Sequence[int] | None = None,
    ):
        super().__init__()
        self.coords_min: Sequence[int] | None = coords_min
        self.coords_max: Sequence[int] | None = coords_max

    def forward(self, input: Sparse) -> Sparse:
        """Return the cropped tensor."""
        return spcrop(input, self.coords_min, self.coords_max)

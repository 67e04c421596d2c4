"""Normalisation modules, in the manner of mlx.nn, over active rows alone.

Statistics are float32 and results have the input's dtype, whatever the dtype of the
parameters.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn

from .. import ops
from ..tensor import SparseTensor, features_of

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class BatchNorm(mlx.nn.BatchNorm):
    """Applies batch normalization over the active rows of all batch elements.

    While training it normalises by the statistics of the rows it got and updates the
    running ones as ``mlx.nn.BatchNorm`` does. No rows leave the running statistics
    as they are; a single row moves the mean alone, since it has no variance.

    Args:
        num_features (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        momentum (float): How far the running statistics move. Default: ``0.1``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        track_running_stats (bool): If ``True`` keep running statistics and use them
            in evaluation. Default: ``True``.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Normalise a tensor, or (N, C) features."""
        feats = features_of(x)
        if feats.ndim != 2 or feats.shape[1] != self.num_features:
            raise ValueError(
                f"expected features of shape (N, {self.num_features}); got "
                f"{tuple(feats.shape)}"
            )
        if self.track_running_stats and not self.training:
            mean, var = self.running_mean, self.running_var
        else:
            mean, var = ops.batch_stats(feats)
            if self.training and self.track_running_stats:
                self._update(mean, var, feats.shape[0])
        weight, bias = self.get("weight"), self.get("bias")
        return ops.batch_norm(x, mean, var, weight, bias, self.eps)

    def _update(self, mean: mx.array, var: mx.array, rows: int) -> None:
        mean, var = mx.stop_gradient(mean), mx.stop_gradient(var)
        mu = self.momentum
        if rows > 0:
            self.running_mean = (1 - mu) * self.running_mean + mu * mean
        if rows > 1:
            var = var * (rows / (rows - 1))
            self.running_var = (1 - mu) * self.running_var + mu * var


class LayerNorm(mlx.nn.LayerNorm):
    """Applies layer normalization to each row, over its channels.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        bias (bool): If ``False`` learn no shift. Default: ``True``.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Normalise a tensor, or an array over its last axis."""
        return ops.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)


class RMSNorm(mlx.nn.RMSNorm):
    """Applies root mean square normalization to each row, over its channels.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the mean square. Default: ``1e-5``.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Normalise a tensor, or an array over its last axis."""
        return ops.rms_norm(x, self.weight, self.eps)


class GroupNorm(mlx.nn.Module):
    """Applies group normalization to the active rows of each batch element.

    Groups are neighbouring channels, as in PyTorch (``mlx.nn.GroupNorm`` with
    ``pytorch_compatible=True``).

    Args:
        num_groups (int): The number of groups.
        dims (int): The number of channels, a multiple of ``num_groups``.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
    """

    def __init__(
        self, num_groups: int, dims: int, eps: float = 1e-5, affine: bool = True
    ):
        super().__init__()
        if eps <= 0.0:
            raise ValueError(f"[GroupNorm] 'eps' must be positive but got {eps}.")
        if num_groups < 1 or dims < 1 or dims % num_groups:
            raise ValueError(
                f"The number of features ({dims}) must be positive and divisible by "
                f"the number of groups ({num_groups})."
            )
        if affine:
            self.bias = mx.zeros((dims,))
            self.weight = mx.ones((dims,))
        self.num_groups = num_groups
        self.dims = dims
        self.eps = eps

    def _extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.dims}, eps={self.eps}, affine={'weight' in self}"
        )

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Normalise a tensor."""
        weight, bias = self.get("weight"), self.get("bias")
        return ops.group_norm(x, self.num_groups, weight, bias, self.eps)


class InstanceNorm(mlx.nn.InstanceNorm):
    """Applies instance normalization: each channel over each batch element's rows.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``False``.
    """

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Normalise a tensor."""
        return ops.instance_norm(x, self.get("weight"), self.get("bias"), self.eps)

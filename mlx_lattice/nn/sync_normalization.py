"""Batch normalisation over the rows of all processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_map

from .. import ops
from ..tensor import SparseTensor, features_of
from .normalization import BatchNorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(BatchNorm):
    """Applies batch normalization over the active rows of all processes.

    While training, the statistics are those of the rows of all processes together,
    which may have different numbers of rows, or none: two processes with halves of a
    batch compute what one computes with the whole. So do their gradients, of any
    order, of the sum of all processes' losses. It takes one exchange of
    ``2 * num_features + 1`` values forward and one backward.

    Every process must run the same layers, forward and backward, in the same order:
    an exchange waits for all. A process without rows runs the net on no rows. In
    evaluation, and in a group of one process, it is a ``BatchNorm`` and exchanges
    nothing.

    Inside ``mx.compile`` give ``net.state`` as inputs and outputs, as for any
    ``BatchNorm``.

    Args:
        num_features (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        momentum (float): How far the running statistics move. Default: ``0.1``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        track_running_stats (bool): If ``True`` keep running statistics and use them
            in evaluation. Default: ``True``.
        group (mx.distributed.Group): The processes. Default: all.
    """

    # The layer whose exchange was the last one that this process asked for.
    _last: Callable[[], SyncBatchNorm | None] = staticmethod(lambda: None)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: mx.distributed.Group | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._group = group
        self._exchanged = mx.zeros(())  # an array, since it is state of mx.compile

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Normalise a tensor, or (N, C) features."""
        group = self._group or mx.distributed.init()
        if not self.training or group.size() == 1:
            return super().__call__(x)
        feats = features_of(x)
        if feats.ndim != 2 or feats.shape[1] != self.num_features:
            raise ValueError(
                f"expected features of shape (N, {self.num_features}); got "
                f"{tuple(feats.shape)}"
            )
        rows = feats.shape[0]
        if not rows:
            # A row that counts for nothing keeps the exchanges in the graph.
            feats = mx.concatenate([feats, mx.zeros((1, feats.shape[1]), feats.dtype)])
        mean, var, total = self._statistics(feats, rows, group)
        if self.track_running_stats:
            self._update_by(mean, var, total)
        weight, bias = self.get("weight"), self.get("bias")
        y = ops.batch_norm(feats, mean, var, weight, bias, self.eps)[:rows]
        return x.replace(feats=y) if isinstance(x, SparseTensor) else y

    def _statistics(self, feats, rows: int, group) -> tuple[mx.array, ...]:
        """Return mean, biased variance and rows of all processes.

        Each gives its own mean and variance, so that no large squares cancel: Chan,
        Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
        Sample Variances", 1979.
        """
        channels = self.num_features
        mine = mx.concatenate([*ops.batch_stats(feats), mx.array([float(rows)])])
        every = self._gather(mine, group)
        means, variances = every[:, :channels], every[:, channels : 2 * channels]
        counts = mx.stop_gradient(every[:, 2 * channels :])
        total = counts.sum()
        shares = counts / mx.maximum(total, 1)
        mean = (shares * means).sum(axis=0)
        var = (shares * (variances + mx.square(means - mean))).sum(axis=0)
        return mean, var, total

    def _update_by(self, mean: mx.array, var: mx.array, total: mx.array) -> None:
        mean, var = mx.stop_gradient(mean), mx.stop_gradient(var)
        moved = mx.where(total > 0, self.momentum, 0.0)
        self.running_mean = self.running_mean + moved * (mean - self.running_mean)
        moved = mx.where(total > 1, self.momentum, 0.0)
        var = var * (total / mx.maximum(total - 1, 1))
        self.running_var = self.running_var + moved * (var - self.running_var)

    def _gather(self, row: mx.array, group) -> mx.array:
        """Return the rows of all processes; its gradient is this one's of the sum."""

        @mx.custom_function
        def gather(row):
            return self._in_turn(mx.distributed.all_gather, row[None], group)

        @gather.vjp
        def gather_vjp(row, cotangent, _):
            return self._sum(cotangent, group)[group.rank()]

        return gather(row)

    def _sum(self, x: mx.array, group) -> mx.array:
        """Return the sum over processes, whose gradient is the sum of gradients.

        MLX's own rule takes this process's gradient alone.
        """

        @mx.custom_function
        def add(x):
            return self._in_turn(mx.distributed.all_sum, x, group)

        @add.vjp
        def add_vjp(_, cotangent, __):
            return self._sum(cotangent, group)

        return add(x)

    def _in_turn(self, exchange: Callable, x: mx.array, group) -> mx.array:
        """Exchange after the exchange before it.

        Branches of a net have no order in a graph, but processes must exchange in the
        same order, also where routes, and so their graphs, differ.
        """
        before = SyncBatchNorm._last()
        if before is not None:
            x = mx.depends(x, before._exchanged)
        y = exchange(x, group=group)
        self._exchanged = mx.depends(mx.zeros(()), y)
        SyncBatchNorm._last = staticmethod(weakref.ref(self))
        return y


def convert_sync_batchnorm(
    net: mlx.nn.Module, group: mx.distributed.Group | None = None
) -> mlx.nn.Module:
    """Put a ``SyncBatchNorm`` wherever a net has a ``BatchNorm``, in place.

    The new layers have the parameters, running statistics and mode of the old ones,
    and the same names in files of weights. A layer that a net has twice stays one.

    Args:
        net: the net, whose ``mlx.nn.BatchNorm`` layers are converted too.
        group: the processes; by default all.

    Returns:
        The net, or its ``SyncBatchNorm`` where it is a single ``BatchNorm``.
    """
    made: dict[int, SyncBatchNorm] = {}

    def convert(module):
        kind = isinstance(module, mlx.nn.BatchNorm)
        if not kind or isinstance(module, SyncBatchNorm):
            return module
        if id(module) not in made:
            made[id(module)] = _synchronised(module, group)
        return made[id(module)]

    if isinstance(net, mlx.nn.BatchNorm):
        return convert(net)
    leaves = net.leaf_modules()
    leaves = tree_map(convert, leaves, is_leaf=lambda m: isinstance(m, mlx.nn.Module))
    return net.update_modules(leaves)


def _synchronised(norm: mlx.nn.BatchNorm, group) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        affine="weight" in norm,
        track_running_stats=norm.track_running_stats,
        group=group,
    )
    for name, value in norm.items():
        new[name] = value
    new._training, new._no_grad = norm._training, set(norm._no_grad)
    return new

"""Batch normalisation over the rows of all processes."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_map

from ..backends.norms_protocol import Activation
from ..ops import channel_norms
from ..ops.channel_norms import Layer
from ..ops.exchanges import Exchanges
from ..ops.shared_statistics import SharedStatistics
from . import fused
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
        self._exchanged = mx.zeros((1,))  # an array, since it is state of mx.compile

    def _normalized(
        self, x: mx.array, residual: mx.array | None, act: Activation, lines=None
    ) -> mx.array:
        group = self._group or mx.distributed.init()
        if not self.training or group.size() == 1:
            return super()._normalized(x, residual, act, lines)
        rows = x.shape[0]
        if not rows:
            # A row that counts for nothing keeps the exchanges in the graph.
            x, residual = (
                _one_row(x),
                residual if residual is None else _one_row(residual),
            )
        running = None
        if self.track_running_stats:
            running = self["running_mean"], self["running_var"]
        exchanges = Exchanges(group, self)
        statistics = SharedStatistics(rows, exchanges, running, self.momentum)
        y, mean, var = channel_norms.batch_norm(
            x,
            Layer("SyncBatchNorm", self.eps, act),
            self.get("weight"),
            self.get("bias"),
            residual,
            statistics=statistics,
            lines=lines,
        )
        if running is not None:
            self["running_mean"], self["running_var"] = mean, var  # as items: quicker
        return y if rows else y[:0]


fused.FUSING.add(SyncBatchNorm)
fused.FIXED.add(SyncBatchNorm)


def _one_row(x: mx.array) -> mx.array:
    return mx.concatenate([x, mx.zeros((1, x.shape[1]), x.dtype)])


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

    Raises:
        TypeError: a layer is of a subclass with a call of its own.
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
    if type(norm).__call__ not in (BatchNorm.__call__, mlx.nn.BatchNorm.__call__):
        raise TypeError(
            f"{type(norm).__name__} has a __call__ of its own, which SyncBatchNorm has "
            "not; derive it from SyncBatchNorm, or convert the other layers"
        )
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

"""Data-parallel training: averaged gradients and shared batch statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_map

from ..ops.norms import moments, moved_statistics
from ..reductions import linear
from ..registry import Activation, Fit, Norms, Running
from . import fused
from .normalization import BatchNorm

__all__ = ["SyncBatchNorm", "average_gradients", "convert_sync_batchnorm"]

BUCKET_BYTES = 16 * 2**20


def average_gradients(
    gradients: Any,
    group: mx.distributed.Group | None = None,
    all_reduce_size: int = BUCKET_BYTES,
    communication_stream: mx.Stream | None = None,
) -> Any:
    """Average gradients over the processes of a group.

    Takes the place of ``mlx.nn.average_gradients``. Gradients are joined into buckets
    from the last layer to the first, the order in which the backward pass computes
    them. Buckets are exchanged in this order on every process, after the exchanges of
    ``SyncBatchNorm``, also if the processes' graphs differ. Like every operation of
    MLX, the exchanges run when their results are evaluated.

    Args:
        gradients: a tree of arrays, of the same structure and shapes on every process.
        group: the processes; by default all. In a group of one process the gradients
            are returned as they are.
        all_reduce_size (int): Close a bucket when it has this many bytes; 0 exchanges
            each array by itself. Default: 16 MiB.
        communication_stream: the stream of the exchanges. With the ring it must be
            the one of all other exchanges.

    Returns:
        The tree of averages, of the gradients' dtypes.
    """
    group = group or mx.distributed.init()
    if group.size() == 1:
        return gradients
    arrays = [gradient for _, gradient in tree_flatten(gradients)]
    exchanges = Exchanges(group, stream=communication_stream)
    for bucket in _buckets(arrays, all_reduce_size):
        # Divided before they are added: a sum of half values may overflow.
        total = exchanges.add(*[arrays[i] / group.size() for i in bucket])
        end = 0
        for i in bucket:
            begin, end = end, end + arrays[i].size
            arrays[i] = mx.as_strided(total, arrays[i].shape, offset=begin)
    averages = iter(arrays)
    return tree_map(lambda _: next(averages), gradients)


def _buckets(arrays: list[mx.array], size: int) -> list[list[int]]:
    """Return indices of arrays, from the last one, in buckets of a size and dtype."""
    closed: list[list[int]] = []
    open_: dict[mx.Dtype, list[int]] = {}
    filled: dict[mx.Dtype, int] = {}
    for i in reversed(range(len(arrays))):
        dtype, count = arrays[i].dtype, arrays[i].nbytes
        if not count:
            continue
        open_.setdefault(dtype, []).append(i)
        filled[dtype] = filled.get(dtype, 0) + count
        if filled[dtype] >= size:
            closed.append(open_.pop(dtype))
            del filled[dtype]
    return [*closed, *open_.values()]


class Exchanges:
    """Exchanges of a group of processes, in the order of the Python calls.

    Branches of a graph have no order, but all processes must exchange in the same
    order, also if their graphs differ. NCCL allows one exchange at a time. So each
    exchange also sends one number of the result of the exchange before it.

    Args:
        group: the processes.
        holder: keeps the result that the next exchange depends on, as ``_exchanged``;
            by default this object. The state of a module goes through ``mx.compile``.
        stream: of the exchanges; by default MLX's own choice.
    """

    # Returns the holder of the latest exchange of this process, if it is alive.
    _last: Callable[[], object | None] = staticmethod(lambda: None)

    def __init__(
        self,
        group: mx.distributed.Group,
        holder: object | None = None,
        stream: mx.Stream | None = None,
    ):
        self.group, self.stream, self._holder = group, stream, holder
        self._exchanged: mx.array | None = None

    def gather(self, *parts: mx.array) -> mx.array:
        """Return (P, W): the W numbers of each of the P processes."""
        return self._in_turn(mx.distributed.all_gather, parts)

    def add(self, *parts: mx.array) -> mx.array:
        """Return (W,): the numbers of all processes, added up."""
        return self._in_turn(mx.distributed.all_sum, parts)[0]

    def gathered(self, row: mx.array) -> mx.array:
        """Return ``gather(row)``, differentiable.

        Its gradient is that of the sum of all processes' losses.
        """
        rank = self.group.rank()

        def back(dy):
            return self.added(dy)[rank]

        return linear(self.gather, back, self.gathered)(row)

    def added(self, x: mx.array) -> mx.array:
        """Return the sum over processes, whose gradient is the sum of gradients.

        MLX's own rule takes this process's gradient alone.
        """

        def add(x):
            return self.add(x).reshape(x.shape)

        return linear(add, self.added, self.added)(x)

    def _in_turn(self, exchange: Callable, parts: Sequence[mx.array]) -> mx.array:
        previous = self if self._exchanged is not None else Exchanges._last()
        after = None if previous is None else previous._exchanged
        # CUDA graphs order launches by the arrays that they read, so ``mx.depends`` is
        # not enough. Every process sends as many numbers, also for a first exchange.
        number = mx.zeros((1,)) if after is None else after
        flat = [part.reshape(-1) for part in parts]
        row = mx.concatenate([*flat, number.astype(flat[0].dtype)])
        every = exchange(row, group=self.group, stream=self.stream)
        last = mx.stop_gradient(every.reshape(-1)[-1:])
        if self._holder is None:
            self._exchanged = last
        else:
            self._holder._exchanged = last.astype(mx.float32)
            Exchanges._last = staticmethod(weakref.ref(self._holder))
        return every.reshape(-1, row.size)[:, :-1]


class SharedStatistics:
    """Statistics of the rows of all processes, which may have any number of them.

    Each process sends its own mean and variance, so that no large squares cancel: Chan,
    Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979. One exchange forward and one backward.

    Args:
        rows: of this process; 0 if its one row is padding.
        exchanges: between the processes.
    """

    def __init__(self, rows: int, exchanges: Exchanges):
        self.rows, self.exchanges = mx.array([float(rows)]), exchanges

    def composed(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return (C,) mean and variance and the number of rows, in MLX operations."""
        row = mx.concatenate([*moments(x), self.rows])
        return _of_all(self.exchanges.gathered(row))

    def moments(
        self,
        kernels: Norms,
        x: mx.array,
        running: Running,
        momentum: float,
        lines: mx.array | None,
    ) -> tuple[mx.array, ...]:
        """Return (1, C) mean, variance and moved running statistics, by kernels."""
        mean, var, *_ = kernels.moments(x, lines=lines)
        mean, var, rows = _of_all(self.exchanges.gather(mean, var, self.rows))
        moved = moved_statistics(running, momentum, rows, mean, var)
        return tuple(a.reshape(1, -1) for a in (mean, var, *moved))

    def terms(self, fit: Fit, sums: mx.array, _: mx.array) -> mx.array:
        """Return the means of the sums of g and g xhat over all rows, times the weight.

        The gradients of weight and bias are those of this process.
        """
        every = self.exchanges.add(sums, self.rows)
        means = every[:-1].reshape(sums.shape) / mx.maximum(every[-1], 1)
        return means if fit.weight is None else means * fit.weight.astype(mx.float32)


def _of_all(every: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return mean, variance and number of all rows from those of each process."""
    channels = every.shape[1] // 2
    means, variances = every[:, :channels], every[:, channels:-1]
    counts = mx.stop_gradient(every[:, -1:])
    total = counts.sum()
    shares = counts / mx.maximum(total, 1)
    mean = (shares * means).sum(axis=0)
    var = (shares * (variances + mx.square(means - mean))).sum(axis=0)
    return mean, var, total


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
        self,
        x: mx.array,
        residual: mx.array | None,
        act: Activation,
        lines: mx.array | None = None,
    ) -> mx.array:
        group = self._group or mx.distributed.init()
        if not self.training or group.size() == 1:
            return super()._normalized(x, residual, act, lines)
        rows = x.shape[0]
        if not rows:
            # A row that counts for nothing keeps the exchanges in the graph.
            x = _one_row(x)
            residual = None if residual is None else _one_row(residual)
        statistics = SharedStatistics(rows, Exchanges(group, self))
        shared = {"name": "SyncBatchNorm", "statistics": statistics}
        y = super()._normalized(x, residual, act, lines, **shared)
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
    converted: dict[int, SyncBatchNorm] = {}

    def convert(module):
        kind = isinstance(module, mlx.nn.BatchNorm)
        if not kind or isinstance(module, SyncBatchNorm):
            return module
        if id(module) not in converted:
            converted[id(module)] = _synchronised(module, group)
        return converted[id(module)]

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

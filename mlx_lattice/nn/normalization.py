"""Norms over active rows, of one process or of several; averaged gradients.

Statistics are float32 and results have the input's dtype, whatever the dtype of the
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten, tree_map

from .. import ops
from ..checks import dtype_name, flag, real, whole
from ..epilogue import Epilogue
from ..ops.attention_calls import inside
from ..ops.channels import activation_of
from ..ops.norms import (
    expect_lines,
    moments,
    moved_statistics,
    normalized_by,
    normalized_by_rows,
    residual_of,
)
from ..reductions import linear
from ..registry import Activation, Fit, Norms, Running
from ..tensor import Features, SparseTensor, features_of
from .layers import ModuleCache, Parameters

__all__ = [
    "BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm", "SyncBatchNorm",
    "average_gradients", "convert_sync_batchnorm",
]  # fmt: skip

BUCKET_BYTES = 16 * 2**20
_LINES = "running_mean", "running_var", "weight", "bias"
_NAMES = "running statistics, weight and bias"  # in errors


class BatchNorm(Parameters, mlx.nn.BatchNorm):
    """Apply batch normalization over the active rows of all batch elements.

    In training it normalises by the statistics of the input's rows and updates the
    running statistics as ``mlx.nn.BatchNorm`` does. An input without rows leaves them
    unchanged. A single row has no variance: it moves the running mean only.

    The running statistics are float32 in a net of any dtype: ``set_dtype``,
    ``load_weights`` and assignments cast them.

    Args:
        num_features (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        momentum (float): How far the running statistics move. Default: ``0.1``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        track_running_stats (bool): If ``True`` keep running statistics and use them
            in evaluation. Default: ``True``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 1)))
        >>> norm = nn.BatchNorm(1, momentum=0.5)
        >>> norm(x).shape, norm.running_mean.item()  # half way from 0 to the mean, 1
        ((64, 1), 0.5)
    """

    never_trained: Iterable[str] = "running_mean", "running_var"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        if momentum is None:
            raise TypeError(
                "momentum must be a number; got None, PyTorch's cumulative average, "
                "which is not here. Set layer.momentum = 1 / (1 + n) before batch n, "
                "from 0"
            )
        super().__init__(
            whole(num_features, "num_features", 1),
            real(eps, "eps", 0.0),
            real(momentum, "momentum", 0.0),
            flag(affine, "affine"),
            flag(track_running_stats, "track_running_stats"),
        )

    def __setitem__(self, name: str, value: object) -> None:
        # Training makes them float32: kernels compiled for another dtype would be of
        # no use after the first step.
        is_statistic = name in self.never_trained
        if is_statistic and getattr(value, "dtype", mx.float32) != mx.float32:
            value = value.astype(mx.float32)
        super().__setitem__(name, value)

    def __call__(
        self,
        x: Features,
        *,
        residual: Features | None = None,
        activation: str | Activation | Callable[..., Any] | None = None,
        lines: mx.array | None = None,
    ) -> Features:
        """Normalise a tensor, or (N, C) features.

        ``residual`` is added before the activation, in the same launch, as in
        ``ops.batch_norm``. ``lines``: statistics of the rows, if the convolution that
        wrote them summed them (see ``Moments``).
        """
        feats = features_of(x)
        if feats.ndim != 2 or feats.shape[1] != self.num_features:
            raise ValueError(
                f"expected features of shape (N, {self.num_features}); got "
                f"{tuple(feats.shape)}"
            )
        dtype_name(feats.dtype)
        expect_lines(_NAMES, self.num_features, *map(self.get, _LINES))
        with inside(self):
            added, act = residual_of(x, residual), activation_of(activation)
            y = self._normalized(feats, added, act, lines)
        return x.replace(y) if isinstance(x, SparseTensor) else y

    def _normalized(
        self,
        x: mx.array,
        residual: mx.array | None,
        act: Activation,
        lines: mx.array | None = None,
        **shared,
    ) -> mx.array:
        """Return the rows of (N, C); ``shared`` replaces arguments of the norm."""
        parameters = self.get("weight"), self.get("bias"), residual
        how = {"act": act, "eps": self.eps}
        if not self.is_by_rows:
            mean, var = map(mx.stop_gradient, (self.running_mean, self.running_var))
            return normalized_by(x, mean, var, *parameters, **how)
        is_moved, rows = self.track_running_stats and self.training, x.shape[0]
        how |= {"lines": lines, "momentum": self.momentum, **shared}
        if is_moved:
            how["running"] = self["running_mean"], self["running_var"]
        y, mean, var = normalized_by_rows(x, *parameters, **how)
        if is_moved and (rows or shared):
            # As items: a module takes as long to set an attribute as a launch.
            self["running_mean"] = mean
            if rows > 1 or shared:
                self["running_var"] = var
        return y

    def as_epilogue(self, dtype: mx.Dtype, activation: str = "") -> Epilogue | None:
        """Return a norm with fixed statistics, and an activation, as an epilogue.

        None if its arrays have other dtypes than float32 and ``dtype``. The layer keeps
        the last epilogue, since convolutions look up launches by its ``key``.
        """
        own = (*map(self.get, _LINES),)
        facts = self.eps, dtype, activation
        known = getattr(self, "_epilogue", None)
        if known is None:
            known = ModuleCache()
            object.__setattr__(self, "_epilogue", known)  # not a parameter
        arrays, last, made = known.get("last", ((None,) * 4, None, None))
        if last == facts and all(map(is_, arrays, own)):
            return made
        expect_lines(_NAMES, self.num_features, *own)
        made, (mean, var, scale, shift) = None, own
        if all([a is None or a.dtype in (mx.float32, dtype) for a in own]):
            facts_of_norm = mean, var, self.eps, "BatchNorm"
            made = Epilogue(scale, shift, None, activation, *facts_of_norm)
        known["last"] = own, facts, made
        return made

    @property
    def is_by_rows(self) -> bool:
        """Whether it normalises by statistics of its rows, not by running ones."""
        return self._training or not self.track_running_stats

    def scale_shift(self) -> tuple[mx.array, mx.array]:
        """Return (C,) float32 a and b: in evaluation the norm is ``a * x + b``."""
        if not self.track_running_stats:
            raise ValueError(
                "scale_shift needs running statistics; this norm has "
                "track_running_stats=False"
            )
        scale = mx.rsqrt(self.running_var + self.eps)
        if "weight" in self:
            scale = scale * self.weight.astype(mx.float32)
        shift = -self.running_mean * scale
        if "bias" in self:
            shift = shift + self.bias.astype(mx.float32)
        return scale, shift


class LayerNorm(Parameters, mlx.nn.LayerNorm):
    """Apply layer normalization to each row, over its channels.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.
        bias (bool): If ``False`` learn no shift. Default: ``True``.

    Examples:
        >>> nn.LayerNorm(4)(mx.array([[1.0, 2.0, 3.0, 4.0]]))
        array([[-1.34164, -0.447212, 0.447212, 1.34164]], dtype=float32)
    """

    def __init__(
        self, dims: int, eps: float = 1e-5, affine: bool = True, bias: bool = True
    ):
        affine, bias = flag(affine, "affine"), flag(bias, "bias")
        super().__init__(whole(dims, "dims", 1), real(eps, "eps", 0.0), affine, bias)

    def __call__(
        self,
        x: Features,
        *,
        residual: Features | None = None,
        activation: str | Activation | Callable[..., Any] | None = None,
    ) -> Features:
        """Normalise a tensor, or an array over its last axis; then what follows.

        ``residual`` and ``activation`` are as of ``ops.layer_norm``.
        """
        given = self.get("weight"), self.get("bias"), self.eps
        more = {"residual": residual, "activation": activation}
        with inside(self):
            return ops.layer_norm(x, *given, **more)


class RMSNorm(Parameters, mlx.nn.RMSNorm):
    """Apply root mean square normalization to each row, over its channels.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the mean square. Default: ``1e-5``.

    Examples:
        >>> nn.RMSNorm(2)(mx.array([[3.0, 4.0]]))  # divided by sqrt(12.5)
        array([[0.848528, 1.13137]], dtype=float32)
    """

    def __init__(self, dims: int, eps: float = 1e-5):
        super().__init__(whole(dims, "dims", 1), real(eps, "eps", 0.0))

    def __call__(self, x: Features) -> Features:
        """Normalise a tensor, or an array over its last axis."""
        return ops.rms_norm(x, self.weight, self.eps)


class GroupNorm(Parameters, mlx.nn.Module):
    """Apply group normalization to the active rows of each batch element.

    Groups are neighbouring channels, as in PyTorch (``mlx.nn.GroupNorm`` with
    ``pytorch_compatible=True``).

    Args:
        num_groups (int): The number of groups.
        dims (int): The number of channels, a multiple of ``num_groups``.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``True``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.GroupNorm(4, 8)(x).shape  # 4 groups of 2 channels
        (64, 8)
    """

    def __init__(
        self, num_groups: int, dims: int, eps: float = 1e-5, affine: bool = True
    ):
        super().__init__()
        eps, affine = real(eps, "eps", 0.0), flag(affine, "affine")
        if eps == 0.0:
            raise ValueError(f"[GroupNorm] 'eps' must be positive but got {eps}.")
        num_groups, dims = whole(num_groups, "num_groups"), whole(dims, "dims")
        if num_groups < 1 or dims < 1 or dims % num_groups:
            raise ValueError(
                f"The number of features ({dims}) must be positive and divisible by "
                f"the number of groups ({num_groups})."
            )
        if affine:
            self.bias: mx.array = mx.zeros((dims,))
            self.weight: mx.array = mx.ones((dims,))
        self.num_groups = num_groups
        self.dims = dims
        self.eps = eps

    def _extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.dims}, eps={self.eps}, affine={'weight' in self}"
        )

    def __call__(
        self,
        x: SparseTensor,
        *,
        residual: SparseTensor | None = None,
        activation: str | Activation | Callable[..., Any] | None = None,
    ) -> SparseTensor:
        """Normalise a tensor; what follows is as of ``BatchNorm``."""
        given = self.get("weight"), self.get("bias"), self.eps
        more = {"residual": residual, "activation": activation}
        with inside(self):
            return ops.group_norm(x, self.num_groups, *given, **more)


class InstanceNorm(Parameters, mlx.nn.InstanceNorm):
    """Apply instance normalization: each channel over the rows of a batch element.

    Args:
        dims (int): The number of channels.
        eps (float): Added to the variance. Default: ``1e-5``.
        affine (bool): If ``True`` learn a scale and a shift. Default: ``False``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.InstanceNorm(8)(x, activation="relu").shape
        (64, 8)
    """

    def __init__(self, dims: int, eps: float = 1e-5, affine: bool = False):
        affine = flag(affine, "affine")
        super().__init__(whole(dims, "dims", 1), real(eps, "eps", 0.0), affine)

    def __call__(
        self,
        x: SparseTensor,
        *,
        residual: SparseTensor | None = None,
        activation: str | Activation | Callable[..., Any] | None = None,
    ) -> SparseTensor:
        """Normalise a tensor; what follows is as of ``BatchNorm``."""
        given = self.get("weight"), self.get("bias"), self.eps
        more = {"residual": residual, "activation": activation}
        with inside(self):
            return ops.instance_norm(x, *given, **more)


# Several processes


def average_gradients(
    gradients: Any,
    group: mx.distributed.Group | None = None,
    all_reduce_size: int = BUCKET_BYTES,
    communication_stream: mx.Stream | None = None,
) -> Any:
    """Average gradients over the processes of a group.

    Use it instead of ``mlx.nn.average_gradients``. It joins gradients into buckets from
    the last layer to the first, the order in which the backward pass computes them.
    Every process exchanges the buckets in this order, after the exchanges of
    ``SyncBatchNorm``, even if the graphs of the processes differ. Like every operation
    of MLX, an exchange runs when its result is evaluated.

    Args:
        gradients: a tree of arrays, of the same structure and shapes on every process.
        group: the processes; by default all. In a group of one process the gradients
            are returned as they are.
        all_reduce_size (int): Close a bucket when it has this many bytes; 0 exchanges
            each array by itself. Default: 16 MiB.
        communication_stream: the stream of the exchanges. With the ring backend all
            exchanges must use the same stream.

    Returns:
        The tree of averages, of the gradients' dtypes.

    Examples:
        >>> gradients = {"weight": mx.ones((2,))}
        >>> nn.average_gradients(gradients)["weight"].tolist()  # a single process
        [1.0, 1.0]
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
    exchange also sends one number of the result of the exchange before it, which
    ``holder`` keeps: the state of a module goes through ``mx.compile``.
    """

    # Returns the holder of the latest exchange of this process, if it is alive.
    _last: Callable[[], object | None] = staticmethod(lambda: None)

    def __init__(
        self,
        group: mx.distributed.Group,
        holder: object | None = None,
        stream: mx.Stream | None = None,
    ):
        self.group: mx.distributed.Group = group
        self.stream: mx.Stream | None = stream
        self._holder = holder
        self._exchanged: mx.array | None = None

    def gather(self, *parts: mx.array) -> mx.array:
        """Return (P, W): the W numbers of each of the P processes."""
        return self._in_turn(mx.distributed.all_gather, parts)

    def add(self, *parts: mx.array) -> mx.array:
        """Return (W,): the numbers of all processes, added up."""
        return self._in_turn(mx.distributed.all_sum, parts)[0]

    def gathered(self, row: mx.array) -> mx.array:
        """Return ``gather(row)``, with the gradient of the sum of all losses."""
        rank = self.group.rank()

        def back(dy):
            return self.added(dy)[rank]

        return linear(self.gather, back, self.gathered)(row)

    def added(self, x: mx.array) -> mx.array:
        """Return the sum over processes, whose gradient is the sum of gradients."""
        # MLX's own rule takes this process's gradient alone.

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
    Variances", 1979. ``rows`` are 0 if the one row of this process is padding.
    """

    def __init__(self, rows: int, exchanges: Exchanges):
        self.rows: Any = mx.array([float(rows)])
        self.exchanges: Exchanges = exchanges

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
        """Return the means of the sums of g and g xhat over all rows, times weight."""
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
    """Apply batch normalization over the active rows of all processes.

    While training, the statistics are those of the rows of all processes together; each
    process may have any number of rows, or none. Two processes with half of a batch
    each compute what one process computes with the whole batch. This also holds for
    gradients of any order of the sum of all losses. A layer exchanges ``2 *
    num_features + 1`` values once forward and once backward.

    Every process must run the same layers, forward and backward, in the same order,
    because an exchange waits for all processes. A process without rows runs the net on
    an empty tensor. In evaluation, and in a group of one process, the layer is a
    ``BatchNorm`` and exchanges nothing.

    Inside ``mx.compile`` pass ``net.state`` as inputs and outputs, as for any
    ``BatchNorm``. Arguments are those of ``BatchNorm``, and ``group``
    (mx.distributed.Group): the processes, by default all.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.SyncBatchNorm(8)(x).shape  # a BatchNorm in a single process
        (64, 8)
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


def _one_row(x: mx.array) -> mx.array:
    return mx.concatenate([x, mx.zeros((1, x.shape[1]), x.dtype)])


def convert_sync_batchnorm(
    net: mlx.nn.Module, group: mx.distributed.Group | None = None
) -> mlx.nn.Module:
    """Replace every ``BatchNorm`` of a net by a ``SyncBatchNorm``, in place.

    The new layers have the parameters, running statistics, mode and names of the old
    layers. A layer that is used twice stays one layer.

    Args:
        net: the net, whose ``mlx.nn.BatchNorm`` layers are converted too.
        group: the processes; by default all.

    Returns:
        The net, or the new layer if ``net`` is a single ``BatchNorm``.

    Raises:
        TypeError: a layer is of a subclass with its own ``__call__``.

    Examples:
        >>> net = nn.Sequential(nn.SubmConv3d(8, 8, 3), nn.BatchNorm(8))
        >>> net = nn.convert_sync_batchnorm(net)
        >>> type(net.layers[1]).__name__
        'SyncBatchNorm'
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

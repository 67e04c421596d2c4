"""Exchanges between processes, and batch statistics over the rows of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..backends.norms_protocol import Fit, Norms
from ..reductions import linear
from .norm_statistics import Four, Three, moments


class Holder(Protocol):
    """The owner of the last exchange's result.

    A module is one: its arrays are state, which goes through ``mx.compile``.
    """

    _exchanged: mx.array


class Exchanges:
    """Exchanges of a group of processes, in the order of the Python calls.

    Branches of a graph have no order, but all processes must exchange in the same
    order, also if their graphs differ. NCCL allows one exchange at a time. So each
    exchange also sends one number of the result of the exchange before it.

    Args:
        group: the processes.
        holder: keeps the result that the next exchange depends on; by default this
            object keeps it.
        stream: of the exchanges; by default MLX's own choice.
    """

    # Returns the holder of the latest exchange of this process, if it is alive.
    _last: Callable[[], Holder | None] = staticmethod(lambda: None)

    def __init__(
        self,
        group: mx.distributed.Group,
        holder: Holder | None = None,
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

        return self._linear(self.gather, back, self.gathered)(row)

    def added(self, x: mx.array) -> mx.array:
        """Return the sum over processes, whose gradient is the sum of gradients.

        MLX's own rule takes this process's gradient alone.
        """

        def add(x):
            return self.add(x).reshape(x.shape)

        return self._linear(add, self.added, self.added)(x)

    def _linear(self, forward: Callable, back: Callable, itself: Callable) -> Callable:
        return linear(forward, back, itself)

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


class SharedStatistics(NamedTuple):  # made once a call, faster than a dataclass
    """Statistics of the rows of all processes, which may have any number of them.

    Each process sends its own mean and variance, so that no large squares cancel: Chan,
    Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979. One exchange forward and one backward.

    Attributes:
        rows: of this process; 0 if its one row is padding.
        exchanges: between the processes.
        running: (C,) float32 mean and variance to be moved, or None.
        momentum: how far they move.
    """

    rows: int
    exchanges: Exchanges
    running: tuple[mx.array, mx.array] | None = None
    momentum: float = 0.0
    spread = None  # all rows have one line

    def composed(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return (C,) mean and variance in MLX operations."""
        row = mx.concatenate([*moments(x), _count(self.rows)])
        return _of_all(self.exchanges.gathered(row))[:2]

    lines = composed

    def run(self, kernels: Norms, x: mx.array, lines: mx.array | None = None) -> Four:
        """Return (1, C) mean, variance and moved running statistics, by kernels.

        lines: as ``Norms.moments`` takes them.
        """
        mean, var, *_ = kernels.moments(x, lines=lines)
        every = self.exchanges.gather(mean, var, _count(self.rows))
        mean, var, total = _of_all(every)
        found = mean, var, *self._moved(total, mean, var)
        return tuple(a.reshape(1, -1) for a in found)

    def moved(
        self, rows: int, mean: mx.array, var: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return running statistics moved by those of all rows."""
        return self._moved(self.exchanges.add(_count(self.rows))[0], mean, var)

    def terms(self, kernels: Norms, fit: Fit, found: Four) -> Three:
        """Return the means of the sums of g and g xhat over all rows, times the weight.

        Arguments and results are as of ``BatchStatistics``; the gradients of weight and
        bias are those of this process.
        """
        sums, _, *parameters = found
        return self._means(fit, sums), *(a.reshape(-1) for a in parameters)

    def _means(self, fit: Fit, sums: mx.array) -> mx.array:
        every = self.exchanges.add(sums, _count(self.rows))
        means = every[:-1].reshape(sums.shape) / mx.maximum(every[-1], 1)
        return means if fit.weight is None else means * fit.weight.astype(mx.float32)

    def _moved(
        self, total: mx.array, mean: mx.array, var: mx.array
    ) -> tuple[mx.array, mx.array]:
        # As in BatchStatistics, but only the device knows the number of rows.
        if self.running is None:
            return mean, var
        old_mean, old_var = self.running
        unbiased = var * (total / mx.maximum(total - 1, 1))
        by = mx.where(total > 0, self.momentum, 0.0)
        new_mean = (1 - by) * old_mean + by * mean
        by = mx.where(total > 1, self.momentum, 0.0)
        return new_mean, (1 - by) * old_var + by * unbiased


@lru_cache(maxsize=256)
def _count(rows: int) -> mx.array:
    return mx.array([float(rows)])


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

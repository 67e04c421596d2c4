"""Statistics that norms by channel use: of all rows, segments, or all processes.

The backend's kernels compute each, or MLX operations that differentiate to any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..backends.mlx_reductions import group_means, row_sum
from ..backends.norms_protocol import Fit, Norms, RowSegments
from .exchanges import Exchanges

Sum = Callable[[mx.array], mx.array]
Three = tuple[mx.array, mx.array, mx.array]
Four = tuple[mx.array, mx.array, mx.array, mx.array]


def moments(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 (C,) mean and biased variance over the rows of (N, C).

    In MLX operations; zeros where N = 0.
    """
    x, rows = x.astype(mx.float32), max(1, x.shape[0])
    mean = row_sum(x) / rows
    return mean, row_sum(mx.square(x - mean)) / rows


class BatchStatistics(NamedTuple):  # made once a call, faster than a dataclass
    """Statistics of all rows.

    Attributes:
        running: (C,) float32 mean and variance to be moved, or None.
        momentum: how far.
    """

    running: tuple[mx.array, mx.array] | None = None
    momentum: float = 0.0
    spread = groups = None  # all rows have one line, and so has each channel
    before = None  # only arrays of the call are read, see ``Function``

    def composed(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return (C,) mean and variance in MLX operations."""
        return moments(x)

    lines = composed

    def run(self, kernels: Norms, x: mx.array, lines: mx.array | None = None) -> Four:
        """Return (1, C) mean, variance and moved running statistics, by kernels.

        lines: as ``Norms.moments`` takes them.
        """
        return kernels.moments(x, None, self.running, self.momentum, lines)

    def moved(
        self, rows: int, mean: mx.array, var: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return running statistics moved by those of some rows.

        No rows leave them as they are; a single row moves the mean alone.
        """
        if self.running is None:
            return mean, var
        by, (old_mean, old_var) = self.momentum, self.running
        if rows > 0:
            old_mean = (1 - by) * old_mean + by * mean
        if rows > 1:
            old_var = (1 - by) * old_var + by * (var * (rows / (rows - 1)))
        return old_mean, old_var

    def terms(self, kernels: Norms, fit: Fit, found: Four) -> Three:
        """Return what the gradient of the statistics takes from that of each row.

        Args:
            kernels: that found it.
            fit: what normalised.
            found: what ``Norms.gradient_sums`` returned.

        Returns:
            (2, S, C) terms, as ``Norms.gradient`` takes them, and the gradients of
            weight and bias, in their shape.
        """
        _, terms, *parameters = found
        return terms, *(a.reshape(-1) for a in parameters)  # an index is a launch


@dataclass(frozen=True, eq=False)
class SegmentStatistics:
    """Statistics of each segment's rows, over each group of channels.

    Attributes:
        segments: of the rows.
        groups: of neighbouring channels, a divisor of C.
        sum: (N, C) float32 to (S, C) sums over segments, differentiable.
        spread: (S, C) to the line of each row.
    """

    segments: RowSegments
    groups: int
    sum: Sum
    spread: Sum
    before = None  # as above

    def composed(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return (N, C) mean and variance of each row's segment, in MLX operations."""
        mean, var = self.lines(x)
        return self.spread(mean), self.spread(var)

    def lines(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return (S, C) mean and variance of each segment, in MLX operations."""
        x = x.astype(mx.float32)

        def means(values: mx.array) -> mx.array:
            return group_means(self.sum(values) / self.segments.counts, self.groups)

        mean = means(x)
        return mean, means(mx.square(x - self.spread(mean)))

    def run(self, kernels: Norms, x: mx.array) -> Four:
        """Return (S, C) mean and variance, by kernels, and once more."""
        return kernels.group_moments(x, self.segments, self.groups) * 2

    def is_by_channel(self, fit: Fit) -> bool:
        """Whether a gradient takes no more than sums of each segment and channel."""
        alone = fit.is_apart or self.segments.size == 1
        alone = alone or (fit.weight is None and fit.bias is None)
        return alone and self.groups == fit.mean.shape[-1]

    def adds_parameters(self, fit: Fit) -> bool:
        """Whether gradients of weight and bias are sums over several segments."""
        there = fit.weight is not None or fit.bias is not None
        return there and not fit.is_apart and self.segments.size > 1

    def terms(self, kernels: Norms, fit: Fit, found: Four) -> Three:
        """Return what the gradient of the statistics takes from that of each row."""
        sums, terms, *parameters = found
        if not self.is_by_channel(fit):
            return kernels.group_terms(fit, sums, terms, self.groups)
        shape = sums.shape[1:] if fit.is_apart else (-1,)
        return terms, *(a.reshape(shape) for a in parameters)


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

    def before(self) -> tuple[mx.array, ...]:
        """Return what the latest exchange came after, see ``Function``."""
        return self.exchanges.before()

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

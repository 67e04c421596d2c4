"""The statistics of rows that several processes share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..backends import registry
from ..backends.norms_protocol import Fit, Norms
from .exchanges import Exchanges
from .norm_statistics import Four, Three, moments


class SharedStatistics(NamedTuple):  # made once a call, faster than a dataclass
    """Statistics of the rows of all processes, which may have any number of them.

    Each process gives its own mean and variance, so that no large squares cancel: Chan,
    Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979. One exchange forward and one backward.

    Attributes:
        rows: of this process; 0 where the one row there is counts for nothing.
        exchanges: between the processes.
        running: (C,) float32 mean and variance to be moved, or None.
        momentum: how far.
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
        if merging := registry.exchanges():
            return tuple(merging.merge(every, self.running, self.momentum))
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
        if merging := registry.exchanges():
            return merging.mean_terms(every, fit.weight)
        means = every[:-1].reshape(sums.shape) / mx.maximum(every[-1], 1)
        return means if fit.weight is None else means * fit.weight.astype(mx.float32)

    def _moved(
        self, total: mx.array, mean: mx.array, var: mx.array
    ) -> tuple[mx.array, mx.array]:
        # Like BatchStatistics, by a number of rows that only the device knows.
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

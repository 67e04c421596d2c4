"""Reductions and norms by channel on the CPU, by the C++ extension, on all threads."""

from __future__ import annotations

import mlx.core as mx

from .cpu_extension import extension
from .mlx_reductions import MlxReductions, divided, group_means, take
from .norms_protocol import Fit, RowSegments
from .reductions_protocol import BatchRows


class CpuReductions(MlxReductions):
    """The reductions of the CPU's extension, products by MLX; see ``Reductions``."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that a table names, or their means."""
        if divisors is None:
            return extension.gather_sum(x, table, weights)
        sums = extension.gather_sum(x.astype(mx.float32), table, weights)
        return divided(sums, divisors).astype(x.dtype)

    def scatter_sum(
        self,
        y: mx.array,
        table: mx.array,
        rows: int,
        weights: mx.array | None = None,
        order: tuple = (),
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that name each of ``rows``."""
        if divisors is None:
            return extension.scatter_sum(y, table, rows, weights)
        sums = extension.scatter_sum(y.astype(mx.float32), table, rows, weights)
        return divided(sums, divisors).astype(y.dtype)

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that a table names, and their rows."""
        return extension.gather_max(x, table)

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that name each of ``rows``, and which."""
        return extension.scatter_max(x, table, rows)

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return to each row the sum of the results that it won."""
        return extension.max_pool_backward(dy, rows, back)

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the maxima over batch elements, by blocks, and their rows."""
        best, places = extension.scatter_max(x, rows.blocks, len(rows.block_batch))
        y, block = extension.scatter_max(best, rows.block_batch, rows.size)
        return y, take(places + 1, block) - 1


class CpuNorms:
    """The norms by channel of the CPU's extension; see ``Norms``."""

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: tuple[mx.array, mx.array] | None = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them."""
        if lines is not None:
            given = running or (None, None)
            return extension.combine_moments(lines, *given, momentum=momentum)
        rest = *_rows(segments), *(running or (None, None))
        return extension.channel_moments(x, *rest, momentum=momentum)

    def group_moments(
        self, x: mx.array, segments: RowSegments, groups: int
    ) -> tuple[mx.array, mx.array]:
        """Return mean and biased variance of groups of channels."""
        mean, var = self.moments(x, segments)[:2]
        if groups == x.shape[1]:
            return mean, var
        middle = group_means(mean, groups)
        return middle, group_means(var + mx.square(mean - middle), groups)

    def normalize(
        self, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> mx.array:
        """Return (N, C) in the dtype of x; ``residual`` is added before ``fit.act``."""
        given = *_arrays(fit, residual), _of(fit)
        return extension.normalize_channels(x, *given, **_told(fit))

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative."""
        given = _arrays(fit, residual if fit.act.changes else None)
        sums, terms = extension.channel_gradient_sums(
            dy, x, *given, *_rows(fit.segments), **_told(fit)
        )
        dbias, dweight = (a.squeeze(0).astype(fit.dtype) for a in mx.split(sums, 2))
        return sums, terms, dweight, dbias

    def group_terms(
        self, fit: Fit, sums: mx.array, terms: mx.array, groups: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return terms of groups of channels, and gradients of weight and bias."""
        terms = group_means(terms, groups)
        dbias, dweight = sums if fit.is_apart else sums.sum(axis=1)
        return terms, dweight.astype(fit.dtype), dbias.astype(fit.dtype)

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: mx.array | None = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g."""
        given = _arrays(fit, residual if fit.act.changes else None)
        made = extension.channel_gradient(dy, x, *given, _of(fit), terms, **_told(fit))
        return made[0], made[1] if len(made) > 1 else dy

    def of_few(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        groups: int | None = None,
    ) -> None:
        """Return None: a launch takes next to nothing."""


def _arrays(fit: Fit, residual: mx.array | None) -> tuple[mx.array | None, ...]:
    def wide(a: mx.array | None) -> mx.array | None:
        return None if a is None else a.astype(mx.float32)

    return *map(wide, (fit.mean, fit.var, fit.weight, fit.bias)), residual


def _rows(segments: RowSegments | None) -> tuple[list[int], mx.array | None]:
    return ([], None) if segments is None else (list(segments.starts), segments.order)


def _of(fit: Fit) -> mx.array | None:
    return None if fit.segments is None else fit.segments.of


def _told(fit: Fit) -> dict[str, float]:
    return {"act": fit.act.kind, "eps": fit.eps, "slope": fit.act.slope}

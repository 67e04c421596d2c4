"""Norms by channel on the CPU, by the C++ extension; all threads share each of them."""

from __future__ import annotations

import mlx.core as mx

from .cpu_extension import extension
from .mlx_reductions import group_means
from .norms_protocol import Fit, RowSegments


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

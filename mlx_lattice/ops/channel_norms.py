"""Norms by channel with their activation and residual sum, in the backend's kernels.

Each is one ``Function``: three launches forward and three back for statistics of the
rows, two forward where a convolution summed these, one each for those of few rows, of
all or of each batch element; one and up to three for fixed ones; one more back for
groups of channels. Higher derivatives, forward mode, vmap and devices without kernels
take the composed form: the same in MLX operations, which differentiate to any order.
Kept for the backward pass are the inputs, as they are, and a mean and variance a
channel.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..backends.norms_protocol import BatchNorms, Norms
from ..transformations import Function, differentiable, filled
from .exchanges import SharedStatistics
from .norm_rules import (
    Given,
    Layer,
    affine,
    fit_of,
    given_of,
    kernels_of,
    mapped,
    no_gradient,
    row_norm,
)
from .norm_statistics import BatchStatistics, SegmentStatistics, moments

NOT_KEPT = BatchStatistics()


def batch_norm(
    x: mx.array,
    layer: Layer,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    statistics: BatchStatistics | SharedStatistics = NOT_KEPT,
    lines: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Normalise each channel by the statistics of the rows.

    Args:
        x: (N, C) floating.
        layer: name, eps and activation.
        weight, bias: (C,) or None.
        residual: (N, C), added before the activation, or None.
        statistics: of which rows, and the running ones that they move.
        lines: of ``Moments`` that whatever wrote x was given, or None.

    Returns:
        y, (N, C) in the dtype of x; (C,) float32 running mean and variance, moved, or
        without them values of no meaning. Gradients reach y alone.
    """
    given, arrays = given_of(x, layer, weight, bias, residual)
    if given.kernels:
        own = x, arrays, layer, given, statistics, lines
        y, _, _, mean, var = _by_rows(*own)
        return y, mean, var
    mean, var = statistics.composed(x)
    y = affine(x, mean, var, *given.spread(arrays), layer)
    mean, var = statistics.moved(x.shape[0], mean, var)
    return y, mx.stop_gradient(mean), mx.stop_gradient(var)


def group_norm(
    x: mx.array,
    layer: Layer,
    statistics: SegmentStatistics,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Normalise the rows of each segment over each group of channels.

    Args:
        x: (N, C) floating.
        layer: name, eps and activation.
        statistics: of which rows and channels.
        weight, bias: (C,) or None.
        residual: (N, C), added before the activation, or None.
    """
    given, arrays = given_of(x, layer, weight, bias, residual)
    if given.kernels:
        return _by_segments(x, layer, given, statistics)(x, *arrays)[0]
    lines, spread = statistics.composed(x), statistics.spread
    return affine(x, *lines, *given.spread(arrays), layer, spread)


def fixed_norm(
    x: mx.array,
    layer: Layer,
    mean: mx.array,
    var: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    are_frozen: bool = False,
) -> mx.array:
    """Normalise each channel by given (C,) statistics, in one launch.

    Differentiable in all arrays; not in statistics that ``are_frozen``. The others are
    those of ``batch_norm``.
    """
    given, arrays = given_of(x, layer, weight, bias, residual)
    mean, var = mean.astype(mx.float32), var.astype(mx.float32)
    if given.kernels is None:
        if are_frozen:
            mean, var = mx.stop_gradient(mean), mx.stop_gradient(var)
        return affine(x, mean, var, *given.spread(arrays), layer)
    if given.is_told:
        function = _by_fixed(layer, given, are_frozen)
    else:
        facts = layer, tuple(given.there), given.kernels, are_frozen
        function = _untold_by_fixed(*facts, x.shape, x.dtype)
    return function(x, mean, var, *arrays)


@lru_cache(maxsize=1024)
def _untold_by_fixed(
    layer: Layer,
    there: tuple[bool, ...],
    kernels: Norms,
    are_frozen: bool,
    shape: tuple[int, int],
    dtype: mx.Dtype,
) -> Function:
    return _by_fixed(layer, Given(there, kernels), are_frozen)


def _by_fixed(layer: Layer, given: Given, are_frozen: bool) -> Function:
    """Return the norm of x, mean, var, and those that there are of the rest."""
    kernels = given.kernels

    def composed(x, mean, var, *rest):
        return affine(x, mean, var, *given.spread(rest), layer)

    def forward(x, mean, var, *rest):
        weight, bias, residual = given.spread(rest)
        fit = fit_of(layer, mean, var, weight, bias)
        return kernels.normalize(x, fit, residual)

    def back(dy, x, mean, var, *rest):
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # two launches read them
        weight, bias, residual = given.spread(rest)
        fit = fit_of(layer, mean, var, weight, bias)
        dx, dresidual = kernels.gradient(dy, x, fit, residual)
        if are_frozen and not any(given.there[:2]):
            return dx, *given.kept(None, None, dresidual)
        sums, _, dweight, dbias = kernels.gradient_sums(dy, x, fit, residual)
        own = given.kept(dweight.reshape(-1), dbias.reshape(-1), dresidual)
        if are_frozen:
            return dx, *own
        inverse = mx.rsqrt(var + layer.eps)
        scale = inverse if weight is None else inverse * weight.astype(mx.float32)
        dmean, dvar = -scale * sums[0, 0], -0.5 * scale * inverse * sums[1, 0]
        return dx, dmean, dvar, *own

    gradient = differentiable(back, composed, frozen=2 if are_frozen else 0)

    def vjp(primals, dy, _):
        given.tell("backward", 3)
        found = gradient(dy, *primals)
        if not are_frozen:
            return found
        dx, *rest = found
        return dx, *(no_gradient(a.shape, a.dtype) for a in primals[1:3]), *rest

    given.tell("forward", 1)
    function = Function(forward)
    function.vjp(vjp)
    function.jvp(lambda at, by: mx.jvp(composed, list(at), filled(at, by))[1][0])
    function.vmap(lambda arrays, axes: (mapped(composed, axes)(*arrays), 0))
    return function


def batch_stats(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 (C,) mean and biased variance over the rows of (N, C).

    Two launches; differentiable to any order. Zeros where N = 0.
    """
    kernels = kernels_of(x) if x.ndim == 2 else None
    if kernels is None:
        return moments(x)

    def forward(x):
        mean, var, *_ = kernels.moments(x)
        return mean.reshape(-1), var.reshape(-1)

    function = Function(forward)
    function.vjp(lambda x, by, _: mx.vjp(moments, [x], list(by))[1][0])
    function.jvp(lambda x, by: tuple(mx.jvp(moments, [x], [by])[1]))
    function.vmap(lambda x, axis: (mapped(moments, (axis,))(x), (0, 0)))
    return function(x)


def _by_segments(
    x: mx.array, layer: Layer, given: Given, statistics: SegmentStatistics
) -> Function:
    """Return the norm of a layer; kept by the segments, which launches depend on."""
    segments, groups = statistics.segments, statistics.groups
    few = given.kernels.of_few(x, segments, groups)
    facts = statistics, segments, few
    if given.is_told:
        return row_norm(layer, given, *facts)
    there, kept = tuple(given.there), segments.functions
    key = layer, there, given.kernels, few, groups, x.shape, x.dtype
    if key not in kept:
        made = Given(there, given.kernels)
        kept[key] = row_norm(layer, made, *facts)
    return kept[key]


def _by_rows(x, optional, layer: Layer, given: Given, statistics, lines=None):
    """Return y, (1, C) statistics of the rows, and (C,) moved ones."""
    summed = () if lines is None else (lines,)
    if not isinstance(statistics, BatchStatistics):
        function = row_norm(layer, given, statistics, None, None, bool(summed))
        return function(x, *optional, *summed)
    running, momentum = statistics
    few = given.kernels.of_few(x)
    if given.is_told:
        function = row_norm(layer, given, statistics, None, few, bool(summed))
    else:
        facts = layer, tuple(given.there), given.kernels, few, momentum
        shapes = x.shape, x.dtype, lines if lines is None else lines.shape
        function = _batch_norm(*facts, running is not None, *shapes)
    return function(x, *optional, *(running or ()), *summed)


@lru_cache(maxsize=1024)
def _batch_norm(
    layer: Layer,
    there: tuple[bool, ...],
    kernels: Norms,
    few: BatchNorms | None,
    momentum: float,
    is_running: bool,
    shape: tuple[int, int],
    dtype: mx.Dtype,
    lines: tuple[int, int, int] | None,
) -> Function:
    """Return the norm of a layer of some shapes, which observers are not told of."""
    given, is_summed = Given(there, kernels), lines is not None
    statistics = BatchStatistics(() if is_running else None, momentum)
    return row_norm(layer, given, statistics, None, few, is_summed)

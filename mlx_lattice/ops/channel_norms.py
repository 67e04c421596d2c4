"""Norms by channel with their activation and residual sum, in the backend's kernels.

Each is one ``Function``: three launches forward and three back for statistics of the
rows, two forward where a convolution summed these, one each for those of few rows; one
and up to three for fixed ones. Higher
derivatives, forward mode, vmap and devices without kernels take the composed form: the
same in MLX operations, which differentiate to any order. Kept for the backward pass are
the inputs, as they are, and a mean and variance a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..activations import composed
from ..backends import registry
from ..backends.norms_protocol import (
    NONE,
    Activation,
    BatchNorms,
    Fit,
    Norms,
    RowSegments,
)
from ..problem import FLOATS
from ..routes.selection import situation
from ..transformations import Function, differentiable, filled, several
from .fusion import observed, teller, untold
from .norm_statistics import BatchStatistics, SegmentStatistics, moments
from .shared_statistics import SharedStatistics

NOT_KEPT = BatchStatistics()
Arrays = Sequence[mx.array | None]


class Layer(NamedTuple):
    """What a norm does besides its arrays.

    Attributes:
        name: as a trace has it.
        eps: added to the variance.
        act: what follows.
    """

    name: str
    eps: float = 1e-5
    act: Activation = NONE


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
    given, arrays = _given(x, layer, weight, bias, residual)
    if given.kernels:
        own = x, arrays, layer, given, statistics, None, lines
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
    given, arrays = _given(x, layer, weight, bias, residual)
    if given.kernels:
        return _by_rows(x, arrays, layer, given, statistics, statistics.segments)[0]
    return affine(x, *statistics.composed(x), *given.spread(arrays), layer)


def fixed_norm(
    x: mx.array,
    layer: Layer,
    mean: mx.array,
    var: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Normalise each channel by given (C,) statistics, in one launch.

    Differentiable in all arrays; the others are those of ``batch_norm``.
    """
    given, arrays = _given(x, layer, weight, bias, residual)
    kernels = given.kernels
    if mean.dtype != var.dtype or mean.dtype not in FLOATS:
        mean, var = mean.astype(mx.float32), var.astype(mx.float32)
    kind = mean.dtype

    def composed(x, mean, var, *rest):
        return affine(x, mean, var, *given.spread(rest), layer)

    if kernels is None:
        return composed(x, mean, var, *arrays)

    def forward(x, mean, var, *rest):
        weight, bias, residual = given.spread(rest)
        fit = _fit(layer, mean, var, weight, bias)
        return kernels.normalize(x, fit, residual)

    def back(dy, x, mean, var, *rest):
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # two launches read them
        weight, bias, residual = given.spread(rest)
        fit = _fit(layer, mean, var, weight, bias)
        dx, dresidual = kernels.gradient(dy, x, fit, residual)
        sums, _, dweight, dbias = kernels.gradient_sums(dy, x, fit, residual)
        inverse = mx.rsqrt(var.astype(mx.float32) + layer.eps)
        scale = inverse if weight is None else inverse * weight.astype(mx.float32)
        dmean, dvar = -scale * sums[0, 0], -0.5 * scale * inverse * sums[1, 0]
        return (
            dx,
            dmean.astype(kind),
            dvar.astype(kind),
            *given.kept(dweight.reshape(-1), dbias.reshape(-1), dresidual),
        )

    def vjp(primals, dy, _):
        given.tell("backward", 3)
        return differentiable(back, composed)(dy, *primals)

    given.tell("forward", 1)
    function = Function(forward)
    function.vjp(vjp)
    function.jvp(lambda at, by: mx.jvp(composed, list(at), filled(at, by))[1][0])
    function.vmap(lambda arrays, axes: (_mapped(composed, axes)(*arrays), 0))
    return function(x, mean, var, *arrays)


def batch_stats(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 (C,) mean and biased variance over the rows of (N, C).

    Two launches; differentiable to any order. Zeros where N = 0.
    """
    kernels = _kernels(x) if x.ndim == 2 else None
    if kernels is None:
        return moments(x)

    def forward(x):
        mean, var, *_ = kernels.moments(x)
        return mean.reshape(-1), var.reshape(-1)

    function = Function(forward)
    function.vjp(lambda x, by, _: mx.vjp(moments, [x], list(by))[1][0])
    function.jvp(lambda x, by: tuple(mx.jvp(moments, [x], [by])[1]))
    function.vmap(lambda x, axis: (_mapped(moments, (axis,))(x), (0, 0)))
    return function(x)


def affine(
    x: mx.array,
    mean: mx.array,
    var: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    residual: mx.array | None,
    layer: Layer,
) -> mx.array:
    """Return ``act((x - mean) / sqrt(var + eps) * weight + bias + residual)``.

    The composed form: float32 inside, rounded to the dtype of x.
    """
    y = (x.astype(mx.float32) - mean) * mx.rsqrt(var.astype(mx.float32) + layer.eps)
    y = y if weight is None else y * weight.astype(mx.float32)
    y = y if bias is None else y + bias.astype(mx.float32)
    y = y if residual is None else y + residual.astype(mx.float32)
    return activated(y, layer.act).astype(x.dtype)


def activated(v: mx.array, act: Activation) -> mx.array:
    """Return a norm's activation, in MLX operations."""
    if not v.size:  # of which MLX's compiled activations on CUDA divide by zero
        return v
    return composed(act)(v)


def _by_rows(
    x, optional, layer: Layer, given: _Given, statistics, segments, lines=None
):
    """Return y, (S, C) statistics of the rows, and (S * C,) moved ones."""
    summed = () if lines is None else (lines,)
    if not isinstance(statistics, BatchStatistics):
        function = _row_norm(layer, given, statistics, segments, None, bool(summed))
        return function(x, *optional, *summed)
    running, momentum = statistics
    few = given.kernels.of_few(x)
    if given.is_told:
        function = _row_norm(layer, given, statistics, None, few, bool(summed))
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
    given, is_summed = _Given(there, kernels), lines is not None
    statistics = BatchStatistics(() if is_running else None, momentum)
    return _row_norm(layer, given, statistics, None, few, is_summed, situation)


def _row_norm(
    layer: Layer,
    given: _Given,
    statistics,
    segments,
    few,
    is_summed: bool = False,
    settled=None,
) -> Function:
    """Return a norm by statistics of the rows, with its transformations.

    Of x, those that there are of weight, bias and residual, running statistics, of
    which ``statistics`` says here no more than whether there are any, and the lines of
    ``Moments`` where it ``is_summed``.
    """
    kernels, last = given.kernels, 1 + sum(given.there)
    launches = 3 if few is None else 1
    size = 1 if segments is None else segments.size
    end = -1 if is_summed else None  # of running statistics

    def composed(x, *rest):
        return affine(x, *statistics.composed(x), *given.spread(rest), layer)

    def forward(x, *rest):
        x = mx.contiguous(x)  # several launches read it
        weight, bias, residual = given.spread(rest)
        now = statistics
        running, lines = rest[last - 1 : end], rest[end:] if is_summed else ()
        if running:
            now = statistics._replace(running=running)
        if few is not None:
            facts = *now, layer.eps, layer.act
            y, mean, var, *moved = few.normalize(x, weight, bias, residual, *facts)
        else:
            mean, var, *moved = now.run(kernels, x, *lines)
            fit = _fit(layer, mean, var, weight, bias, segments)
            y = kernels.normalize(x, fit, residual)
        return y, mean, var, *(a.reshape(-1) for a in moved)

    def no_statistics(channels: int) -> list[mx.array]:
        line, moved = mx.zeros((size, channels)), mx.zeros((size * channels,))
        return [line, line, moved, moved]

    def back(dy, x, mean, var, *rest):
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # as above
        weight, bias, residual = given.spread(rest)
        fit = _fit(layer, mean, var, weight, bias, segments)
        if few is not None:
            dx, *others = few.gradient(dy, x, fit, residual)
            return dx, *given.kept(*others)
        sums, terms, dweight, dbias = kernels.gradient_sums(dy, x, fit, residual)
        terms = statistics.terms(fit, sums, terms)
        dx, dresidual = kernels.gradient(dy, x, fit, residual, terms)
        if segments is None:
            # By reshape: an index is a launch.
            dweight, dbias = dweight.reshape(-1), dbias.reshape(-1)
        else:
            dbias, dweight = sums.sum(axis=1).astype(fit.dtype)
        return dx, *given.kept(dweight, dbias, dresidual)

    gradient = differentiable(back, composed, 2, settled)

    def vjp(primals, cotangents, outputs):
        given.tell("backward", launches)
        x, *rest = several(primals)
        rest, others = rest[: last - 1], rest[last - 1 :]
        found = gradient(cotangents[0], x, *outputs[1:3], *rest)
        return *found, *[_zeros(a.shape) for a in others]

    given.tell("forward", launches - (is_summed and few is None))
    function = Function(forward, settled)
    function.vjp(vjp)

    @function.jvp
    def jvp(at, by):
        at, by = several(at)[:last], several(by)[:last]
        (moved,) = mx.jvp(composed, list(at), filled(at, by))[1]
        return moved, *no_statistics(moved.shape[1])

    @function.vmap
    def vmap(arrays, axes):
        y = _mapped(composed, several(axes)[:last])(*several(arrays)[:last])
        none = [mx.stack([a] * len(y)) for a in no_statistics(y.shape[-1])]
        return (y, *none), (0,) * 5

    return function


@lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...]) -> mx.array:
    """Return the gradient of statistics that are given, which nobody asks for."""
    return mx.zeros(shape)


def _given(x, layer: Layer, weight, bias, residual) -> tuple[_Given, list[mx.array]]:
    """Return which there are of weight, bias and residual; those, as kernels take them.

    Apart: rules hold the first, MLX the rules, until what they are of is computed.
    """
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        weight, bias = weight.astype(mx.float32), bias.astype(mx.float32)
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.astype(x.dtype)
    optional = weight, bias, residual
    arrays = [a for a in optional if a is not None]
    given = _Given([a is not None for a in optional], _kernels(x, *arrays))
    if observed():
        given.observe(x, layer)
    return given, arrays


class _Given:
    """Which of weight, bias and residual a norm has, and who runs it. Holds no array.

    Attributes:
        there: which there are.
        kernels: of the device, or None where MLX operations run.
        tell: tells of passes; of the forward one if these are MLX operations.
        is_told: whether anybody listens.
    """

    __slots__ = "is_told", "kernels", "tell", "there"

    def __init__(self, there: Sequence[bool], kernels: Norms | None):
        self.there, self.kernels = there, kernels
        self.tell, self.is_told = untold, False

    def observe(self, x: mx.array, layer: Layer) -> None:
        """Tell observers of now of the passes of a layer over ``x``."""

        def parts() -> tuple[str, ...]:
            added = "residual" if self.there[2] else ""
            return tuple(filter(None, (layer.name, added, layer.act.name)))

        self.tell, self.is_told = teller(parts, self.kernels is not None, x), True
        if self.kernels is None:
            self.tell("forward", None)

    def spread(self, arrays: Sequence[mx.array]) -> list[mx.array | None]:
        """Return arrays in their places, None where there is none."""
        rest = iter(arrays)
        return [next(rest) if there else None for there in self.there]

    def kept(self, *values: mx.array) -> list[mx.array]:
        """Return the values of those that there are."""
        return [v for v, there in zip(values, self.there, strict=True) if there]


def _kernels(*arrays: mx.array) -> Norms | None:
    """Return the device's kernels, if they take these arrays."""
    if not arrays[0].size or not all([a.dtype in FLOATS for a in arrays]):
        return None
    return registry.norms()


def _fit(layer: Layer, mean, var, weight, bias, segments: RowSegments | None = None):
    if mean.ndim == 1:
        mean, var = mean.reshape(1, -1), var.reshape(1, -1)
    return Fit(mean, var, weight, bias, layer.eps, layer.act, segments)


# Derivatives


def _mapped(composed: Callable, axes: Sequence[int | None]) -> Callable:
    return mx.vmap(composed, in_axes=tuple(axes))

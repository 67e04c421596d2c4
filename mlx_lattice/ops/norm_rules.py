"""A norm by channel as one ``Function``: the launches of its kernels, and its rules."""

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
from ..dtypes import FLOATS
from ..transformations import Function, differentiable, filled, several
from .exchanges import SharedStatistics
from .fusion import observed, teller, untold
from .norm_statistics import BatchStatistics, SegmentStatistics

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


def affine(
    x: mx.array,
    mean: mx.array,
    var: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    residual: mx.array | None,
    layer: Layer,
    spread: Callable[[mx.array], mx.array] | None = None,
) -> mx.array:
    """Return ``act((x - mean) / sqrt(var + eps) * weight + bias + residual)``.

    The composed form: float32 inside, rounded to the dtype of x. ``spread``: from lines
    of segments, which weight and bias may be, to those of rows.
    """
    if spread is not None:
        lines = weight, bias
        weight, bias = (
            spread(a) if a is not None and a.ndim == 2 else a for a in lines
        )
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


def row_norm(
    layer: Layer,
    given: Given,
    statistics: BatchStatistics | SegmentStatistics | SharedStatistics,
    segments: RowSegments | None,
    few: BatchNorms | None,
    is_summed: bool = False,
) -> Function:
    """Return a norm by statistics of the rows, with its transformations.

    Of x, those that there are of weight, bias and residual, running statistics, of
    which ``statistics`` says here no more than whether there are any, and the lines of
    ``Moments`` where it ``is_summed``. Returns y, the statistics, and moved ones.
    """
    kernels, last = given.kernels, 1 + sum(given.there)
    launches = 3 if few is None else 1
    size = 1 if segments is None else segments.size
    end = -1 if is_summed else None  # of running statistics

    def composed(x, *rest):
        lines = statistics.composed(x)
        return affine(x, *lines, *given.spread(rest), layer, statistics.spread)

    def forward(x, *rest):
        x = mx.contiguous(x)  # several launches read it
        weight, bias, residual = given.spread(rest)
        now = statistics
        running, lines = rest[last - 1 : end], rest[end:] if is_summed else ()
        if running:
            now = statistics._replace(running=running)
        if few is not None:
            moved = (None, 0.0) if segments is not None else now
            facts = *moved, layer.eps, layer.act, segments, now.groups
            y, mean, var, *moved = few.normalize(x, weight, bias, residual, *facts)
        else:
            mean, var, *moved = now.run(kernels, x, *lines)
            fit = fit_of(layer, mean, var, weight, bias, segments)
            y = kernels.normalize(x, fit, residual)
        return y, mean, var, *(a.reshape(-1) for a in moved)

    def no_statistics(channels: int) -> list[mx.array]:
        line, moved = mx.zeros((size, channels)), mx.zeros((size * channels,))
        return [line, line, moved, moved]

    def back(dy, x, mean, var, *rest):
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # as above
        weight, bias, residual = given.spread(rest)
        fit = fit_of(layer, mean, var, weight, bias, segments)
        if few is not None:
            dx, *others = few.gradient(dy, x, fit, residual, statistics.groups)
            return dx, *given.kept(*others)
        found = kernels.gradient_sums(dy, x, fit, residual)
        terms, dweight, dbias = statistics.terms(kernels, fit, found)
        dx, dresidual = kernels.gradient(dy, x, fit, residual, terms)
        return dx, *given.kept(dweight, dbias, dresidual)

    gradient = differentiable(back, composed, 2)

    def vjp(primals, cotangents, outputs):
        x, *rest = several(primals)
        rest, others = rest[: last - 1], rest[last - 1 :]
        more = 0
        if segments is not None:
            fit = fit_of(layer, *outputs[1:3], *given.spread(rest)[:2], segments)
            more = not statistics.is_by_channel(fit)
            if few is not None:
                more = statistics.adds_parameters(fit)
        given.tell("backward", launches + more)
        found = gradient(cotangents[0], x, *outputs[1:3], *rest)
        return *found, *[no_gradient(a.shape) for a in others]

    given.tell("forward", launches - (is_summed and few is None))
    function = Function(forward)
    function.vjp(vjp)

    @function.jvp
    def jvp(at, by):
        at, by = several(at)[:last], several(by)[:last]
        (moved,) = mx.jvp(composed, list(at), filled(at, by))[1]
        return moved, *no_statistics(moved.shape[1])

    @function.vmap
    def vmap(arrays, axes):
        arrays, axes = several(arrays)[:last], several(axes)[:last]
        y = mapped(composed, axes)(*arrays)

        def lines(x, *_):  # which the way back reads
            return tuple(a.reshape(size, -1) for a in statistics.lines(x))

        moved = [mx.stack([a] * len(y)) for a in no_statistics(y.shape[-1])[2:]]
        return (y, *mapped(lines, axes)(*arrays), *moved), (0,) * 5

    return function


@lru_cache(maxsize=256)
def no_gradient(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the gradient of statistics that are given, which nobody asks for."""
    return mx.zeros(shape, dtype)


def given_of(x, layer: Layer, weight, bias, residual) -> tuple[Given, list[mx.array]]:
    """Return which there are of weight, bias and residual; those, as kernels take them.

    Apart: rules hold the first, MLX the rules, until what they are of is computed.
    """
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        weight, bias = weight.astype(mx.float32), bias.astype(mx.float32)
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.astype(x.dtype)
    optional = weight, bias, residual
    arrays = [a for a in optional if a is not None]
    given = Given([a is not None for a in optional], kernels_of(x, *arrays))
    if observed():
        given.observe(x, layer)
    return given, arrays


class Given:
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


def kernels_of(*arrays: mx.array) -> Norms | None:
    """Return the device's kernels, if they take these arrays."""
    if not arrays[0].size or not all([a.dtype in FLOATS for a in arrays]):
        return None
    return registry.norms()


def fit_of(
    layer: Layer,
    mean: mx.array,
    var: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    segments: RowSegments | None = None,
) -> Fit:
    """Return what normalises by (C,) or (S, C) statistics."""
    if mean.ndim == 1:
        mean, var = mean.reshape(1, -1), var.reshape(1, -1)
    return Fit(mean, var, weight, bias, layer.eps, layer.act, segments)


def mapped(composed: Callable, axes: Sequence[int | None]) -> Callable:
    """Return the composed form of several inputs along axes."""
    return mx.vmap(composed, in_axes=tuple(axes))

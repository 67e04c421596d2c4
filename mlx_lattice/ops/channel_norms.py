"""Norms by channel, with the activation and residual sum that follow them.

Each is one function over the backend's kernels: three launches forward and three
back for statistics of the rows. Higher derivatives, forward mode, vmap and devices
without kernels use the composed form, the same in MLX operations. Saved for the
backward pass are the inputs and a mean and variance for each channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .. import registry
from ..backends.mlx import group_means, row_sum
from ..checks import FLOATS
from ..epilogue import composed
from ..registry import NONE, Activation, BatchNorms, Fit, Norms, RowSegments
from ..transformations import Function, Gradient, Rules, filled, several
from .exchanges import Exchanges
from .observed import norm_teller, norms, untold

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
        every = self.exchanges.add(sums, _count(self.rows))
        means = every[:-1].reshape(sums.shape) / mx.maximum(every[-1], 1)
        if fit.weight is not None:
            means = means * fit.weight.astype(mx.float32)
        return means, *(a.reshape(-1) for a in parameters)

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
    if y.size:  # MLX's compiled activations on CUDA divide by zero of no rows
        y = composed(layer.act)(y)
    return y.astype(x.dtype)


class _RowNorm(Rules):
    """A norm by statistics of the rows.

    A function of x, those that there are of weight, bias and residual, running
    statistics, and the lines of ``Moments`` if it ``is_summed``. Returns y, the
    statistics, and moved ones. It holds no array of a call.

    Args:
        layer: eps and activation.
        given: which of weight, bias and residual there are, and the kernels.
        statistics: of which rows; of running ones it says whether there are any.
        segments: of the rows, or None.
        few: the kernels of few rows, or None.
        is_summed: whether lines are given.
    """

    __slots__ = (
        "few",
        "given",
        "is_summed",
        "launches",
        "layer",
        "segments",
        "statistics",
    )

    def __init__(
        self,
        layer: Layer,
        given: Given,
        statistics: BatchStatistics | SegmentStatistics | SharedStatistics,
        segments: RowSegments | None,
        few: BatchNorms | None,
        is_summed: bool = False,
    ):
        self.layer, self.given, self.statistics = layer, given, statistics
        self.segments, self.few, self.is_summed = segments, few, is_summed
        self.launches = 3 if few is None else 1
        given.tell("forward", self.launches - (is_summed and few is None))

    @property
    def last(self) -> int:
        """How many arrays are differentiated: x, weight, bias and residual."""
        return 1 + sum(self.given.there)

    def composed(self, x, *rest) -> mx.array:
        lines, spread = self.statistics.composed(x), self.statistics.spread
        return affine(x, *lines, *self.given.spread(rest), self.layer, spread)

    def forward(self, x, *rest):
        x = mx.contiguous(x)  # several launches read it
        given, layer, now, last = self.given, self.layer, self.statistics, self.last
        weight, bias, residual = given.spread(rest)
        running, lines = rest[last - 1 :], ()
        if self.is_summed:
            running, lines = running[:-1], running[-1:]
        if running:
            now = now._replace(running=running)
        if self.few is not None:
            moved = (None, 0.0) if self.segments is not None else now
            facts = *moved, layer.eps, layer.act, self.segments, now.groups
            y, mean, var, *moved = self.few.normalize(x, weight, bias, residual, *facts)
        else:
            mean, var, *moved = now.run(given.kernels, x, *lines)
            fit = fit_of(layer, mean, var, weight, bias, self.segments)
            y = given.kernels.normalize(x, fit, residual)
        return y, mean, var, *[a.reshape(-1) for a in moved]

    def back(self, dy, x, mean, var, *rest):
        """Return the gradients of x and of those that there are of the rest."""
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # several launches read them
        given, kernels = self.given, self.given.kernels
        weight, bias, residual = given.spread(rest)
        fit = fit_of(self.layer, mean, var, weight, bias, self.segments)
        if self.few is not None:
            groups = self.statistics.groups
            dx, *others = self.few.gradient(dy, x, fit, residual, groups)
            return dx, *given.kept(*others)
        found = kernels.gradient_sums(dy, x, fit, residual)
        terms, dweight, dbias = self.statistics.terms(kernels, fit, found)
        dx, dresidual = kernels.gradient(dy, x, fit, residual, terms)
        return dx, *given.kept(dweight, dbias, dresidual)

    def vjp(self, primals, cotangents, outputs):
        x, *rest = several(primals)
        rest, others = rest[: self.last - 1], rest[self.last - 1 :]
        more = 0
        if self.segments is not None:
            lines = *outputs[1:3], *self.given.spread(rest)[:2]
            fit = fit_of(self.layer, *lines, self.segments)
            more = not self.statistics.is_by_channel(fit)
            if self.few is not None:
                more = self.statistics.adds_parameters(fit)
        self.given.tell("backward", self.launches + more)
        gradient = Gradient(self.back, self.composed, 2)
        found = gradient(cotangents[0], x, *outputs[1:3], *rest)
        return *found, *[mx.zeros(a.shape) for a in others]

    def jvp(self, at, by):
        at, by = several(at)[: self.last], several(by)[: self.last]
        (moved,) = mx.jvp(self.composed, list(at), filled(at, by))[1]
        return moved, *self.no_statistics(moved.shape[1])

    def vmap(self, arrays, axes):
        arrays, axes = several(arrays)[: self.last], several(axes)[: self.last]
        y = mx.vmap(self.composed, tuple(axes))(*arrays)

        def lines(x, *_):  # which the way back reads
            return tuple(a.reshape(self.size, -1) for a in self.statistics.lines(x))

        moved = [mx.stack([a] * len(y)) for a in self.no_statistics(y.shape[-1])[2:]]
        return (y, *mx.vmap(lines, tuple(axes))(*arrays), *moved), (0,) * 5

    @property
    def size(self) -> int:
        """Lines of the statistics."""
        return 1 if self.segments is None else self.segments.size

    def no_statistics(self, channels: int) -> list[mx.array]:
        """Return zeros for all results but y."""
        line, moved = mx.zeros((self.size, channels)), mx.zeros((self.size * channels,))
        return [line, line, moved, moved]


def given_of(x, layer: Layer, weight, bias, residual) -> tuple[Given, list[mx.array]]:
    """Return which of weight, bias and residual exist, and their arrays for kernels.

    ``Given`` holds no array: MLX keeps the rules that hold it until it has evaluated
    their results.
    """
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        weight, bias = weight.astype(mx.float32), bias.astype(mx.float32)
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.astype(x.dtype)
    optional = weight, bias, residual
    arrays = [a for a in optional if a is not None]
    given = Given([a is not None for a in optional], kernels_of(x, *arrays))
    if norms:
        given.observe(x, layer)
    return given, arrays


class Given:
    """Which of weight, bias and residual a norm has, and who runs it. Holds no array.

    Attributes:
        there: which there are.
        kernels: of the device, or None where MLX operations run.
        tell: tells of passes; of the forward one if these are MLX operations.
    """

    __slots__ = "kernels", "tell", "there"

    def __init__(self, there: Sequence[bool], kernels: Norms | None):
        self.there, self.kernels = there, kernels
        self.tell = untold

    def observe(self, x: mx.array, layer: Layer) -> None:
        """Tell observers of now of the passes of a layer over ``x``."""

        def parts() -> tuple[str, ...]:
            added = "residual" if self.there[2] else ""
            return tuple(filter(None, (layer.name, added, layer.act.name)))

        self.tell = norm_teller(parts, self.kernels is not None, x)
        if self.kernels is None:
            self.tell("forward", None)

    def spread(self, arrays: Sequence[mx.array]) -> list[mx.array | None]:
        """Return weight, bias and residual, None for those that do not exist."""
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
        summed, running, few = () if lines is None else (lines,), None, None
        if isinstance(statistics, BatchStatistics):
            # Rules must not hold the running statistics: each call has other arrays.
            running, momentum = statistics
            statistics = BatchStatistics(None if running is None else (), momentum)
            few = given.kernels.of_few(x)
        function = _RowNorm(layer, given, statistics, None, few, bool(summed))
        y, _, _, mean, var = function(x, *arrays, *(running or ()), *summed)
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

    Arguments are those of ``batch_norm``.
    """
    given, arrays = given_of(x, layer, weight, bias, residual)
    if given.kernels:
        few = given.kernels.of_few(x, statistics.segments, statistics.groups)
        function = _RowNorm(layer, given, statistics, statistics.segments, few)
        return function(x, *arrays)[0]
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
    return _by_fixed(layer, given, are_frozen)(x, mean, var, *arrays)


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

    gradient = Gradient(back, composed, frozen=2 if are_frozen else 0)

    def vjp(primals, dy, _):
        given.tell("backward", 3)
        found = gradient(dy, *primals)
        if not are_frozen:
            return found
        dx, *rest = found
        return dx, *map(mx.zeros_like, primals[1:3]), *rest

    given.tell("forward", 1)
    function = Function(forward)
    function.vjp(vjp)
    function.jvp(lambda at, by: mx.jvp(composed, list(at), filled(at, by))[1][0])
    function.vmap(lambda arrays, axes: (mx.vmap(composed, tuple(axes))(*arrays), 0))
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
    function.vmap(lambda x, axis: (mx.vmap(moments, (axis,))(x), (0, 0)))
    return function(x)

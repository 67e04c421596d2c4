"""Norms over active rows, by channel and by row, and shift, scale and gate.

A norm by channel is statistics of rows, and what is applied to each row by them, in
float32 and rounded once to the input's dtype. Each is one function over the backend's
kernels, whose higher derivatives, forward mode and vmap are those of the same function
in MLX operations, as on devices without kernels. Saved for the backward pass are the
inputs and a mean and variance for each channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .. import devices, registry
from ..backends.mlx import group_means, row_sum
from ..channel_kernels import Affine, norm_teller
from ..checks import FLOATS, arrays_of, dtype_name, real, whole
from ..epilogue import NONE, Activation, composed
from ..registry import Fit, Norms, Residual, RowSegments, Running
from ..tensor import Features, SparseTensor, expect_tensor, features_of
from ..transformations import filled, several
from .channels import activated, activation_of
from .pool import BatchRows, batch_rows, batch_spread, batch_sum

__all__ = [
    "batch_norm", "batch_stats", "gate", "group_norm", "instance_norm",
    "layer_norm", "modulate", "rms_norm",
]  # fmt: skip


# Public functions


def batch_stats(feats: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 mean and biased variance of each channel over all rows.

    Differentiable to any order.

    Args:
        feats: (N, C) floating.

    Returns:
        Two (C,) arrays; zeros if N = 0.

    Examples:
        >>> mean, var = ops.batch_stats(mx.array([[1.0], [3.0]]))
        >>> mean.item(), var.item()
        (2.0, 1.0)
    """
    feats = features_of(feats)
    expect_rows(feats)
    return moments(feats)


def batch_norm(
    x: Features,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: Features | None = None,
    activation: str | Activation | Callable[..., Any] | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, each channel normalised.

    The norm is computed in float32 and rounded once. It takes one launch if ``mean``
    and ``var`` are given, and three with the statistics of the rows.

    Args:
        x: tensor, or its (N, C) features.
        mean, var: (C,) statistics; by default those of the rows. Both or neither.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
        residual: features of the same rows.
        activation: the name of an activation (docs/norms.md lists them), with a slope
            of your own as in "leaky_relu(0.2)"; or a layer or function such as
            ``nn.ReLU()``. By default none.

    Raises:
        TypeError: the features are not floating.
        ValueError: only one of ``mean`` and ``var`` is given, there is no such
            activation, or the shape of an array does not fit.

    Examples:
        >>> ops.batch_norm(mx.array([[1.0], [3.0]]))[:, 0]
        array([-0.999995, 0.999995], dtype=float32)
    """
    if (mean is None) != (var is None):
        raise ValueError("mean and var go together: give both, or neither")
    mean, var, weight, bias = arrays_of(mean=mean, var=var, weight=weight, bias=bias)
    how = {"act": activation_of(activation), "eps": real(eps, "eps", 0.0)}
    feats = features_of(x)
    expect_rows(feats, mean, var, weight, bias)
    parameters = weight, bias, residual_of(x, residual)
    if mean is None:
        y = normalized_by_rows(feats, *parameters, **how)[0]
    else:
        y = normalized_by(feats, mean, var, *parameters, **how)
    return _replace(x, y)


def group_norm(
    x: SparseTensor,
    groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: SparseTensor | None = None,
    activation: str | Activation | Callable[..., Any] | None = None,
) -> SparseTensor:
    """Normalise the rows of each batch element over each group of channels.

    Groups are neighbouring channels, as in PyTorch. The statistics of an
    element are those of its active rows alone; empty elements are legal.

    Args:
        x: tensor.
        groups: number of groups, a divisor of the channels.
        weight, bias: (C,) scale and shift; or (B, C), those of each batch element.
        eps: added to the variance.
        residual, activation: added and applied in the same launch, as in
            ``batch_norm``.

    Raises:
        ValueError: ``groups`` does not divide the channels, or shapes do not fit.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.group_norm(x, groups=4).shape
        (64, 8)
    """
    expect_tensor(x)
    groups, eps = whole(groups, "groups", 1), real(eps, "eps", 0.0)
    weight, bias = arrays_of(weight=weight, bias=bias)
    channels = x.channels
    if channels % groups:
        raise ValueError(
            f"groups must divide the {channels} channels; got {groups} groups"
        )
    for line in (weight, bias):
        if line is not None and tuple(line.shape) != (channels,):
            check_values(x, line)
    rows, act = batch_rows(x), activation_of(activation)
    # MLX adds the gradients of the lines of all elements.
    lines = [_line_of_each(a, rows.size) for a in (weight, bias)]
    name = "InstanceNorm" if groups == channels else "GroupNorm"
    given = *lines, residual_of(x, residual)
    statistics = ElementStatistics(rows, groups)
    facts = {"act": act, "eps": eps, "name": name, "statistics": statistics}
    return x.replace(normalized_by_rows(x.feats, *given, **facts)[0])


def instance_norm(
    x: SparseTensor,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: SparseTensor | None = None,
    activation: str | Activation | Callable[..., Any] | None = None,
) -> SparseTensor:
    """Normalise each channel over the rows of each batch element.

    Arguments are those of ``group_norm``, with one channel a group.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.instance_norm(x, activation="silu").shape
        (64, 8)
    """
    expect_tensor(x)
    return group_norm(
        x, x.channels, weight, bias, eps, residual=residual, activation=activation
    )


def layer_norm(
    x: Features,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: Features | None = None,
    activation: str | Activation | Callable[..., Any] | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, each row normalised over its channels.

    On CUDA this is one launch, and two in the backward pass, if the channels of a row
    fill multiples of 16 bytes and take at most 2 KB.

    Args:
        x: tensor, its (N, C) features, or an array of more axes, over its last one.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
        residual, activation: as for ``batch_norm``.

    Examples:
        >>> ops.layer_norm(mx.array([[1.0, 3.0]]), activation="relu")
        array([[0, 0.999995]], dtype=float32)
    """
    feats, eps = features_of(x), real(eps, "eps", 0.0)
    weight, bias = arrays_of(weight=weight, bias=bias)
    expect_lines("weight and bias", feats.shape[-1], weight, bias)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x if residual is None else _replace(x, feats + residual_of(x, residual))
    kernels, act = registry.norms(), activation_of(activation)
    if residual is not None:
        residual = residual_of(x, residual).astype(feats.dtype)
    fit = Fit(None, None, weight, bias)
    if kernels is None or not kernels.normalizes_rows(feats, fit):
        y = _layer_norm_by_mlx(feats, weight, bias, residual, eps)
        return _replace(x, activated(y, act) if act.changes else y)
    given = "LayerNorm", feats, (weight, bias, residual)
    rules, arrays = _rules(_LayerNorm, *given, act=act, eps=eps)
    return _replace(x, rules(feats, *arrays))


def rms_norm(
    x: Features, weight: mx.array | None = None, eps: float = 1e-5
) -> Features:
    """Divide each row by the root mean square of its channels.

    Args:
        x: tensor, or its (N, C) features.
        weight: (C,) scale.
        eps: added to the mean square.

    Examples:
        >>> ops.rms_norm(mx.array([[3.0, 4.0]]))  # divided by sqrt(12.5)
        array([[0.848528, 1.13137]], dtype=float32)
    """
    feats, eps = features_of(x), real(eps, "eps", 0.0)
    (weight,) = arrays_of(weight=weight)
    expect_lines("weight and bias", feats.shape[-1], weight)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x
    return _replace(x, mx.fast.rms_norm(feats, *_like(feats, weight), eps))


def modulate(
    x: Features,
    shift: mx.array,
    scale: mx.array,
    *,
    residual: SparseTensor | None = None,
) -> Features:
    """Return ``x * (1 + scale) + shift`` with the values of each batch element.

    An adaptive norm (Peebles and Xie, "Scalable Diffusion Models with Transformers",
    2023) is a norm without parameters followed by ``modulate``.

    On a GPU this is one launch for a tensor, including the residual.

    Args:
        x: a tensor, or an array (B, L, C) of sequences.
        shift, scale: (B, C); B is the tensor's batch size, or 1 for all elements.
        residual: a tensor of the same rows that is added, or None.

    Returns:
        A tensor or an array like ``x``, in its dtype.

    Raises:
        ValueError: shapes do not fit.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> shift, scale = mx.ones((1, 8)), mx.full((1, 8), 2.0)
        >>> ops.modulate(x, shift, scale).feats[0, 0].item()
        4.0
    """
    shift, scale = _values(x, shift=shift, scale=scale)
    scale = 1 + scale.astype(mx.float32)
    if isinstance(x, SparseTensor):
        return scaled(x, scale, shift, residual)
    scale, shift = (a[:, None].astype(x.dtype) for a in (scale, shift))
    return x * scale + shift


def gate(
    x: Features, by: mx.array, *, residual: SparseTensor | None = None
) -> Features:
    """Return ``x * by + residual`` with the values of each batch element.

    Arguments, result and errors are those of ``modulate``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.gate(x, mx.full((1, 8), 0.5), residual=x).feats[0, 0].item()
        1.5
    """
    (by,) = _values(x, by=by)
    if isinstance(x, SparseTensor):
        return scaled(x, by, residual=residual)
    return x * by[:, None].astype(x.dtype)


# Checks of arguments


def expect_rows(feats: mx.array, *lines: mx.array | None) -> None:
    """Raise unless features are (N, C) floats and each line has one value a channel."""
    dtype_name(feats.dtype)
    if feats.ndim != 2:
        raise ValueError(f"features must have shape (N, C); got {tuple(feats.shape)}")
    expect_lines("mean, var, weight and bias", feats.shape[1], *lines)


def expect_lines(names: str, channels: int, *lines: mx.array | None) -> None:
    """Raise unless each line has one value a channel; ``names`` is what they are."""
    shape = (channels,)
    for line in lines:
        if line is not None and line.shape != shape:
            raise ValueError(
                f"{names} must have shape {shape}, one value a channel; got "
                f"{line.shape}"
            )


def residual_of(x: Features, residual: Features | None) -> mx.array | None:
    """Return the features of a residual of the rows of ``x``."""
    if residual is None:
        return None
    both = isinstance(x, SparseTensor) and isinstance(residual, SparseTensor)
    if both and x.key != residual.key:
        raise ValueError(
            "a residual must lie on the rows of x, by the same key; add tensors of "
            "other rows with +"
        )
    feats = features_of(residual)
    if feats.shape != features_of(x).shape:
        raise ValueError(
            f"a residual must have the shape of x, {tuple(features_of(x).shape)}; got "
            f"{tuple(feats.shape)}"
        )
    return feats


def check_values(x: Features, *values: mx.array) -> None:
    """Raise unless each batch element of ``x`` has its values, or all share them."""
    sparse = isinstance(x, SparseTensor)
    batches = x.batch_size if sparse else features_of(x).shape[0]
    channels = x.shape[-1]  # of a tensor without reading its features
    for line in values:
        fits = tuple(line.shape) in ((1, channels), (batches, channels))
        if len(x.shape) != (2 if sparse else 3) or not fits:
            raise ValueError(
                f"each batch element has its values: expected ({batches}, {channels}) "
                f"for features {tuple(x.shape)}; got {tuple(line.shape)}"
            )


def _values(x: Features, **named: mx.array) -> list[mx.array]:
    values = arrays_of(**named)
    for name, value in zip(named, values, strict=True):
        if value is None:
            raise TypeError(f"{name} must be an array (B, C); got None")
    check_values(x, *values)
    return values


def _replace(x: Features, feats: mx.array) -> Features:
    return x.replace(feats) if isinstance(x, SparseTensor) else feats


def _like(feats: mx.array, *parameters: mx.array | None) -> list[mx.array | None]:
    # Of float32 parameters MLX would make a float32 copy of half features.
    return [p if p is None else p.astype(feats.dtype) for p in parameters]


def _line_of_each(line: mx.array | None, elements: int) -> mx.array | None:
    """Return (B, C) lines of batch elements, which may share one."""
    if line is None:
        return None
    shape = elements, line.shape[-1]
    return mx.contiguous(mx.broadcast_to(line.reshape(-1, shape[1]), shape))


# Statistics


def moments(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 (C,) mean and biased variance over the rows of (N, C)."""
    x, rows = x.astype(mx.float32), max(1, x.shape[0])
    mean = row_sum(x) / rows
    return mean, row_sum(mx.square(x - mean)) / rows


def moved_statistics(
    running: Running,
    momentum: float,
    rows: int | mx.array,
    mean: mx.array,
    var: mx.array,
) -> tuple[mx.array, mx.array]:
    """Return running statistics moved by those of some rows, by one row the mean."""
    if running is None:
        return mean, var
    old_mean, old_var = running
    rows = mx.array(rows, dtype=mx.float32)
    unbiased = var * (rows / mx.maximum(rows - 1, 1))
    by = mx.where(rows > 0, momentum, 0.0)
    new_mean = (1 - by) * old_mean + by * mean
    by = mx.where(rows > 1, momentum, 0.0)
    return new_mean, (1 - by) * old_var + by * unbiased


class ElementStatistics:
    """Statistics of each batch element's rows, over each group of channels."""

    def __init__(self, rows: BatchRows, groups: int):
        self.rows: BatchRows = rows
        self.groups: int = groups
        self.segments: RowSegments = rows.segments

    def spread(self, lines: mx.array) -> mx.array:
        """Return (N, C): the line of each row's element."""
        return batch_spread(lines, self.rows)

    def composed(self, x: mx.array) -> tuple[mx.array, mx.array, int]:
        """Return (B, C) mean and variance, in MLX operations."""
        x, counts = x.astype(mx.float32), self.segments.counts

        def means(values: mx.array) -> mx.array:
            return group_means(batch_sum(values, self.rows) / counts, self.groups)

        mean = means(x)
        return mean, means(mx.square(x - self.spread(mean))), 0

    def moments(self, kernels: Norms, x: mx.array, *_: object) -> tuple[mx.array, ...]:
        """Return (B, C) mean and variance, by kernels, and once more."""
        mean, var, *_ = kernels.moments(x, self.segments)
        if self.groups < x.shape[1]:
            middle = group_means(mean, self.groups)
            var = group_means(var + mx.square(mean - middle), self.groups)
            mean = middle
        return mean, var, mean, var

    def terms(self, fit: Fit, sums: mx.array, terms: mx.array) -> mx.array:
        """Return what ``Norms.gradient`` takes, of what ``gradient_sums`` returned."""
        return group_means(terms, self.groups)


# Rules of norms by kernels


def _kernels_for(*arrays: mx.array) -> Norms | None:
    """Return the device's kernels, if they take these arrays."""
    if not arrays[0].size or not all([a.dtype in FLOATS for a in arrays]):
        return None
    return registry.norms()


def _rules(
    kind: type[Affine],
    name: str,
    x: mx.array,
    parameters: tuple[mx.array | None, mx.array | None, Residual],
    *,
    act: Activation = NONE,
    **more,
) -> tuple[Affine, list[mx.array]]:
    """Return the rules of a norm, and the arrays that it has, as kernels take them."""
    weight, bias, residual = parameters
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        weight, bias = weight.astype(mx.float32), bias.astype(mx.float32)
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.astype(x.dtype)
    every = weight, bias, residual
    arrays = [a for a in every if a is not None]
    kernels = _kernels_for(x, *arrays)
    parts = name, "" if residual is None else "residual", act.name
    tell = norm_teller(parts, kernels is not None, x)
    if kernels is None:
        tell("forward", None)
    present = [a is not None for a in every]
    return kind(kernels, present, act, tell=tell, **more), arrays


def _run(rules: Affine, *arrays: mx.array):
    """Return a norm by kernels, or in MLX operations if the device has none."""
    return rules.composed(*arrays) if rules.kernels is None else rules(*arrays)


class _NormByRows(Affine):
    """A norm by statistics of the rows: of batch elements, processes or all of them.

    A function of x, of those present of weight, bias and residual, of running
    statistics if there are any, and of ``Moments.lines`` if the convolution summed
    them. Returns y, (S, C) mean and variance, and moved (C,) running ones.
    """

    statistics = 2

    def __init__(self, *others, statistics=None, momentum: float = 0.0, **more):
        segments = getattr(statistics, "segments", None)
        spread = getattr(statistics, "spread", None)
        super().__init__(*others, segments=segments, spread=spread, **more)
        self.source, self.momentum = statistics, momentum

    def _parted(self, rest):
        """Return weight, bias and residual; running statistics; the lines."""
        running, lines = [*rest[sum(self.present) :]], None
        if len(running) % 2:
            lines = running.pop()
        return self.named(rest), tuple(running) or None, lines

    def everything(self, x, *rest):
        """Return all results, in MLX operations; gradients reach y alone."""
        (weight, bias, residual), running, _ = self._parted(rest)
        if self.source is None:
            mean, var, rows = *moments(x), x.shape[0]
        else:
            mean, var, rows = self.source.composed(x)
        lines = self.of_rows(mean, var, weight, bias)
        y = self.affine(x, *lines, residual)
        moved = moved_statistics(running, self.momentum, rows, mean, var)
        found = [a.reshape(self.lines, x.shape[1]) for a in (mean, var)]
        found += [a.flatten() for a in moved]
        return y, *[mx.stop_gradient(a) for a in found]

    def composed(self, x, *rest) -> mx.array:
        return self.everything(x, *rest)[0]

    def forward(self, x, *rest) -> mx.array:
        x = mx.contiguous(x)  # several launches read it
        (weight, bias, residual), running, lines = self._parted(rest)
        fit, moving = (
            self.fit(None, None, weight, bias),
            (running, self.momentum, lines),
        )
        if self.source is None:
            y, mean, var, *moved = self.kernels.batch_norm(x, fit, residual, *moving)
        else:
            mean, var, *moved = self.source.moments(self.kernels, x, *moving)
            fit = fit._replace(mean=mean, var=var)
            y = self.kernels.normalize(x, fit, residual)
        self.tell("forward", self._launches(x, lines))
        return y, mean, var, *[a.reshape(-1) for a in moved]

    def _launches(self, x: mx.array, lines: mx.array | None = None) -> int:
        if self.source is None and self.kernels.is_one_launch(x):
            return 1
        return 3 if lines is None else 2

    def back(self, dy, x, mean, var, *rest) -> tuple[mx.array, ...]:
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # several launches read them
        weight, bias, residual = self.named(rest)
        fit, kernels = self.fit(mean, var, weight, bias), self.kernels
        if self.source is None:
            dx, *others = kernels.batch_norm_gradient(dy, x, fit, residual)
        else:
            sums, terms, *others = kernels.gradient_sums(dy, x, fit, residual)
            terms = self.source.terms(fit, sums, terms)
            dx, dresidual = kernels.gradient(dy, x, fit, residual, terms)
            others.append(dresidual)
        gradients = [
            gradient.reshape(array.shape)
            for gradient, array in zip(self.those(*others), rest, strict=True)
        ]
        self.tell("backward", self._launches(x))
        return dx, *gradients

    def vjp(self, primals, cotangents, outputs):
        x, *rest = several(primals)
        count = sum(self.present)
        found = self.gradient(cotangents[0], x, *outputs[1:3], *rest[:count])
        return *found, *map(mx.zeros_like, rest[count:])

    def jvp(self, at, by):
        at, by = [*several(at)], several(by)
        return tuple(mx.jvp(self.everything, at, filled(at, by))[1])

    def vmap(self, arrays, axes):
        axes = tuple(several(axes))
        return mx.vmap(self.everything, axes)(*several(arrays)), (0,) * 5


def normalized_by_rows(
    x: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    act: Activation = NONE,
    eps: float = 1e-5,
    name: str = "BatchNorm",
    statistics: ElementStatistics | None = None,
    running: Running = None,
    momentum: float = 0.0,
    lines: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Normalise each channel by statistics of the rows; return y, mean and variance.

    The latter are the (C,) ``running`` ones, moved; without any they have no meaning.
    Lines are (C,), or (B, C) for ``statistics`` of elements. Gradients reach y alone.
    """
    more = {"eps": eps, "statistics": statistics, "momentum": momentum}
    given = name, x, (weight, bias, residual)
    rules, arrays = _rules(_NormByRows, *given, act=act, **more)
    # Rules must not hold the running statistics: each call has other arrays.
    arrays += [*(running or ()), *([] if lines is None else [lines])]
    function = rules.everything if rules.kernels is None else rules
    y, _, _, mean, var = function(x, *arrays)
    return y, mean, var


class _NormBy(Affine):
    """A norm by given statistics: of x, mean, var, and those present of the rest."""

    def composed(self, x, mean, var, *rest) -> mx.array:
        return self.affine(x, mean, var, *self.named(rest))

    def forward(self, x, mean, var, *rest) -> mx.array:
        weight, bias, residual = self.named(rest)
        self.tell("forward", 1)
        return self.kernels.normalize(x, self._fit(mean, var, weight, bias), residual)

    def _fit(self, mean, var, weight, bias) -> Fit:
        return self.fit(mean.reshape(1, -1), var.reshape(1, -1), weight, bias)

    def back(self, dy, x, mean, var, *rest) -> tuple[mx.array, ...]:
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # two launches read them
        weight, bias, residual = self.named(rest)
        given = dy, x, self._fit(mean, var, weight, bias), residual
        dx, dresidual = self.kernels.gradient(*given)
        # MLX computes what is asked for: without parameters, dx alone.
        sums, _, dweight, dbias = self.kernels.gradient_sums(*given)
        inverse = mx.rsqrt(var + self.eps)
        scale = inverse if weight is None else inverse * weight.astype(mx.float32)
        dmean, dvar = -scale * sums[0, 0], -0.5 * scale * inverse * sums[1, 0]
        self.tell("backward", 3)
        lines = dweight.reshape(-1), dbias.reshape(-1)
        return dx, dmean, dvar, *self.those(*lines, dresidual)


def normalized_by(
    x: mx.array,
    mean: mx.array,
    var: mx.array,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    *,
    act: Activation = NONE,
    eps: float = 1e-5,
) -> mx.array:
    """Normalise each channel by given (C,) statistics, in one launch."""
    given = "BatchNorm", x, (weight, bias, residual)
    rules, arrays = _rules(_NormBy, *given, act=act, eps=eps)
    statistics = mean.astype(mx.float32), var.astype(mx.float32)
    return _run(rules, x, *statistics, *arrays)


def scaled(
    x: SparseTensor,
    weight: mx.array,
    bias: mx.array | None = None,
    residual: SparseTensor | None = None,
) -> SparseTensor:
    """Return ``x * weight + bias + residual``; lines are (C,), (1, C) or (B, C)."""
    lines, segments, spread = [weight, bias], None, None
    if all(a is None or a.size == a.shape[-1] for a in lines):
        lines = [a if a is None else a.reshape(-1) for a in lines]
    else:
        rows = batch_rows(x)
        lines = [_line_of_each(a, rows.size) for a in lines]
        both = ElementStatistics(rows, x.channels)
        segments, spread = both.segments, both.spread
    name = "gate" if bias is None else "modulate"
    given = name, x.feats, (*lines, residual_of(x, residual))
    rules, arrays = _rules(Affine, *given, segments=segments, spread=spread)
    return x.replace(_run(rules, x.feats, *arrays))


class _LayerNorm(Affine):
    """Layer norm by kernels: of x and those that are present of the rest."""

    def composed(self, x, *rest) -> mx.array:
        return composed(self.act)(_layer_norm_by_mlx(x, *self.named(rest), self.eps))

    def forward(self, x, *rest) -> mx.array:
        weight, bias, residual = self.named(rest)
        fit = self.fit(None, None, weight, bias)
        self.tell("forward", 1)
        return self.kernels.layer_norm(mx.contiguous(x), fit, residual)

    def back(self, dy, x, *rest) -> tuple[mx.array, ...]:
        dy, x = mx.contiguous(dy), mx.contiguous(x)
        weight, bias, residual = self.named(rest)
        fit = self.fit(None, None, weight, bias)
        dx, *others = self.kernels.layer_norm_gradient(dy, x, fit, residual)
        self.tell("backward", 2 if any(self.present[:2]) else 1)
        return dx, *self.those(*others)


def _layer_norm_by_mlx(
    feats: mx.array,
    weight: mx.array | None,
    bias: mx.array | None,
    residual: mx.array | None,
    eps: float,
) -> mx.array:
    """Return a layer norm by MLX's kernel, and a residual added."""
    if feats.shape[-1] % 4 and devices.current().backend == devices.CUDA:
        # The gradient of MLX's kernel is wrong there for channels not a multiple of 4.
        wide = feats.astype(mx.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        var = mx.square(centred).mean(axis=-1, keepdims=True)
        y = centred * mx.rsqrt(var + eps)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    else:
        y = mx.fast.layer_norm(feats, *_like(feats, weight, bias), eps)
    y = y.astype(feats.dtype)
    return y if residual is None else y + residual

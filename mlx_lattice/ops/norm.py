"""Norms over active rows, by channel and by row, and shift, scale and gate.

Statistics are computed in float32, results are in the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from .. import devices, registry
from ..channel_kernels import standard
from ..checks import arrays_of, dtype_name, real, whole
from ..epilogue import Activation
from ..tensor import SparseTensor, expect_tensor, features_of
from ..transformations import Function, of_kernels
from . import channel_norms
from .activation import activated, activation_of
from .channel_norms import Given, Layer, SegmentStatistics, affine, fit_of, given_of
from .observed import norms
from .pool import BatchRows, batch_rows, batch_spread, batch_sum

__all__ = [
    "batch_norm", "batch_stats", "gate", "group_norm", "instance_norm",
    "layer_norm", "modulate", "rms_norm",
]  # fmt: skip


Features = SparseTensor | mx.array


def batch_stats(feats: mx.array) -> tuple[mx.array, mx.array]:
    """Return the float32 mean and biased variance of each channel over all rows.

    Args:
        feats: (N, C) floating.

    Returns:
        Two (C,) arrays; zeros where N = 0.
    """
    feats = features_of(feats)
    expect_rows(feats)
    return channel_norms.batch_stats(feats)


def batch_norm(
    x: Features,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: Features | None = None,
    activation: str | Activation | Callable | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, each channel normalised.

    Computed in float32 and rounded once; one launch where ``mean`` and ``var`` are
    given, three for the statistics of the rows.

    Args:
        x: tensor, or its (N, C) features.
        mean, var: (C,) statistics; by default those of the rows. Both or neither.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
        residual: features of the same rows.
        activation: "relu", "gelu", "silu", "gelu_tanh", "leaky_relu", "elu", or with
            another slope "leaky_relu(0.2)", "elu(0.5)"; or a layer or function of
            these, such as ``nn.ReLU()``; by default none.

    Raises:
        TypeError: the features are not floating.
        ValueError: one of ``mean`` and ``var`` was given without the other, the
            activation has another name, or an array another shape.
    """
    if (mean is None) != (var is None):
        raise ValueError("mean and var go together: give both, or neither")
    mean, var, weight, bias = arrays_of(mean=mean, var=var, weight=weight, bias=bias)
    act, eps = activation_of(activation), real(eps, "eps", 0.0)
    feats, layer = features_of(x), Layer("BatchNorm", eps, act)
    expect_rows(feats, mean, var, weight, bias)
    added = residual_of(x, residual)
    if mean is None:
        y = channel_norms.batch_norm(feats, layer, weight, bias, added)[0]
    else:
        y = channel_norms.fixed_norm(feats, layer, mean, var, weight, bias, added)
    return x.replace(y) if isinstance(x, SparseTensor) else y


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
    """Return the features of a residual of the rows of ``x``.

    Raises:
        ValueError: it has other rows or channels.
    """
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


def group_norm(
    x: SparseTensor,
    groups: int,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: SparseTensor | None = None,
    activation: str | Activation | Callable | None = None,
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
    """
    expect_tensor(x)
    groups, eps = whole(groups, "groups", 1), real(eps, "eps", 0.0)
    weight, bias = arrays_of(weight=weight, bias=bias)
    if x.channels % groups:
        raise ValueError(
            f"groups must divide the {x.channels} channels; got {groups} groups"
        )
    for line in (weight, bias):
        if line is not None and tuple(line.shape) != (x.channels,):
            check_values(x, line)
    rows = batch_rows(x)
    add, spread = partial(batch_sum, rows=rows), partial(batch_spread, rows=rows)
    statistics = SegmentStatistics(rows.segments, groups, add, spread)
    name = "InstanceNorm" if groups == x.channels else "GroupNorm"
    layer = Layer(name, eps, activation_of(activation))
    lines = apart(weight, bias, lambda: rows.size)
    given = *lines, residual_of(x, residual)
    return x.replace(channel_norms.group_norm(x.feats, layer, statistics, *given))


def instance_norm(
    x: SparseTensor,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: SparseTensor | None = None,
    activation: str | Activation | Callable | None = None,
) -> SparseTensor:
    """Normalise each channel over the rows of each batch element.

    Arguments are those of ``group_norm``, with one channel a group.
    """
    expect_tensor(x)
    return group_norm(
        x, x.channels, weight, bias, eps, residual=residual, activation=activation
    )


def check_values(x: SparseTensor | mx.array, *values: mx.array) -> None:
    """Raise unless each batch element of ``x`` has its values, or all share them."""
    sparse = isinstance(x, SparseTensor)
    batches = x.batch_size if sparse else features_of(x).shape[0]
    channels = x.shape[-1]  # of a tensor without reading its features
    for given in values:
        fits = tuple(given.shape) in ((1, channels), (batches, channels))
        if len(x.shape) != (2 if sparse else 3) or not fits:
            raise ValueError(
                f"each batch element has its values: expected ({batches}, {channels}) "
                f"for features {tuple(x.shape)}; got {tuple(given.shape)}"
            )


def apart(
    weight: mx.array | None, bias: mx.array | None, size: Callable[[], int]
) -> list[mx.array | None]:
    """Return lines for all rows, (C,), or both of them for each batch element.

    ``size``: returns the number of elements, which may have to be read.
    """
    lines = [
        a.reshape(-1) if a is not None and a.size == a.shape[-1] else a
        for a in (weight, bias)
    ]
    if all(a is None or a.ndim == 1 for a in lines):
        return lines
    shape = size(), lines[0 if lines[1] is None else 1].shape[-1]
    return [a if a is None else mx.broadcast_to(a, shape) for a in lines]


def layer_norm(
    x: Features,
    weight: mx.array | None = None,
    bias: mx.array | None = None,
    eps: float = 1e-5,
    *,
    residual: Features | None = None,
    activation: str | Activation | Callable | None = None,
) -> Features:
    """Return ``activation(norm(x) + residual)``, each row normalised over its channels.

    On CUDA this is one launch, and two backward, if the channels fill 16 bytes and take
    at most 2 KB.

    Args:
        x: tensor, its (N, C) features, or an array of more axes, over its last one.
        weight, bias: (C,) scale and shift.
        eps: added to the variance.
        residual, activation: as of ``batch_norm``.
    """
    feats, eps = features_of(x), real(eps, "eps", 0.0)
    weight, bias = arrays_of(weight=weight, bias=bias)
    expect_lines("weight and bias", feats.shape[-1], weight, bias)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x if residual is None else _replace(x, feats + residual_of(x, residual))
    kernels = registry.row_norms()
    if kernels is not None and not kernels.takes(feats, weight, bias):
        kernels = None
    layer, added = Layer("LayerNorm", eps, activation_of(activation)), None
    if residual is not None:
        added = residual_of(x, residual).astype(feats.dtype)
    if kernels is None:
        return _replace(x, _row_composed(feats, layer, weight, bias, added))
    arrays = weight, bias, added
    given = Given([a is not None for a in arrays], kernels)
    if norms:
        given.observe(feats, layer)
    function = _row_function(layer, given)
    return _replace(x, function(feats, *[a for a in arrays if a is not None]))


def _row_function(layer: Layer, given: Given) -> Function:
    """Return a function of rows and what there is; second derivatives are composed."""
    kernels, act = given.kernels, (layer.eps, layer.act)

    def composed(feats, *rest):
        return _row_composed(feats, layer, *given.spread(rest))

    def forward(feats, *rest):
        return kernels.layer_norm(mx.contiguous(feats), *given.spread(rest), *act)

    def back(dy, feats, *rest):
        dy, feats = mx.contiguous(dy), mx.contiguous(feats)
        found = kernels.layer_norm_gradient(dy, feats, *given.spread(rest), *act)
        given.tell("backward", 2 if any(given.there[:2]) else 1)
        return tuple([a for a in found if a is not None])

    given.tell("forward", 1)
    return of_kernels(forward, back, composed, 1 + sum(given.there))


def _row_composed(
    feats: mx.array,
    layer: Layer,
    weight: mx.array | None,
    bias: mx.array | None,
    residual: mx.array | None,
) -> mx.array:
    """Return it by MLX's kernel, and what follows that."""
    if feats.shape[-1] % 4 and devices.current().backend == devices.CUDA:
        # The gradient of MLX's kernel is wrong there for channels not a multiple of 4.
        wide = feats.astype(mx.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        var = mx.square(centred).mean(axis=-1, keepdims=True)
        y = centred * mx.rsqrt(var + layer.eps)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    else:
        y = mx.fast.layer_norm(feats, *_like(feats, weight, bias), layer.eps)
    y = y.astype(feats.dtype)
    y = y if residual is None else y + residual
    return activated(y, layer.act) if layer.act.changes else y


def rms_norm(
    x: Features, weight: mx.array | None = None, eps: float = 1e-5
) -> Features:
    """Divide each row by the root mean square of its channels.

    Args:
        x: tensor, or its (N, C) features.
        weight: (C,) scale.
        eps: added to the mean square.
    """
    feats, eps = features_of(x), real(eps, "eps", 0.0)
    (weight,) = arrays_of(weight=weight)
    expect_lines("weight and bias", feats.shape[-1], weight)
    if feats.size == 0:  # MLX's CUDA kernels cannot be launched for no rows
        return x
    return _replace(x, mx.fast.rms_norm(feats, *_like(feats, weight), eps))


def _replace(x: Features, feats: mx.array) -> Features:
    return x.replace(feats) if isinstance(x, SparseTensor) else feats


def _like(feats: mx.array, *parameters: mx.array | None) -> list[mx.array | None]:
    # Of float32 parameters MLX would make a float32 copy of half features.
    return [p if p is None else p.astype(feats.dtype) for p in parameters]


def modulate(
    x: Features,
    shift: mx.array,
    scale: mx.array,
    *,
    residual: SparseTensor | None = None,
) -> Features:
    """Return ``x * (1 + scale) + shift`` with the values of each batch element.

    An adaptive norm (Peebles and Xie, "Scalable Diffusion Models with Transformers",
    2023) is a norm without parameters, and then ``modulate``.

    On a GPU this is one launch for a tensor, the residual included.

    Args:
        x: a tensor, or an array (B, L, C) of sequences.
        shift, scale: (B, C); B is the tensor's batch size, or 1 for all elements.
        residual: a tensor of the same rows that is added, or None.

    Returns:
        A tensor or an array like ``x``, in its dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    shift, scale = _values(x, shift=shift, scale=scale)
    scale = 1 + scale.astype(mx.float32)
    if isinstance(x, SparseTensor):
        return scaled(x, scale, shift, residual)
    return x * _of_sequences(scale, x) + _of_sequences(shift, x)


def gate(
    x: Features, by: mx.array, *, residual: SparseTensor | None = None
) -> Features:
    """Return ``x * by + residual`` with the values of each batch element.

    Arguments, launches, result and errors are those of ``modulate``.
    """
    (by,) = _values(x, by=by)
    if isinstance(x, SparseTensor):
        return scaled(x, by, residual=residual)
    return x * _of_sequences(by, x)


def _values(x: Features, **given: mx.array) -> list[mx.array]:
    values = arrays_of(**given)
    for name, value in zip(given, values, strict=True):
        if value is None:
            raise TypeError(f"{name} must be an array (B, C); got None")
    check_values(x, *values)
    return values


def _of_sequences(values: mx.array, x: mx.array) -> mx.array:
    return values[:, None].astype(x.dtype)


def scaled(
    x: SparseTensor,
    weight: mx.array,
    bias: mx.array | None = None,
    residual: SparseTensor | None = None,
) -> SparseTensor:
    """Return ``x * weight + bias + residual``."""
    lines = apart(weight, bias, lambda: x.batch_size)
    rows = batch_rows(x) if lines[0].ndim > 1 else None
    layer = Layer("gate" if bias is None else "modulate", 0.0)
    given, arrays = given_of(x.feats, layer, *lines, residual_of(x, residual))
    if given.kernels is None:
        y = _lines_composed(x.feats, layer, rows, *given.spread(arrays))
    else:
        y = _line_function(layer, given, rows, x.channels)(x.feats, *arrays)
    return x.replace(y)


def _line_function(
    layer: Layer, given: Given, rows: BatchRows | None, channels: int
) -> Function:
    kernels, segments = given.kernels, None if rows is None else rows.segments
    mean, var, _ = standard(channels, lines=1 if rows is None else rows.size)

    def composed(x, *rest):
        return _lines_composed(x, layer, rows, *given.spread(rest))

    def forward(x, *rest):
        weight, bias, residual = given.spread(rest)
        fit = fit_of(layer, mean, var, weight, bias, segments)
        return kernels.normalize(x, fit, residual)

    def back(dy, x, *rest):
        dy, x = mx.contiguous(dy), mx.contiguous(x)  # two launches read them
        weight, bias, residual = given.spread(rest)
        fit = fit_of(layer, mean, var, weight, bias, segments)
        dx, dresidual = kernels.gradient(dy, x, fit, residual)
        *_, dweight, dbias = kernels.gradient_sums(dy, x, fit, residual)
        lines = [a.reshape(weight.shape) for a in (dweight, dbias)]
        given.tell("backward", 3)
        return dx, *given.kept(*lines, dresidual)

    given.tell("forward", 1)
    return of_kernels(forward, back, composed, 1 + sum(given.there))


def _lines_composed(x, layer: Layer, rows: BatchRows | None, weight, bias, residual):
    mean, var = mx.array(0.0), mx.array(1.0)
    spread = None if rows is None else partial(batch_spread, rows=rows)
    return affine(x, mean, var, weight, bias, residual, layer, spread)

"""Shift, scale and gate of the features, with other values for each batch element.

Adaptive norms (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023)
are a norm without parameters, and then ``modulate``.
"""

from __future__ import annotations

from functools import lru_cache, partial

import mlx.core as mx

from ..arrays import arrays_of
from ..backends.norms_protocol import Norms
from ..channel_kernels import standard
from ..tensor import SparseTensor
from ..transformations import Function, of_kernels
from .batch_lines import apart, check_values
from .global_pool import BatchRows, batch_rows, batch_spread
from .norm import residual_of
from .norm_rules import Given, Layer, affine, fit_of, given_of

__all__ = ["gate", "modulate"]

Features = SparseTensor | mx.array


def modulate(
    x: Features,
    shift: mx.array,
    scale: mx.array,
    *,
    residual: SparseTensor | None = None,
) -> Features:
    """Return ``x * (1 + scale) + shift`` with the values of each batch element.

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
    """Return values of the batch elements after checks; array-likes as arrays."""
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
    """Return ``x * weight + bias + residual``.

    Args:
        x: the tensor.
        weight, bias: (C,) or (1, C) for all rows, or (B, C) of the batch elements.
        residual: a tensor of the same rows, or None.
    """
    lines = apart(weight, bias, lambda: x.batch_size)
    rows = batch_rows(x) if lines[0].ndim > 1 else None
    return x.replace(_by_lines(x.feats, rows, *lines, residual_of(x, residual)))


def _by_lines(
    x: mx.array,
    rows: BatchRows | None,
    weight: mx.array,
    bias: mx.array | None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return ``x * weight + bias + residual``, by the kernels of norms.

    Args:
        x: (N, C).
        rows: of each line of weight and bias, (S, C); None where they are (C,).
    """
    name = "gate" if bias is None else "modulate"
    layer = Layer(name, 0.0)
    given, arrays = given_of(x, layer, weight, bias, residual)
    if given.kernels is None:
        return _composed(x, layer, rows, *given.spread(arrays))
    key = layer, tuple(given.there), given.kernels, x.shape, x.dtype
    if given.is_told:
        function = _function(layer, given, rows, x.shape[1])
    elif rows is None:
        function = _of_one_line(*key)
    else:
        kept = rows.segments.functions
        if key not in kept:
            kept[key] = _untold(*key, rows)
        function = kept[key]
    return function(x, *arrays)


def _untold(
    layer: Layer,
    there: tuple[bool, ...],
    kernels: Norms,
    shape: tuple[int, int],
    dtype: mx.Dtype,
    rows: BatchRows | None = None,
) -> Function:
    return _function(layer, Given(there, kernels), rows, shape[1])


_of_one_line = lru_cache(maxsize=256)(_untold)


def _function(
    layer: Layer, given: Given, rows: BatchRows | None, channels: int
) -> Function:
    kernels, segments = given.kernels, None if rows is None else rows.segments
    mean, var, _ = standard(channels, lines=1 if rows is None else rows.size)

    def composed(x, *rest):
        return _composed(x, layer, rows, *given.spread(rest))

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


def _composed(x, layer: Layer, rows: BatchRows | None, weight, bias, residual):
    mean, var = mx.array(0.0), mx.array(1.0)
    spread = None if rows is None else partial(batch_spread, rows=rows)
    return affine(x, mean, var, weight, bias, residual, layer, spread)

"""Scales of int8 features and of integer weights, searched by what a net meets."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn import Module

from ..integer_facts import MOST, to_int8
from ..integer_weight import IntegerWeight, integer_weight
from ..quantized import module_layout

SAMPLES = 1 << 15  # magnitudes that are kept of a call
SHARE = 0.9999  # of magnitudes that a percentile keeps unclipped
# Shares of the greatest magnitude that the searches try.
FEATURES = tuple(1 - at / 40 for at in range(33))
WEIGHTS = {8: (1.0, 0.95, 0.9), 4: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)}


class Samples:
    """Magnitudes of features: some of each call, evenly spaced, and the greatest."""

    def __init__(self):
        self._kept: list[mx.array] = []

    def add(self, x: mx.array) -> None:
        """Take those of (N, C) features."""
        if not x.size:
            return
        flat = mx.abs(x.astype(mx.float32)).reshape(-1)
        step = -(-flat.size // SAMPLES)
        kept = mx.concatenate([flat[::step], flat.max(keepdims=True)])
        mx.eval(kept)
        self._kept.append(kept)

    def scale(self, method: str) -> mx.array:
        """Return the (1,) float32 scale that a method of ``METHODS`` chooses."""
        if not self._kept:
            return mx.array([0.0], dtype=mx.float32)
        x = mx.concatenate(self._kept)
        return METHODS[method](x).reshape(1).astype(mx.float32)


def _greatest(x: mx.array) -> mx.array:
    return x.max() / MOST


def _percentile(x: mx.array) -> mx.array:
    at = min(x.size - 1, int(SHARE * x.size))
    return mx.sort(x)[at] / MOST


def _least_squares(x: mx.array) -> mx.array:
    most = x.max() / MOST
    scales = most * mx.array(FEATURES)
    errors = []
    for at in range(len(FEATURES)):
        scale = scales[at : at + 1]
        rounded = to_int8(x, mx.where(scale > 0, 1 / scale, 0))
        errors.append(mx.square(rounded.astype(mx.float32) * scale - x).sum())
        mx.eval(errors[-1])
    return scales[mx.argmin(mx.stack(errors))]


METHODS: dict[str, Callable[[mx.array], mx.array]] = {
    "least squares": _least_squares,
    "percentile": _percentile,
    "greatest": _greatest,
}


def searched_weight(
    layer: Module, bits: int, group_size: int | None, squares: mx.array | None
) -> IntegerWeight:
    """Return a layer's weight in integers, each output channel by its best scale.

    Args:
        layer: float: a convolution or a linear layer.
        bits, group_size: of the weight.
        squares: (C_in,) float32 mean squares of the features, by which errors count;
            None for all alike.
    """
    layout = module_layout(layer.weight)
    given = {"bits": bits, "group_size": group_size, "layout": layout}
    plain = integer_weight(layer.weight, **given)
    c_out, c_in = layer.weight.shape[0], layer.weight.shape[-1]
    w = layer.weight.astype(mx.float32).reshape(c_out, -1, c_in)
    if squares is None:
        squares = mx.ones(c_in)
    else:  # of each output channel's own group
        groups = squares.size // c_in
        squares = mx.repeat(squares.reshape(groups, c_in), c_out // groups, axis=0)
        squares = squares.reshape(c_out, 1, c_in)
    least, scale = None, plain.scale
    for share in WEIGHTS[bits]:
        tried = plain.scale * share
        made = integer_weight(layer.weight, scale=tried, **given)
        wrong = mx.square(made.dense().transpose(2, 0, 1) - w) * squares
        error = wrong.sum(axis=(1, 2))
        if least is None:
            least = error
        scale = mx.where(error < least, tried, scale)
        least = mx.minimum(error, least)
        mx.eval(least, scale)
    return integer_weight(layer.weight, scale=scale, **given)

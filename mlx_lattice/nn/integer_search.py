"""Scales of int8 features and of integer weights, searched by what a net meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
from mlx.nn import Module

from ..integer_facts import MOST, to_int8
from ..integer_tensor import TINY, inverse_of
from ..integer_weight import IntegerWeight, integer_weight
from ..quantized import module_layout

SAMPLES = 1 << 15  # magnitudes that are kept of a call
SHARE = 0.9999  # of magnitudes that a percentile keeps unclipped
# Normal features of one size are 0.9% off, beside others 4 times as large 3.5%, and 16
# times 14%; where a call is more off than this by a common scale, and by its own this
# many times less, it gets another: rows scaled by themselves are 0.6% off at any size.
MOST_OFF, TIMES = 0.04, 3
# Shares of the greatest magnitude that the searches try.
FEATURES = tuple(1 - at / 40 for at in range(33))
WEIGHTS = {8: (1.0, 0.95, 0.9), 4: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)}


class Worst(NamedTuple):
    """The call that a common scale rounds worst.

    Attributes:
        call: its place in a run of the model, from 0 on.
        calls: how many there are.
        error: norm of the error over that of the features, by the common scale.
        own: the same by a scale of its own.
    """

    call: int
    calls: int
    error: float
    own: float

    def __str__(self) -> str:
        """Return "call 2 of 3 16.2% off (its own 0.9%)"."""
        at = f"call {self.call + 1} of {self.calls}"
        return f"{at} {self.error:.1%} off (its own {self.own:.1%})"


class Samples:
    """Magnitudes of features: some of each call, evenly spaced, and the greatest."""

    def __init__(self):
        self._kept: dict[int, list[mx.array]] = {}

    def add(self, x: mx.array, call: int = 0) -> None:
        """Take those of (N, C) features, of a call by its place in a run."""
        if not x.size:
            return
        flat = mx.abs(x.astype(mx.float32)).reshape(-1)
        step = -(-flat.size // SAMPLES)
        kept = mx.concatenate([flat[::step], flat.max(keepdims=True)])
        mx.eval(kept)
        self._kept.setdefault(call, []).append(kept)

    def scale(self, method: str) -> mx.array:
        """Return the (1,) float32 scale that a method of ``METHODS`` chooses."""
        return _chosen([each for kept in self._kept.values() for each in kept], method)

    def worst(self, scale: mx.array, method: str) -> Worst | None:
        """Return the call that a scale rounds worst, if that is too much; else None.

        It is where the error is above ``MOST_OFF``, and ``TIMES`` that of the scale
        which the method chooses for this call alone.
        """
        found = None
        for call, kept in self._kept.items() if len(self._kept) > 1 else ():
            error = _error(mx.concatenate(kept), scale)
            if error > max(MOST_OFF, found.error if found else 0.0):
                own = _error(mx.concatenate(kept), _chosen(kept, method))
                if error > TIMES * own:
                    found = Worst(call, len(self._kept), error, own)
        return found


def _chosen(kept: list[mx.array], method: str) -> mx.array:
    if not kept:
        return mx.array([0.0], dtype=mx.float32)
    return METHODS[method](mx.concatenate(kept)).reshape(1).astype(mx.float32)


def _error(x: mx.array, scale: mx.array) -> float:
    """Return the norm of what rounding by a scale does to magnitudes, over theirs."""
    off = to_int8(x, inverse_of(scale)).astype(mx.float32) * scale - x
    return (mx.linalg.norm(off) / mx.maximum(mx.linalg.norm(x), TINY)).item()


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
        rounded = to_int8(x, inverse_of(scale))
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

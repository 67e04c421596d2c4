"""Means of neighbouring channels, and each channel several times: rows are kept."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from .. import devices
from ..checks import whole
from ..reductions import linear
from ..tensor import SparseTensor, expect_tensor, features_of
from .activation import Features, on_features

__all__ = ["channel_avg_pool", "channel_repeat"]


def channel_avg_pool(x: Features, channels: int) -> Features:
    """Return the means of neighbouring channels, as many as there are for each.

    ``feats.reshape(N, channels, -1).mean(-1)``, added up in float32: TRELLIS.2 reduces
    the channels of joined rows so.

    Args:
        x: (N, C) features, of a tensor or an array.
        channels: how many are left; a divisor of C.

    Returns:
        (N, channels) features in the same dtype.

    Raises:
        ValueError: ``channels`` does not divide C.
    """
    if isinstance(x, SparseTensor):
        expect_tensor(x)
    given, channels = features_of(x).shape[-1], whole(channels, "channels", 1)
    if given % channels:
        raise ValueError(
            f"channel_avg_pool needs a divisor of the {given} channels; got {channels}"
        )
    share = given // channels
    return on_features(_sums, x, share, 1 / share)


def channel_repeat(x: Features, times: int) -> Features:
    """Return each channel several times, one beside the other.

    ``mx.repeat(feats, times, axis=1)``, with a gradient that is added up in float32.

    Args:
        x: (N, C) features, of a tensor or an array.
        times: how often; 1 or more.

    Returns:
        (N, C * times) features in the same dtype.

    Raises:
        ValueError: ``times`` is below 1.
    """
    times = whole(times, "times", 1)
    return on_features(_repeats, x, times, 1)


def _sums(feats: mx.array, share: int, scale: float) -> mx.array:
    """Return (N, C / share) sums of neighbours, times a number; differentiable."""
    facts = {"share": share, "scale": scale}
    turned, itself = partial(_repeats, **facts), partial(_sums, **facts)
    return linear(partial(_summed, **facts), turned, itself)(feats)


def _repeats(feats: mx.array, share: int, scale: float) -> mx.array:
    """Return (N, C * share): the transpose of ``_sums``; differentiable."""
    facts = {"share": share, "scale": scale}
    turned, itself = partial(_sums, **facts), partial(_repeats, **facts)
    return linear(partial(_repeated, **facts), turned, itself)(feats)


def _repeated(feats: mx.array, share: int, scale: float) -> mx.array:
    return mx.repeat(feats if scale == 1 else feats * scale, share, axis=1)


def _summed(feats: mx.array, share: int, scale: float) -> mx.array:
    shape = feats.shape[0], feats.shape[1] // share, share
    parts = feats.astype(mx.float32).reshape(shape)
    if devices.current().backend == devices.CUDA:
        total = by_halves(parts)
    else:
        total = parts.sum(axis=2)
    return (total if scale == 1 else total * scale).astype(feats.dtype)


def by_halves(parts: mx.array) -> mx.array:
    """Return (N, C) sums over the last, short axis of (N, C, share).

    For each of them MLX's sum has a block of threads on CUDA.
    """
    while parts.shape[2] % 2 == 0:
        first, second = mx.split(parts, 2, axis=2)
        parts = first + second
    total, *others = (parts[:, :, at] for at in range(parts.shape[2]))
    for other in others:
        total = total + other
    return total

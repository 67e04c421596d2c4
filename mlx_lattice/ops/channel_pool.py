"""Means of neighbouring channels: a pool that keeps the rows."""

from __future__ import annotations

import mlx.core as mx

from .. import devices
from ..tensor import features_of
from .activation import Features, on_features

__all__ = ["channel_avg_pool"]


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
    given = features_of(x).shape[-1]
    if channels < 1 or given % channels:
        raise ValueError(
            f"channel_avg_pool needs a divisor of the {given} channels; got {channels}"
        )
    return on_features(_means, x, channels)


def _means(feats: mx.array, channels: int) -> mx.array:
    n, share = feats.shape[0], feats.shape[1] // channels
    parts = feats.astype(mx.float32).reshape(n, channels, share)
    if devices.current().backend != devices.CUDA:
        return parts.mean(axis=2).astype(feats.dtype)
    # There MLX has a block of threads for each sum, however short.
    while parts.shape[2] % 2 == 0:
        first, second = mx.split(parts, 2, axis=2)
        parts = first + second
    total, *others = (parts[:, :, at] for at in range(parts.shape[2]))
    for other in others:
        total = total + other
    return (total / share).astype(feats.dtype)

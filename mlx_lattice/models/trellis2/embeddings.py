"""Times and places as vectors of sines and cosines, as TRELLIS.2's flow models do it.

Vaswani et al., "Attention Is All You Need", 2017; of times, Ho et al., "Denoising
Diffusion Probabilistic Models", 2020.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn

from ... import nn
from .torso import dtype_of

TIME_FEATURES = 256
PERIOD = 10000.0


class TimestepEmbedder(nn.Module):
    """Maps times to vectors: cosines and sines, then two linear layers.

    Args:
        dims (int): The number of channels.
    """

    def __init__(self, dims: int):
        super().__init__()
        layers = nn.Linear(TIME_FEATURES, dims), mlx.nn.SiLU(), nn.Linear(dims, dims)
        self.mlp = list(layers)

    def __call__(self, t: mx.array) -> mx.array:
        """Return (B, dims) of (B,) times."""
        y = time_features(t).astype(dtype_of(self.mlp[0]))
        for layer in self.mlp:
            y = layer(y)
        return y


def time_features(t: mx.array) -> mx.array:
    """Return (B, 256) float32: cosines, then sines, of falling frequencies."""
    half = TIME_FEATURES // 2
    speed = [math.exp(-math.log(PERIOD) * i / half) for i in range(half)]
    angle = t.astype(mx.float32)[:, None] * mx.array(speed)
    return mx.concatenate([mx.cos(angle), mx.sin(angle)], axis=1)


def place_features(coords: mx.array, channels: int) -> mx.array:
    """Return (N, channels) float32 for (N, D) cells: for each axis sines, then cosines.

    An axis has ``channels // (2 * D)`` of both; zeros fill what is left.
    """
    n, axes = coords.shape
    each = channels // axes // 2
    speed = mx.array([PERIOD ** (-i / each) for i in range(each)])
    angle = coords.astype(mx.float32)[:, :, None] * speed
    y = mx.concatenate([mx.sin(angle), mx.cos(angle)], axis=2)
    y = y.reshape(n, 2 * each * axes)
    return mx.pad(y, [(0, 0), (0, channels - y.shape[1])])

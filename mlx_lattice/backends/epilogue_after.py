"""An epilogue in a launch of its own, where a convolution's kernel has none."""

from __future__ import annotations

import mlx.core as mx

from ..epilogue import EpilogueFacts
from . import registry
from .norms_protocol import ACTIVATIONS, NONE, Fit


def launched(
    sums: mx.array,
    facts: EpilogueFacts,
    shift: mx.array | None = None,
    scale: mx.array | None = None,
    mean: mx.array | None = None,
    var: mx.array | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """Return an epilogue of sums, rounded ones, by the kernel of norms."""
    if not sums.size:
        return sums
    eps, channels = facts.eps, sums.shape[1]
    if var is None:  # the root of exactly one
        var, eps = mx.array([1.0] * channels), 0.0
    if mean is None:
        mean = mx.array([0.0] * channels)
    mean, var = (a.astype(mx.float32).reshape(1, channels) for a in (mean, var))
    act = ACTIVATIONS[facts.activation] if facts.activation else NONE
    fit = Fit(mean, var, scale, shift, eps, act)
    return registry.norms().normalize(sums, fit, residual)

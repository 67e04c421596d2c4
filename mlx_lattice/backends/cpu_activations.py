"""Activations on the CPU, by the C++ extension: one pass, all threads."""

from __future__ import annotations

import mlx.core as mx

from ..activations import GELU, GELU_TANH, SILU
from .cpu_extension import extension


def gelu(x: mx.array, dy: mx.array | None = None) -> mx.array:
    """Return GELU by the error function, or ``dy`` times its slope at ``x``."""
    return extension.gelu(x, dy)


def gelu_tanh(x: mx.array, dy: mx.array | None = None) -> mx.array:
    """Return GELU by tanh, or ``dy`` times its slope at ``x``."""
    return extension.gelu_tanh(x, dy)


def silu(x: mx.array, dy: mx.array | None = None) -> mx.array:
    """Return SiLU, or ``dy`` times its slope at ``x``."""
    return extension.silu(x, dy)


KERNELS = {GELU: gelu, GELU_TANH: gelu_tanh, SILU: silu}

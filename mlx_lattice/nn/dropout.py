"""Layers that drop entries or rows, or scale channels."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity, Module

from ..checks import real
from ..ops import on_features
from ..ops.modulation import scaled
from ..tensor import SparseTensor
from .parameters import Parameters

__all__ = ["DropPath", "Dropout", "Identity", "LayerScale"]


def _probability(p: float) -> float:
    p = real(p, "p")
    if not 0 <= p < 1:
        raise ValueError(f"p must be from 0 to below 1; got {p}")
    return p


class Dropout(mlx.nn.Dropout):
    """``mlx.nn.Dropout`` that takes tensors too: zeroes entries of the features.

    Args:
        p (float): The probability to zero an entry. Default: ``0.5``.
    """

    def __init__(self, p: float = 0.5):
        super().__init__(_probability(p))

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop entries while training."""
        return on_features(super().__call__, x)


class DropPath(Module):
    """Zeroes whole rows while training, and scales the others up to the same mean.

    Stochastic depth (Huang et al., 2016) of a residual branch, each row by itself, as
    Point Transformer V3 has it.

    Args:
        p (float): The probability to zero a row. Default: ``0.5``.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = _probability(p)

    def _extra_repr(self) -> str:
        return f"p={self.p}"

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop rows while training."""
        return on_features(self._drop, x) if self.training and self.p else x

    def _drop(self, x: mx.array) -> mx.array:
        kept = mx.random.bernoulli(1 - self.p, (x.shape[0], *[1] * (x.ndim - 1)))
        full, none = (mx.array(v, x.dtype) for v in (1 / (1 - self.p), 0))
        return x * mx.where(kept, full, none)


class LayerScale(Parameters, Module):
    """Multiplies each channel by a learnt factor (Touvron et al., 2021).

    Args:
        dims (int): The number of channels.
        init (float): What the factors begin at. Default: ``1e-5``.
    """

    def __init__(self, dims: int, init: float = 1e-5):
        super().__init__()
        self.gamma = mx.full((dims,), init)

    def __call__(
        self, x: SparseTensor | mx.array, *, residual: SparseTensor | None = None
    ) -> SparseTensor | mx.array:
        """Scale the channels of each row, and add a residual to a tensor.

        On a GPU this is one launch for a tensor.
        """
        if x.shape[-1] != self.gamma.size:
            raise ValueError(
                f"expected {self.gamma.size} channels, as many as there are factors; "
                f"got features of shape {tuple(x.shape)}"
            )
        if isinstance(x, SparseTensor):
            return scaled(x, self.gamma, residual=residual)
        return x * self.gamma.astype(x.dtype)

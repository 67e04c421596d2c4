"""Layers of mlx.nn that act on each row: Linear, Dropout, Identity."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity

from ..ops import on_features
from ..tensor import SparseTensor

__all__ = ["Dropout", "Identity", "Linear"]


class Linear(mlx.nn.Linear):
    """``mlx.nn.Linear`` that takes tensors too.

    Args:
        input_dims (int): The number of input channels.
        output_dims (int): The number of output channels.
        bias (bool): If ``True`` add a learnable bias. Default: ``True``.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Apply the layer to each row.

        Raises:
            TypeError: a tensor's dtype is not the weight's.
        """
        if isinstance(x, SparseTensor) and x.dtype != self.weight.dtype:
            raise TypeError(
                f"features are {x.dtype}, the weight is {self.weight.dtype}; cast one "
                "with .astype or set_dtype"
            )
        return on_features(super().__call__, x)

    def to_quantized(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> mlx.nn.Module:
        """Return the layer with a packed weight, as ``mlx.nn.quantize`` asks for.

        Raises:
            ValueError: the mode is not "affine", or ``quantize_input`` is set.
        """
        from .quantized import QuantizedLinear, check_mode

        check_mode(mode, quantize_input)
        return QuantizedLinear.from_linear(self, group_size, bits, mode)


class Dropout(mlx.nn.Dropout):
    """``mlx.nn.Dropout`` that takes tensors too: zeroes entries of the features.

    Args:
        p (float): The probability to zero an entry. Default: ``0.5``.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop entries while training."""
        return on_features(super().__call__, x)

"""Layers of mlx.nn that act on each row: Linear, Dropout, Identity."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity

from ..ops import on_features
from ..tensor import SparseTensor

__all__ = ["Dropout", "Identity", "Linear", "QuantizedLinear"]


class QuantizedLinear(mlx.nn.QuantizedLinear):
    """``mlx.nn.QuantizedLinear`` that takes tensors too; what ``Linear`` becomes."""

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Apply the layer to each row."""
        return on_features(super().__call__, x)


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
    ) -> QuantizedLinear:
        """Return the layer with a packed weight, as ``mlx.nn.quantize`` asks for.

        Raises:
            ValueError: ``quantize_input`` is set, which tensors do not support.
        """
        if quantize_input:
            raise ValueError(
                "quantize_input is for mlx.nn.Linear; a Linear of tensors quantizes "
                "its weight alone"
            )
        return QuantizedLinear.from_linear(self, group_size, bits, mode=mode)


class Dropout(mlx.nn.Dropout):
    """``mlx.nn.Dropout`` that takes tensors too: zeroes entries of the features.

    Args:
        p (float): The probability to zero an entry. Default: ``0.5``.
    """

    def __call__(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        """Drop entries while training."""
        return on_features(super().__call__, x)

"""Layers of mlx.nn that act on each row: Linear, Dropout, Identity."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.nn import Identity

from .. import contraction, devices
from ..kernel_spec import KernelSpec
from ..ops import on_features
from ..relation import Relation
from ..routes import launch
from ..routes.needs import accelerate
from ..tensor import SparseTensor

__all__ = ["Dropout", "Identity", "Linear"]


def _each_row(n: int) -> Relation:
    """Return the relation in which n rows feed themselves."""
    spec = KernelSpec.of(1, kernel_size=1)
    table = mx.arange(n, dtype=mx.int32)[:, None]
    return Relation("submanifold", 1, n, n, lambda *_: table, spec=spec, mirrored=True)


def is_contraction(x: mx.array) -> bool:
    """Return whether a linear layer of these rows is a contraction here.

    It is on CPUs where MLX has a reference BLAS alone; elsewhere MLX's matmul serves.
    """
    return x.ndim > 0 and devices.current().backend == devices.CPU and not accelerate()


def contracted(layer: mlx.nn.Module, x: mx.array, weight) -> mx.array:
    """Return ``x @ weight[0]`` and the layer's bias, by a route and seen by traces."""
    rows = x.reshape(-1, x.shape[-1])
    with launch.scope(layer):
        y = contraction.conv(
            rows,
            weight,
            _each_row(len(rows)),
            bias=layer.bias if "bias" in layer else None,
        )
    return y.reshape(*x.shape[:-1], y.shape[1])


class Linear(mlx.nn.Linear):
    """``mlx.nn.Linear`` that takes tensors too.

    On CPUs where MLX has a reference BLAS alone it is a contraction of one offset,
    with a route and a line in traces; elsewhere it is MLX's own matmul.

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
        return on_features(self._apply, x)

    def _apply(self, x: mx.array) -> mx.array:
        if x.size == 0 and x.shape[-1:] == self.weight.shape[1:]:
            # MLX's CUDA matmul can't start for no rows.
            return mx.zeros((*x.shape[:-1], self.weight.shape[0]), dtype=x.dtype)
        if x.dtype == self.weight.dtype and is_contraction(x):
            return contracted(self, x, self.weight.T[None])
        return super().__call__(x)

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

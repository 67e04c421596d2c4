"""Pooling modules."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn import Module

from .. import ops
from ..kernel_spec import IntOrTuple, KernelSpec, per_axis
from ..ops import PoolIndices
from ..tensor import SparseTensor
from .convolution import Coordinates


class Pool(Module):
    """Pools the active inputs under a kernel; the names choose how.

    Args:
        kernel_size (int or tuple): The size of the kernel. Default: ``2``.
        stride (int or tuple, optional): The step between output cells; by default
            ``kernel_size``.
        padding (int or tuple, optional): The dense rule of PyTorch; by default the
            kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        support (str): ``"cell"``, or ``"reach"`` for every row that an input reaches.
            Default: ``"cell"``.
    """

    dims: int
    function: str

    def __init__(
        self,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple | None = None,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        support: str = "cell",
    ):
        super().__init__()
        size = per_axis(kernel_size, self.dims, "kernel_size")
        spec = KernelSpec.of(
            self.dims,
            kernel_size=size,
            stride=size if stride is None else stride,
            padding=padding,
            dilation=dilation,
        )
        if support not in ("cell", "reach"):
            raise ValueError(f'support must be "cell" or "reach"; got {support!r}')
        self.kernel_size = spec.size
        self.stride = spec.stride
        self.padding = spec.padding
        self.dilation = spec.dilation
        self.support = support

    def _extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, support={self.support}"
        )

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None, **options
    ) -> SparseTensor:
        """Pool; with ``coordinates`` onto exactly those rows, in their order."""
        return getattr(ops, f"{self.function}{self.dims}d")(
            x,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.support,
            coordinates,
            **options,
        )


class MaxPool(Pool):
    """Takes the greatest active input under the kernel. Arguments: see ``Pool``."""

    function = "max_pool"

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        return_indices: bool = False,
    ) -> SparseTensor | tuple[SparseTensor, PoolIndices]:
        """Pool; ``return_indices`` adds what ``ops.max_unpool`` needs."""
        return super().__call__(x, coordinates, return_indices=return_indices)


class SumPool(Pool):
    """Adds up the active inputs under the kernel. Arguments: see ``Pool``."""

    function = "sum_pool"


class AvgPool(Pool):
    """Averages the active inputs under the kernel. Other arguments: see ``Pool``.

    Args:
        count (str): ``"active"`` divides by the number of active inputs, ``"volume"``
            by the kernel's. Default: ``"active"``.
    """

    function = "avg_pool"

    def __init__(
        self,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple | None = None,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        support: str = "cell",
        *,
        count: str = "active",
    ):
        super().__init__(kernel_size, stride, padding, dilation, support)
        if count not in ("active", "volume"):
            raise ValueError(f'count must be "active" or "volume"; got {count!r}')
        self.count = count

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, count={self.count}"

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Pool; with ``coordinates`` onto exactly those rows, in their order."""
        return super().__call__(x, coordinates, count=self.count)


class Upsample(Module):
    """Gives every finer row the features of its cell, ``floor(out / scale)``.

    Args:
        scale (int or tuple): The number of fine cells in a coarse one. Default: ``2``.
    """

    dims: int

    def __init__(self, scale: IntOrTuple = 2):
        super().__init__()
        self.scale = per_axis(scale, self.dims, "scale")

    def _extra_repr(self) -> str:
        return f"scale={self.scale}"

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Upsample onto ``coordinates``, or the set that an earlier step consumed."""
        function = getattr(ops, f"upsample_nearest{self.dims}d")
        return function(x, self.scale, coordinates)


class GlobalMaxPool(Module):
    """Returns the (batch_size, C) greatest features of each batch element."""

    def __call__(self, x: SparseTensor) -> mx.array:
        """Pool; an empty element is 0."""
        return ops.global_max_pool(x)


class GlobalSumPool(Module):
    """Returns the (batch_size, C) sums over each batch element."""

    def __call__(self, x: SparseTensor) -> mx.array:
        """Pool; an empty element is 0."""
        return ops.global_sum_pool(x)


class GlobalAvgPool(Module):
    """Returns the (batch_size, C) means over each batch element."""

    def __call__(self, x: SparseTensor) -> mx.array:
        """Pool; an empty element is 0."""
        return ops.global_avg_pool(x)


class MaxPool1d(MaxPool):
    """``MaxPool`` over 1 spatial axis."""

    dims = 1


class MaxPool2d(MaxPool):
    """``MaxPool`` over 2 spatial axes."""

    dims = 2


class MaxPool3d(MaxPool):
    """``MaxPool`` over 3 spatial axes."""

    dims = 3


class MaxPool4d(MaxPool):
    """``MaxPool`` over 4 spatial axes."""

    dims = 4


class SumPool1d(SumPool):
    """``SumPool`` over 1 spatial axis."""

    dims = 1


class SumPool2d(SumPool):
    """``SumPool`` over 2 spatial axes."""

    dims = 2


class SumPool3d(SumPool):
    """``SumPool`` over 3 spatial axes."""

    dims = 3


class SumPool4d(SumPool):
    """``SumPool`` over 4 spatial axes."""

    dims = 4


class AvgPool1d(AvgPool):
    """``AvgPool`` over 1 spatial axis."""

    dims = 1


class AvgPool2d(AvgPool):
    """``AvgPool`` over 2 spatial axes."""

    dims = 2


class AvgPool3d(AvgPool):
    """``AvgPool`` over 3 spatial axes."""

    dims = 3


class AvgPool4d(AvgPool):
    """``AvgPool`` over 4 spatial axes."""

    dims = 4


class Upsample1d(Upsample):
    """``Upsample`` over 1 spatial axis."""

    dims = 1


class Upsample2d(Upsample):
    """``Upsample`` over 2 spatial axes."""

    dims = 2


class Upsample3d(Upsample):
    """``Upsample`` over 3 spatial axes."""

    dims = 3


class Upsample4d(Upsample):
    """``Upsample`` over 4 spatial axes."""

    dims = 4

"""Pooling modules."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn import Module

from .. import ops
from ..axes import Family, expect_axes
from ..checks import one_of
from ..kernel_spec import IntOrTuple, check_support, per_axis
from ..ops.interpolation import MODES, upsample_linear
from ..ops.pool import COUNTS, PoolIndices, max_pool, pool, upsample_nearest
from ..ops.relations import Coordinates
from ..tensor import SparseTensor
from .offsets import kernel_spec

__all__ = [
    "AvgPool1d", "AvgPool2d", "AvgPool3d", "AvgPool4d", "GlobalAvgPool",
    "GlobalMaxPool", "GlobalSumPool", "MaxPool1d", "MaxPool2d", "MaxPool3d",
    "MaxPool4d", "SumPool1d", "SumPool2d", "SumPool3d", "SumPool4d", "Upsample1d",
    "Upsample2d", "Upsample3d", "Upsample4d",
]  # fmt: skip


class _Pool(Family, Module):
    """The geometry that all of the poolings share."""

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
        stride = size if stride is None else stride
        spec = kernel_spec(self.dims, size, stride, padding, dilation)
        self.kernel_size = spec.size
        self.stride = spec.stride
        self.padding = spec.padding
        self.dilation = spec.dilation
        self.support = check_support(support)

    def _extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, support={self.support}"
        )

    def _run(self, function, x: SparseTensor, coordinates: Coordinates, **options):
        expect_axes(x, self.dims, type(self).__name__)
        kernel = self.kernel_size, self.stride, self.padding, self.dilation
        return function(x, *kernel, self.support, coordinates, **options)


class MaxPool(_Pool):
    """Takes the greatest active input of each channel under the kernel.

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

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        return_indices: bool = False,
    ) -> SparseTensor | tuple[SparseTensor, PoolIndices]:
        """Pool; ``return_indices`` adds what ``ops.max_unpool`` needs."""
        return self._run(max_pool, x, coordinates, return_indices=return_indices)


class SumPool(_Pool):
    """Adds up the active inputs under the kernel; arguments as for ``MaxPool3d``."""

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Pool; with ``coordinates`` onto exactly those rows, in their order."""
        return self._run(pool, x, coordinates, mode="sum")


class AvgPool(_Pool):
    """Averages the active inputs under the kernel; arguments as for ``MaxPool3d``.

    Args:
        count (str): ``"active"`` divides by the number of active inputs, ``"volume"``
            by the kernel's. Default: ``"active"``.
    """

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
        self.count = one_of(count, COUNTS, "count")

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, count={self.count}"

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Pool; with ``coordinates`` onto exactly those rows, in their order."""
        return self._run(pool, x, coordinates, count=self.count)


class Upsample(Family, Module):
    """Gives every finer row the features of its cell, or of the cells around it.

    Args:
        scale (int or tuple): The number of fine cells in a coarse one. Default: ``2``.
        mode (str): ``"nearest"``, the cell ``floor(out / scale)``; or ``"linear"``,
            between the centres of the active cells around it, whose weights are made
            to add up to 1. Default: ``"nearest"``.
    """

    def __init__(self, scale: IntOrTuple = 2, mode: str = "nearest"):
        super().__init__()
        self.mode = one_of(mode, MODES, "mode")
        self.scale = per_axis(scale, self.dims, "scale")

    def _extra_repr(self) -> str:
        return f"scale={self.scale}, mode={self.mode}"

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Upsample onto ``coordinates``, or the set that an earlier step consumed."""
        expect_axes(x, self.dims, type(self).__name__)
        run = upsample_linear if self.mode == "linear" else upsample_nearest
        return run(x, self.scale, coordinates)


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


# fmt: off
class MaxPool1d(MaxPool, dims=1): ...
class MaxPool2d(MaxPool, dims=2): ...
class MaxPool3d(MaxPool, dims=3): ...
class MaxPool4d(MaxPool, dims=4): ...

class SumPool1d(SumPool, dims=1): ...
class SumPool2d(SumPool, dims=2): ...
class SumPool3d(SumPool, dims=3): ...
class SumPool4d(SumPool, dims=4): ...

class AvgPool1d(AvgPool, dims=1): ...
class AvgPool2d(AvgPool, dims=2): ...
class AvgPool3d(AvgPool, dims=3): ...
class AvgPool4d(AvgPool, dims=4): ...

class Upsample1d(Upsample, dims=1): ...
class Upsample2d(Upsample, dims=2): ...
class Upsample3d(Upsample, dims=3): ...
class Upsample4d(Upsample, dims=4): ...
# fmt: on

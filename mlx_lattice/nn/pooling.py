"""Pooling, upsampling, and dense maps of a lattice."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import overload

import mlx.core as mx
from mlx.nn import Module

from .. import ops
from ..checks import one_of, spatial_axes
from ..kernel_spec import IntOrTuple, check_support, per_axis
from ..ops.convolution import Coordinates
from ..ops.points import MODES, upsample_linear
from ..ops.pool import (
    COUNTS,
    PoolIndices,
    avg_pool,
    max_pool,
    sum_pool,
    upsample_nearest,
)
from ..reductions import put
from ..tensor import SparseTensor, expect_axes, expect_tensor
from ..transformations import zeros_of
from .convolution import kernel_spec
from .fused import Sequential
from .layers import GELU
from .linear import Linear
from .normalization import BatchNorm, LayerNorm

__all__ = [
    "AvgPool", "GlobalAvgPool", "GlobalMaxPool", "GlobalSumPool", "GridPooling",
    "GridUnpooling", "MaxPool", "SumPool", "ToBEV", "Upsample",
]  # fmt: skip


class _Pool(Module):
    """The geometry of every pooling."""

    def __init__(
        self,
        kernel_size: IntOrTuple = 2,
        stride: IntOrTuple | None = None,
        padding: IntOrTuple | None = None,
        dilation: IntOrTuple = 1,
        support: str = "cell",
        *,
        dims: int = 3,
    ):
        super().__init__()
        size = per_axis(kernel_size, spatial_axes(dims), "kernel_size")
        stride = size if stride is None else stride
        spec = kernel_spec(dims, size, stride, padding, dilation)
        self.dims = spec.dims
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

    def _geometry(self, x: SparseTensor) -> tuple:
        expect_axes(x, self.dims, type(self).__name__)
        return self.kernel_size, self.stride, self.padding, self.dilation, self.support


class MaxPool(_Pool):
    """Take the greatest active input of each channel under the kernel.

    Args:
        kernel_size (int or tuple): The size of the kernel. Default: ``2``.
        stride (int or tuple, optional): The step between output cells; by default
            ``kernel_size``.
        padding (int or tuple, optional): Padding as in a dense pooling of PyTorch; by
            default the kernel is centred.
        dilation (int or tuple): The spacing of the kernel. Default: ``1``.
        support (str): ``"cell"``, or ``"reach"`` for every row that an input reaches.
            Default: ``"cell"``.
        dims (int): The number of spatial axes, 1 to 4; ``MaxPool1d`` to ``MaxPool4d``
            set it. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [0.0], [2.0]]]))
        >>> y = nn.MaxPool1d(2)(x)
        >>> y.feats.tolist()  # cells 0 and 1, then cell 3 alone
        [[5.0], [2.0]]
    """

    @overload
    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor: ...

    @overload
    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        return_indices: bool,
    ) -> tuple[SparseTensor, PoolIndices]: ...

    def __call__(
        self,
        x: SparseTensor,
        coordinates: Coordinates = None,
        *,
        return_indices: bool = False,
    ) -> SparseTensor | tuple[SparseTensor, PoolIndices]:
        """Pool; ``return_indices`` adds what ``ops.max_unpool`` needs."""
        geometry = self._geometry(x)
        return max_pool(x, *geometry, coordinates, return_indices=return_indices)


class SumPool(_Pool):
    """Add up the active inputs under the kernel; arguments as for ``MaxPool3d``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [0.0], [2.0]]]))
        >>> nn.SumPool1d(2)(x).feats.tolist()
        [[6.0], [2.0]]
    """

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Pool; with ``coordinates`` onto exactly those rows, in their order."""
        return sum_pool(x, *self._geometry(x), coordinates)


class AvgPool(_Pool):
    """Average the active inputs under the kernel; arguments as for ``MaxPool3d``.

    Args:
        count (str): ``"active"`` divides by the number of active inputs, ``"volume"``
            by the kernel's. Default: ``"active"``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [0.0], [2.0]]]))
        >>> nn.AvgPool1d(2)(x).feats.tolist()  # cell 2 is not active
        [[3.0], [2.0]]
        >>> nn.AvgPool1d(2, count="volume")(x).feats.tolist()
        [[3.0], [1.0]]
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
        dims: int = 3,
    ):
        super().__init__(kernel_size, stride, padding, dilation, support, dims=dims)
        self.count: str = one_of(count, COUNTS, "count")

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, count={self.count}"

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Pool; with ``coordinates`` onto exactly those rows, in their order."""
        return avg_pool(x, *self._geometry(x), coordinates, count=self.count)


class Upsample(Module):
    """Give every finer row the features of its cell, or of the cells around it.

    Args:
        scale (int or tuple): The number of fine cells in a coarse one. Default: ``2``.
        mode (str): ``"nearest"`` takes the cell ``floor(out / scale)``. ``"linear"``
            interpolates between the centres of the active cells around a row, with
            weights that add up to 1. Default: ``"nearest"``.
        dims (int): The number of spatial axes, 1 to 4. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> coarse = nn.MaxPool3d()(x)
        >>> fine = nn.Upsample3d()(coarse)
        >>> len(coarse), len(fine)
        (8, 64)
    """

    def __init__(self, scale: IntOrTuple = 2, mode: str = "nearest", *, dims: int = 3):
        super().__init__()
        self.dims: int = spatial_axes(dims)
        self.mode: str = one_of(mode, MODES, "mode")
        self.scale: tuple[int, ...] = per_axis(scale, self.dims, "scale")

    def _extra_repr(self) -> str:
        return f"scale={self.scale}, mode={self.mode}"

    def __call__(
        self, x: SparseTensor, coordinates: Coordinates = None
    ) -> SparseTensor:
        """Upsample onto ``coordinates``, or the set that an earlier step consumed."""
        expect_axes(x, self.dims, type(self).__name__)
        upsample = upsample_linear if self.mode == "linear" else upsample_nearest
        return upsample(x, self.scale, coordinates)


class GlobalMaxPool(Module):
    """Return the (batch_size, C) greatest features of each batch element.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.GlobalMaxPool()(x).shape
        (1, 8)
    """

    def __call__(self, x: SparseTensor) -> mx.array:
        """Pool; an empty element is 0."""
        return ops.global_max_pool(x)


class GlobalSumPool(Module):
    """Return the (batch_size, C) sums over each batch element.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((2, 4, 4, 4, 1)))
        >>> nn.GlobalSumPool()(x).tolist()
        [[64.0], [64.0]]
    """

    def __call__(self, x: SparseTensor) -> mx.array:
        """Pool; an empty element is 0."""
        return ops.global_sum_pool(x)


class GlobalAvgPool(Module):
    """Return the (batch_size, C) means over each batch element.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((2, 4, 4, 4, 8)))
        >>> net = nn.Sequential(nn.GlobalAvgPool(), nn.Linear(8, 10))
        >>> net(x).shape  # the scores of 10 classes for each batch element
        (2, 10)
    """

    def __call__(self, x: SparseTensor) -> mx.array:
        """Pool; an empty element is 0."""
        return ops.global_avg_pool(x)


class GridPooling(Module):
    """Apply a linear layer, take the maximum of each cell, then a norm and GELU.

    The pooling of Wu et al., "Point Transformer V2", 2022. Parameters are named as in
    Point Transformer V3.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        stride (int or tuple): The extent of a cell. Default: ``2``.
        norm (Module, optional): A norm of the output channels; by default a
            ``LayerNorm``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> nn.GridPooling(8, 16, stride=2)(x).shape
        (8, 16)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: IntOrTuple = 2,
        norm: BatchNorm | LayerNorm | None = None,
    ):
        super().__init__()
        self.stride = stride
        self.proj: Linear = Linear(in_channels, out_channels)
        norm = LayerNorm(out_channels) if norm is None else norm
        self.norm: Sequential = Sequential(norm, GELU())

    def _extra_repr(self) -> str:
        return f"stride={self.stride}"

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the sorted unique cells ``floor(row / stride)``."""
        expect_tensor(x)
        stride = per_axis(self.stride, x.dims, "stride")
        return self.norm(max_pool(self.proj(x), stride, padding=0))

    def positions(self, x: SparseTensor) -> SparseTensor:
        """Return the mean of the features of each cell's rows, on the same cells."""
        expect_tensor(x)
        return avg_pool(x, per_axis(self.stride, x.dims, "stride"), padding=0)


class GridUnpooling(Module):
    """Add the features of a cell to its rows, after a layer and a norm for each.

    Args:
        in_channels (int): The number of channels of the cells.
        skip_channels (int): The number of channels of the rows.
        out_channels (int): The number of output channels.
        stride (int or tuple): The extent of a cell. Default: ``2``.
        norm (type): ``LayerNorm``, ``BatchNorm`` or a function that makes a norm of a
            number of channels. Default: ``LayerNorm``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> coarse = nn.GridPooling(8, 16)(x)
        >>> nn.GridUnpooling(16, 8, 4)(coarse, x).shape
        (64, 4)
    """

    def __init__(
        self,
        in_channels: int,
        skip_channels: int,
        out_channels: int,
        stride: IntOrTuple = 2,
        norm: Callable[[int], Module] = LayerNorm,
    ):
        super().__init__()
        self.stride = stride
        self.proj: Sequential = Sequential(
            Linear(in_channels, out_channels), norm(out_channels), GELU()
        )
        self.proj_skip: Sequential = Sequential(
            Linear(skip_channels, out_channels), norm(out_channels), GELU()
        )

    def _extra_repr(self) -> str:
        return f"stride={self.stride}"

    def __call__(self, x: SparseTensor, skip: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``skip``."""
        skip, cells = self.branches(x, skip)
        return skip + cells

    def branches(
        self, x: SparseTensor, skip: SparseTensor
    ) -> tuple[SparseTensor, SparseTensor]:
        """Return what is added: of the rows themselves, and of their cells."""
        expect_tensor(x)
        rows = self.proj_skip(skip)
        return rows, upsample_nearest(self.proj(x), self.stride, skip)


class ToBEV(Module):
    """Make a dense map by folding one axis into the channels.

    This is OpenPCDet's ``HeightCompression`` with the channels last, as MLX's 2D
    convolutions take them. Channel ``c * D + d`` of a cell is feature c of the row at
    height d, or 0 if that row is not active.

    Args:
        axis (int): The spatial axis of height: ``0`` of (z, y, x), ``-1`` of
            (x, y, z). Default: ``0``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 2, 5, 6, 8)))  # z, y, x
        >>> nn.ToBEV()(x).shape
        (1, 5, 6, 16)
    """

    def __init__(self, axis: int = 0):
        super().__init__()
        self.axis = axis

    def _extra_repr(self) -> str:
        return f"axis={self.axis}"

    def __call__(self, x: SparseTensor) -> mx.array:
        """Return a (B, other axes..., C * D) array in the features' dtype."""
        expect_tensor(x)
        if x.spatial_shape is None:
            raise ValueError(
                "ToBEV needs the extents of the map: make the tensor with "
                "spatial_shape=, which convolutions then hand on"
            )
        if x.dims < 2 or not -x.dims <= self.axis < x.dims:
            raise ValueError(
                f"ToBEV folds axis {self.axis} of two or more; got a tensor with "
                f"{x.dims}"
            )
        up = self.axis % x.dims
        coordinate_set = x.coordinate_set
        coordinate_set.index  # noqa: B018 (raises where rows repeat)
        coordinate_set.bounds  # noqa: B018 (raises where a row lies outside its shape)
        grid = [x.batch_size, *x.spatial_shape]
        deep = grid.pop(1 + up)
        if not len(x):
            return zeros_of([x.feats], (*grid, x.channels * deep), x.dtype)
        columns = [
            coordinate_set.coords[:, i].astype(mx.int64) for i in range(1 + x.dims)
        ]
        height = columns.pop(1 + up)
        cell = mx.zeros_like(height)
        for column, extent in zip(columns, grid, strict=True):
            cell = cell * extent + column
        channel = mx.arange(x.channels, dtype=mx.int64)
        at = (cell[:, None] * x.channels + channel) * deep + height[:, None]
        size = prod(grid) * x.channels * deep
        dense = put(x.feats.flatten(), at.flatten(), size)
        return dense.reshape(*grid, x.channels * deep)

"""ToBEV: a lattice as a dense map from above, its height folded into the channels."""

from __future__ import annotations

from math import prod

import mlx.core as mx
from mlx.nn import Module

from ..reductions import put
from ..tensor import SparseTensor, expect_tensor
from ..transformations import zeros_of

__all__ = ["ToBEV"]


class ToBEV(Module):
    """Makes a dense map of all axes but one, which is folded into the channels.

    OpenPCDet's ``HeightCompression``, with the channels last, as MLX's 2D convolutions
    take them: channel ``c * D + d`` of a cell is feature c of the row at height d, and
    0 where there is none. Features go to their places in one scatter.

    Args:
        axis (int): The spatial axis of height: ``0`` of (z, y, x), ``-1`` of
            (x, y, z). Default: ``0``.
    """

    def __init__(self, axis: int = 0):
        super().__init__()
        self.axis = axis

    def _extra_repr(self) -> str:
        return f"axis={self.axis}"

    def __call__(self, x: SparseTensor) -> mx.array:
        """Return a (B, other axes..., C * D) array in the features' dtype.

        Raises:
            ValueError: the tensor has no ``spatial_shape``, one axis alone, or a row
                outside its shape.
        """
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
        held = x.coordinate_set
        held.index  # noqa: B018 (raises where rows repeat)
        held.bounds  # noqa: B018 (raises where a row lies outside its shape)
        grid = [x.batch_size, *x.spatial_shape]
        deep = grid.pop(1 + up)
        if not len(x):
            return zeros_of([x.feats], (*grid, x.channels * deep), x.dtype)
        columns = [held.coords[:, i].astype(mx.int64) for i in range(1 + x.dims)]
        height = columns.pop(1 + up)
        cell = mx.zeros_like(height)
        for column, extent in zip(columns, grid, strict=True):
            cell = cell * extent + column
        channel = mx.arange(x.channels, dtype=mx.int64)
        at = (cell[:, None] * x.channels + channel) * deep + height[:, None]
        size = prod(grid) * x.channels * deep
        dense = put(x.feats.flatten(), at.flatten(), size)
        return dense.reshape(*grid, x.channels * deep)

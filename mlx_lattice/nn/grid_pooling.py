"""Pooling into the cells of a coarser grid, and back, with a linear layer before each.

Wu et al., "Point Transformer V2", 2022; as Point Transformer V3 has them, whose
parameters they are named as.
"""

from __future__ import annotations

from mlx.nn import Module

from ..kernel_spec import IntOrTuple, per_axis
from ..ops.pool import max_pool, pool, upsample_nearest
from ..tensor import SparseTensor, expect_tensor
from .activations import GELU
from .containers import Sequential
from .linear import Linear
from .normalization import BatchNorm, LayerNorm

__all__ = ["GridPooling", "GridUnpooling"]


class GridPooling(Module):
    """A linear layer, the greatest of each cell, a norm and GELU.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        stride (int or tuple): The extent of a cell. Default: ``2``.
        norm (Module, optional): A norm of the output channels; by default a
            ``LayerNorm``.
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
        self.proj = Linear(in_channels, out_channels)
        norm = LayerNorm(out_channels) if norm is None else norm
        self.norm = Sequential(norm, GELU())

    def _extra_repr(self) -> str:
        return f"stride={self.stride}"

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the sorted unique cells ``floor(row / stride)``."""
        expect_tensor(x)
        stride = per_axis(self.stride, x.dims, "stride")
        return self.norm(max_pool(self.proj(x), stride, padding=0))

    def positions(self, x: SparseTensor) -> SparseTensor:
        """Return on the same cells the mean of their rows' features."""
        expect_tensor(x)
        return pool(x, per_axis(self.stride, x.dims, "stride"), padding=0)


class GridUnpooling(Module):
    """Features of a cell added to those of its rows, after a layer and a norm each.

    Args:
        in_channels (int): The number of channels of the cells.
        skip_channels (int): The number of channels of the rows.
        out_channels (int): The number of output channels.
        stride (int or tuple): The extent of a cell. Default: ``2``.
        norm (type): ``LayerNorm``, ``BatchNorm`` or a function that makes a norm of a
            number of channels. Default: ``LayerNorm``.
    """

    def __init__(
        self,
        in_channels: int,
        skip_channels: int,
        out_channels: int,
        stride: IntOrTuple = 2,
        norm=LayerNorm,
    ):
        super().__init__()
        self.stride = stride
        self.proj = Sequential(
            Linear(in_channels, out_channels), norm(out_channels), GELU()
        )
        self.proj_skip = Sequential(
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

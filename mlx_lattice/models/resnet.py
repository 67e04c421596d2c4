"""SparseResNet: residual classification of whole scenes or objects.

He et al., "Deep Residual Learning", 2015, with basic blocks over active cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import nn, ops
from ..prepare import prepare_scan
from ..tensor import SparseTensor
from .blocks import blocks, conv_norm, layer
from .pretrained import Pretrained


class SparseResNet(Pretrained):
    """A stem, a max pooling, four stages of basic blocks, global pooling, a Linear.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of classes.
        layers (tuple): The number of blocks of each stage. Default: ``(2, 2, 2, 2)``.
        planes (tuple): The channels of each stage. Default: ``(64, 128, 256, 512)``.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        layers: Sequence[int] = (2, 2, 2, 2),
        planes: Sequence[int] = (64, 128, 256, 512),
        *,
        dims: int = 3,
    ):
        super().__init__()
        if len(planes) != len(layers) or not planes:
            raise ValueError(
                "planes and layers have one entry for each stage; got "
                f"{len(planes)} and {len(layers)}"
            )
        stem = layer("SubmConv", dims, in_channels, planes[0], 3, bias=False)
        self.stem = conv_norm(stem)
        self.pool = layer("MaxPool", dims, 2)
        widths = [planes[0], *planes]
        self.stages = [
            blocks(widths[i], widths[i + 1], count, 1 if i == 0 else 2, dims)
            for i, count in enumerate(layers)
        ]
        self.head = nn.Linear(planes[-1], num_classes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return (2,) * len(self.stages)

    def __call__(self, x: SparseTensor) -> mx.array:
        """Return (batch_size, num_classes) scores; of the bias alone where empty."""
        prepare_scan(self, x)
        x = self.stem(x)
        x = self.pool(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(ops.global_avg_pool(x))


class SparseResNet14(SparseResNet):
    """``SparseResNet`` of one block a stage (MinkowskiEngine's ResNet14)."""

    def __init__(self, in_channels: int, num_classes: int, *, dims: int = 3):
        super().__init__(in_channels, num_classes, (1, 1, 1, 1), dims=dims)


class SparseResNet18(SparseResNet):
    """``SparseResNet`` of two blocks a stage."""

    def __init__(self, in_channels: int, num_classes: int, *, dims: int = 3):
        super().__init__(in_channels, num_classes, (2, 2, 2, 2), dims=dims)


class SparseResNet34(SparseResNet):
    """``SparseResNet`` of three to six blocks a stage."""

    def __init__(self, in_channels: int, num_classes: int, *, dims: int = 3):
        super().__init__(in_channels, num_classes, (3, 4, 6, 3), dims=dims)

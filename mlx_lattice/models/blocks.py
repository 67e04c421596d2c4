"""Residual blocks, and the nets that classify with them.

He et al., "Deep Residual Learning", 2015.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import nn, ops, sync
from ..checks import spatial_axes, whole
from ..geometry.lattice import true_positions
from ..nn.fused import convolved
from ..prepare import prepare_scan
from ..tensor import SparseTensor
from .pretrained import Pretrained

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
]


def layer(name: str, dims: int, *args: Any, **kwargs: Any) -> nn.Module:
    """Return a module by its family's name and spatial axes: ``Conv``, 3."""
    return getattr(nn, f"{name}{spatial_axes(dims)}d")(*args, **kwargs)


def conv_norm(conv: nn.Module, activate: bool = True) -> nn.ConvNormAct:
    """Return a convolution with a BatchNorm and, if ``activate``, a ReLU after it."""
    norm = nn.BatchNorm(conv.weight.shape[0])
    return nn.ConvNormAct(conv, norm, ops.relu if activate else None)


def spconv_norm(channels: int) -> nn.BatchNorm:
    """Return a BatchNorm with the epsilon and the momentum of spconv's nets."""
    # PyTorch and MLX mean the same by momentum: how far the running statistics move.
    return nn.BatchNorm(channels, eps=1e-3, momentum=0.01)


def conv_norm_relu(conv: nn.Module) -> nn.Sequential:
    """Return a convolution, its norm and a ReLU, which are named by their places."""
    return nn.Sequential(conv, spconv_norm(conv.weight.shape[0]), nn.ReLU())


def conv_onto(
    block: nn.Sequential, x: SparseTensor, rows: SparseTensor | mx.array
) -> SparseTensor:
    """Call a convolution, norm and activation; the output has the given rows."""
    conv, norm, activation = block.layers
    return convolved(conv, norm, x, rows, activation=activation)


class SparseBasicBlock(nn.Module):
    """Two 3x3x3 convolutions beside a shortcut, with the names of spconv's nets."""

    def __init__(
        self, in_channels: int, out_channels: int, bias: bool = False, dims: int = 3
    ):
        super().__init__()
        self.conv1: nn.Module = layer(
            "SubmConv", dims, in_channels, out_channels, 3, bias=bias
        )
        self.bn1: nn.BatchNorm = spconv_norm(out_channels)
        self.conv2: nn.Module = layer(
            "SubmConv", dims, out_channels, out_channels, 3, bias=bias
        )
        self.bn2: nn.BatchNorm = spconv_norm(out_channels)
        if in_channels != out_channels:
            proj = layer("SubmConv", dims, in_channels, out_channels, 1, bias=False)
            self.proj: nn.Sequential = nn.Sequential(proj, spconv_norm(out_channels))

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = convolved(self.conv1, self.bn1, x, activation=ops.relu)
        x = self.proj(x) if "proj" in self else x
        return convolved(self.conv2, self.bn2, y, activation=ops.relu, residual=x)


class BasicBlock(nn.Module):
    """Apply two 3x3x3 convolutions beside a shortcut.

    The shortcut of a strided block has a kernel of the stride's size, so it reads every
    input. It computes the rows of the main branch.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
        stride (int): The stride of the first convolution. Default: ``1``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.BasicBlock(8, 16, stride=2)(x).shape
        (8, 16)
    """

    expansion = 1

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, dims: int = 3
    ):
        super().__init__()
        sizes = in_channels, out_channels
        if stride == 1:
            first = layer("SubmConv", dims, *sizes, 3, bias=False)
        else:
            first = layer("Conv", dims, *sizes, 3, stride, bias=False)
        self.conv1: nn.ConvNormAct = conv_norm(first)
        second = layer("SubmConv", dims, out_channels, out_channels, 3, bias=False)
        self.conv2: nn.ConvNormAct = conv_norm(second)
        if stride != 1 or in_channels != out_channels:
            shortcut = layer("Conv", dims, *sizes, stride, stride, bias=False)
            self.shortcut: nn.ConvNormAct = conv_norm(shortcut, activate=False)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``, or of its cells at the stride."""
        y = self["conv1"](x)
        shortcut = self.get("shortcut")
        if shortcut is not None:
            x = shortcut(x) if y.key == x.key else shortcut(x, y)
        return self["conv2"](y, residual=x)


def trimmed_cells(x: SparseTensor) -> mx.array | None:
    """Return the rows at stride 2 that torchsparse 2.1 makes; None for all of them."""
    (key,) = x.manager.cells(x.key, (2,))
    rows = x.manager[key].coords
    if not len(rows):
        return None
    last = (x.coordinate_set.coords[:, 1:].max(axis=0) - 1) // 2
    keep = mx.all(rows[:, 1:] <= last, axis=1)
    return None if sync.read(keep.all())[0] else rows[true_positions(keep)]


class Bottleneck(nn.Module):
    """Apply a narrow 3x3x3 convolution between two 1x1x1, beside a shortcut.

    Args:
        in_channels (int): The number of input channels.
        channels (int): The number of channels of the 3x3x3 convolution; the output has
            four times as many.
        stride (int): Must be ``1``, as blocks of a U-net do not stride. Default: ``1``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.Bottleneck(8, 4)(x).shape  # 4 times the channels
        (64, 16)
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int = 1, dims: int = 3):
        super().__init__()
        if stride != 1:
            raise ValueError(f"a Bottleneck has stride 1; got {stride}")
        wide = self.expansion * channels

        def conv(c_in: int, c_out: int, size: int, activate: bool = True) -> nn.Module:
            module = layer("SubmConv", dims, c_in, c_out, size, bias=False)
            return conv_norm(module, activate)

        self.conv1: nn.ConvNormAct = conv(in_channels, channels, 1)
        self.conv2: nn.ConvNormAct = conv(channels, channels, 3)
        self.conv3: nn.ConvNormAct = conv(channels, wide, 1)
        if in_channels != wide:
            self.shortcut: nn.ConvNormAct = conv(in_channels, wide, 1, activate=False)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = self.conv2(self.conv1(x))
        x = self.shortcut(x) if "shortcut" in self else x
        return self.conv3(y, residual=x)


def blocks(
    in_channels: int,
    channels: int,
    count: int,
    stride: int,
    dims: int,
    block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
) -> nn.Sequential:
    """Return ``count`` blocks, the first of which strides; one or more."""
    whole(count, "the number of a stage's blocks", 1)
    first = block(in_channels, channels, stride, dims)
    wide = block.expansion * channels
    rest = [block(wide, channels, 1, dims) for _ in range(count - 1)]
    return nn.Sequential(first, *rest)


class SparseResNet(Pretrained):
    """Classify batch elements with a residual net: stem, stages, global pooling.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of classes.
        layers (tuple): The number of blocks of each stage. Default: ``(2, 2, 2, 2)``.
        planes (tuple): The channels of each stage. Default: ``(64, 128, 256, 512)``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = models.SparseResNet(8, 10, layers=(1, 1), planes=(8, 16))
        >>> net(x).shape  # (batch_size, num_classes)
        (1, 10)
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
        self.stem: nn.ConvNormAct = conv_norm(stem)
        self.pool: Any = layer("MaxPool", dims, 2)
        widths = [planes[0], *planes]
        self.stages: list[nn.Sequential] = [
            blocks(widths[i], widths[i + 1], count, 1 if i == 0 else 2, dims)
            for i, count in enumerate(layers)
        ]
        self.head: nn.Linear = nn.Linear(planes[-1], num_classes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return (2,) * len(self.stages)

    def __call__(self, x: SparseTensor) -> mx.array:
        """Return (batch_size, num_classes) scores; the bias for an empty element."""
        prepare_scan(self, x)
        x = self.pool(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        return self.head(ops.global_avg_pool(x))


class _Sized(SparseResNet):
    blocks: tuple[int, ...]

    def __init__(self, in_channels: int, num_classes: int, *, dims: int = 3):
        super().__init__(in_channels, num_classes, self.blocks, dims=dims)


class SparseResNet14(_Sized):
    """Classify with ``SparseResNet`` of one block a stage, MinkowskiEngine's ResNet14.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.SparseResNet14(8, 10)(x).shape
        (1, 10)
    """

    blocks: tuple[int, ...] = (1, 1, 1, 1)


class SparseResNet18(_Sized):
    """Classify with ``SparseResNet`` of two blocks a stage.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.SparseResNet18(8, 10)(x).shape
        (1, 10)
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)


class SparseResNet34(_Sized):
    """Classify with ``SparseResNet`` of three to six blocks a stage.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> models.SparseResNet34(8, 10)(x).shape
        (1, 10)
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)

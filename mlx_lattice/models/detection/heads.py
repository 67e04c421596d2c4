"""OpenPCDet's 2D backbone, and heads over a dense map or over sparse rows.

Yin, Zhou and Kraehenbuehl, "Center-based 3D Object Detection and Tracking", 2021; Chen
et al., "VoxelNeXt", 2023. Dense maps are (B, y, x, C), as MLX's convolutions take them.
Parameters are named as in OpenPCDet's ``base_bev_backbone.py``, ``center_head.py`` and
``voxelnext_head.py``:

    blocks.<i>.<place>, deblocks.<i>.<place>    of BaseBEVBackbone; place 0 is padding
    shared_conv.{0, 1}                          of CenterHead
    heads_list.<head>.<branch>.<i>.{0, 1}       a convolution and its norm
    heads_list.<head>.<branch>.<last>           the convolution to the outputs

A head is of some classes. Its branches are "hm", a heat map with a channel a class,
and those of ``branches``: of each box "center" (2), how far its centre is from the
cell's corner, in cells; "center_z" (1); "dim" (3), logarithms of dx, dy, dz; "rot" (2),
cosine and sine of the heading; and, if trained, "vel" (2) and "iou" (1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn

from ... import nn
from ...tensor import SparseTensor

__all__ = ["BaseBEVBackbone", "CenterHead", "VoxelNeXtHead"]

Branch = tuple[str, int, int]  # name, channels, convolutions
BRANCHES: tuple[Branch, ...] = (
    ("center", 2, 2),
    ("center_z", 1, 2),
    ("dim", 3, 2),
    ("rot", 2, 2),
)
NEEDED = {name: channels for name, channels, _ in BRANCHES}
KNOWN = NEEDED | {"vel": 2, "iou": 1}
# A heat map of untrained weights: a tenth everywhere.
HEAT = -2.19


EPS, MOMENTUM = 1e-3, 0.01


class Dense(mlx.nn.Sequential):
    """Calls layers in order; a convolution, its BatchNorm and a ReLU are one."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return a (B, y, x, C) map."""
        at = 0
        while at < len(self.layers):
            here = self.layers[at : at + 3]
            if len(here) == 3 and isinstance(here[1], mlx.nn.BatchNorm):
                x = _in_one(*here, x)
                at += 3
            else:
                x = here[0](x)
                at += 1
        return x


def _in_one(conv, norm, activation, x: mx.array) -> mx.array:
    """Return ``activation(norm(conv(x)))``; in evaluation the activation is a ReLU."""
    if norm.training:
        return activation(norm(_convolved(conv, x, conv.weight)))
    scale = norm.weight * mx.rsqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    if "bias" in conv:
        shift = shift + conv.bias * scale
    weight = (conv.weight * scale[:, None, None, None]).astype(x.dtype)
    y = _convolved(conv, x, weight, bias=False)
    return mx.maximum(y + shift.astype(x.dtype), 0)


def _convolved(conv, x: mx.array, weight: mx.array, bias: bool = True) -> mx.array:
    if isinstance(conv, mlx.nn.ConvTranspose2d):
        # Its stride is its kernel: a matmul, whose channels are then put side by side.
        b, high, wide, _ = x.shape
        out, size, _, c_in = weight.shape
        y = x @ weight.transpose(3, 1, 2, 0).reshape(c_in, -1)
        y = y.reshape(b, high, wide, size, size, out).transpose(0, 1, 3, 2, 4, 5)
        y = y.reshape(b, high * size, wide * size, out)
    else:
        y = mx.conv2d(x, weight, conv.stride, conv.padding)
    return y + conv.bias if bias and "bias" in conv else y


def conv_norm(
    in_channels: int,
    out_channels: int,
    size: int = 3,
    stride: int = 1,
    *,
    bias: bool = False,
    eps: float = EPS,
    momentum: float = MOMENTUM,
    transposed: bool = False,
) -> list[mlx.nn.Module]:
    """Return a padded or a transposed convolution, a norm and a ReLU."""
    kind = mlx.nn.ConvTranspose2d if transposed else mlx.nn.Conv2d
    padding = size // 2 if size % 2 and not transposed else 0
    return [
        kind(in_channels, out_channels, size, stride, padding, bias=bias),
        mlx.nn.BatchNorm(out_channels, eps=eps, momentum=momentum),
        mlx.nn.ReLU(),
    ]


class BaseBEVBackbone(mlx.nn.Module):
    """Apply OpenPCDet's 2D backbone to a dense map and join the maps of its blocks.

    Args:
        in_channels (int): The number of input channels.
        layer_nums (tuple): The number of layers of each block after its first.
        layer_strides (tuple): The stride of each block.
        num_filters (tuple): The channels of each block.
        upsample_strides (tuple): The factor by which each block's map is enlarged;
            below 1 the map is strided. One more value is the factor of the joined map.
        num_upsample_filters (tuple): The channels of each enlarged map.
        conv_for_no_stride (bool): If ``True``, maps that keep their size pass a 1x1
            convolution instead of a transposed convolution. Default: ``False``.

    Examples:
        >>> net = models.BaseBEVBackbone(8, (1, 1), (1, 2), (8, 8), (1, 2), (4, 4))
        >>> net(mx.ones((1, 16, 16, 8))).shape
        (1, 16, 16, 8)
    """

    def __init__(
        self,
        in_channels: int,
        layer_nums: Sequence[int] = (5, 5),
        layer_strides: Sequence[int] = (1, 2),
        num_filters: Sequence[int] = (128, 256),
        upsample_strides: Sequence[float] = (1, 2),
        num_upsample_filters: Sequence[int] = (256, 256),
        conv_for_no_stride: bool = False,
    ):
        super().__init__()
        levels = len(layer_nums)
        if not levels == len(layer_strides) == len(num_filters):
            raise ValueError(
                "layer_nums, layer_strides and num_filters have one entry a block; got "
                f"{layer_nums}, {layer_strides} and {num_filters}"
            )
        if len(upsample_strides) not in (0, levels, levels + 1) or len(
            num_upsample_filters
        ) != min(len(upsample_strides), levels):
            raise ValueError(
                f"upsample_strides and num_upsample_filters are of {levels} blocks; "
                f"got {upsample_strides} and {num_upsample_filters}"
            )
        self.blocks: list[Any] = []
        self.deblocks: list[Any] = []
        wide = in_channels
        for count, stride, channels in zip(
            layer_nums, layer_strides, num_filters, strict=True
        ):
            layers = [mlx.nn.Identity(), *conv_norm(wide, channels, 3, stride)]
            for _ in range(count):
                layers += conv_norm(channels, channels)
            self.blocks.append(Dense(*layers))
            wide = channels
        pairs = list(zip(num_filters, num_upsample_filters, strict=False))
        for (channels, out), stride in zip(pairs, upsample_strides, strict=False):
            enlarged = stride > 1 or (stride == 1 and not conv_for_no_stride)
            step = round(stride if enlarged else 1 / stride)
            layers = conv_norm(channels, out, step, step, transposed=enlarged)
            self.deblocks.append(Dense(*layers))
        self.out_channels: int = sum(num_upsample_filters or num_filters)
        if len(upsample_strides) > levels:
            wide, step = self.out_channels, round(upsample_strides[-1])
            last = conv_norm(wide, wide, step, step, transposed=True)
            self.deblocks.append(Dense(*last))

    def __call__(self, x: mx.array) -> mx.array:
        """Return (B, y, x, C) of the joined maps."""
        maps = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            maps.append(self.deblocks[i](x) if self.deblocks else x)
        if len({each.shape[1:3] for each in maps}) > 1:
            raise ValueError(
                "a map must have extents that its strides divide; got maps of "
                f"{', '.join(str(each.shape[1:3]) for each in maps)} to join"
            )
        x = maps[0] if len(maps) == 1 else mx.concatenate(maps, axis=-1)
        return self.deblocks[-1](x) if len(self.deblocks) > len(maps) else x


def expect_branches(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """Return the branches of a head; raise unless they make a box."""
    checked = tuple((str(n), int(c), int(k)) for n, c, k in branches)
    names = [name for name, _, _ in checked]
    channels = {name: c for name, c, _ in checked}
    wrong = len(set(names)) != len(names) or not NEEDED.keys() <= channels.keys()
    if wrong or any(KNOWN.get(name) != c for name, c in channels.items()):
        raise ValueError(
            "branches are (name, channels, convolutions), one each of "
            f"{', '.join(f'{n} ({c})' for n, c in KNOWN.items())}, the last two as "
            f"trained; got {tuple(branches)}"
        )
    if min(count for _, _, count in checked) < 1:
        raise ValueError(f"a branch has at least one convolution; got {checked}")
    return checked


class CenterHead(mlx.nn.Module):
    """Apply CenterPoint's heads to a dense map: a shared convolution, then branches.

    Args:
        in_channels (int): The number of input channels.
        classes (tuple): The number of classes of each head.
        shared_channels (int): The channels of the shared convolution. Default: ``64``.
        branches (tuple): (name, channels, convolutions) of each branch but "hm".
        heat_convs (int): The number of convolutions of "hm". Default: ``2``.
        bias (bool): If ``True`` convolutions before norms have a bias. Default:
            ``True``.
        eps (float): Added to the variance in norms. Default: ``1e-5``.
        momentum (float): How far running statistics move. Default: ``0.1``.

    Examples:
        >>> head = models.CenterHead(8, classes=(2,), shared_channels=8)
        >>> found = head(mx.ones((1, 16, 16, 8)))
        >>> found[0]["hm"].shape  # a heat map for each of the 2 classes
        (1, 16, 16, 2)
    """

    def __init__(
        self,
        in_channels: int,
        classes: Sequence[int],
        shared_channels: int = 64,
        branches: Sequence[Branch] = BRANCHES,
        heat_convs: int = 2,
        bias: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ):
        super().__init__()
        options = {"bias": bias, "eps": eps, "momentum": momentum}
        self.shared_conv: Dense = Dense(
            *conv_norm(in_channels, shared_channels, **options)
        )

        def branch(channels: int, count: int) -> Dense:
            wide = shared_channels
            layers = [
                Dense(*conv_norm(wide, wide, **options)) for _ in range(count - 1)
            ]
            return Dense(*layers, mlx.nn.Conv2d(wide, channels, 3, padding=1))

        self.heads_list: list[Any] = _heads(classes, branches, heat_convs, branch)

    def __call__(self, x: mx.array) -> list[dict[str, mx.array]]:
        """Return (B, y, x, channels) of each branch, for each head."""
        x = self.shared_conv(x)
        return [{name: head[name](x) for name in head} for head in self.heads_list]


class VoxelNeXtHead(mlx.nn.Module):
    """Apply VoxelNeXt's heads to sparse rows: branches of submanifold convolutions.

    Args:
        in_channels (int): The number of input channels.
        classes (tuple): The number of classes of each head.
        branches (tuple): (name, channels, convolutions) of each branch but "hm".
        heat_convs (int): The number of convolutions of "hm". Default: ``2``.
        kernel_size (int): The kernel size of all convolutions but the last. Default:
            ``3``.
        bias (bool): If ``True`` these convolutions have a bias. Default: ``True``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 8)))
        >>> head = models.VoxelNeXtHead(8, classes=(2,))
        >>> head(x)[0]["hm"].shape
        (16, 2)
    """

    def __init__(
        self,
        in_channels: int,
        classes: Sequence[int],
        branches: Sequence[Branch] = BRANCHES,
        heat_convs: int = 2,
        kernel_size: int = 3,
        bias: bool = True,
    ):
        super().__init__()

        def branch(channels: int, count: int) -> nn.Sequential:
            wide = in_channels
            layers = [
                nn.Sequential(
                    nn.SubmConv2d(wide, wide, kernel_size, bias=bias),
                    nn.BatchNorm(wide),
                    nn.ReLU(),
                )
                for _ in range(count - 1)
            ]
            return nn.Sequential(*layers, nn.SubmConv2d(wide, channels, 1))

        self.heads_list: list[Any] = _heads(classes, branches, heat_convs, branch)

    def __call__(self, x: SparseTensor) -> list[dict[str, SparseTensor]]:
        """Return tensors of each branch on the rows of ``x``, for each head."""
        return [{name: head[name](x) for name in head} for head in self.heads_list]


def _heads(classes, branches, heat_convs: int, branch) -> list[mlx.nn.Module]:
    heads = []
    for count in classes:
        head = mlx.nn.Module()
        for name, channels, convs in expect_branches(branches):
            head[name] = branch(channels, convs)
        head["hm"] = branch(count, heat_convs)
        head["hm"].layers[-1].bias = mx.full((count,), HEAT)
        heads.append(head)
    return heads

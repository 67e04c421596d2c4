"""Heads of detectors: CenterPoint's over a dense map, VoxelNeXt's over sparse rows.

Yin, Zhou and Kraehenbuehl, "Center-based 3D Object Detection and Tracking", 2021; Chen
et al., "VoxelNeXt", 2023. Parameters are named as in OpenPCDet's ``center_head.py`` and
``voxelnext_head.py``:

    shared_conv.{0, 1}                          of CenterHead
    heads_list.<head>.<branch>.<i>.{0, 1}       a convolution and its norm
    heads_list.<head>.<branch>.<last>           the convolution to the outputs

A head is of some classes. Its branches are "hm", a heat map with a channel a class,
and those of ``branches``: of each box "center" (2), how far its centre is from the
cell's corner, in cells; "center_z" (1); "dim" (3), logarithms of dx, dy, dz; "rot" (2),
cosine and sine of the heading; and where they are trained "vel" (2) and "iou" (1).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn

from ... import nn
from ...tensor import SparseTensor
from .dense import Dense, conv_norm

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


def expect_branches(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """Return the branches of a head; raise unless they make a box."""
    made = tuple((str(n), int(c), int(k)) for n, c, k in branches)
    names = [name for name, _, _ in made]
    channels = {name: c for name, c, _ in made}
    wrong = len(set(names)) != len(names) or not NEEDED.keys() <= channels.keys()
    if wrong or any(KNOWN.get(name) != c for name, c in channels.items()):
        raise ValueError(
            "branches are (name, channels, convolutions), one each of "
            f"{', '.join(f'{n} ({c})' for n, c in KNOWN.items())}, the last two as "
            f"trained; got {tuple(branches)}"
        )
    if min(count for _, _, count in made) < 1:
        raise ValueError(f"a branch has at least one convolution; got {made}")
    return made


class CenterHead(mlx.nn.Module):
    """CenterPoint's head: a shared convolution, then branches of each head.

    Args:
        in_channels (int): The number of input channels.
        classes (tuple): The number of classes of each head.
        shared_channels (int): The channels of the shared convolution. Default: ``64``.
        branches (tuple): (name, channels, convolutions) of each branch but "hm".
        heat_convs (int): The number of convolutions of "hm". Default: ``2``.
        bias (bool): If ``True`` convolutions before norms have one. Default: ``True``.
        eps (float): Added to the variance in norms. Default: ``1e-5``.
        momentum (float): How far running statistics move. Default: ``0.1``.
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
        shared = conv_norm(in_channels, shared_channels, **options)
        self.shared_conv = Dense(*shared)

        def branch(channels: int, count: int) -> Dense:
            wide = shared_channels
            layers = [
                Dense(*conv_norm(wide, wide, **options)) for _ in range(count - 1)
            ]
            return Dense(*layers, mlx.nn.Conv2d(wide, channels, 3, padding=1))

        self.heads_list = _heads(classes, branches, heat_convs, branch)

    def __call__(self, x: mx.array) -> list[dict[str, mx.array]]:
        """Return (B, y, x, channels) of each branch, for each head.

        Args:
            x: (B, y, x, C).
        """
        x = self.shared_conv(x)
        return [{name: head[name](x) for name in head} for head in self.heads_list]


class VoxelNeXtHead(mlx.nn.Module):
    """VoxelNeXt's head: branches of submanifold convolutions on sparse rows.

    Args:
        in_channels (int): The number of input channels.
        classes (tuple): The number of classes of each head.
        branches (tuple): (name, channels, convolutions) of each branch but "hm".
        heat_convs (int): The number of convolutions of "hm". Default: ``2``.
        kernel_size (int): Of the convolutions before the last one. Default: ``3``.
        bias (bool): If ``True`` they have one. Default: ``True``.
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

        self.heads_list = _heads(classes, branches, heat_convs, branch)

    def __call__(self, x: SparseTensor) -> list[dict[str, SparseTensor]]:
        """Return tensors of each branch on the rows of ``x``, for each head.

        Args:
            x: at (batch, y, x).
        """
        return [{name: head[name](x) for name in head} for head in self.heads_list]


def _heads(classes, branches, heat_convs: int, branch) -> list[mlx.nn.Module]:
    """Return a module for each head, with a branch of each name."""
    made = []
    for count in classes:
        head = mlx.nn.Module()
        for name, channels, convs in expect_branches(branches):
            head[name] = branch(channels, convs)
        head["hm"] = branch(count, heat_convs)
        head["hm"].layers[-1].bias = mx.full((count,), HEAT)
        made.append(head)
    return made

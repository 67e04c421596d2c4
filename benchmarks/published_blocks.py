"""Nets of other blocks, as a user writes them: resolutions side by side, dense joins,
rows that grow.

Each calls layer after layer, as in ``published_nets.py``.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn
from published_mixes import CLASSES

import mlx_lattice as ml
from mlx_lattice import nn, ops


class Normed(mlx.nn.Module):
    """A convolution and its norm, and perhaps a ReLU."""

    def __init__(self, conv: mlx.nn.Module, channels: int, relu: bool = True):
        super().__init__()
        self.conv, self.norm = conv, nn.BatchNorm(channels)
        self.relu = nn.ReLU() if relu else nn.Identity()

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the convolution's rows."""
        return self.relu(self.norm(self.conv(x)))


def same(c_in: int, c_out: int, size: int = 3, relu: bool = True, dilation=1) -> Normed:
    """Return a submanifold convolution, its norm, and perhaps a ReLU."""
    conv = nn.SubmConv3d(c_in, c_out, size, dilation=dilation, bias=False)
    return Normed(conv, c_out, relu)


def down(c_in: int, c_out: int, size: int = 3, relu: bool = True) -> Normed:
    """Return the same of stride 2."""
    return Normed(nn.Conv3d(c_in, c_out, size, stride=2, bias=False), c_out, relu)


class Residual(mlx.nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = same(channels, channels)
        self.second = same(channels, channels, relu=False)
        self.relu = nn.ReLU()

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        return self.relu(self.second(self.first(x)) + x)


class Exchange(mlx.nn.Module):
    """Blocks at each resolution, and sums of what all have, brought to each."""

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        levels = range(len(widths))
        self.blocks = [[Residual(c) for _ in range(2)] for c in widths]
        # From the finer to the coarser in steps of 2, and across to a width.
        self.down = [
            [
                [down(widths[k], widths[k + 1], relu=False) for k in range(j, i)]
                for j in range(i)
            ]
            for i in levels
        ]
        self.across = [
            [same(c, widths[i], 1, relu=False) for c in widths[i + 1 :]] for i in levels
        ]
        self.relu = nn.ReLU()

    def __call__(self, xs: list[ml.SparseTensor]) -> list[ml.SparseTensor]:
        """Return as many tensors, on the same rows."""
        ys = []
        for x, blocks in zip(xs, self.blocks, strict=True):
            for block in blocks:
                x = block(x)
            ys.append(x)
        made = []
        for i, own in enumerate(ys):
            for y, steps in zip(ys, self.down[i], strict=False):
                for step in steps:
                    y = step(y)
                own = own + y
            for j, across in enumerate(self.across[i], i + 1):
                own = own + ops.upsample_nearest3d(across(ys[j]), 2 ** (j - i), ys[i])
            made.append(self.relu(own))
        return made


class Resolutions(mlx.nn.Module):
    """Three resolutions side by side (HRNet: Wang et al., "Deep High-Resolution
    Representation Learning for Visual Recognition", 2020).
    """

    WIDTHS, STAGES = (32, 64, 128), 2

    def __init__(self):
        super().__init__()
        self.stem = same(4, self.WIDTHS[0])
        self.down = [down(a, b, 2) for a, b in pairwise(self.WIDTHS)]
        self.stages = [Exchange(self.WIDTHS) for _ in range(self.STAGES)]
        self.head = nn.Linear(sum(self.WIDTHS), CLASSES)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, CLASSES) on the rows of ``x``."""
        levels = [self.stem(x)]
        for step in self.down:
            levels.append(step(levels[-1]))
        for stage in self.stages:
            levels = stage(levels)
        top, *coarser = levels
        parts = [ops.upsample_nearest3d(y, 2**i, top) for i, y in enumerate(coarser, 1)]
        return self.head(ops.cat([top, *parts]))


class Dense(mlx.nn.Module):
    """Blocks that join what each layer adds (Huang et al., "Densely Connected
    Convolutional Networks", 2017), then several dilations, and the mean of all rows,
    side by side (Chen et al., "Rethinking Atrous Convolution", 2017).
    """

    FIRST, GROWTH, LAYERS, BLOCKS, WIDE = 48, 24, 4, 3, 64

    def __init__(self):
        super().__init__()
        channels = self.FIRST
        self.stem, self.relu = same(4, channels), nn.ReLU()
        self.blocks, self.shrink = [], []
        for _ in range(self.BLOCKS):
            layers = []
            for _ in range(self.LAYERS):
                conv = nn.SubmConv3d(channels, self.GROWTH, 3, bias=False)
                layers.append([nn.BatchNorm(channels), conv])
                channels += self.GROWTH
            self.blocks.append(layers)
            conv = nn.SubmConv3d(channels, channels // 2, 1, bias=False)
            self.shrink.append([nn.BatchNorm(channels), conv])
            channels //= 2
        self.pool = nn.AvgPool3d(2, 2)
        self.beside = [same(channels, self.WIDE, dilation=d) for d in (1, 2, 4)]
        self.whole = mlx.nn.Linear(channels, self.WIDE)
        self.head = nn.Linear(4 * self.WIDE, CLASSES)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, CLASSES) on the rows of ``x``."""
        top = x = self.stem(x)
        for layers, (norm, shrink) in zip(self.blocks, self.shrink, strict=True):
            for own_norm, conv in layers:
                x = ops.cat([x, conv(self.relu(own_norm(x)))])
            x = self.pool(shrink(self.relu(norm(x))))
        parts = [layer(x) for layer in self.beside]
        ones = parts[0].replace(mx.ones_like(parts[0].feats))
        parts.append(ops.gate(ones, self.whole(ops.global_avg_pool(x))))
        return ops.upsample_nearest3d(self.head(ops.cat(parts)), 2**self.BLOCKS, top)


class Focal(mlx.nn.Module):
    """Rows that matter grow by their neighbours (Chen et al., "Focal Sparse
    Convolutional Networks for 3D Object Detection", 2022): new rows at every call.
    """

    WIDTHS, OFFSETS, OWN = (16, 32, 64), 27, 13

    def __init__(self):
        super().__init__()
        widths = self.WIDTHS
        self.stem = same(4, widths[0])
        self.importance = [nn.SubmConv3d(c, self.OFFSETS, 3) for c in widths]
        self.convs = [nn.SubmConv3d(c, c, 3, bias=False) for c in widths]
        self.grow = [
            nn.GenerativeConvTranspose3d(c, c, 3, stride=1, bias=False) for c in widths
        ]
        self.norms, self.relu = [nn.BatchNorm(c) for c in widths], nn.ReLU()
        self.down = [down(a, b) for a, b in pairwise(widths)]
        self.head = nn.Linear(widths[-1], CLASSES)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (M, CLASSES) on rows of stride 4."""
        x = self.stem(x)
        for level, importance in enumerate(self.importance):
            share = mx.sigmoid(importance(x).feats[:, self.OWN])
            x = x.replace(x.feats * share[:, None])
            grown = self.grow[level](ops.prune(x, share > 0.5))
            x = ops.union(self.convs[level](x), grown)
            x = self.relu(self.norms[level](x))
            if level < len(self.down):
                x = self.down[level](x)
        return self.head(x)


NETS = {"resolutions": Resolutions, "dense": Dense, "focal": Focal}

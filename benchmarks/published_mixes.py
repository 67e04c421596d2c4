"""More nets that are published with other libraries, as a user writes them: by hand.

Norms before convolutions, bottlenecks, layers of points joined over scales, and a
variational autoencoder. Each calls layer after layer, as in ``published_nets.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import mlx.nn

import mlx_lattice as ml
from mlx_lattice import nn, ops

CLASSES = 20
Activation = Callable[[], mlx.nn.Module]


class Preactivated(mlx.nn.Module):
    """A residual block that normalises first; a 1x1x1 branch where widths change."""

    def __init__(self, c_in: int, c_out: int, activation: Activation):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm(c_in), nn.BatchNorm(c_out)
        self.conv1 = nn.SubmConv3d(c_in, c_out, 3, bias=False)
        self.conv2 = nn.SubmConv3d(c_out, c_out, 3, bias=False)
        self.act = activation()
        is_same = c_in == c_out
        self.branch = None if is_same else nn.SubmConv3d(c_in, c_out, 1, bias=False)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        out = self.conv1(self.act(self.norm1(x)))
        out = self.conv2(self.act(self.norm2(out)))
        return out + (x if self.branch is None else self.branch(x))


class Level(mlx.nn.Module):
    """Blocks, the levels below, and blocks of both joined."""

    def __init__(self, widths: tuple[int, ...], activation: Activation = nn.ReLU):
        super().__init__()
        width, *below = widths
        self.blocks = [Preactivated(width, width, activation) for _ in range(2)]
        self.below = Level(tuple(below), activation) if below else None
        if below:
            self.norm, self.act = nn.BatchNorm(width), activation()
            self.down = nn.Conv3d(width, below[0], 2, stride=2, bias=False)
            self.up_norm = nn.BatchNorm(below[0])
            self.up = nn.ConvTranspose3d(below[0], width, 2, bias=False)
            self.tail = [Preactivated(c, width, activation) for c in (2 * width, width)]

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        for block in self.blocks:
            x = block(x)
        if self.below is None:
            return x
        out = self.below(self.down(self.act(self.norm(x))))
        out = self.up(self.act(self.up_norm(out)), x)
        out = ops.cat([x, out])
        for block in self.tail:
            out = block(out)
        return out


class PointGroup(mlx.nn.Module):
    """The U-Net of Graham et al., "3D Semantic Segmentation with Submanifold Sparse
    Convolutional Networks", 2018, as in Jiang et al., "PointGroup", 2020.
    """

    WIDTHS = 32, 64, 96, 128, 160

    def __init__(self):
        super().__init__()
        self.stem = nn.SubmConv3d(4, self.WIDTHS[0], 3, bias=False)
        self.net = Level(self.WIDTHS)
        self.norm, self.relu = nn.BatchNorm(self.WIDTHS[0]), nn.ReLU()
        self.head = nn.Linear(self.WIDTHS[0], CLASSES)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        return self.head(self.relu(self.norm(self.net(self.stem(x)))))


class Bottleneck(mlx.nn.Module):
    """1x1x1, 3x3x3 and 1x1x1, four times as wide behind; strided with its shortcut."""

    def __init__(self, c_in: int, width: int, stride: int):
        super().__init__()
        wide = 4 * width
        self.conv1 = nn.SubmConv3d(c_in, width, 1, bias=False)
        self.conv2 = nn.Conv3d(width, width, 3, stride=stride, bias=False)
        self.conv3 = nn.SubmConv3d(width, wide, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm(width), nn.BatchNorm(width)
        self.norm3, self.relu = nn.BatchNorm(wide), nn.ReLU()
        self.shortcut = self.norm = None
        if stride > 1 or c_in != wide:
            self.shortcut = nn.Conv3d(c_in, wide, 1, stride=stride, bias=False)
            self.norm = nn.BatchNorm(wide)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``, or on its cells."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        if self.shortcut is not None:
            x = self.norm(self.shortcut(x))
        return self.relu(out + x)


class ResNet50(mlx.nn.Module):
    """He et al., "Deep Residual Learning", 2015, as MinkowskiEngine's ResNet50 (Choy
    et al., "4D Spatio-Temporal ConvNets", 2019) has it.
    """

    WIDTHS, DEPTHS = (64, 128, 256, 512), (3, 4, 6, 3)

    def __init__(self):
        super().__init__()
        self.stem, c_in = nn.Conv3d(4, 64, 3, stride=2, bias=False), 64
        self.norm, self.relu, self.pool = nn.BatchNorm(64), nn.ReLU(), nn.MaxPool3d(2)
        self.blocks = []
        for width, depth in zip(self.WIDTHS, self.DEPTHS, strict=True):
            for i in range(depth):
                stride = 2 if i == 0 and width > self.WIDTHS[0] else 1
                self.blocks.append(Bottleneck(c_in, width, stride))
                c_in = 4 * width
        self.head = nn.Linear(c_in, CLASSES)

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (B, 20) scores of the batch elements."""
        x = self.pool(self.relu(self.norm(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(ops.global_avg_pool(x))


class Leaky(mlx.nn.Module):
    """A layer, a norm and LeakyReLU."""

    def __init__(self, layer: mlx.nn.Module, channels: int):
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm(channels)
        self.act = nn.LeakyReLU()

    def __call__(self, x):
        """Return what the layer makes of a tensor, or of (B, C) features."""
        return self.act(self.norm(self.layer(x)))


class Points(mlx.nn.Module):
    """MinkowskiFCNN, MinkowskiEngine's classifier of point clouds: features of four
    scales at each point, joined; greatest and mean of each cloud, joined.
    """

    WIDTHS, WIDE, TOP = (32, 48, 64, 96, 128), (256, 512, 512), 512

    def __init__(self):
        super().__init__()
        widths, wide = self.WIDTHS, (sum(self.WIDTHS[1:]), *self.WIDE)
        self.first = Leaky(nn.Linear(4, widths[0], bias=False), widths[0])
        self.convs = [
            Leaky(nn.SubmConv3d(a, b, 3, bias=False), b) for a, b in pairwise(widths)
        ]
        self.pool = nn.MaxPool3d(3, stride=2)
        self.wide = [
            Leaky(nn.Conv3d(a, b, 3, stride=2, bias=False), b)
            for a, b in pairwise(wide)
        ]
        tops = 2 * wide[-1], self.TOP, self.TOP
        self.tops = [Leaky(nn.Linear(a, b, bias=False), b) for a, b in pairwise(tops)]
        self.head = nn.Linear(self.TOP, CLASSES)

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (B, 20) scores of the batch elements."""
        points = y = self.first(x)
        scales = []
        for i, conv in enumerate(self.convs, 1):
            y = self.pool(conv(y))
            scales.append(ops.upsample_nearest3d(y, 2**i, points))
        y = ops.cat(scales)
        for layer in self.wide:
            y = layer(y)
        y = mx.concatenate([ops.global_max_pool(y), ops.global_avg_pool(y)], axis=1)
        for layer in self.tops:
            y = layer(y)
        return self.head(y)


class ConvNeXtBlock(mlx.nn.Module):
    """A convolution, LayerNorm, and two linear layers around GELU, added to x."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.SubmConv3d(channels, channels, 3)
        self.norm, self.act = nn.LayerNorm(channels), nn.GELU()
        self.wide = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        return x + self.narrow(self.act(self.wide(self.norm(self.conv(x)))))


class Autoencoder(mlx.nn.Module):
    """A variational autoencoder (Kingma and Welling, 2013) of sparse voxels, as
    TRELLIS.2's and XCube's are: cells become channels on the way down, and back.
    """

    WIDTHS, LATENT = (64, 128, 256), 16

    def __init__(self):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))
        self.stem = nn.Linear(4, widths[0])
        self.enc = [[ConvNeXtBlock(c), ConvNeXtBlock(c)] for c in widths]
        self.down = [nn.Linear(a, b // 8) for a, b in between]
        self.moments = nn.Linear(widths[-1], 2 * self.LATENT)
        self.latent = nn.Linear(self.LATENT, widths[-1])
        self.dec = [[ConvNeXtBlock(c), ConvNeXtBlock(c)] for c in widths]
        self.up = [nn.Linear(b, 8 * a) for a, b in between]
        self.norm, self.head = nn.LayerNorm(widths[0]), nn.Linear(widths[0], CLASSES)

    def encode(self, x: ml.SparseTensor) -> tuple[ml.SparseTensor, list]:
        """Return the last level's features, and the tensors of those above."""
        above = []
        for level, blocks in enumerate(self.enc):
            for block in blocks:
                x = block(x)
            if level < len(self.down):
                above.append(x)
                y = ops.space_to_channel(self.down[level](x))
                x = y + ops.channel_avg_pool(ops.space_to_channel(x), y.channels)
        return x, above

    def sample(self, x: ml.SparseTensor) -> tuple[ml.SparseTensor, mx.array]:
        """Return a latent, and its divergence from a unit Gaussian."""
        mean, logvar = mx.split(self.moments(x).feats, 2, axis=-1)
        logvar = mx.clip(logvar, -30, 20)
        std, noise = mx.exp(0.5 * logvar), mx.random.normal(mean.shape, mean.dtype)
        z = mean + std * noise if self.training else mean
        loss = 0.5 * mx.mean(mx.square(mean) + mx.exp(logvar) - 1 - logvar)
        return x.replace(z), loss

    def decode(self, z: ml.SparseTensor, above: list) -> ml.SparseTensor:
        """Return the first level's features, on the rows of the encoder."""
        x = self.latent(z)
        for level in reversed(range(len(self.dec))):
            for block in self.dec[level]:
                x = block(x)
            if level:
                rows = above[level - 1]
                y = ops.channel_to_space(self.up[level - 1](x), coordinates=rows)
                again = ops.channel_repeat(x, 8 * y.channels // x.channels)
                wide = ops.channel_to_space(again, coordinates=rows)
                x = y + wide
        return x

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``, with the divergence added."""
        below, above = self.encode(self.stem(x))
        z, loss = self.sample(below)
        y = self.head(self.norm(self.decode(z, above)))
        return y.replace(y.feats + loss)

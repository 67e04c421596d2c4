"""Nets that are published with other libraries, as a user writes them: by hand.

Each calls layer after layer, in its own order: no ``Sequential``, no block of
``models``. Widths and depths are those of the papers or near them.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn

import mlx_lattice as ml
from mlx_lattice import nn, ops

# Of kernels: across, along, and the three that look along one axis.
ACROSS, ALONG = (1, 3, 3), (3, 1, 3)
AXES = (3, 1, 1), (1, 3, 1), (1, 1, 3)


class Activated(mlx.nn.Module):
    """A convolution, LeakyReLU and then a norm: the order of Cylinder3D."""

    def __init__(self, c_in: int, c_out: int, size):
        super().__init__()
        self.conv = nn.SubmConv3d(c_in, c_out, size, bias=False)
        self.act, self.norm = nn.LeakyReLU(), nn.BatchNorm(c_out)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        return self.norm(self.act(self.conv(x)))


class Asymmetric(mlx.nn.Module):
    """Two pairs of asymmetric kernels side by side, and their sum."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.left = [Activated(c_in, c_out, ACROSS), Activated(c_out, c_out, ALONG)]
        self.right = [Activated(c_in, c_out, ALONG), Activated(c_out, c_out, ACROSS)]

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        return self.right[1](self.right[0](x)) + self.left[1](self.left[0](x))


class Cylinder(mlx.nn.Module):
    """A U-Net of asymmetric kernels (Zhu et al., "Cylindrical and Asymmetrical 3D
    Convolution Networks for LiDAR Segmentation", 2021), gated by each axis at its end.
    """

    WIDTHS = 32, 64, 128, 256, 256

    def __init__(self):
        super().__init__()
        widths, top = self.WIDTHS, 64
        self.stem = Asymmetric(4, widths[0])
        self.blocks = [Asymmetric(a, b) for a, b in pairwise(widths)]
        self.down = [
            nn.Conv3d(c, c, 3, stride=2, padding=1, bias=False) for c in widths[1:]
        ]
        outs = [*widths[-2:0:-1], top]
        self.before = [
            Activated(a, b, 3) for a, b in zip((256, *outs), outs, strict=False)
        ]
        self.up = [nn.ConvTranspose3d(c, c, 3, stride=2, bias=False) for c in outs]
        sizes = ACROSS, ALONG, 3
        self.after = [[Activated(c, c, size) for size in sizes] for c in outs]
        self.axes = [nn.SubmConv3d(top, top, size, bias=False) for size in AXES]
        self.norms = [nn.BatchNorm(top) for _ in AXES]
        self.head = nn.SubmConv3d(2 * top, 20, 3)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        x, skips = self.stem(x), []
        for block, down in zip(self.blocks, self.down, strict=True):
            x = block(x)
            skips.append(x)
            x = down(x)
        for before, up, after in zip(self.before, self.up, self.after, strict=True):
            x = before(x)
            skip = skips.pop()
            x = up(x, skip)
            if x.channels == skip.channels:
                x = x + skip
            for layer in after:
                x = layer(x)
        gates = [
            ops.sigmoid(norm(conv(x))).feats
            for conv, norm in zip(self.axes, self.norms, strict=True)
        ]
        return self.head(ops.cat([x.replace(x.feats * sum(gates)), x]))


class Modulated(mlx.nn.Module):
    """A residual block under a condition: norms first, the second one modulated."""

    def __init__(self, c_in: int, c_out: int, condition: int):
        super().__init__()
        self.norm1, self.act = nn.GroupNorm(16, c_in), nn.SiLU()
        self.conv1 = nn.SubmConv3d(c_in, c_out, 3)
        self.condition = mlx.nn.Linear(condition, 2 * c_out)
        self.norm2 = nn.GroupNorm(16, c_out, affine=False)
        self.conv2 = nn.SubmConv3d(c_out, c_out, 3)
        self.skip = nn.Linear(c_in, c_out) if c_in != c_out else nn.Identity()

    def __call__(self, x: ml.SparseTensor, condition: mx.array) -> ml.SparseTensor:
        """Return features on the rows of ``x``; condition: (B, channels)."""
        out = self.conv1(self.act(self.norm1(x)))
        scale, shift = mx.split(self.condition(mlx.nn.silu(condition)), 2, axis=-1)
        out = self.act(ops.modulate(self.norm2(out), shift, scale))
        return self.conv2(out) + self.skip(x)


class Diffusion(mlx.nn.Module):
    """A denoising U-Net (Ho et al., "Denoising Diffusion Probabilistic Models", 2020)
    on sparse voxels, as XCube's and TRELLIS's are.
    """

    WIDTHS, TIMES = (64, 128, 256, 512), 256

    def __init__(self):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))

        def blocks(c_in: int, c_out: int) -> list[Modulated]:
            sizes = (c_in, c_out), (c_out, c_out)
            return [Modulated(*pair, self.TIMES) for pair in sizes]

        self.times, self.stem = mlx.nn.Linear(64, self.TIMES), nn.SubmConv3d(4, 64, 3)
        self.enc, self.dec = [blocks(c, c) for c in widths], []
        self.down = [nn.Conv3d(a, b, 2, stride=2) for a, b in between]
        self.up = [nn.ConvTranspose3d(b, a, 2) for a, b in between]
        self.dec = [blocks(2 * c, c) for c in widths[:-1]]
        self.norm, self.act = nn.GroupNorm(16, 64), nn.SiLU()
        self.head = nn.SubmConv3d(64, 20, 3)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``; each element has a time of its own."""
        angles = mx.arange(x.batch_size)[:, None] * mx.arange(1, 65)
        times, x, skips = self.times(mx.sin(angles).astype(x.dtype)), self.stem(x), []
        for level, blocks in enumerate(self.enc):
            for block in blocks:
                x = block(x, times)
            if level < len(self.down):
                skips.append(x)
                x = self.down[level](x)
        for level in reversed(range(len(self.up))):
            x = ops.cat([self.up[level](x, skips[level]), skips[level]])
            for block in self.dec[level]:
                x = block(x, times)
        return self.head(self.act(self.norm(x)))


class Squeezed(mlx.nn.Module):
    """A residual block with squeeze and excitation (Hu et al., 2018)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.SubmConv3d(channels, channels, 3, bias=False)
        self.conv2 = nn.SubmConv3d(channels, channels, 3, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm(channels), nn.BatchNorm(channels)
        self.squeeze = mlx.nn.Linear(channels, channels // 8)
        self.excite = mlx.nn.Linear(channels // 8, channels)
        self.relu = nn.ReLU()

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        by = mlx.nn.relu(self.squeeze(ops.global_avg_pool(out)))
        return self.relu(ops.gate(out, mx.sigmoid(self.excite(by))) + x)


class Features(mlx.nn.Module):
    """ResUNetBN2C (Choy et al., "Fully Convolutional Geometric Features", 2019), with
    squeeze and excitation: a first kernel of 7, and unit features at its end.
    """

    WIDTHS, OUT = (32, 64, 128, 256), (64, 64, 128)

    def __init__(self):
        super().__init__()
        widths, outs = self.WIDTHS, self.OUT
        self.stem = nn.SubmConv3d(4, widths[0], 7, bias=False)
        self.first, self.relu = nn.BatchNorm(widths[0]), nn.ReLU()
        again = {"stride": 2, "padding": 1, "bias": False}
        self.down = [nn.Conv3d(a, b, 3, **again) for a, b in pairwise(widths)]
        self.blocks = [Squeezed(c) for c in widths]
        self.norms = [nn.BatchNorm(c) for c in widths[1:]]
        below = 2 * outs[1], outs[2] + widths[2], widths[3]
        self.up = [
            nn.ConvTranspose3d(a, b, 3, **again)
            for a, b in zip(below, outs, strict=True)
        ]
        self.up_blocks = [Squeezed(c) for c in outs]
        self.up_norms = [nn.BatchNorm(c) for c in outs]
        self.wide = nn.SubmConv3d(outs[0] + widths[0], 64, 1, bias=False)
        self.head = nn.SubmConv3d(64, 32, 1)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 32) of length 1 on the rows of ``x``."""
        x = self.blocks[0](self.first(self.stem(x)))
        skips = []
        for down, norm, block in zip(
            self.down, self.norms, self.blocks[1:], strict=True
        ):
            skips.append(x)
            x = block(norm(down(x)))
        for level in (2, 1, 0):
            x = self.up_norms[level](self.up[level](x, skips[level]))
            x = ops.cat([self.up_blocks[level](x), skips[level]])
        feats = self.head(self.relu(self.wide(x))).feats
        length = mx.linalg.norm(feats.astype(mx.float32), axis=1, keepdims=True)
        return x.replace(feats / (length + 1e-6).astype(feats.dtype))


class Completion(mlx.nn.Module):
    """An encoder, and a decoder that makes voxels and prunes them (MinkowskiEngine's
    example of completion): its rows are those that it was given.
    """

    WIDTHS = 16, 32, 64, 128, 256

    def __init__(self):
        super().__init__()
        between = list(pairwise(self.WIDTHS))
        self.stem, self.norm = nn.SubmConv3d(4, 16, 3, bias=False), nn.BatchNorm(16)
        options = {"stride": 2, "bias": False}
        self.down = [nn.Conv3d(a, b, 2, **options) for a, b in between]
        self.up = [nn.GenerativeConvTranspose3d(b, a, 2, **options) for a, b in between]
        self.convs = [nn.SubmConv3d(b, b, 3, bias=False) for _, b in between]
        self.up_convs = [nn.SubmConv3d(a, a, 3, bias=False) for a, _ in between]
        self.norms = [[nn.BatchNorm(b), nn.BatchNorm(b)] for _, b in between]
        self.up_norms = [[nn.BatchNorm(a), nn.BatchNorm(a)] for a, _ in between]
        self.occupied = [nn.Linear(a, 1) for a, _ in between]
        self.elu, self.head = nn.ELU(), nn.Linear(16, 20)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        x, skips = self.elu(self.norm(self.stem(x))), []
        for down, conv, norms in zip(self.down, self.convs, self.norms, strict=True):
            skips.append(x)
            x = self.elu(norms[0](down(x)))
            x = self.elu(norms[1](conv(x)))
        scores = 0
        for level in reversed(range(len(self.up))):
            skip, norms = skips[level], self.up_norms[level]
            x = self.elu(norms[0](self.up[level](x)))
            x = self.elu(norms[1](self.up_convs[level](x)))
            scores = scores + self.occupied[level](x).feats.mean()
            x = ops.prune(x, ops.lookup(skip, x.coords) >= 0) + skip
        y = self.head(x)
        return y.replace(y.feats + scores)

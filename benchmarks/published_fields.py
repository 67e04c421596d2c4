"""Nets of other fields, as a user writes them: pillars, time, volumes, tracks, rooms.

Each calls layer after layer, as in ``published_nets.py``; ``rows_of`` gives the rows
that its field has: cells of a plane, scans one after another, solids, or thin tracks.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn
import numpy as np
from published_mixes import CLASSES, Level

import mlx_lattice as ml
from mlx_lattice import models, nn, ops


class PointVoxels(mlx.nn.Module):
    """SPVCNN, on points that lie anywhere in the cells that it is given."""

    SIZE = 0.05

    def __init__(self):
        super().__init__()
        self.net = models.SPVCNN(4, CLASSES, self.SIZE)

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (N, 20) scores of one point in each row of ``x``."""
        cells = x.coords[:, 1:].astype(mx.float32)
        within = 0.5 + 0.45 * mx.sin(cells * mx.array([12.9, 78.2, 37.7]))
        return self.net(self.SIZE * (cells + within), x.feats, x.coords[:, 0])


class Basic(mlx.nn.Module):
    """Two 3x3 convolutions of a plane beside their input."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.SubmConv2d(channels, channels, 3, bias=False)
        self.conv2 = nn.SubmConv2d(channels, channels, 3, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm(channels), nn.BatchNorm(channels)
        self.relu = nn.ReLU()

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + x)


class PillarNet(mlx.nn.Module):
    """The sparse encoder of Shi et al., "PillarNet", 2022: a ResNet18 of a plane."""

    WIDTHS = 32, 64, 128, 256

    def __init__(self):
        super().__init__()
        widths = self.WIDTHS
        self.first, self.norm = nn.Linear(4, widths[0]), nn.BatchNorm(widths[0])
        self.relu, again = nn.ReLU(), {"stride": 2, "padding": 1, "bias": False}
        self.down = [
            nn.Conv2d(a, b, 3, support="reach", **again) for a, b in pairwise(widths)
        ]
        self.norms = [nn.BatchNorm(b) for b in widths[1:]]
        self.blocks = [[Basic(c), Basic(c)] for c in widths]

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return 256 features on the cells at stride 8."""
        x = self.relu(self.norm(self.first(x)))
        for level, blocks in enumerate(self.blocks):
            if level:
                x = self.relu(self.norms[level - 1](self.down[level - 1](x)))
            for block in blocks:
                x = block(x)
        return x


class InTime(mlx.nn.Module):
    """Two convolutions of space and time, on the axes alone, beside their input."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        cross = nn.hyper_cross(3, dims=4)
        self.conv1 = nn.SubmConv4d(c_in, c_out, offsets=cross, bias=False)
        self.conv2 = nn.SubmConv4d(c_out, c_out, offsets=cross, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm(c_out), nn.BatchNorm(c_out)
        self.relu, is_same = nn.ReLU(), c_in == c_out
        self.branch = None if is_same else nn.SubmConv4d(c_in, c_out, 1, bias=False)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return self.relu(out + (x if self.branch is None else self.branch(x)))


class Temporal(mlx.nn.Module):
    """A U-Net of Choy et al., "4D Spatio-Temporal ConvNets", 2019: all of a tesseract
    in the first kernel, and time at full rate in all levels.
    """

    WIDTHS = 32, 64, 128, 128

    def __init__(self):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))
        self.stem, self.relu = nn.SubmConv4d(4, widths[0], 3, bias=False), nn.ReLU()
        self.norm = nn.BatchNorm(widths[0])
        step = {"stride": (2, 2, 2, 1), "bias": False}
        cell = (2, 2, 2, 1)
        self.down = [nn.Conv4d(a, a, cell, **step) for a, _ in between]
        self.up = [nn.ConvTranspose4d(b, a, cell, **step) for a, b in between]
        self.down_norms = [nn.BatchNorm(a) for a, _ in between]
        self.up_norms = [nn.BatchNorm(a) for a, _ in between]
        self.blocks = [InTime(a, b) for a, b in between]
        self.tail = [InTime(2 * a, a) for a, _ in between]
        self.head = nn.Linear(widths[0], CLASSES)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        x, skips = self.relu(self.norm(self.stem(x))), []
        for down, norm, block in zip(
            self.down, self.down_norms, self.blocks, strict=True
        ):
            skips.append(x)
            x = block(self.relu(norm(down(x))))
        for level in reversed(range(len(self.up))):
            x = self.relu(self.up_norms[level](self.up[level](x, skips[level])))
            x = self.tail[level](ops.cat([x, skips[level]]))
        return self.head(x)


class Twice(mlx.nn.Module):
    """A convolution, InstanceNorm and LeakyReLU, twice; the first may be strided."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv3d(c_in, c_out, 3, stride=stride)
        self.conv2 = nn.SubmConv3d(c_out, c_out, 3)
        self.norm1, self.norm2 = nn.InstanceNorm(c_out), nn.InstanceNorm(c_out)
        self.act = nn.LeakyReLU(0.01)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``, or on its cells."""
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


class Volume(mlx.nn.Module):
    """Isensee et al., "nnU-Net", 2021, with its scores at three levels."""

    WIDTHS, SCORED = (32, 64, 128, 256, 320), 3

    def __init__(self):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))
        self.stem = Twice(4, widths[0])
        self.down = [Twice(a, b, 2) for a, b in between]
        self.up = [nn.ConvTranspose3d(b, a, 2) for a, b in between]
        self.tail = [Twice(2 * a, a) for a, _ in between]
        self.heads = [nn.SubmConv3d(a, CLASSES, 1) for a in widths[: self.SCORED]]

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``; in training with those of its cells."""
        x, skips = self.stem(x), []
        for down in self.down:
            skips.append(x)
            x = down(x)
        scores = []
        for level in reversed(range(len(self.up))):
            x = ops.cat([self.up[level](x, skips[level]), skips[level]])
            x = self.tail[level](x)
            if level < self.SCORED:
                scores.append(self.heads[level](x))
        *coarse, fine = scores
        if not self.training:
            return fine
        for level, y in zip((2, 1), coarse, strict=True):
            fine = fine + ops.upsample_nearest3d(y, 2**level, fine)
        return fine


class Tracks(mlx.nn.Module):
    """UResNet (Domine and Terao, "Scalable deep convolutional neural networks for
    sparse, locally dense liquid argon time projection chamber data", 2020).
    """

    WIDTHS = tuple(range(16, 113, 16))

    def __init__(self):
        super().__init__()
        self.stem = nn.SubmConv3d(4, self.WIDTHS[0], 3, bias=False)
        self.net = Level(self.WIDTHS, lambda: nn.LeakyReLU(0.33))
        self.norm, self.act = nn.BatchNorm(self.WIDTHS[0]), nn.LeakyReLU(0.33)
        self.head = nn.Linear(self.WIDTHS[0], CLASSES)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        return self.head(self.act(self.norm(self.net(self.stem(x)))))


class Block34(mlx.nn.Module):
    """A residual block of a ResNet34; strided with its shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv3d(c_in, c_out, 3, stride=stride, bias=False)
        self.conv2 = nn.SubmConv3d(c_out, c_out, 3, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm(c_out), nn.BatchNorm(c_out)
        self.relu, self.shortcut, self.norm = nn.ReLU(), None, None
        if stride > 1:
            self.shortcut = nn.Conv3d(c_in, c_out, 1, stride=stride, bias=False)
            self.norm = nn.BatchNorm(c_out)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``, or on its cells."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.shortcut is not None:
            x = self.norm(self.shortcut(x))
        return self.relu(out + x)


class Boxes(mlx.nn.Module):
    """Rukhovich et al., "FCAF3D", 2021: a ResNet34, and a neck that makes voxels, adds
    them to those that there are, and keeps the best of them.
    """

    WIDTHS, DEPTHS, OUT, KEPT = (64, 128, 256, 512), (3, 4, 6, 3), 128, 20_000

    def __init__(self):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))
        self.stem = nn.Conv3d(4, widths[0], 3, stride=2, bias=False)
        self.first, self.relu = nn.InstanceNorm(widths[0]), nn.ReLU()
        self.pool, self.stages, c_in = nn.MaxPool3d(2, stride=2), [], widths[0]
        for width, depth in zip(widths, self.DEPTHS, strict=True):
            stage = [Block34(c_in, width, 2)]
            stage += [Block34(width, width, 1) for _ in range(depth - 1)]
            self.stages.append(stage)
            c_in = width
        make = nn.GenerativeConvTranspose3d
        self.up = [make(b, a, 2, bias=False) for a, b in between]
        self.up_norms = [nn.BatchNorm(a) for a, _ in between]
        self.convs = [nn.SubmConv3d(a, a, 3, bias=False) for a, _ in between]
        self.norms = [nn.BatchNorm(a) for a, _ in between]
        self.outs = [nn.SubmConv3d(a, self.OUT, 3, bias=False) for a in widths]
        self.out_norms = [nn.BatchNorm(self.OUT) for _ in widths]
        self.elu, self.centre = nn.ELU(), nn.SubmConv3d(self.OUT, 1, 1, bias=False)
        self.box = nn.SubmConv3d(self.OUT, 6, 1, bias=False)
        self.scores = nn.SubmConv3d(self.OUT, CLASSES, 1)

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (M, 27) of the voxels of all levels: centre, box and classes."""
        x, levels = self.pool(self.relu(self.first(self.stem(x)))), []
        for stage in self.stages:
            for block in stage:
                x = block(x)
            levels.append(x)
        found, scores = [], None
        for level in reversed(range(len(levels))):
            if scores is not None:
                x = self.elu(self.up_norms[level](self.up[level](x)))
                x = self.elu(self.norms[level](self.convs[level](x)))
                x = ops.union(levels[level], x)
                x = ops.top_k(x, self._best(scores, x), self.KEPT)
            out = self.elu(self.out_norms[level](self.outs[level](x)))
            scores = self.scores(out)
            heads = self.centre(out), self.box(out), scores
            found.append(mx.concatenate([head.feats for head in heads], axis=1))
        return mx.concatenate(found)

    def _best(self, scores: ml.SparseTensor, x: ml.SparseTensor) -> mx.array:
        best = scores.replace(scores.feats.max(axis=1, keepdims=True))
        halves = mx.array([1, 0.5, 0.5, 0.5])
        return ops.interpolate(best, x.coords * halves)[:, 0]


NETS = {
    "point-voxels": PointVoxels,
    "pillars": PillarNet,
    "time": Temporal,
    "volume": Volume,
    "tracks": Tracks,
    "boxes": Boxes,
}


def rows_of(net: str, coords: np.ndarray) -> np.ndarray:
    """Return sorted rows as a net's field has them: about as many as are given.

    Args:
        net: one of ``NETS``.
        coords: (N, 4) int32 rows of a surface, batch first.
    """
    if net == "pillars":
        return np.unique(coords[:, :3], axis=0)
    if net == "time":  # five scans of a surface that moves
        parts = [coords[i::5] + np.array([0, 2 * i, 0, 0]) for i in range(5)]
        parts = [np.insert(part, 4, i, axis=1) for i, part in enumerate(parts)]
        return np.unique(np.concatenate(parts), axis=0).astype(np.int32)
    if net == "volume":
        side = round((len(coords) / 2) ** (1 / 3))
        return np.argwhere(np.ones((2, side, side, side))).astype(np.int32)
    if net == "tracks":
        return _tracks(len(coords))
    return coords


def _tracks(rows: int) -> np.ndarray:
    """Return about ``rows`` cells of thin curves in two batch elements."""
    rng, length = np.random.default_rng(5), 400
    count = rows // length
    ways = rng.normal(size=(count, 1, 3)) + 0.04 * np.cumsum(
        rng.normal(size=(count, length, 3)), axis=1
    )
    ways /= np.linalg.norm(ways, axis=2, keepdims=True)
    at = rng.integers(0, 768, (count, 1, 3)) + np.cumsum(ways, axis=1)
    batch = np.broadcast_to(np.arange(count)[:, None, None] % 2, (count, length, 1))
    cells = np.concatenate([batch, np.floor(at)], axis=2).reshape(-1, 4)
    return np.unique(cells, axis=0).astype(np.int32)

"""Nets of other tasks, as a user writes them: one line for a scan, masks, memory.

Each calls layer after layer, as in ``published_nets.py``.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn
from published_mixes import CLASSES

import mlx_lattice as ml
from mlx_lattice import models, nn, ops


class Weighed(mlx.nn.Module):
    """A residual block whose channels a kernel over their means weighs (ECA-Net)."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.conv1 = nn.SubmConv3d(c_in, c_out, 3, bias=False)
        self.conv2 = nn.SubmConv3d(c_out, c_out, 3, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm(c_out), nn.BatchNorm(c_out)
        self.along = mlx.nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.relu, self.branch, self.norm = nn.ReLU(), None, None
        if c_in != c_out:
            self.branch = nn.SubmConv3d(c_in, c_out, 1, bias=False)
            self.norm = nn.BatchNorm(c_out)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        means = self.along(ops.global_avg_pool(out)[..., None])[..., 0]
        out = ops.gate(out, mx.sigmoid(means))
        if self.branch is not None:
            x = self.norm(self.branch(x))
        return self.relu(out + x)


class Places(mlx.nn.Module):
    """A feature pyramid and one line for each scan (Komorowski, "Improving Point Cloud
    Based Place Recognition with Ranking-based Loss and Large Batch Training", 2022).
    """

    WIDTHS, OUT, TOP_DOWN = (64, 64, 128, 64, 32), 256, 2

    def __init__(self):
        super().__init__()
        widths = self.WIDTHS
        self.stem = nn.SubmConv3d(4, widths[0], 5, bias=False)
        self.norm, self.relu = nn.BatchNorm(widths[0]), nn.ReLU()
        self.down = [nn.Conv3d(a, a, 2, stride=2, bias=False) for a in widths[:-1]]
        self.norms = [nn.BatchNorm(a) for a in widths[:-1]]
        self.blocks = [Weighed(a, b) for a, b in pairwise(widths)]
        tops = widths[-1 : -2 - self.TOP_DOWN : -1]
        self.flat = [nn.SubmConv3d(a, self.OUT, 1) for a in tops]
        self.up = [
            nn.ConvTranspose3d(self.OUT, self.OUT, 2, stride=2)
            for _ in range(self.TOP_DOWN)
        ]
        self.power = mx.array([3.0])

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (B, 256)."""
        x, levels = self.relu(self.norm(self.stem(x))), []
        for down, norm, block in zip(self.down, self.norms, self.blocks, strict=True):
            x = block(self.relu(norm(down(x))))
            levels.append(x)
        top, *finer = reversed(levels)
        x = self.flat[0](top)
        for flat, up, level in zip(self.flat[1:], self.up, finer, strict=False):
            x = up(x, level) + flat(level)
        power = self.power.astype(x.dtype)
        means = ops.global_avg_pool(x.replace(mx.maximum(x.feats, 1e-4) ** power))
        return means ** (1 / power)


class Refined(mlx.nn.Module):
    """Queries look at the rows that their masks have, at one another, and at none."""

    def __init__(self, dims: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.asked, self.shown = mlx.nn.Linear(dims, dims), mlx.nn.Linear(dims, dims)
        self.said, self.out = mlx.nn.Linear(dims, dims), mlx.nn.Linear(dims, dims)
        self.own = mlx.nn.MultiHeadAttention(dims, heads, bias=True)
        self.norms = [mlx.nn.LayerNorm(dims) for _ in range(3)]
        self.wide = mlx.nn.Linear(dims, hidden)
        self.narrow = mlx.nn.Linear(hidden, dims)

    def _split(self, a: mx.array) -> mx.array:
        return a.reshape(*a.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def __call__(self, queries, rows, places, mask) -> mx.array:
        """Return (B, Q, C) queries of (B, L, C) rows and the places in them."""
        q, k = self.asked(queries), self.shown(rows + places)
        q, k, v = (self._split(a) for a in (q, k, self.said(rows)))
        found = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=q.shape[-1] ** -0.5, mask=mask[:, None]
        )
        found = found.transpose(0, 2, 1, 3).reshape(queries.shape)
        queries = self.norms[0](queries + self.out(found))
        queries = self.norms[1](queries + self.own(queries, queries, queries))
        inner = self.narrow(mlx.nn.relu(self.wide(queries)))
        return self.norms[2](queries + inner)


class Masks(mlx.nn.Module):
    """A U-Net and queries, each of which finds one object (Schult et al., "Mask3D",
    2023): all levels in turn, each time by what the masks before were.
    """

    QUERIES, DIMS, HEADS, HIDDEN, ROUNDS = 100, 128, 8, 1024, 2

    def __init__(self):
        super().__init__()
        self.net = models.MinkUNet34(4, CLASSES, "C")
        widths = 256, 256, 128, 96
        self.flat = [nn.Linear(a, self.DIMS) for a in widths]
        self.fine = nn.SubmConv3d(96, self.DIMS, 1)
        self.layers = [Refined(self.DIMS, self.HEADS, self.HIDDEN) for _ in widths]
        self.first = mx.random.normal((self.QUERIES, self.DIMS))
        self.norm = mlx.nn.LayerNorm(self.DIMS)
        self.mask = mlx.nn.Sequential(
            mlx.nn.Linear(self.DIMS, self.DIMS),
            mlx.nn.ReLU(),
            mlx.nn.Linear(self.DIMS, self.DIMS),
        )
        self.frequencies = mx.random.normal((3, self.DIMS // 2))
        self.freeze(keys="frequencies", recurse=False)

    def _levels(self, x: ml.SparseTensor) -> list[ml.SparseTensor]:
        net, skips, found = self.net, [], []
        skips.append(net.stem(x))
        for down in net.encoder:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in net.decoder:
            found.append(x)
            x = up(x, skips.pop())
        return [*found, x]

    def _places(self, x: ml.SparseTensor) -> mx.array:
        at = x.coords[:, 1:].astype(mx.float32) * 0.01
        angles = at @ self.frequencies.astype(mx.float32)
        return mx.concatenate([mx.sin(angles), mx.cos(angles)], 1).astype(x.dtype)

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (N, Q) scores of each row for each query."""
        *levels, x = self._levels(x)
        fine = self.fine(x)
        size = x.batch_size
        queries = mx.broadcast_to(self.first, (size, *self.first.shape))
        known = []
        for level, flat in zip(levels, self.flat, strict=True):
            own = flat(level)
            rows, lengths = ops.to_sequences(own)
            places, _ = ops.to_sequences(own.replace(self._places(own)))
            inside = mx.arange(rows.shape[1]) < lengths[:, None]
            known.append((rows, places, inside, own))
        for _ in range(self.ROUNDS):
            for layer, (rows, places, inside, own) in zip(
                self.layers, known, strict=True
            ):
                scores = self._scores(queries, fine)
                scores = ops.align(self._at(scores, fine, own), own)
                seen, _ = ops.to_sequences(scores)
                mask = (seen.transpose(0, 2, 1) > 0) & inside[:, None]
                mask = mx.where(mask.any(-1, keepdims=True), mask, inside[:, None])
                queries = layer(queries, rows, places, mask)
        return self._scores(queries, fine)

    def _scores(self, queries: mx.array, fine: ml.SparseTensor) -> mx.array:
        lines = self.mask(self.norm(queries))
        parts = [
            part.feats @ line.T
            for part, line in zip(ops.unbatch(fine), lines, strict=True)
        ]
        return mx.concatenate(parts)

    def _at(self, scores, fine, own) -> ml.SparseTensor:
        x = fine.replace(mx.stop_gradient(scores))
        while x.stride != own.stride:
            x = ops.avg_pool3d(x, 2, 2)
        return x


class Recurrent(mlx.nn.Module):
    """A gated recurrent unit whose gates are convolutions (Cho et al., 2014)."""

    def __init__(self, channels: int):
        super().__init__()
        c = channels
        self.kept, self.reset, self.new = (nn.SubmConv3d(2 * c, c, 3) for _ in range(3))

    def __call__(self, before: ml.SparseTensor, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return the state after ``x``, on its rows."""
        both = ops.cat([before, x])
        z, r = ops.sigmoid(self.kept(both)), ops.sigmoid(self.reset(both))
        new = ops.tanh(self.new(ops.cat([r * before, x])))
        return (1 - z) * before + z * new


class Fused(mlx.nn.Module):
    """Features of a space in three levels, each with what is remembered of it and with
    the level before (Sun et al., "NeuralRecon", 2021; no cell is cut off).
    """

    WIDTHS = 96, 48, 24

    def __init__(self):
        super().__init__()
        self.stem = [nn.SubmConv3d(4, c, 3) for c in self.WIDTHS]
        joined = (a + b + 1 for a, b in pairwise(self.WIDTHS))
        self.before = [
            nn.Linear(a, b) for a, b in zip(joined, self.WIDTHS[1:], strict=True)
        ]
        self.nets = [
            models.MinkUNet(c, c, (c,) * 8, (1,) * 8, stem=(3,), stem_channels=c)
            for c in self.WIDTHS
        ]
        self.memory = [Recurrent(c) for c in self.WIDTHS]
        self.tsdf = [nn.Linear(c, 1) for c in self.WIDTHS]
        self.occupied = [nn.Linear(c, 1) for c in self.WIDTHS]

    def __call__(self, x: ml.SparseTensor) -> mx.array:
        """Return (N, 2) on the rows of ``x``: distance and occupancy."""
        cells = [x]
        for _ in self.WIDTHS[1:]:
            cells.append(ops.avg_pool3d(cells[-1], 2, 2))
        found, made = None, None
        for level, rows in enumerate(reversed(cells)):
            own = self.stem[level](rows)
            if made is not None:
                finer = ops.upsample_nearest3d(made, 2, rows)
                own = self.before[level - 1](ops.cat([finer, own]))
            own = self.nets[level](own)
            remembered = own.replace(mx.tanh(own.feats[::-1]))
            own = self.memory[level](remembered, own)
            occupancy, tsdf = self.occupied[level](own), self.tsdf[level](own)
            found = mx.concatenate([mx.tanh(tsdf.feats), occupancy.feats], 1)
            made = ops.cat([own, occupancy])
        return found


NETS = {"places": Places, "masks": Masks, "fusion": Fused}

"""The nets of nets.py, and the tensors that they take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import mlx.nn
import numpy as np
import published_blocks
import published_fields
import published_tasks
from published_mixes import Autoencoder, PointGroup, Points, ResNet50
from published_nets import Completion, Cylinder, Diffusion, Features

import mlx_lattice as ml
from mlx_lattice import models, nn


class ShapeDecoder(mlx.nn.Module):
    """TRELLIS.2's shape decoder at full size, onto the rows that it is given."""

    def __init__(self):
        super().__init__()
        self.decoder = models.SparseVAEDecoder()

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 7) on the rows of ``x``, whose features are not looked at."""
        levels = [x.key, *x.manager.cells(x.key, (2, 2, 2, 2))]
        rows = len(x.manager[levels[-1]])
        latents = mx.ones((rows, 32), dtype=x.dtype)
        latents = ml.SparseTensor.of(x.manager, levels[-1], latents)
        return self.decoder(latents, coordinates=levels[-2::-1])


class ConvNeXt(mlx.nn.Module):
    """A U-Net of ConvNeXt's blocks, as a user writes it: no module of ``models``.

    A convolution, a norm, and two linear layers around an activation, twice at each of
    four levels.

    Args:
        norm, activation: what makes these layers.
        size: of the convolution's kernel.
        depthwise: whether each of its channels is a group.
    """

    WIDTHS = 32, 64, 128, 256
    strides = 2, 2, 2  # of its levels, for ml.prepare

    def __init__(
        self,
        norm: Callable = nn.LayerNorm,
        activation: Callable = nn.GELU,
        size: int = 3,
        depthwise: bool = False,
    ):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))

        def block(c: int) -> nn.Sequential:
            wide = nn.Linear(c, 4 * c), activation(), nn.Linear(4 * c, c)
            conv = nn.SubmConv3d(c, c, size, groups=c if depthwise else 1)
            return nn.Sequential(conv, norm(c), *wide)

        self.stem = nn.SubmConv3d(4, widths[0], 3)
        self.blocks = [[block(c) for _ in range(2)] for c in widths]
        self.down = [
            nn.Sequential(norm(a), nn.Conv3d(a, b, 2, stride=2)) for a, b in between
        ]
        self.up = [nn.ConvTranspose3d(b, a, 2) for a, b in between]
        self.head = nn.Linear(widths[0], 20)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        x, skips = self.stem(x), []
        for level, blocks in enumerate(self.blocks):
            for block in blocks:
                x = x + block(x)
            if level < len(self.down):
                skips.append(x)
                x = self.down[level](x)
        for up, skip in zip(self.up[::-1], skips[::-1], strict=True):
            x = up(x, skip) + skip
        return self.head(x)


class Residual(mlx.nn.Module):
    """A residual block of two convolutions, as most are written by hand."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.SubmConv3d(channels, channels, 3, bias=False)
        self.norm1 = nn.BatchNorm(channels)
        self.conv2 = nn.SubmConv3d(channels, channels, 3, bias=False)
        self.norm2 = nn.BatchNorm(channels)
        self.relu = nn.ReLU()

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return features on the rows of ``x``."""
        out = self.conv1(x)
        out = self.norm1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.norm2(out)
        out = out + x
        return self.relu(out)


class ByHand(mlx.nn.Module):
    """A U-Net that calls layer after layer: no Sequential, no module of ``models``."""

    WIDTHS = 32, 64, 128, 256

    def __init__(self):
        super().__init__()
        widths, between = self.WIDTHS, list(pairwise(self.WIDTHS))
        self.stem, self.relu = nn.SubmConv3d(4, widths[0], 3, bias=False), nn.ReLU()
        self.norm = nn.BatchNorm(widths[0])
        self.blocks = [[Residual(c), Residual(c)] for c in widths]
        self.down = [nn.Conv3d(a, b, 2, stride=2, bias=False) for a, b in between]
        self.down_norms = [nn.BatchNorm(b) for _, b in between]
        self.up = [nn.ConvTranspose3d(b, a, 2, bias=False) for a, b in between]
        self.up_norms = [nn.BatchNorm(a) for a, _ in between]
        self.head = nn.Linear(widths[0], 20)

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        x, skips = self.relu(self.norm(self.stem(x))), []
        for level, blocks in enumerate(self.blocks):
            for block in blocks:
                x = block(x)
            if level < len(self.down):
                skips.append(x)
                x = self.relu(self.down_norms[level](self.down[level](x)))
        for level in reversed(range(len(self.up))):
            x = self.up_norms[level](self.up[level](x, skips[level]))
            x = self.relu(x + skips[level])
        return self.head(x)


class Transformer(mlx.nn.Module):
    """Blocks of attention as TRELLIS's nets have them, windows in turns shifted.

    Args:
        dims, heads, depth: of the blocks.
        window: extent of the windows; None for whole elements.
        **attention: the other arguments of ``nn.SparseAttention``.
    """

    def __init__(self, dims: int, heads: int, depth: int, window=None, **attention):
        super().__init__()
        self.stem, self.head = nn.Linear(4, dims), nn.Linear(dims, 20)
        moves = [
            {"window": window, "shift": i % 2 * (window or 0) // 2}
            for i in range(depth)
        ]
        self.blocks = [
            nn.SparseTransformerBlock(
                dims, heads, **(move if window else {}), **attention
            )
            for move in moves
        ]

    def __call__(self, x: ml.SparseTensor) -> ml.SparseTensor:
        """Return (N, 20) on the rows of ``x``."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NETS = {
    "full-attention": lambda: Transformer(512, 8, 6, rope=True, qk_rms_norm=True),
    "windows": lambda: Transformer(192, 6, 8, window=8),
    "decoder": ShapeDecoder,
    "spunet": lambda: models.SpUNet(4, 20),
    "ptv3": lambda: models.PTv3(4, 20),
    "litept": lambda: models.LitePT(4, 20),
    "minkunet14": lambda: models.MinkUNet14(4, 20),
    "minkunet18": lambda: models.MinkUNet18(4, 20),
    "minkunet34": lambda: models.MinkUNet34(4, 20),
    "resnet18": lambda: models.SparseResNet18(4, 20),
    "convnext": ConvNeXt,
    "convnext-instance": lambda: ConvNeXt(nn.InstanceNorm, nn.ReLU),
    "depthwise": lambda: ConvNeXt(nn.BatchNorm, size=5, depthwise=True),
    "by-hand": ByHand,
    "asymmetric": Cylinder,
    "diffusion": Diffusion,
    "squeezed": Features,
    "completion": Completion,
    "preactivated": PointGroup,
    "bottleneck": ResNet50,
    "points": Points,
    "latent": Autoencoder,
    "second": lambda: models.VoxelBackBone8x(4),
    "centerpoint": lambda: models.VoxelResBackBone8x(4),
    "unetv2": lambda: models.UNetV2(4),
    "voxelnext": lambda: models.VoxelResBackBone8xVoxelNeXt(4),
    **published_fields.NETS,
    **published_tasks.NETS,
    **published_blocks.NETS,
}
# Of detectors: their rows are (batch, z, y, x) of a grid.
ON_GRID = {"second", "centerpoint", "unetv2", "voxelnext"}


def rows_for(net: str, coords: np.ndarray) -> tuple[np.ndarray, dict[str, object]]:
    """Return (N, 4) sorted rows as a net takes them, and what else its tensor has.

    Args:
        net: one of ``NETS``.
        coords: (N, 4) int32 rows of a surface, batch first.
    """
    if net in published_fields.NETS:
        return published_fields.rows_of(net, coords), {}
    if net not in ON_GRID:
        return coords, {}
    rows = coords[:, [0, 3, 2, 1]]
    rows[:, 1:] -= rows[:, 1:].min(axis=0)
    extents = rows[:, 1:].max(axis=0) // 16 * 16 + 16
    rows = np.ascontiguousarray(rows[np.lexsort(rows.T[::-1])])
    facts = {"spatial_shape": tuple(map(int, extents))}
    return rows, facts | {"batch_size": int(rows[:, 0].max()) + 1}


def result_of(made: object) -> mx.array:
    """Return the features of what a net makes: of the last of several tensors."""
    if isinstance(made, tuple):
        made = made[-1]
    return made.feats if isinstance(made, ml.SparseTensor) else made

"""SPVCNN: a sparse U-net of voxels beside an MLP of points.

Tang et al., "Searching Efficient 3D Architectures with Sparse Point-Voxel
Convolution", 2020. Parameters are named as in SPVNAS and torchsparse, but for the
``layers`` of a Sequential, which ``io.import_checkpoint`` leaves out by itself:

    stem.{0, 1, 3, 4}               stage1.0.net.{0, 1}
    stage1.{1, 2}.net.{0, 1, 3, 4}  stage1.{1, 2}.downsample.{0, 1}
    up1.0.net.{0, 1}                up1.1.{0, 1}.net.{0, 1, 3, 4}
    point_transforms.{0, 1, 2}.{0, 1}                 classifier.0
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import mlx.core as mx

from .. import nn, ops
from ..arrays import arrays_of, positions_of, stream_of
from ..coordinate_set import CoordinateKey
from ..coordinates import CoordinateManager
from ..geometry.voxelize import cells_of, reduce_segments, voxelize
from ..nn.containers import in_order
from ..nn.fused import convolved
from ..ops.interpolation import blend_at
from ..tensor import SparseTensor
from .blocks import trimmed_cells
from .recipe import Voxels
from .segmentor import Segmentor

COARSEST = 16  # cells of the finest lattice in one of the coarsest, an axis
FAR = 1 << 20  # cells: of what is farther float32 has few bits within a cell
PLANES = (32, 32, 64, 128, 256, 256, 128, 96, 96)


class ConvolutionBlock(nn.Module):
    """A strided convolution, BatchNorm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, trimmed: bool = False):
        super().__init__()
        self.trimmed = trimmed
        conv = nn.Conv3d(in_channels, out_channels, 2, 2, bias=False)
        self.net = nn.Sequential(conv, nn.BatchNorm(out_channels), nn.ReLU())

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the cells at stride 2."""
        rows = trimmed_cells(x) if self.trimmed else None
        if rows is None:
            return self.net(x)
        conv, norm, activation = self.net.layers
        return convolved(conv, norm, x, rows, activation=activation)


class DeconvolutionBlock(nn.Module):
    """A transposed convolution onto given rows, BatchNorm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        conv = nn.ConvTranspose3d(in_channels, out_channels, 2, 2, bias=False)
        self.net = nn.Sequential(conv, nn.BatchNorm(out_channels), nn.ReLU())

    def __call__(self, x: SparseTensor, like: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``like``."""
        conv, norm, activation = self.net.layers
        return convolved(conv, norm, x, like, activation=activation)


class ResidualBlock(nn.Module):
    """Two 3x3x3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.SubmConv3d(in_channels, out_channels, 3, bias=False),
            nn.BatchNorm(out_channels),
            nn.ReLU(),
            nn.SubmConv3d(out_channels, out_channels, 3, bias=False),
            nn.BatchNorm(out_channels),
        )
        self.downsample = nn.Identity()
        if in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.SubmConv3d(in_channels, out_channels, 1, bias=False),
                nn.BatchNorm(out_channels),
            )

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        *rest, conv, norm = self.net.layers
        after = {"activation": ops.relu, "residual": self.downsample(x)}
        return convolved(conv, norm, in_order(rest, x), **after)


def _in_near_cells(points: mx.array, size: float) -> mx.array:
    """Return float64 points as float32 ones in cells, counted from the least of them.

    Cells of every level are the same ones, moved.
    """
    with stream_of(points):
        at = points / mx.array(size, dtype=mx.float64)
        if at.size:
            low = mx.floor(at.min(axis=0) / COARSEST) * COARSEST
            at = at - mx.where(mx.isfinite(low), low, 0)
        return at.astype(mx.float32)


class _Points:
    """Points in cells of the finest lattice, and their rows on coarser ones.

    Args:
        points: (P, 3) float32, in cells of the finest lattice.
        batch: (P,) int32.
        trimmed: as of ``SPVCNN``.
        rows: by coordinate set, the (P,) int32 row of each point, where it is known.
    """

    def __init__(
        self,
        points: mx.array,
        batch: mx.array,
        trimmed: bool,
        rows: dict[CoordinateKey, mx.array],
    ):
        self.points, self.batch, self.trimmed = points, batch, trimmed
        self._rows, self._cells, self._blends = rows, {}, {}

    def _at(self, x: SparseTensor) -> mx.array:
        """Return the (P, 4) int32 cells of the points in the lattice of a tensor."""
        if x.key not in self._cells:
            self._cells[x.key] = cells_of(self.points, self.batch, size=x.stride)
        return self._cells[x.key]

    def from_voxels(self, x: SparseTensor) -> mx.array:
        """Interpolate each point between the active cells around it."""
        if x.key not in self._blends:
            self._blends[x.key] = blend_at(x, self.points, self._at(x), x.stride)
        return self._blends[x.key](x.feats)

    def to_voxels(self, x: SparseTensor, feats: mx.array) -> SparseTensor:
        """Return the mean of the points in each row of ``x``."""
        if x.key not in self._rows:
            self._rows[x.key] = ops.lookup(x, self._at(x))
        rows, count = self._rows[x.key], len(x)
        if not self.trimmed:
            return x.replace(reduce_segments(feats, rows, count, "mean"))
        # Points of cells that were left out go to a row behind the last.
        rows = mx.where(rows < 0, count, rows)
        return x.replace(reduce_segments(feats, rows, count + 1, "mean")[:count])


class SPVCNN(Segmentor):
    """Scores points with a voxel net of four halvings and a point branch.

    Args:
        in_channels (int): The number of features of a point.
        num_classes (int): The number of output channels.
        voxel_size (float): The edge of a voxel, in the unit of the points.
            Default: ``0.05``.
        width (float): A factor of all channels. Default: ``1``.
        planes (tuple): The channels of the stem, four encoder and four decoder
            stages.
        dropout (float): The probability to zero a voxel's feature before two of the
            decoder's stages, while training. Default: ``0.3``.
        trimmed (bool): As of ``MinkUNet``. Default: ``False``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        voxel_size: float = 0.05,
        width: float = 1.0,
        *,
        planes: Sequence[int] = PLANES,
        dropout: float = 0.3,
        trimmed: bool = False,
    ):
        super().__init__()
        if len(planes) != 9:
            raise ValueError(
                "planes has one entry for the stem, four encoder and four decoder "
                f"stages; got {len(planes)}"
            )
        cs = [int(width * c) for c in planes]
        self.voxel_size, self.trimmed = voxel_size, trimmed
        self.stem = nn.Sequential(
            nn.SubmConv3d(in_channels, cs[0], 3, bias=False),
            nn.BatchNorm(cs[0]),
            nn.ReLU(),
            nn.SubmConv3d(cs[0], cs[0], 3, bias=False),
            nn.BatchNorm(cs[0]),
            nn.ReLU(),
        )
        for i in range(4):
            stage = nn.Sequential(
                ConvolutionBlock(cs[i], cs[i], trimmed),
                ResidualBlock(cs[i], cs[i + 1]),
                ResidualBlock(cs[i + 1], cs[i + 1]),
            )
            setattr(self, f"stage{i + 1}", stage)
        for i in range(4):
            wide, out = cs[3 - i], cs[5 + i]
            up = DeconvolutionBlock(cs[4 + i], out)
            residual = nn.Sequential(
                ResidualBlock(out + wide, out), ResidualBlock(out, out)
            )
            setattr(self, f"up{i + 1}", [up, residual])
        self.classifier = nn.Sequential(nn.Linear(cs[8], num_classes))
        self.point_transforms = [
            nn.Sequential(nn.Linear(cs[a], cs[b]), nn.BatchNorm(cs[b]), nn.ReLU())
            for a, b in ((0, 4), (4, 6), (6, 8))
        ]
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self,
        points: mx.array,
        feats: mx.array,
        batch: mx.array | None = None,
    ) -> mx.array:
        """Return (P, num_classes) scores, one row a point, in their order.

        Args:
            points: (P, 3) float positions; none at all is legal.
            feats: (P, in_channels) in the dtype of the weights.
            batch: (P,) integer batch index of each point; by default all 0.
        """
        points, size = positions_of(points, "points"), self.voxel_size
        feats, batch = arrays_of(feats=feats, batch=batch)
        if points.dtype == mx.float64:
            points, size = _in_near_cells(points, size), 1.0
        coords, means, rows = voxelize(points, feats, size, batch)
        manager = CoordinateManager()
        key = manager.insert(coords, trusted=True)
        n = points.shape[0]
        batch = mx.zeros((n,), dtype=mx.int32) if batch is None else batch
        at = points.astype(mx.float32) / size
        batch = mx.contiguous(batch.astype(mx.int32))  # it may be a column
        z = _Points(at, batch, self.trimmed, {key: rows})

        first, second, third = self.point_transforms
        x0 = self.stem(SparseTensor.of(manager, key, means))
        z0 = z.from_voxels(x0)
        if not self.trimmed:
            manager.cells(key, (2, 2, 2, 2))
        x1 = self.stage1(z.to_voxels(x0, z0))
        x2 = self.stage2(x1)
        x3 = self.stage3(x2)
        x4 = self.stage4(x3)
        z1 = z.from_voxels(x4) + first(z0)
        y = self.dropout(z.to_voxels(x4, z1))
        y = self._up(self.up1, y, x3)
        y = self._up(self.up2, y, x2)
        z2 = z.from_voxels(y) + second(z1)
        y = self.dropout(z.to_voxels(y, z2))
        y = self._up(self.up3, y, x1)
        y = self._up(self.up4, y, x0)
        z3 = z.from_voxels(y) + third(z2)
        return self.classifier(z3)

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        The net's points are the recipe's cells, as in SPVNAS, which calls their size
        ``pres`` and the net's ``voxel_size`` ``vres``. Without a recipe the cells have
        the size ``voxel_size``.
        """
        x, recipe = voxels.x, self.about.voxels
        size = recipe.voxel_size if recipe else self.voxel_size
        held = x.coordinate_set
        coords, (low, high) = held.coords, held.bounds
        if len(x) and max(*map(abs, low[1:]), *map(abs, high[1:])) > FAR:
            # Move by whole cells of the coarsest lattice.
            ratio = Fraction(size / self.voxel_size).limit_denominator(FAR)
            step = COARSEST * ratio.denominator
            coords = coords - mx.array([0, *(v // step * step for v in low[1:])])
        points = coords[:, 1:].astype(mx.float32) * size
        return self(points, x.feats.astype(self.dtype), coords[:, 0])

    def _up(self, stage, x: SparseTensor, skip: SparseTensor) -> SparseTensor:
        up, residual = stage
        return residual(ops.cat([up(x, skip), skip]))

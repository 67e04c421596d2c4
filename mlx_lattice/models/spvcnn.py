"""SPVCNN: a sparse U-net of voxels beside an MLP of points.

Tang et al., "Searching Efficient 3D Architectures with Sparse Point-Voxel
Convolution", 2020. Its U-net is ``MinkUNet``, in torchsparse's form;
``io.import_checkpoint`` knows the names of SPVNAS and torchsparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import mlx.core as mx

from .. import nn, ops
from ..checks import arrays_of, positions_of, stream_of
from ..coordinate_set import CoordinateKey
from ..coordinates import CoordinateManager
from ..geometry.points import cells_of, reduce_segments, voxelize
from ..ops.interpolation import blend_at
from ..prepare import prepare_scan
from ..tensor import SparseTensor
from .minkunet import LAYERS, PLANES, MinkUNet
from .pretrained import Voxels

COARSEST = 16  # cells of the finest lattice in one of the coarsest, an axis
FAR = 1 << 20  # cells: beyond this float32 has few bits within a cell


def _in_near_cells(points: mx.array, size: float) -> mx.array:
    """Return float64 points as float32 cells, counted from the lowest coarse cell."""
    with stream_of(points):
        at = points / mx.array(size, dtype=mx.float64)
        if at.size:
            low = mx.floor(at.min(axis=0) / COARSEST) * COARSEST
            at = at - mx.where(mx.isfinite(low), low, 0)
        return at.astype(mx.float32)


class _Points:
    """Points (P, 3) float32 in cells of the finest lattice, and (P,) int32 batches.

    ``rows`` has the (P,) int32 row of each point by coordinate set, if known.
    """

    def __init__(
        self,
        points: mx.array,
        batch: mx.array,
        trimmed: bool,
        rows: dict[CoordinateKey, mx.array],
    ):
        self.points, self.batch, self.trimmed = points, batch, trimmed
        self.rows, self.cells, self.blends = rows, {}, {}

    def cells_on(self, x: SparseTensor) -> mx.array:
        if x.key not in self.cells:
            self.cells[x.key] = cells_of(self.points, self.batch, size=x.stride)
        return self.cells[x.key]

    def from_voxels(self, x: SparseTensor) -> mx.array:
        if x.key not in self.blends:
            blend = blend_at(x, self.points, self.cells_on(x), x.stride)
            self.blends[x.key] = blend
        return self.blends[x.key](x.feats)

    def to_voxels(self, x: SparseTensor, feats: mx.array) -> SparseTensor:
        if x.key not in self.rows:
            self.rows[x.key] = ops.lookup(x, self.cells_on(x))
        rows, count = self.rows[x.key], len(x)
        if not self.trimmed:
            return x.replace(reduce_segments(feats, rows, count, "mean"))
        # Points of cells that were left out go to a row behind the last.
        rows = mx.where(rows < 0, count, rows)
        return x.replace(reduce_segments(feats, rows, count + 1, "mean")[:count])


class SPVCNN(MinkUNet):
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
        if len(planes) != 9:
            raise ValueError(
                "planes has one entry for the stem, four encoder and four decoder "
                f"stages; got {len(planes)}"
            )
        cs = [int(width * c) for c in planes]
        super().__init__(
            in_channels,
            num_classes,
            cs[1:],
            LAYERS[18],
            stem=(3, 3),
            stem_channels=cs[0],
            trimmed=trimmed,
        )
        self.voxel_size, self.trimmed = voxel_size, trimmed
        self.head = nn.Linear(cs[8], num_classes)
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
        x = SparseTensor.of(manager, key, means)
        z = _Points(at, batch, self.trimmed, {key: rows})
        prepare_scan(self, x, z, call=self._scores)
        return self._scores(x, z)

    def _scores(self, x: SparseTensor, z: _Points) -> mx.array:
        """Return the scores of points, of the means of their features in voxels."""
        first, second, third = self.point_transforms
        up1, up2, up3, up4 = self.decoder
        x0 = self.stem(x)
        z0 = z.from_voxels(x0)
        skips = [z.to_voxels(x0, z0)]
        for stage in self.encoder:
            skips.append(stage(skips[-1]))
        _, x1, x2, x3, x4 = skips
        z1 = z.from_voxels(x4) + first(z0)
        y = self.dropout(z.to_voxels(x4, z1))
        y = up2(up1(y, x3), x2)
        z2 = z.from_voxels(y) + second(z1)
        y = self.dropout(z.to_voxels(y, z2))
        y = up4(up3(y, x1), x0)
        return self.head(z.from_voxels(y) + third(z2))

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        The net's points are the recipe's cells, as in SPVNAS, which calls their size
        ``pres`` and the net's ``voxel_size`` ``vres``. Without a recipe the cells have
        the size ``voxel_size``.
        """
        x, recipe = voxels.x, self.about.voxels
        size = recipe.voxel_size if recipe else self.voxel_size
        cells = x.coordinate_set
        coords, (low, high) = cells.coords, cells.bounds
        if len(x) and max(*map(abs, low[1:]), *map(abs, high[1:])) > FAR:
            # Move by whole cells of the coarsest lattice.
            ratio = Fraction(size / self.voxel_size).limit_denominator(FAR)
            step = COARSEST * ratio.denominator
            coords = coords - mx.array([0, *(v // step * step for v in low[1:])])
        points = coords[:, 1:].astype(mx.float32) * size
        return self(points, x.feats.astype(self.dtype), coords[:, 0])

"""VoxelNeXt's backbone: six stages whose last three meet in one map of sparse rows.

Chen et al., "VoxelNeXt: Fully Sparse VoxelNet for 3D Object Detection and Tracking",
2023; OpenPCDet's ``spconv_backbone_voxelnext.py``, whose names the parameters have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ... import nn
from ...backends import registry
from ...coordinate_set import CoordinateKey, CoordinateSet, OfPairs
from ...coordinates import CoordinateManager
from ...geometry import sync
from ...geometry.output_rows import Rule
from ...prepare import prepare_scan
from ...reductions import sum_over
from ...tensor import SparseTensor
from ..pretrained import Pretrained
from .backbones import SparseBasicBlock, expect_grid, expect_widths, kept, norm, strided

CHANNELS = (16, 32, 64, 128, 128)


class _Flat(NamedTuple):
    """Cells of the finest of some levels, over (y, x), that have rows above them.

    Attributes:
        key: of the cells, among the sets of the levels' manager.
        rows: (M, heights) int32: for each cell the row of each height of each level,
            of all levels' rows one after another, or -1.
        cell: (N, 1) int32: the cell of each row.
    """

    key: CoordinateKey
    rows: mx.array
    cell: mx.array


_known = OfPairs()  # of the finest and the coarsest level, by all of them


def _flat(levels: Sequence[SparseTensor]) -> _Flat:
    """Return the cells of levels, each twice as wide as the one before it.

    They depend on the levels' rows alone: they are made once.
    """
    manager, sets = levels[0].manager, [x.coordinate_set for x in levels]
    known, name = _known.of(sets[0], sets[-1]), tuple(x.key.serial for x in levels)
    if name not in known:
        flat = _flattened(manager, sets)
        sync.complete((manager[flat.key].coords, flat))
        known[name] = flat
    return known[name]


def _flattened(manager: CoordinateManager, sets: Sequence[CoordinateSet]) -> _Flat:
    """Return what ``_flat`` does; reads the number of cells."""
    finest, columns = sets[0], mx.array([0, 2, 3])
    coords, place, heights, high = [], [], 0, (0, 0)
    for i, each in enumerate(sets):
        height, *extents = each.spatial_shape
        coords.append(each.coords[:, columns] << mx.array([0, i, i]))
        place.append(each.coords[:, 1] + heights)
        heights += height
        high = [max(h, (n - 1) << i) for h, n in zip(high, extents, strict=True)]
    coords, shape = mx.concatenate(coords), finest.spatial_shape[1:]
    box = (0, 0, 0), (finest.batch_size - 1, *high)
    cells = registry.geometry().made_rows(
        Rule.CELL, coords, [(0, 0)], (1, 1), box, False
    )
    # Those of even kernels may lie beyond the grid: then they are read and checked.
    is_inside = all(h < n for h, n in zip(high, shape, strict=True))
    held = manager.inserted(
        cells,
        finest.stride[1:],
        spatial_shape=shape,
        batch_size=finest.batch_size,
        trusted=True,
        box=box if is_inside else None,
    )
    cell = held.index.find(coords, box)
    rows = mx.full((len(cells), heights), -1, dtype=mx.int32)
    if len(coords):
        rows[cell, mx.concatenate(place)] = mx.arange(len(coords), dtype=mx.int32)
    return _Flat(held.key, rows, cell[:, None])


class VoxelResBackBone8xVoxelNeXt(Pretrained):
    """Residual stages to a thirty-second of the grid, summed over height.

    Args:
        in_channels (int): The number of input channels.
        channels (tuple): Channels of ``conv1`` to ``conv4``, and of ``conv5`` and
            ``conv6``, which must be those of ``conv4``.
        out_channels (int): The number of output channels. Default: ``128``.
        kernel_sizes (tuple): Of the strided convolutions of ``conv2``, ``conv3``,
            ``conv4``, and of ``conv5`` and ``conv6``.
        use_bias (bool): If ``True`` the blocks' convolutions have a bias.
            Default: ``True``.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int] = CHANNELS,
        out_channels: int = 128,
        kernel_sizes: Sequence[int] = (3, 3, 3, 3),
        use_bias: bool = True,
    ):
        super().__init__()
        if len(kernel_sizes) != 4 or expect_widths(channels)[3] != channels[4]:
            raise ValueError(
                "there are kernel_sizes of 4 levels, and rows of conv4, conv5 and "
                "conv6 are added up, so their channels are equal; got kernel_sizes "
                f"{tuple(kernel_sizes)}, channels {tuple(channels)}"
            )
        self.out_channels = out_channels
        self.conv_input = kept(in_channels, channels[0])
        wide = [channels[0], *channels, channels[4]]  # of conv_input, conv1 to conv6
        sizes = [*kernel_sizes, kernel_sizes[3]]
        for i in range(1, 7):
            blocks = [SparseBasicBlock(wide[i], use_bias) for _ in range(2)]
            if i > 1:
                size = sizes[i - 2]
                down = strided(wide[i - 1], wide[i], size, padding=size // 2)
                blocks.insert(0, down)
            self[f"conv{i}"] = nn.Sequential(*blocks)
        conv = nn.Conv2d(
            channels[3], out_channels, 3, padding=1, bias=False, support="reach"
        )
        self.conv_out = nn.Sequential(conv, norm(out_channels), nn.ReLU())
        self.shared_conv = nn.Sequential(
            nn.SubmConv2d(out_channels, out_channels, 3),
            nn.BatchNorm(out_channels),
            nn.ReLU(),
        )

    def stages(self, x: SparseTensor) -> dict[str, SparseTensor]:
        """Return what each stage makes.

        ``x_conv1`` to ``x_conv6``, then over (y, x) ``bev_sum``, ``conv_out`` and
        ``out``.
        """
        expect_grid(x, type(self).__name__)
        x, made = self.conv_input(x), {}
        for i in range(1, 7):
            x = made[f"x_conv{i}"] = self[f"conv{i}"](x)
        made["bev_sum"] = self._summed(*(made[f"x_conv{i}"] for i in (4, 5, 6)))
        made["conv_out"] = self.conv_out(made["bev_sum"])
        return made | {"out": self.shared_conv(made["conv_out"])}

    def _summed(self, *levels: SparseTensor) -> SparseTensor:
        """Return the sum of rows of one (batch, y, x), in cells of the finest."""
        flat = _flat(levels)
        feats = mx.concatenate([x.feats for x in levels])
        feats = sum_over(feats, flat.rows, lambda: flat.cell)
        return SparseTensor.of(levels[0].manager, flat.key, feats)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return rows at (batch, y, x), at an eighth of the grid.

        Args:
            x: at (batch, z, y, x), with a ``spatial_shape``.
        """
        prepare_scan(self, x)
        return self.stages(x)["out"]

"""VoxelNeXt's backbone: six stages whose last three meet in one map of sparse rows.

Chen et al., "VoxelNeXt: Fully Sparse VoxelNet for 3D Object Detection and Tracking",
2023; OpenPCDet's ``spconv_backbone_voxelnext.py``, whose names the parameters have.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ... import nn, ops
from ...preparation import prepare_once
from ...tensor import SparseTensor
from ..pretrained import Pretrained
from .backbones import SparseBasicBlock, expect_grid, expect_widths, kept, norm, strided

CHANNELS = (16, 32, 64, 128, 128)


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
        rows = []
        for i, x in enumerate(levels):
            scale = mx.array([1, 2**i, 2**i], dtype=mx.int32)
            rows.append(x.coords[:, mx.array([0, 2, 3])] * scale)
        return ops.unique_sum(
            mx.concatenate(rows),
            mx.concatenate([x.feats for x in levels]),
            stride=levels[0].stride[1:],
            spatial_shape=levels[0].spatial_shape[1:],
            batch_size=levels[0].batch_size,
        )

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return rows at (batch, y, x), at an eighth of the grid.

        Args:
            x: at (batch, z, y, x), with a ``spatial_shape``.
        """
        prepare_once(self, x)
        return self.stages(x)["out"]

"""UNetV2: Part-A2's encoder and decoder, with features of each voxel.

Shi et al., "From Points to Parts", 2019; OpenPCDet's ``spconv_unet.py``, whose names
the parameters have: those of ``VoxelBackBone8x``, and for each level ``conv_up_t<i>``,
``conv_up_m<i>`` and ``inv_conv<i>`` (at level 1 ``conv5``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import nn, ops
from ...nn.fused import convolved
from ...ops.channels import by_halves
from ...prepare import prepare_scan
from ...tensor import SparseTensor
from .backbones import WIDTHS, SparseBasicBlock, VoxelBackBone8x, kept, norm


class UNetV2(VoxelBackBone8x):
    """SECOND's encoder and a decoder back to its input's rows.

    Args:
        in_channels (int): The number of input channels.
        widths (tuple): As of ``VoxelBackBone8x``; those of the decoder are the same.
        last_pad (int): As of ``VoxelBackBone8x``. Default: ``0``.
        return_encoded (bool): If ``False`` there is no ``conv_out``, and no encoded
            tensor. Default: ``True``.
    """

    def __init__(
        self,
        in_channels: int,
        widths: Sequence[int] = WIDTHS,
        last_pad: int = 0,
        return_encoded: bool = True,
    ):
        super().__init__(in_channels, widths, last_pad)
        if not return_encoded:
            del self.conv_out
        channels = list(widths[:4])
        for level in (4, 3, 2, 1):
            c = channels[level - 1]
            below = channels[level - 2] if level > 1 else c
            self[f"conv_up_t{level}"] = SparseBasicBlock(c, bias=False)
            self[f"conv_up_m{level}"] = kept(2 * c, c)
            if level > 1:
                conv = nn.ConvTranspose3d(
                    c, below, 3, 2, (0, 1, 1) if level == 4 else 1, bias=False
                )
                up = nn.Sequential(conv, norm(below), nn.ReLU())
                self[f"inv_conv{level}"] = up
        self.conv5 = nn.Sequential(kept(channels[0], channels[0]))

    def stages(self, x: SparseTensor) -> dict[str, SparseTensor]:
        """Return what each stage makes: those of the encoder, ``up4`` to ``up1``."""
        made = super().stages(x)
        y = made["x_conv4"]
        for level in (4, 3, 2, 1):
            y = made[f"up{level}"] = self._up(level, y, made)
        return made

    def _up(self, level: int, bottom: SparseTensor, made: dict) -> SparseTensor:
        """Return the features of the next finer level, or at level 1 of the rows."""
        across = self[f"conv_up_t{level}"](made[f"x_conv{level}"])
        both = ops.cat([bottom, across])
        y = self[f"conv_up_m{level}"](both)
        # Neighbouring channels are added up in pairs, one for each channel of y.
        pairs = both.feats.reshape(len(both), y.channels, 2)
        y = y.replace(y.feats + by_halves(pairs))
        if level == 1:
            return self.conv5(y)
        conv, follows, activation = self[f"inv_conv{level}"].layers
        fine = made[f"x_conv{level - 1}"]
        return convolved(conv, follows, y, fine, activation=activation)

    def __call__(self, x: SparseTensor) -> tuple[SparseTensor | None, SparseTensor]:
        """Return the encoded tensor, or None, and features on the rows of ``x``.

        Args:
            x: at (batch, z, y, x), with a ``spatial_shape``.
        """
        prepare_scan(self, x)
        made = self.stages(x)
        return made.get("out"), made["up1"]

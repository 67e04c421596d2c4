"""SpUNet: Pointcept's U-net of spconv layers, and its encoder alone.

Pointcept contributors, "SpUNet-v1m1", 2023; the blocks are those of Choy, Gwak and
Savarese, "4D Spatio-Temporal ConvNets", 2019. Parameters are named as in its
checkpoints, but for the ``layers`` of a Sequential, which ``io.import_checkpoint``
leaves out by itself, as it does the ``backbone`` of its segmentors:

    conv_input.{0, 1}               stem
    down.<level>.{0, 1}             enc.<level>.block<i>.{conv1, bn1, conv2, bn2}
    up.<level>.{0, 1}               dec.<level>.block<i>.{..., proj.0, proj.1}
    final

Level 0 is the finest: ``up`` and ``dec`` run from their last entry to their first.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import nn, ops
from ..prepare import prepare_scan
from ..tensor import SparseTensor
from .blocks import SparseBasicBlock, conv_norm_relu, conv_onto, layer
from .pretrained import Segmentor, Voxels

CHANNELS = (32, 64, 128, 256, 256, 128, 96, 96)
LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)


class SpUNetStage(nn.Module):
    """Blocks in order, named ``block0``, ``block1`` and so on; none is legal."""

    def __init__(self, in_channels: int, out_channels: int, count: int, dims: int = 3):
        super().__init__()
        self.count = count
        for i in range(count):
            inputs = in_channels if i == 0 else out_channels
            self[f"block{i}"] = SparseBasicBlock(inputs, out_channels, dims=dims)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        for i in range(self.count):
            x = self[f"block{i}"](x)
        return x


class SpUNet(Segmentor):
    """A U-net of basic blocks over a halving of the lattice a level, or its encoder.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels; 0 for those of the last
            stage.
        base_channels (int): The output channels of the stem. Default: ``32``.
        channels (tuple): The channels of each encoder stage, from the finest, then of
            each decoder stage, from the coarsest.
        layers (tuple): The number of blocks of each stage, in the same order; none
            is legal in an encoder stage.
        enc_mode (bool): If ``True`` there is no decoder, and a call returns the mean
            of each batch element. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        base_channels: int = 32,
        channels: Sequence[int] = CHANNELS,
        layers: Sequence[int] = LAYERS,
        enc_mode: bool = False,
        *,
        dims: int = 3,
    ):
        super().__init__()
        if len(channels) != len(layers) or len(channels) % 2 or not channels:
            raise ValueError(
                "channels and layers have one entry for each encoder and each decoder "
                f"stage, as many of both; got {len(channels)} and {len(layers)}"
            )
        if not (enc_mode or all(layers[len(layers) // 2 :])):
            raise ValueError(
                "a decoder stage has one block or more, which takes the skip's "
                f"channels in; got layers = {tuple(layers)}"
            )
        self.enc_mode = enc_mode
        stem = layer("SubmConv", dims, in_channels, base_channels, 5, bias=False)
        self.conv_input = conv_norm_relu(stem)
        levels = len(channels) // 2
        widths = [base_channels, *channels[:levels]]  # of the encoder, by level
        self.down, self.enc = [], []
        for i in range(levels):
            fine, coarse = widths[i], widths[i + 1]
            down = layer("Conv", dims, fine, coarse, 2, 2, bias=False)
            self.down.append(conv_norm_relu(down))
            self.enc.append(SpUNetStage(coarse, coarse, layers[i], dims))
        last = widths[-1]
        if not enc_mode:
            self.up, self.dec = [], []
            # What a decoder stage gets, and what it returns, from the finest on.
            deeper = [*channels[: levels - 1 : -1], last]
            for i in range(levels):
                low, out = deeper[i + 1], deeper[i]
                up = layer("ConvTranspose", dims, low, out, 2, 2, bias=False)
                self.up.append(conv_norm_relu(up))
                count = layers[-1 - i]
                self.dec.append(SpUNetStage(out + widths[i], out, count, dims))
            last = channels[-1]
        if num_classes:
            self.final = layer("SubmConv", dims, last, num_classes, 1)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return (2,) * len(self.down)

    def __call__(self, x: SparseTensor) -> SparseTensor | mx.array:
        """Return scores.

        Returns:
            a tensor on the rows of ``x``, in their order; with ``enc_mode`` an array
            (batch_size, num_classes), a row a batch element: the mean over its rows
            at the coarsest level.
        """
        prepare_scan(self, x)
        x, skips = self.conv_input(x), []
        for down, stage in zip(self.down, self.enc, strict=True):
            skips.append(x)
            x = stage(down(x))
        if not self.enc_mode:
            for up, stage in zip(self.up[::-1], self.dec[::-1], strict=True):
                skip = skips.pop()
                x = stage(ops.cat([conv_onto(up, x, skip), skip]))
        x = self.final(x) if "final" in self else x
        return ops.global_avg_pool(x) if self.enc_mode else x

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        Raises:
            ValueError: with ``enc_mode`` there are none.
        """
        if self.enc_mode:
            raise ValueError("with enc_mode, SpUNet scores whole scans, not points")
        return super().score_voxels(voxels)

"""The blocks of TRELLIS.2's sparse U-nets: ConvNeXt, up-sampling, down-sampling.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025, whose configurations call them ``SparseConvNeXtBlock3d``,
``SparseResBlockC2S3d`` and ``SparseResBlockS2C3d``. A fine cell's offset counts its
first axis fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn

from ... import memory, nn, ops
from ...coordinate_set import CoordinateKey
from ...nn import fused
from ...ops.channels import fine_rows, forget_slots, rows_of
from ...settings import boundary
from ...tensor import SparseTensor
from .torso import zero

CELLS = 8
ORDER = "first"


class ConvNeXtBlock(nn.Module):
    """A 3x3x3 convolution, LayerNorm and a two-layer MLP, beside a skip.

    The convolution is full, not depthwise. The last layer starts at zero.

    Args:
        channels (int): The number of channels.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
    """

    def __init__(self, channels: int, mlp_ratio: float = 4.0):
        super().__init__()
        hidden = int(channels * mlp_ratio)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.conv = nn.SubmConv3d(channels, channels, 3)
        last = zero(nn.Linear(hidden, channels))
        self.mlp = [nn.Linear(channels, hidden), mlx.nn.SiLU(), last]

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = self.conv(x).feats
        first, act, last = self.mlp

        def beside(x: mx.array, y: mx.array) -> mx.array:
            wide = fused.linear(first, self.norm(y), act)
            return fused.linear(last, wide, residual=x)

        # What a row takes: hidden channels twice, its own channels thrice.
        row_bytes = (2 * first.bias.shape[0] + 3 * x.channels) * x.dtype.size
        y = memory.by_rows(beside, x.feats, y, row_bytes=row_bytes)
        return x.replace(y)


class UpBlock(nn.Module):
    """Divides each row into up to eight, by channel-to-space, in a residual block.

    Args:
        channels (int): The number of input channels, a multiple of 8.
        out_channels (int): The number of output channels, a multiple of an eighth of
            the input's.
        pred_subdiv (bool): If ``True`` predict which fine cells there are.
            Default: ``True``.
    """

    def __init__(self, channels: int, out_channels: int, pred_subdiv: bool = True):
        super().__init__()
        if channels % CELLS or out_channels % (channels // CELLS):
            raise ValueError(
                "channels must be a multiple of 8 and out_channels a multiple of an "
                f"eighth of them; got {channels} and {out_channels}"
            )
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.norm2 = nn.LayerNorm(out_channels, eps=1e-6, affine=False)
        self.conv1 = nn.SubmConv3d(channels, CELLS * out_channels, 3)
        self.conv2 = zero(nn.SubmConv3d(out_channels, out_channels, 3))
        if pred_subdiv:
            self.to_subdiv = nn.Linear(channels, CELLS)
        self.repeats = out_channels // (channels // CELLS)

    def __call__(
        self,
        x: SparseTensor,
        subdivision: mx.array | None = None,
        coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    ) -> tuple[SparseTensor, SparseTensor | None]:
        """Return the fine rows, and (N, 8) logits of the cells where predicted.

        Args:
            x: coarse rows.
            subdivision: (N, 8) bool: the cells to make, instead of those predicted.
            coordinates: the fine rows to make, instead of those predicted.
        """
        logits = self.to_subdiv(x) if "to_subdiv" in self else None
        if subdivision is None and coordinates is None:
            if logits is None:
                raise ValueError(
                    "this block does not predict its cells; pass subdivision or "
                    "coordinates"
                )
            subdivision = logits.feats > 0
        if memory.active() is not None:
            key, _ = ops.channels.fine_slots(
                x, subdivision=subdivision, coordinates=coordinates, order=ORDER
            )
            return self._in_blocks(x, key), logits
        y = self.conv1(self.norm1(x, activation="silu"))
        y = ops.channel_to_space(
            y, subdivision=subdivision, coordinates=coordinates, order=ORDER
        )
        skip = ops.channel_to_space(x, coordinates=y, order=ORDER)
        skip = ops.channel_repeat(skip, self.repeats)
        return self.conv2(self.norm2(y, activation="silu")) + skip, logits

    def _in_blocks(self, x: SparseTensor, key: CoordinateKey) -> SparseTensor:
        """Return features of fine rows, the same bits, nothing wide but in blocks.

        The first convolution goes block by block into the fine rows that there are;
        the skip is taken from the coarse rows block by block.
        """
        _, slots = ops.channels.fine_slots(x, coordinates=key, order=ORDER)
        y = memory.by_rows(
            self._before, x.feats, row_bytes=3 * x.channels * x.dtype.size
        )
        wide = self.conv1.blocks(x.replace(y))
        del y
        fine = fine_rows(wide, slots, CELLS, self._between)
        del wide
        boundary(fine)
        memory.release(x.manager, x.key)
        fine = SparseTensor.of(x.manager, key, fine)
        parts = x.feats.reshape(len(x) * CELLS, x.channels // CELLS)

        def beside() -> Iterator[tuple[int, mx.array]]:
            for first, part in self.conv2.blocks(fine):
                skip = rows_of(parts, slots, first, first + part.shape[0])
                yield first, part + mx.repeat(skip, self.repeats, axis=1)

        y = memory.assembled(beside(), len(fine))
        boundary(y)
        forget_slots(x.coordinate_set)
        return fine.replace(y)

    def _before(self, rows: mx.array) -> mx.array:
        """Return what the first convolution reads of coarse rows."""
        return self.norm1(rows, activation="silu")

    def _between(self, rows: mx.array) -> mx.array:
        """Return what the second convolution reads of fine rows."""
        return self.norm2(rows, activation="silu")

    def cells(self, x: SparseTensor) -> SparseTensor:
        """Return the fine rows alone that the block predicts, with features of 1."""
        ones = mx.ones((len(x), CELLS), dtype=x.dtype)
        subdivision = self.to_subdiv(x).feats > 0
        return ops.channel_to_space(
            x.replace(ones), subdivision=subdivision, order=ORDER
        )


class DownBlock(nn.Module):
    """Joins the rows of each coarse cell, by space-to-channel, in a residual block.

    Args:
        channels (int): The number of input channels.
        out_channels (int): The number of output channels, a multiple of 8 that
            divides 8 times the input's.
    """

    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        if out_channels % CELLS or CELLS * channels % out_channels:
            raise ValueError(
                "out_channels must be a multiple of 8 and divide 8 times channels; "
                f"got {channels} and {out_channels}"
            )
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.norm2 = nn.LayerNorm(out_channels, eps=1e-6, affine=False)
        self.conv1 = nn.SubmConv3d(channels, out_channels // CELLS, 3)
        self.conv2 = zero(nn.SubmConv3d(out_channels, out_channels, 3))
        self.out_channels = out_channels

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the sorted unique cells of 2 x 2 x 2 rows.

        The skip is the mean of as many neighbouring channels of the joined rows as
        there are for an output; cells that are not active count as 0.
        """
        y = self.conv1(self.norm1(x, activation="silu"))
        y = ops.space_to_channel(y, order=ORDER)
        skip = ops.space_to_channel(x, order=ORDER)
        skip = ops.channel_avg_pool(skip, self.out_channels)
        return self.conv2(self.norm2(y, activation="silu")) + skip


def check_stages(model_channels: Sequence[int], num_blocks: Sequence[int]) -> None:
    """Raise unless a net's stages have both widths and numbers of blocks."""
    if len(model_channels) != len(num_blocks) or min(num_blocks, default=-1) < 0:
        raise ValueError(
            "model_channels and num_blocks have one entry for each stage, of 1 or "
            f"more and 0 or more; got {model_channels} and {num_blocks}"
        )

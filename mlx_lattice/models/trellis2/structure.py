"""TRELLIS's decoder of sparse structures: latents on a dense grid to occupied cells.

Xiang et al., "Structured 3D Latents for Scalable and Versatile 3D Generation"
(TRELLIS), 2024; TRELLIS.2 uses it too. Parameters have the published names; the
published convolutions are (C_out, C_in, x, y, z), those here (C_out, x, y, z, C_in).

A dense grid is a tensor of all its cells: on them a submanifold convolution is a dense
one with a border of zeros. MLX's own takes many times as long on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn

from ... import nn, ops
from ...dtypes import dtype_name
from ...routes import launch
from ...tensor import SparseTensor
from ..pretrained import Pretrained
from .blocks import CELLS
from .published import arguments_of
from .torso import cast_layers, dtype_of, torso_dtype, zero


class GridConv3d(mlx.nn.Conv3d):
    """A 3x3x3 convolution, padded by 1, over a tensor of all cells of a grid.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=1)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        with launch.scope(self):
            return ops.subm_conv3d(x, self.weight, self.bias)


class ResBlock3d(nn.Module):
    """Two norms and 3x3x3 convolutions beside a skip, on a dense grid.

    Args:
        channels (int): The number of channels.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.conv1 = GridConv3d(channels, channels)
        self.conv2 = zero(GridConv3d(channels, channels))

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = self.conv1(ops.silu(self.norm1(x)))
        return self.conv2(ops.silu(self.norm2(y))) + x


class UpsampleBlock3d(nn.Module):
    """Divides each cell into eight: a 3x3x3 convolution, then channels to cells.

    Args:
        in_channels (int): The number of input channels.
        out_channels (int): The number of output channels.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = GridConv3d(in_channels, CELLS * out_channels)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return (8N, out_channels) on the fine cells of each row, sorted."""
        y = self.conv(x)
        # Published channels count the fine cells fastest.
        parts = y.feats.reshape(len(y), y.channels // CELLS, CELLS).swapaxes(1, 2)
        return ops.channel_to_space(y.replace(parts.reshape(y.feats.shape)))


class SparseStructureDecoder(Pretrained):
    """Residual blocks on a dense grid, which is doubled between stages.

    The defaults are TRELLIS's, which TRELLIS.2 uses too.

    Args:
        out_channels (int): The number of output channels. Default: ``1``.
        latent_channels (int): The number of input channels. Default: ``8``.
        num_res_blocks (int): The blocks of each stage. Default: ``2``.
        channels (tuple): The channels of each stage. Default: ``(512, 128, 32)``.
        num_res_blocks_middle (int): The blocks before the stages. Default: ``2``.
        dtype (mx.Dtype): The dtype of the stages' convolutions.
            Default: ``mx.float32``.
    """

    def __init__(
        self,
        out_channels: int = 1,
        latent_channels: int = 8,
        num_res_blocks: int = 2,
        channels: Sequence[int] = (512, 128, 32),
        num_res_blocks_middle: int = 2,
        *,
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        dtype_name(dtype)
        first, last = channels[0], channels[-1]
        self.input_layer = GridConv3d(latent_channels, first)
        self.middle_block = [ResBlock3d(first) for _ in range(num_res_blocks_middle)]
        self.blocks = []
        for at, width in enumerate(channels):
            self.blocks += [ResBlock3d(width) for _ in range(num_res_blocks)]
            if at + 1 < len(channels):
                self.blocks.append(UpsampleBlock3d(width, channels[at + 1]))
        self.out_layer = [nn.LayerNorm(last), nn.SiLU(), GridConv3d(last, out_channels)]
        if dtype != mx.float32:
            cast_layers([*self.middle_block, *self.blocks], dtype)

    @classmethod
    def of_config(cls, config: Mapping) -> SparseStructureDecoder:
        """Return the net of the arguments that a published configuration has."""
        return cls(**arguments_of("SparseStructureDecoder", config))

    def __call__(self, z: mx.array) -> mx.array:
        """Decode latents.

        Args:
            z: (B, latent_channels, X, Y, Z); channels stand first, as published.

        Returns:
            (B, out_channels, sX, sY, sZ) logits in the dtype of ``z``, s two to the
            number of stages but one: a cell is occupied where its logit is above 0.

        Raises:
            ValueError: shapes do not fit.
        """
        channels = self.input_layer.weight.shape[-1]
        if z.ndim != 5 or z.shape[1] != channels:
            raise ValueError(
                f"z must have shape (B, {channels}, X, Y, Z); got {tuple(z.shape)}"
            )
        cells = z.transpose(0, 2, 3, 4, 1)
        mask = mx.ones(cells.shape[:-1], dtype=mx.bool_)
        y = SparseTensor.from_dense(cells.astype(dtype_of(self.input_layer)), mask)
        y = self.input_layer(y)
        outer, blocks = y.dtype, [*self.middle_block, *self.blocks]
        y = y.astype(torso_dtype(blocks, outer))
        for block in blocks:
            y = block(y)
        y = y.astype(outer)
        for layer in self.out_layer:
            y = layer(y)
        by = 2 ** sum(isinstance(block, UpsampleBlock3d) for block in blocks)
        size = [n * by for n in z.shape[2:]]
        y = y.feats.reshape(z.shape[0], *size, y.channels)
        return y.transpose(0, 4, 1, 2, 3).astype(z.dtype)


def occupied(logits: mx.array, resolution: int | None = None) -> SparseTensor:
    """Return the occupied cells of a decoded grid, as rows with one feature of 1.

    Args:
        logits: (B, 1, R, R, R): a cell is occupied where its logit is above 0.
        resolution: the extent of a coarser grid to return, a divisor of R: a cell of
            it is occupied where any within it is. By default R.

    Returns:
        a tensor whose rows are sorted by (batch, x, y, z), with the batch size and the
        grid's extent; no rows are legal. Reads their number.

    Raises:
        ValueError: shapes do not fit.
    """
    size = logits.shape[-1]
    resolution = size if resolution is None else resolution
    cube = logits.ndim == 5 and tuple(logits.shape[1:]) == (1, size, size, size)
    if not cube or resolution < 1 or size % resolution:
        raise ValueError(
            "logits must have shape (B, 1, R, R, R), R a multiple of the resolution; "
            f"got {tuple(logits.shape)} and {resolution}"
        )
    mask, by = logits[:, 0] > 0, size // resolution
    if by > 1:
        parts = [n for _ in range(3) for n in (resolution, by)]
        mask = mask.reshape(-1, *parts).any(axis=(2, 4, 6))
    return SparseTensor.from_dense(mx.ones((*mask.shape, 1)), mask)

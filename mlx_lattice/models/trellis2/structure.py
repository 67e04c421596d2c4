"""TRELLIS's encoder and decoder of sparse structures: occupied cells and latents.

Xiang et al., "Structured 3D Latents for Scalable and Versatile 3D Generation"
(TRELLIS), 2024; TRELLIS.2 uses it too. Parameters have the published names; the
published convolutions are (C_out, C_in, x, y, z), those here (C_out, x, y, z, C_in).

A dense grid is a tensor of all its cells: on them a submanifold convolution is a dense
one with a border of zeros. MLX's own takes many times as long on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn

from ... import nn, ops
from ...checks import dtype_name
from ...prepare import prepare_scan
from ...routes import launch
from ...tensor import SparseTensor
from .blocks import CELLS, cast_layers, dtype_of, posterior, torso_dtype, zero
from .published import Trellis2Net


class GridConv3d(mlx.nn.Conv3d):
    """A convolution over a tensor of all cells of a grid.

    A strided one has no padding; otherwise the output has the cells of the input.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int = 3, stride=1):
        super().__init__(in_channels, out_channels, size, stride)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on all cells of the output grid, sorted."""
        with launch.scope(self):
            if self.stride == (1, 1, 1):
                return ops.subm_conv3d(x, self.weight, self.bias)
            return ops.conv3d(
                x,
                self.weight,
                self.bias,
                kernel_size=self.weight.shape[1:-1],
                stride=self.stride,
                padding=0,
                support="reach",
            )


class ResBlock3d(nn.Module):
    """Two norms and 3x3x3 convolutions beside a skip, on a dense grid."""

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
    """Divides each cell into eight: a 3x3x3 convolution, then channels to cells."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = GridConv3d(in_channels, CELLS * out_channels)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return (8N, out_channels) on the fine cells of each row, sorted."""
        y = self.conv(x)
        # Published channels count the fine cells fastest.
        parts = y.feats.reshape(len(y), y.channels // CELLS, CELLS).swapaxes(1, 2)
        return ops.channel_to_space(y.replace(parts.reshape(y.feats.shape)))


class DownsampleBlock3d(nn.Module):
    """Joins eight cells into one, by a 2x2x2 convolution."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = GridConv3d(in_channels, out_channels, 2, 2)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the coarse cells, sorted."""
        return self.conv(x)


class StructureNet(Trellis2Net):
    """The layers that the encoder and the decoder of structures share."""

    def _build(
        self,
        in_channels: int,
        out_channels: int,
        num_res_blocks: int,
        channels: Sequence[int],
        num_res_blocks_middle: int,
        step: type[nn.Module],
        middle: int,
        dtype: mx.Dtype,
    ) -> None:
        """Make the layers; ``step`` changes the grid, the middle has ``middle``."""
        dtype_name(dtype)
        self.input_layer = GridConv3d(in_channels, channels[0])
        self.middle_block = [ResBlock3d(middle) for _ in range(num_res_blocks_middle)]
        self.blocks = []
        for at, width in enumerate(channels):
            self.blocks += [ResBlock3d(width) for _ in range(num_res_blocks)]
            if at + 1 < len(channels):
                self.blocks.append(step(width, channels[at + 1]))
        last = channels[-1]
        self.out_layer = [nn.LayerNorm(last), nn.SiLU(), GridConv3d(last, out_channels)]
        if dtype != mx.float32:
            cast_layers([*self.middle_block, *self.blocks], dtype)

    def _run(self, x: mx.array, name: str, blocks: Sequence[nn.Module]) -> mx.array:
        channels = self.input_layer.weight.shape[-1]
        if x.ndim != 5 or x.shape[1] != channels:
            raise ValueError(
                f"{name} must have shape (B, {channels}, X, Y, Z); got {tuple(x.shape)}"
            )
        cells = x.transpose(0, 2, 3, 4, 1).astype(dtype_of(self.input_layer))
        mask = mx.ones(cells.shape[:-1], dtype=mx.bool_)
        cells = SparseTensor.from_dense(cells, mask)
        prepare_scan(self, cells, blocks, call=self._on_cells)
        y = self._on_cells(cells, blocks)
        y = y.feats.reshape(x.shape[0], *y.spatial_shape, y.channels)
        return y.transpose(0, 4, 1, 2, 3)

    def _on_cells(self, x: SparseTensor, blocks: Sequence[nn.Module]) -> SparseTensor:
        y = self.input_layer(x)
        outer = y.dtype
        y = y.astype(torso_dtype(blocks, outer))
        for block in blocks:
            y = block(y)
        y = y.astype(outer)
        for layer in self.out_layer:
            y = layer(y)
        return y


class SparseStructureEncoder(StructureNet):
    """Residual blocks on a dense grid, which is halved between stages.

    The defaults are TRELLIS's, which TRELLIS.2 uses too.

    Args:
        in_channels (int): The number of input channels. Default: ``1``.
        latent_channels (int): The number of output channels. Default: ``8``.
        num_res_blocks (int): The blocks of each stage. Default: ``2``.
        channels (tuple): The channels of each stage. Default: ``(32, 128, 512)``.
        num_res_blocks_middle (int): The blocks after the stages. Default: ``2``.
        dtype (mx.Dtype): The dtype of the stages' convolutions.
            Default: ``mx.float32``.
    """

    def __init__(
        self,
        in_channels: int = 1,
        latent_channels: int = 8,
        num_res_blocks: int = 2,
        channels: Sequence[int] = (32, 128, 512),
        num_res_blocks_middle: int = 2,
        *,
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        sizes = num_res_blocks, channels, num_res_blocks_middle
        sizes = in_channels, 2 * latent_channels, *sizes
        self._build(*sizes, DownsampleBlock3d, channels[-1], dtype)

    def __call__(
        self, x: mx.array, sample_posterior: bool = False, return_raw: bool = False
    ) -> mx.array | tuple[mx.array, mx.array, mx.array]:
        """Encode a grid.

        Args:
            x: (B, in_channels, X, Y, Z), 1 at occupied cells and 0 elsewhere; channels
                stand first, as published.
            sample_posterior: draw the latents from normal distributions with the
                predicted means and variances; by default the latents are the means.
            return_raw: also return the means and the logarithms of the variances.

        Returns:
            (B, latent_channels, x, y, z) latents in the dtype of ``x``; each step
            halves the extents and rounds down. With ``return_raw`` a tuple of latents,
            means and logarithms of variances.
        """
        y = self._run(x, "x", [*self.blocks, *self.middle_block]).astype(x.dtype)
        mean, log_variance = mx.split(y, 2, axis=1)
        z = posterior(mean, log_variance, sample_posterior)
        return (z, mean, log_variance) if return_raw else z


class SparseStructureDecoder(StructureNet):
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
        sizes = num_res_blocks, channels, num_res_blocks_middle
        sizes = latent_channels, out_channels, *sizes
        self._build(*sizes, UpsampleBlock3d, channels[0], dtype)

    def __call__(self, z: mx.array) -> mx.array:
        """Decode latents.

        Args:
            z: (B, latent_channels, X, Y, Z); channels stand first, as published.

        Returns:
            (B, out_channels, sX, sY, sZ) logits in the dtype of ``z``, s two to the
            number of stages but one: a cell is occupied where its logit is above 0.
        """
        y = self._run(z, "z", [*self.middle_block, *self.blocks])
        return y.astype(z.dtype)


def occupied(logits: mx.array, resolution: int | None = None) -> SparseTensor:
    """Return the occupied cells of a decoded grid, as rows with one feature of 1.

    Args:
        logits: (B, 1, R, R, R): a cell is occupied where its logit is above 0.
        resolution: the extent of a coarser grid to return, a divisor of R: a cell of
            it is occupied where any within it is. By default R.

    Returns:
        a tensor whose rows are sorted by (batch, x, y, z), with the batch size and the
        grid's extent; no rows are legal. Reads their number.
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

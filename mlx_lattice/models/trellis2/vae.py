"""TRELLIS.2's encoders and decoders: of sparse structures, shapes and textures.

Xiang et al., "Structured 3D Latents for Scalable and Versatile 3D Generation"
(TRELLIS), 2024, and "Native and Compact Structured Latents for 3D Generation"
(TRELLIS.2), 2025. Parameters have the published names and layouts, so a state dict
loads without a mapping:

    from_latent, output_layer, input_layer, to_latent            weight, bias
    blocks.<stage>.<block>.conv, .norm           weight, bias    ConvNeXt
    blocks.<stage>.<block>.mlp.0, .mlp.2         weight, bias
    blocks.<stage>.<last>.norm1, .conv1, .conv2  weight, bias    up-, down-sampling
    blocks.<stage>.<last>.to_subdiv              weight, bias    where predicted

Convolutions of the sparse nets are (C_out, x, y, z, C_in) there too; those of the
structure nets are published as (C_out, C_in, x, y, z).

The structure nets run on a tensor of all cells of a dense grid: on it a submanifold
convolution is a dense one with a border of zeros, which MLX computes much more slowly
on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import mlx.core as mx
import mlx.nn

from ... import memory, nn, ops
from ...checks import dtype_name, real
from ...coordinate_set import CoordinateKey
from ...ops.dual_grid import DualGrid
from ...prepare import prepare_scan
from ...routes import launch
from ...tensor import SparseTensor, align, expect_tensor
from .transformer import (
    CELLS,
    DownBlock,
    Trellis2Net,
    UpBlock,
    cast_layers,
    check_stages,
    dtype_of,
    posterior,
    stages,
    torso_dtype,
    zero,
)

__all__ = [
    "DualGrid",
    "SparseStructureDecoder",
    "SparseStructureEncoder",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "dual_grid",
    "dual_grid_features",
    "occupied",
]


class GridConv3d(mlx.nn.Conv3d):
    """A convolution over a tensor of all cells of a grid."""

    def __init__(
        self, in_channels: int, out_channels: int, size: int = 3, stride: int = 1
    ):
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
        self.norm1: nn.LayerNorm = nn.LayerNorm(channels)
        self.norm2: nn.LayerNorm = nn.LayerNorm(channels)
        self.conv1: GridConv3d = GridConv3d(channels, channels)
        self.conv2: GridConv3d = zero(GridConv3d(channels, channels))

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = self.conv1(ops.silu(self.norm1(x)))
        return self.conv2(ops.silu(self.norm2(y))) + x


class UpsampleBlock3d(nn.Module):
    """Divides each cell into eight: a 3x3x3 convolution, then channels to cells."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv: GridConv3d = GridConv3d(in_channels, CELLS * out_channels)

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
        self.conv: GridConv3d = GridConv3d(in_channels, out_channels, 2, 2)

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
        self.input_layer: GridConv3d = GridConv3d(in_channels, channels[0])
        self.middle_block: list[ResBlock3d] = [
            ResBlock3d(middle) for _ in range(num_res_blocks_middle)
        ]
        self.blocks: list[Any] = []
        for at, width in enumerate(channels):
            self.blocks += [ResBlock3d(width) for _ in range(num_res_blocks)]
            if at + 1 < len(channels):
                self.blocks.append(step(width, channels[at + 1]))
        last = channels[-1]
        self.out_layer: list[Any] = [
            nn.LayerNorm(last),
            nn.SiLU(),
            GridConv3d(last, out_channels),
        ]
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
    """Encode a dense occupancy grid with residual blocks, halving it between stages.

    The defaults are those of TRELLIS, which TRELLIS.2 also uses.

    Args:
        in_channels (int): The number of input channels. Default: ``1``.
        latent_channels (int): The number of output channels. Default: ``8``.
        num_res_blocks (int): The blocks of each stage. Default: ``2``.
        channels (tuple): The channels of each stage. Default: ``(32, 128, 512)``.
        num_res_blocks_middle (int): The blocks after the stages. Default: ``2``.
        dtype (mx.Dtype): The dtype of the stages' convolutions.

    Examples:
        >>> net = models.SparseStructureEncoder(channels=(8, 8), num_res_blocks=1)
        >>> net(mx.zeros((1, 1, 8, 8, 8))).shape
        (1, 8, 4, 4, 4)
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

    @overload
    def __call__(self, x: mx.array, sample_posterior: bool = False) -> mx.array: ...

    @overload
    def __call__(
        self, x: mx.array, sample_posterior: bool = False, *, return_raw: bool
    ) -> tuple[mx.array, mx.array, mx.array]: ...

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
    """Decode a dense occupancy grid with residual blocks, doubling it between stages.

    Arguments are those of ``SparseStructureEncoder``, with ``out_channels`` for the
    output and ``latent_channels`` for the input. The middle blocks come first. The
    defaults are those of TRELLIS, which TRELLIS.2 also uses.

    Examples:
        >>> net = models.SparseStructureDecoder(channels=(8, 8), num_res_blocks=1)
        >>> net(mx.zeros((1, 8, 4, 4, 4))).shape
        (1, 1, 8, 8, 8)
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
            number of stages but one: a cell is occupied if its logit is above 0.
        """
        y = self._run(z, "z", [*self.middle_block, *self.blocks])
        return y.astype(z.dtype)


def occupied(logits: mx.array, resolution: int | None = None) -> SparseTensor:
    """Return the occupied cells of a decoded grid, as rows with one feature of 1.

    Args:
        logits: (B, 1, R, R, R): a cell is occupied if its logit is above 0.
        resolution: the extent of a coarser grid to return, a divisor of R. A coarse
            cell is occupied if any cell in it is. By default R.

    Returns:
        A tensor with rows sorted by (batch, x, y, z), the batch size and the grid's
            extent. It may have no rows. Reads their number.

    Examples:
        >>> logits = mx.full((1, 1, 4, 4, 4), -1.0)
        >>> logits[0, 0, 1, 2, 3] = 1.0
        >>> models.trellis2.occupied(logits).coords.tolist()
        [[0, 1, 2, 3]]
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


class SparseVAEDecoder(Trellis2Net):
    """Decode rows with stages of ConvNeXt blocks, up-sampling between stages.

    The defaults are those of TRELLIS.2's shape decoder (see ``dual_grid``). The texture
    decoder has 6 output channels, for materials ``y * 0.5 + 0.5``, and
    ``pred_subdiv=False``.

    Args:
        out_channels (int): The number of output channels. Default: ``7``.
        model_channels (tuple): The channels of each stage.
        latent_channels (int): The number of input channels. Default: ``32``.
        num_blocks (tuple): The ConvNeXt blocks of each stage.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        pred_subdiv (bool): If ``True`` predict which fine cells are active.
        voxel_margin (float): How far a vertex of the shape may lie outside its voxel,
            in voxels; the ``margin`` of ``dual_grid``. Default: ``0.5``.
        dtype (mx.Dtype): The dtype of the stages.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 4)))
        >>> net = models.SparseVAEDecoder(7, (8, 8), 4, (1, 1))
        >>> net(x).channels
        7
    """

    def __init__(
        self,
        out_channels: int = 7,
        model_channels: Sequence[int] = (1024, 512, 256, 128, 64),
        latent_channels: int = 32,
        num_blocks: Sequence[int] = (4, 16, 8, 4, 0),
        *,
        mlp_ratio: float = 4.0,
        pred_subdiv: bool = True,
        voxel_margin: float = 0.5,
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        self.voxel_margin: float = real(voxel_margin, "voxel_margin", 0)
        dtype_name(dtype)
        check_stages(model_channels, num_blocks)
        self.from_latent: nn.Linear = nn.Linear(latent_channels, model_channels[0])
        step = partial(UpBlock, pred_subdiv=pred_subdiv)
        self.blocks: list[list[Any]] = stages(
            model_channels, num_blocks, mlp_ratio, step
        )
        self.output_layer: nn.Linear = nn.Linear(model_channels[-1], out_channels)
        self.pred_subdiv = pred_subdiv
        if dtype != mx.float32:
            self.cast_torso(dtype)

    def cast_torso(self, dtype: mx.Dtype) -> SparseVAEDecoder:
        """Cast the layers between ``from_latent`` and ``output_layer``, except norms.

        Norms compute in float32 and convolutions add in float32, whatever the dtype.
        """
        cast_layers(self.blocks, dtype)
        return self

    @overload
    def __call__(
        self,
        x: SparseTensor,
        *,
        return_subdivisions: Literal[False] = False,
        **rows: Any,
    ) -> SparseTensor: ...

    @overload
    def __call__(
        self, x: SparseTensor, *, return_subdivisions: bool, **rows: Any
    ) -> tuple[SparseTensor, list[SparseTensor]]: ...

    def __call__(
        self,
        x: SparseTensor,
        *,
        subdivisions: Sequence[SparseTensor | mx.array] | None = None,
        coordinates: Sequence[SparseTensor | CoordinateKey | mx.array] | None = None,
        return_subdivisions: bool = False,
    ) -> SparseTensor | tuple[SparseTensor, list[SparseTensor]]:
        """Decode latents.

        Args:
            x: (N, latent_channels) in the dtype of ``from_latent``.
            subdivisions: for each up-sampling the cells to make: (N, 8) bool, or a
                tensor of logits on the coarse rows (what another decoder returned), in
                any order.
            coordinates: for each up-sampling the fine rows to make (the true ones,
                while training).
            return_subdivisions: whether to return the predicted logits too.

        Returns:
            (M, out_channels) on the finest rows, sorted and unique unless they were
            given; with ``return_subdivisions`` also a tensor of (N, 8) logits for each
            up-sampling. No rows left at some stage is legal.

        Raises:
            ValueError: no cells are given nor predicted, or the number given is not
                that of the up-samplings.
        """
        expect_tensor(x)
        ups = len(self.blocks) - 1
        cells = {"subdivisions": subdivisions, "coordinates": coordinates}
        for name, values in cells.items():
            if values is not None and len(values) != ups:
                raise ValueError(
                    f"{name} must have {ups} entries, one for each up-sampling; got "
                    f"{len(values)}"
                )
        if return_subdivisions:
            self._expect_prediction()
        prepare_scan(self, x, **cells)
        y, predicted = self.from_latent(x), []
        outer = y.dtype
        y = y.astype(torso_dtype(self.blocks, outer))
        for at, stage in enumerate(self.blocks):
            for block in stage:
                if not isinstance(block, UpBlock):
                    y = block(y)
                    continue
                chosen = None if subdivisions is None else subdivisions[at]
                if isinstance(chosen, SparseTensor):
                    chosen = ops.align(_on_cells_of(y, chosen), y).feats > 0
                y, logits = block(
                    y, chosen, None if coordinates is None else coordinates[at]
                )
                predicted.append(logits)
        y = y.replace(
            memory.by_rows(
                lambda rows: self.output_layer(ops.layer_norm(rows.astype(outer))),
                y.feats,
                row_bytes=y.channels * (y.dtype.size + 3 * outer.size),
            )
        )
        return (y, predicted) if return_subdivisions else y

    def _expect_prediction(self) -> None:
        if not self.pred_subdiv:
            raise ValueError(
                "a decoder with pred_subdiv=False predicts no subdivisions"
            )

    def upsample(self, x: SparseTensor, times: int) -> mx.array:
        """Return the cells that latents decode to, without features.

        Args:
            x: (N, latent_channels) in the dtype of ``from_latent``.
            times: the number of up-samplings; 0 gives the rows of ``x``.

        Returns:
            (M, 1 + D) int32 rows, sorted and unique but for those of ``x``.

        Raises:
            ValueError: the net predicts no cells, or has fewer up-samplings.
        """
        expect_tensor(x)
        ups = len(self.blocks) - 1
        self._expect_prediction()
        if not 0 <= times <= ups:
            raise ValueError(f"times must be 0 to {ups}; got {times}")
        if times == 0:
            return x.coords
        y = self.from_latent(x)
        y = y.astype(torso_dtype(self.blocks, y.dtype))
        for at, stage in enumerate(self.blocks[:times], 1):
            for block in stage[:-1]:
                y = block(y)
            if at < times:
                y, _ = stage[-1](y)
        return stage[-1].cells(y).coords


def _on_cells_of(y: SparseTensor, x: SparseTensor) -> SparseTensor:
    """Return x on y's lattice: a tensor of a file need not have the same stride."""
    if x.stride == y.stride:
        return x
    cells = x.coordinate_set
    cells = y.manager.inserted(
        cells.shown, y.stride, batch_size=y.batch_size, rows=cells.coords
    )
    return SparseTensor.of(y.manager, cells.key, x.feats)


def dual_grid(y: SparseTensor, margin: float = 0.5) -> DualGrid:
    """Return the dual grid in the output of TRELLIS.2's shape decoder.

    ``ops.dual_grid_mesh`` turns the grid into triangles.

    Args:
        y: (N, 7) output of the decoder.
        margin: how far a vertex may lie outside its cell, in cells: the decoder's
            ``voxel_margin``.

    Examples:
        >>> y = ml.SparseTensor.from_dense(mx.ones((1, 2, 2, 2, 7)))
        >>> grid = models.dual_grid(y)
        >>> ops.dual_grid_mesh(grid).faces.shape
        (12, 3)
    """
    expect_tensor(y, "y")
    if y.channels != 7:
        raise ValueError(f"a dual grid has 7 channels; got {y.channels}")
    vertices = (1 + 2 * margin) * mx.sigmoid(y.feats[:, :3]) - margin
    split = mlx.nn.softplus(y.feats[:, 6:])
    parts = vertices, y.feats[:, 3:6], split
    return DualGrid(*(y.replace(part) for part in parts))


class SparseVAEEncoder(Trellis2Net):
    """Encode rows with stages of ConvNeXt blocks, down-sampling between stages.

    The defaults are those of TRELLIS.2's shape and texture encoders. The shape encoder
    reads the result of ``dual_grid_features``. The texture encoder reads materials ``y
    * 2 - 1``: base colour, metallic, roughness, alpha.

    Args:
        in_channels (int): The number of input channels. Default: ``6``.
        model_channels (tuple): The channels of each stage.
        latent_channels (int): The number of output channels. Default: ``32``.
        num_blocks (tuple): The ConvNeXt blocks of each stage.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        dtype (mx.Dtype): The dtype of the stages' layers, except their norms.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 6)))
        >>> net = models.SparseVAEEncoder(6, (8, 8), 4, (1, 1))
        >>> net(x).shape
        (8, 4)
    """

    def __init__(
        self,
        in_channels: int = 6,
        model_channels: Sequence[int] = (64, 128, 256, 512, 1024),
        latent_channels: int = 32,
        num_blocks: Sequence[int] = (0, 4, 8, 16, 4),
        *,
        mlp_ratio: float = 4.0,
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        dtype_name(dtype)
        check_stages(model_channels, num_blocks)
        self.input_layer: nn.Linear = nn.Linear(in_channels, model_channels[0])
        self.blocks: list[list[Any]] = stages(
            model_channels, num_blocks, mlp_ratio, DownBlock
        )
        self.to_latent: nn.Linear = nn.Linear(model_channels[-1], 2 * latent_channels)
        if dtype != mx.float32:
            cast_layers(self.blocks, dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return (2,) * (len(self.blocks) - 1)

    @overload
    def __call__(
        self, x: SparseTensor, sample_posterior: bool = False
    ) -> SparseTensor: ...

    @overload
    def __call__(
        self, x: SparseTensor, sample_posterior: bool = False, *, return_raw: bool
    ) -> tuple[SparseTensor, SparseTensor, SparseTensor]: ...

    def __call__(
        self,
        x: SparseTensor,
        sample_posterior: bool = False,
        return_raw: bool = False,
    ) -> SparseTensor | tuple[SparseTensor, SparseTensor, SparseTensor]:
        """Encode voxels.

        Args:
            x: (N, in_channels).
            sample_posterior: draw the latents from normal distributions with the
                predicted means and variances; by default the latents are the means.
            return_raw: also return the means and the logarithms of the variances.

        Returns:
            (M, latent_channels) latents on the sorted unique coarse cells, in the
            dtype of ``x``; with ``return_raw`` also the means and the logarithms of
            the variances. No rows are legal.
        """
        expect_tensor(x)
        prepare_scan(self, x)
        y = self.input_layer(x.astype(dtype_of(self.input_layer)))
        y = y.astype(torso_dtype(self.blocks, y.dtype))
        for stage in self.blocks:
            for block in stage:
                y = block(y)
        y = ops.layer_norm(y.astype(dtype_of(self.to_latent)))
        y = self.to_latent(y).astype(x.dtype)
        parts = mx.split(y.feats, 2, axis=1)
        z, mean, log_variance = map(
            y.replace, (posterior(*parts, sample_posterior), *parts)
        )
        return (z, mean, log_variance) if return_raw else z


def dual_grid_features(
    vertices: SparseTensor, intersected: SparseTensor
) -> SparseTensor:
    """Return the shape encoder's input features of a flexible dual grid.

    Args:
        vertices: (N, 3): the vertex of a cell, from its lower corner, 0 to 1.
        intersected: (N, 3): 1 if the cell's edge crosses the surface, else 0; rows in
            any order.

    Examples:
        >>> vertices = ml.SparseTensor.from_dense(mx.full((1, 2, 2, 2, 3), 0.5))
        >>> models.trellis2.dual_grid_features(vertices, vertices).shape
        (8, 6)
    """
    flags = align(intersected, vertices).feats.astype(vertices.dtype)
    return vertices.replace(mx.concatenate([vertices.feats, flags], axis=1) - 0.5)

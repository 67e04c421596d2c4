"""TRELLIS.2's sparse U-nets: from latents to fine voxels, and back.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025. Parameters have the names and layouts of the published checkpoints, so a state
dict loads as it is, without a mapping:

    from_latent, output_layer, input_layer, to_latent            weight, bias
    blocks.<stage>.<block>.conv, .norm           weight, bias    ConvNeXt
    blocks.<stage>.<block>.mlp.0, .mlp.2         weight, bias
    blocks.<stage>.<last>.norm1, .conv1, .conv2  weight, bias    up-, down-sampling
    blocks.<stage>.<last>.to_subdiv              weight, bias    where predicted

Convolutions are (C_out, x, y, z, C_in) there too; a fine cell's offset counts its first
axis fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn

from ... import memory, nn, ops
from ...checks import dtype_name, real
from ...coordinate_set import CoordinateKey
from ...ops.dual_grid import DualGrid
from ...prepare import prepare_scan
from ...tensor import SparseTensor, align, expect_tensor
from .blocks import (
    ConvNeXtBlock,
    DownBlock,
    UpBlock,
    cast_layers,
    check_stages,
    dtype_of,
    posterior,
    torso_dtype,
)
from .published import Trellis2Net


class SparseVAEDecoder(Trellis2Net):
    """Stages of ConvNeXt blocks, each but the last followed by an up-sampling.

    The defaults are TRELLIS.2's shape decoder (see ``dual_grid``). Its texture decoder
    has 6 output channels, for materials ``y * 0.5 + 0.5``, and ``pred_subdiv=False``.

    Args:
        out_channels (int): The number of output channels. Default: ``7``.
        model_channels (tuple): The channels of each stage.
            Default: ``(1024, 512, 256, 128, 64)``.
        latent_channels (int): The number of input channels. Default: ``32``.
        num_blocks (tuple): The ConvNeXt blocks of each stage.
            Default: ``(4, 16, 8, 4, 0)``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        pred_subdiv (bool): If ``True`` predict which fine cells there are.
            Default: ``True``.
        voxel_margin (float): How far a vertex of the shape may lie outside its voxel,
            in voxels; the ``margin`` of ``dual_grid``. Default: ``0.5``.
        dtype (mx.Dtype): The dtype of the stages, see ``cast_torso``.
            Default: ``mx.float32``.
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
        check_stages(model_channels, num_blocks)
        self.voxel_margin = real(voxel_margin, "voxel_margin", 0)
        dtype_name(dtype)
        self.from_latent = nn.Linear(latent_channels, model_channels[0])
        self.blocks = []
        for at, count in enumerate(num_blocks):
            width = model_channels[at]
            stage = [ConvNeXtBlock(width, mlp_ratio) for _ in range(count)]
            if at + 1 < len(model_channels):
                stage.append(UpBlock(width, model_channels[at + 1], pred_subdiv))
            self.blocks.append(stage)
        self.output_layer = nn.Linear(model_channels[-1], out_channels)
        self.pred_subdiv = pred_subdiv
        if dtype != mx.float32:
            self.cast_torso(dtype)

    def cast_torso(self, dtype: mx.Dtype) -> SparseVAEDecoder:
        """Cast the layers between ``from_latent`` and ``output_layer``, except norms.

        Norms compute in float32 and convolutions add in float32, whatever the dtype.
        """
        cast_layers(self.blocks, dtype)
        return self

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
        for name, given in cells.items():
            if given is not None and len(given) != ups:
                raise ValueError(
                    f"{name} must have {ups} entries, one for each up-sampling; got "
                    f"{len(given)}"
                )
        if return_subdivisions and not self.pred_subdiv:
            raise ValueError(
                "a decoder with pred_subdiv=False predicts no subdivisions"
            )
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

    def upsample(self, x: SparseTensor, times: int) -> mx.array:
        """Return the cells that latents become, without features.

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
        if not self.pred_subdiv:
            raise ValueError(
                "a decoder with pred_subdiv=False predicts no subdivisions"
            )
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
    """Return x on y's lattice: of a file's tensor the stride need not be known."""
    if x.stride == y.stride:
        return x
    given, facts = x.coordinate_set, {"batch_size": y.batch_size}
    held = y.manager.inserted(given.shown, y.stride, **facts, rows=given.coords)
    return SparseTensor.of(y.manager, held.key, x.feats)


def dual_grid(y: SparseTensor, margin: float = 0.5) -> DualGrid:
    """Read the output of TRELLIS.2's shape decoder.

    ``ops.dual_grid_mesh`` makes triangles of it.

    Args:
        y: (N, 7) output.
        margin: how far a vertex may lie outside its cell, in cells: the decoder's
            ``voxel_margin``.
    """
    expect_tensor(y, "y")
    if y.channels != 7:
        raise ValueError(f"a dual grid has 7 channels; got {y.channels}")
    vertices = (1 + 2 * margin) * mx.sigmoid(y.feats[:, :3]) - margin
    split = mlx.nn.softplus(y.feats[:, 6:])
    parts = vertices, y.feats[:, 3:6], split
    return DualGrid(*(y.replace(part) for part in parts))


class SparseVAEEncoder(Trellis2Net):
    """Stages of ConvNeXt blocks, each but the last followed by a down-sampling.

    The defaults are TRELLIS.2's shape and texture encoders. The shape encoder reads
    what ``dual_grid_features`` makes, the texture encoder materials ``y * 2 - 1``:
    base colour, metallic, roughness, alpha.

    Args:
        in_channels (int): The number of input channels. Default: ``6``.
        model_channels (tuple): The channels of each stage.
            Default: ``(64, 128, 256, 512, 1024)``.
        latent_channels (int): The number of output channels. Default: ``32``.
        num_blocks (tuple): The ConvNeXt blocks of each stage.
            Default: ``(0, 4, 8, 16, 4)``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        dtype (mx.Dtype): The dtype of the stages' layers, norms apart.
            Default: ``mx.float32``.
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
        check_stages(model_channels, num_blocks)
        dtype_name(dtype)
        self.input_layer = nn.Linear(in_channels, model_channels[0])
        self.blocks = []
        for at, count in enumerate(num_blocks):
            width = model_channels[at]
            stage = [ConvNeXtBlock(width, mlp_ratio) for _ in range(count)]
            if at + 1 < len(model_channels):
                stage.append(DownBlock(width, model_channels[at + 1]))
            self.blocks.append(stage)
        self.to_latent = nn.Linear(model_channels[-1], 2 * latent_channels)
        if dtype != mx.float32:
            cast_layers(self.blocks, dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return (2,) * (len(self.blocks) - 1)

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
        intersected: (N, 3): 1 where the cell's edge crosses the surface, else 0; rows
            in any order.
    """
    flags = align(intersected, vertices).feats.astype(vertices.dtype)
    return vertices.replace(mx.concatenate([vertices.feats, flags], axis=1) - 0.5)

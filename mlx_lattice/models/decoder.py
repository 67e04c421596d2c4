"""SparseVAEDecoder: TRELLIS.2's sparse U-net decoder, from latents to fine voxels.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025. Parameters have the names and layouts of the published checkpoints, so a state
dict loads as it is, without a mapping:

    from_latent, output_layer                    weight, bias
    blocks.<stage>.<block>.conv, .norm           weight, bias    ConvNeXt
    blocks.<stage>.<block>.mlp.0, .mlp.2         weight, bias
    blocks.<stage>.<last>.norm1, .conv1, .conv2  weight, bias    up-sampling
    blocks.<stage>.<last>.to_subdiv              weight, bias    where predicted

Convolutions are (C_out, x, y, z, C_in) there too; a fine cell's offset counts its first
axis fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn

from .. import nn, ops
from ..coordinate_set import CoordinateKey
from ..ops.dual_grid import DualGrid
from ..problem import dtype_name
from ..tensor import SparseTensor, expect_tensor
from .pretrained import Pretrained

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
        last = _zero(nn.Linear(hidden, channels))
        self.mlp = [nn.Linear(channels, hidden), mlx.nn.SiLU(), last]

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Return features on the rows of ``x``."""
        y = self.mlp[0](self.norm(self.conv(x)))
        return x + self.mlp[2](y.replace(self.mlp[1](y.feats)))


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
        self.conv2 = _zero(nn.SubmConv3d(out_channels, out_channels, 3))
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
        y = self.conv1(ops.silu(self.norm1(x)))
        y = ops.channel_to_space(
            y, subdivision=subdivision, coordinates=coordinates, order=ORDER
        )
        skip = ops.channel_to_space(x, coordinates=y, order=ORDER)
        skip = skip.replace(mx.repeat(skip.feats, self.repeats, axis=1))
        return self.conv2(ops.silu(self.norm2(y))) + skip, logits


class SparseVAEDecoder(Pretrained):
    """Stages of ConvNeXt blocks, each but the last followed by an up-sampling.

    TRELLIS.2's published configurations call the two ``SparseConvNeXtBlock3d`` and
    ``SparseResBlockC2S3d``.

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
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        if len(model_channels) != len(num_blocks) or min(num_blocks, default=-1) < 0:
            raise ValueError(
                "model_channels and num_blocks have one entry for each stage, of 1 or "
                f"more and 0 or more; got {model_channels} and {num_blocks}"
            )
        dtype_name(dtype)
        self.from_latent = nn.Linear(latent_channels, model_channels[0])
        self.blocks = []
        for at, (width, count) in enumerate(
            zip(model_channels, num_blocks, strict=True)
        ):
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
        for stage in self.blocks:
            for block in stage:
                for module in block.modules():
                    if not isinstance(module, nn.LayerNorm) and module is not block:
                        module.set_dtype(dtype)
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
                tensor of logits on the coarse rows (what another decoder returned).
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
        for name, given in (
            ("subdivisions", subdivisions),
            ("coordinates", coordinates),
        ):
            if given is not None and len(given) != ups:
                raise ValueError(
                    f"{name} must have {ups} entries, one for each up-sampling; got "
                    f"{len(given)}"
                )
        if return_subdivisions and not self.pred_subdiv:
            raise ValueError(
                "a decoder with pred_subdiv=False predicts no subdivisions"
            )
        y, predicted = self.from_latent(x), []
        outer = y.dtype
        y = y.astype(self._torso_dtype(outer))
        for at, stage in enumerate(self.blocks):
            for block in stage:
                if not isinstance(block, UpBlock):
                    y = block(y)
                    continue
                chosen = None if subdivisions is None else subdivisions[at]
                if isinstance(chosen, SparseTensor):
                    chosen = ops.align(chosen, y).feats > 0
                y, logits = block(
                    y, chosen, None if coordinates is None else coordinates[at]
                )
                predicted.append(logits)
        y = self.output_layer(ops.layer_norm(y.astype(outer)))
        return (y, predicted) if return_subdivisions else y

    def _torso_dtype(self, default: mx.Dtype) -> mx.Dtype:
        """Return the dtype of the features that the stages' weights take."""
        for stage in self.blocks:
            for block in stage:
                conv = block.conv1 if isinstance(block, UpBlock) else block.conv
                return conv.get("scales", conv.weight).dtype
        return default


def dual_grid(y: SparseTensor, margin: float = 0.5) -> DualGrid:
    """Read the output of TRELLIS.2's shape decoder.

    ``ops.dual_grid_mesh`` makes triangles of it.

    Args:
        y: (N, 7) output.
        margin: how far a vertex may lie outside its cell, in cells.
    """
    expect_tensor(y, "y")
    if y.channels != 7:
        raise ValueError(f"a dual grid has 7 channels; got {y.channels}")
    vertices = (1 + 2 * margin) * mx.sigmoid(y.feats[:, :3]) - margin
    split = mlx.nn.softplus(y.feats[:, 6:])
    parts = vertices, y.feats[:, 3:6], split
    return DualGrid(*(y.replace(part) for part in parts))


def _zero(module: nn.Module) -> nn.Module:
    """Set every parameter to zero: a residual branch then starts as the identity."""
    zeros = {name: mx.zeros_like(value) for name, value in module.parameters().items()}
    return module.update(zeros)

"""SparseVAEEncoder: TRELLIS.2's sparse U-net encoder, from fine voxels to latents.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025. Parameters have the names and layouts of the published checkpoints:

    input_layer, to_latent                       weight, bias
    blocks.<stage>.<block>.conv, .norm           weight, bias    ConvNeXt
    blocks.<stage>.<block>.mlp.0, .mlp.2         weight, bias
    blocks.<stage>.<last>.norm1, .conv1, .conv2  weight, bias    down-sampling
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ... import nn, ops
from ...dtypes import dtype_name
from ...tensor import SparseTensor, align, expect_tensor
from .blocks import ConvNeXtBlock, DownBlock, check_stages
from .published import Trellis2Net
from .torso import cast_layers, dtype_of, torso_dtype


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

    def __call__(
        self,
        x: SparseTensor,
        sample_posterior: bool = False,
        return_raw: bool = False,
    ) -> SparseTensor | tuple[SparseTensor, SparseTensor, SparseTensor]:
        """Encode voxels.

        Args:
            x: (N, in_channels).
            sample_posterior: whether to draw the latents, from normal distributions
                that the net gives mean and variance of; else they are the means.
            return_raw: whether to return means and logarithms of variances too.

        Returns:
            (M, latent_channels) latents on the sorted unique coarse cells, in the
            dtype of ``x``; with ``return_raw`` also the means and the logarithms of
            the variances. No rows are legal.
        """
        expect_tensor(x)
        y = self.input_layer(x.astype(dtype_of(self.input_layer)))
        y = y.astype(torso_dtype(self.blocks, y.dtype))
        for stage in self.blocks:
            for block in stage:
                y = block(y)
        y = ops.layer_norm(y.astype(dtype_of(self.to_latent)))
        y = self.to_latent(y).astype(x.dtype)
        mean, log_variance = (y.replace(half) for half in mx.split(y.feats, 2, axis=1))
        z = mean
        if sample_posterior:
            noise = mx.random.normal(mean.feats.shape, dtype=mean.dtype)
            z = mean + mx.exp(0.5 * log_variance.feats) * noise
        return (z, mean, log_variance) if return_raw else z


def dual_grid_features(
    vertices: SparseTensor, intersected: SparseTensor
) -> SparseTensor:
    """Return what the shape encoder reads of a flexible dual grid.

    Args:
        vertices: (N, 3): the vertex of a cell, from its lower corner, 0 to 1.
        intersected: (N, 3): 1 where the cell's edge crosses the surface, else 0; rows
            in any order.
    """
    flags = align(intersected, vertices).feats.astype(vertices.dtype)
    return vertices.replace(mx.concatenate([vertices.feats, flags], axis=1) - 0.5)

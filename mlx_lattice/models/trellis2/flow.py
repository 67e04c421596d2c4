"""TRELLIS.2's flow models: velocities of latents, on a dense grid and on voxels.

Xiang et al., "Native and Compact Structured Latents for 3D Generation" (TRELLIS.2),
2025. Parameters have the names and layouts of the published checkpoints:

    input_layer, out_layer, t_embedder.mlp.{0, 2}       weight, bias
    adaLN_modulation.1                                  weight, bias   shared
    blocks.<i>.modulation                                              shared
    blocks.<i>.adaLN_modulation.1                       weight, bias   not shared
    blocks.<i>.norm2                                    weight, bias
    blocks.<i>.self_attn.{to_qkv, to_out}               weight, bias
    blocks.<i>.cross_attn.{to_q, to_kv, to_out}         weight, bias
    blocks.<i>.{self, cross}_attn.{q, k}_rms_norm       gamma
    blocks.<i>.mlp.mlp.{0, 2}                           weight, bias

The published tables ``rope_phases`` and ``pos_emb`` are computed here, not loaded.
"""

from __future__ import annotations

import mlx.core as mx

from ... import nn, ops
from ...checks import dtype_name
from ...nn.attention import modulation_layers, modulation_of
from ...nn.layers import ModuleCache
from ...prepare import prepare_scan
from ...tensor import SparseTensor, align, expect_tensor
from .blocks import (
    TimestepEmbedder,
    Trellis2Net,
    cast_layers,
    dtype_of,
    place_features,
    torso_dtype,
)

ROPE = (1.0, 10000.0)
PLACES = ("ape", "rope")


class FlowModel(Trellis2Net):
    """The transformer that both flow models are; it has no call of its own.

    Args:
        resolution (int): The extent of the grid of latents.
        in_channels (int): The number of input channels.
        model_channels (int): The channels between the first and the last layer.
        cond_channels (int): The channels of the image's tokens.
        out_channels (int): The number of output channels.
        num_blocks (int): The number of blocks.
        num_heads (int, optional): The heads of an attention; by default as many as
            have ``num_head_channels``.
        num_head_channels (int): The channels of a head. Default: ``64``.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        pe_mode (str): How blocks know places: ``"rope"`` rotates queries and keys,
            ``"ape"`` adds sines and cosines once. Default: ``"ape"``.
        rope_freq (tuple): The fastest rotation in radians a cell, and how much slower
            the slowest is. Default: ``(1, 10000)``.
        share_mod (bool): If ``True`` one layer makes the modulation of all blocks.
            Default: ``False``.
        qk_rms_norm (bool): If ``True`` normalise queries and keys of the attention
            among rows. Default: ``False``.
        qk_rms_norm_cross (bool): The same of the attention to tokens.
            Default: ``False``.
        dtype (mx.Dtype): The dtype of the blocks' linear layers.
            Default: ``mx.float32``.
    """

    def __init__(
        self,
        resolution: int,
        in_channels: int,
        model_channels: int,
        cond_channels: int,
        out_channels: int,
        num_blocks: int,
        num_heads: int | None = None,
        num_head_channels: int = 64,
        mlp_ratio: float = 4.0,
        pe_mode: str = "ape",
        rope_freq: tuple[float, float] = ROPE,
        share_mod: bool = False,
        qk_rms_norm: bool = False,
        qk_rms_norm_cross: bool = False,
        dtype: mx.Dtype = mx.float32,
    ):
        super().__init__()
        dtype_name(dtype)
        if pe_mode not in PLACES:
            raise ValueError(f"pe_mode must be one of {PLACES}; got {pe_mode!r}")
        self.resolution, self.pe_mode = resolution, pe_mode
        self.in_channels, self.out_channels = in_channels, out_channels
        self.cond_channels = cond_channels
        self.t_embedder = TimestepEmbedder(model_channels)
        if share_mod:
            self.adaLN_modulation = modulation_layers(model_channels)
        self.input_layer = nn.Linear(in_channels, model_channels)
        frequency, base = self._rotations(rope_freq)
        self.blocks = [
            nn.ModulatedTransformerBlock(
                model_channels,
                num_heads or max(1, model_channels // num_head_channels),
                cond_channels,
                mlp_ratio,
                share_mod=share_mod,
                rope=pe_mode == "rope",
                rope_base=base,
                rope_frequency=frequency,
                qk_rms_norm=qk_rms_norm,
                qk_rms_norm_cross=qk_rms_norm_cross,
            )
            for _ in range(num_blocks)
        ]
        self.out_layer = nn.Linear(model_channels, out_channels)
        if dtype != mx.float32:
            cast_layers(self.blocks, dtype)

    def _rotations(self, rope_freq: tuple[float, float]) -> tuple[float, float]:
        return tuple(rope_freq)

    def _velocity(
        self,
        x: SparseTensor,
        t: mx.array,
        cond: SparseTensor | mx.array,
        cond_lengths: mx.array | None,
    ) -> SparseTensor:
        packed = not isinstance(cond, SparseTensor) and cond.ndim == 2
        if packed and cond_lengths is not None:  # once, not in each block
            cond, cond_lengths = ops.to_sequences(cond, cond_lengths)
        tokens = cond.channels if isinstance(cond, SparseTensor) else cond.shape[-1]
        if tokens != self.cond_channels:
            raise ValueError(
                f"the net reads tokens of {self.cond_channels} channels; got {tokens}"
            )
        t = self._times(t, x.batch_size)
        y = self.input_layer(x.astype(dtype_of(self.input_layer)))
        outer = y.dtype
        torso = torso_dtype(self.blocks, outer)
        condition = self.t_embedder(t)
        if "adaLN_modulation" in self:
            condition = modulation_of(self.adaLN_modulation, condition)
        condition, cond = condition.astype(torso), cond.astype(torso)
        y = y.astype(torso)
        if self.pe_mode == "ape":
            rows = y.coordinate_set.coords
            y = y + place_features(rows[:, 1:], y.channels).astype(torso)
        for block in self.blocks:
            y = block(y, condition, cond, cond_lengths)
        y = ops.layer_norm(y.astype(outer)).astype(dtype_of(self.out_layer))
        return self.out_layer(y).astype(x.dtype)

    def _times(self, t: mx.array | float, batches: int) -> mx.array:
        t = mx.array(t) if not isinstance(t, mx.array) else t
        if tuple(t.shape) not in ((), (1,), (batches,)):
            raise ValueError(
                f"t must be one time, or ({batches},), one for each batch element; got "
                f"shape {tuple(t.shape)}"
            )
        return t.reshape(-1)


class SLatFlowModel(FlowModel):
    """The flow of structured latents, of shape or of texture: on voxels.

    Arguments are those of ``FlowModel``; the sizes of TRELLIS.2-4B's are in
    ``trellis2.FLOW``. The texture model's input is its own latents and the shape's.
    """

    def __call__(
        self,
        x: SparseTensor,
        t: mx.array | float,
        cond: SparseTensor | mx.array,
        concat_cond: SparseTensor | None = None,
        *,
        cond_lengths: mx.array | None = None,
    ) -> SparseTensor:
        """Return the velocity at the rows of ``x``, in its dtype.

        Args:
            x: (N, C) latents.
            t: (B,) times of the batch elements, or one for all, from 0 to 1000.
            cond: (B, M, cond_channels) tokens of the images, a tensor of them, or
                (T, cond_channels) tokens of all images in a row, in any floating dtype.
            concat_cond: a tensor of the same rows, whose channels follow those of x.
            cond_lengths: (B,) integers: tokens of each image; by default M.
        """
        expect_tensor(x)
        if concat_cond is not None:
            more = align(concat_cond, x).feats.astype(x.dtype)
            x = x.replace(mx.concatenate([x.feats, more], axis=1))
        if x.channels != self.in_channels:
            raise ValueError(
                f"the net reads {self.in_channels} channels, of x and concat_cond; got "
                f"{x.channels}"
            )
        prepare_scan(self, x, t, cond, cond_lengths, call=self._velocity)
        return self._velocity(x, t, cond, cond_lengths)


class SparseStructureFlowModel(FlowModel):
    """The flow of the latents of a dense occupancy grid.

    Arguments are those of ``FlowModel``, but ``rope_freq`` has no effect: its
    rotations are always of (1, 10000), as published. The sizes of TRELLIS.2-4B's are in
    ``trellis2.STRUCTURE_FLOW``.
    """

    def _rotations(self, rope_freq: tuple[float, float]) -> tuple[float, float]:
        return ROPE

    def __call__(
        self,
        x: mx.array,
        t: mx.array | float,
        cond: SparseTensor | mx.array,
        *,
        cond_lengths: mx.array | None = None,
    ) -> mx.array:
        """Return the velocity of ``x``, (B, out_channels, R, R, R) in its dtype.

        Args:
            x: (B, in_channels, R, R, R), R the resolution; channels stand first, as
                published.
            t, cond, cond_lengths: as of ``SLatFlowModel``.
        """
        size = self.resolution
        if x.ndim != 5 or tuple(x.shape[1:]) != (self.in_channels, *(size,) * 3):
            raise ValueError(
                f"x must have shape (B, {self.in_channels}, {size}, {size}, {size}); "
                f"got {tuple(x.shape)}"
            )
        rows = x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)
        cells = self._grid(x.shape[0]).replace(rows.reshape(-1, self.in_channels))
        prepare_scan(self, cells, t, cond, cond_lengths, call=self._velocity)
        y = self._velocity(cells, t, cond, cond_lengths).feats
        y = y.reshape(x.shape[0], -1, self.out_channels).transpose(0, 2, 1)
        return y.reshape(x.shape[0], self.out_channels, *x.shape[2:])

    def _grid(self, batches: int) -> SparseTensor:
        """Return a tensor of all cells; kept, since plans live as long as it."""
        known = self.__dict__.setdefault("_grids", ModuleCache())
        cells = known.get("last")
        if cells is None or cells.batch_size != batches:
            shape = batches, *(self.resolution,) * 3
            mask = mx.ones(shape, dtype=mx.bool_)
            cells = SparseTensor.from_dense(mx.zeros((*shape, 1)), mask)
            known["last"] = cells
        return cells

"""Point Transformer V3: a U-net of attention along curves, and its encoders alone.

Wu et al., "Point Transformer V3", 2024; Sonata (Wu et al., 2025), Concerto (Zhang et
al., 2025) and Utonia are encoders of the second and the third form. Parameters are
named as in Pointcept's checkpoints, but for the ``layers`` of a Sequential, which
``io.import_checkpoint`` leaves out by itself, as it does a segmentor's ``backbone``:

    embedding.stem.{conv, linear, norm}       seg_head
    enc.enc<level>.down.{proj, norm.0}        dec.dec<level>.up.{proj, proj_skip}.{0, 1}
    enc.enc<level>.block<i>.{cpe.{0, 1, 2}, norm1.0, attn.{qkv, proj}, ls1.0,
                             norm2.0, mlp.0.{fc1, fc2}, ls2.0}       dec alike
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .. import nn, ops
from ..checks import one_of
from ..geometry.curves import check_curve
from ..ops.pool import upsample_nearest
from ..prepare import prepare_scan
from ..tensor import SparseTensor, expect_tensor
from .ptv3_config import VARIANTS, count_levels, published_arguments
from .recipe import Voxels
from .segmentor import Segmentor
from .serialized import Level, SerializedBlock

ORDERS = ("z", "z-trans", "hilbert", "hilbert-trans")
STRIDE = (2, 2, 2, 2)
ENC_DEPTHS, DEC_DEPTHS = (2, 2, 2, 6, 2), (2, 2, 2, 2)
ENC_CHANNELS, DEC_CHANNELS = (32, 64, 128, 256, 512), (64, 64, 128, 256)
ENC_HEADS, DEC_HEADS = (2, 4, 8, 16, 32), (4, 4, 8, 16)
ENC_PATCHES, DEC_PATCHES = (1024,) * 5, (1024,) * 4


class PTv3(Segmentor):
    """Point Transformer V3, in the three forms of Pointcept, or its encoder.

    ``m1``, the first, has a 5x5x5 stem and batch norms outside its blocks, and its
    curves lose bits as cells grow; ``m2``, of Sonata and Concerto, has a linear stem
    and layer norms, and its curves fit each level; ``m3``, of Utonia, also rotates
    queries and keys by positions.

    Coordinates must count from 0, since the curves do.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels; 0 for those of the decoder.
        variant (str): ``"m1"``, ``"m2"`` or ``"m3"``. Default: ``"m1"``.
        order (tuple): The curves, one a block in turn: see ``ops.curve_order``.
        stride (tuple): The extent of a level's cells in those of the one before.
        enc_depths, enc_channels, enc_num_head, enc_patch_size (tuple): The numbers of
            blocks, channels, heads and rows of a patch of each level, from the finest.
        dec_depths, dec_channels, dec_num_head, dec_patch_size (tuple): The same of the
            decoder, which has a level fewer.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        qkv_bias (bool): If ``True`` queries, keys and values have a bias.
            Default: ``True``.
        qk_scale (float, optional): The factor of the scores.
        proj_drop (float): The probability to zero an entry. Default: ``0``.
        drop_path (float): The probability to leave a row's branch out, of the last
            block; the first block's is 0. Default: ``0.3``.
        layer_scale (float, optional): What factors of the branches begin at; by
            default there are none.
        shuffle_orders (bool): If ``True`` each level shuffles its curves while
            training, by Python's ``random``; evaluation never does. Default: ``True``.
        enable_flash (bool): If ``False`` no patch is longer than the smallest batch
            element, as Pointcept has it without FlashAttention. Default: ``True``.
        enable_rpe (bool): If ``True`` scores have a bias by relative positions, a table
            a block, which takes ``enable_flash=False``. Default: ``False``.
        enc_mode (bool): If ``True`` there is no decoder. Default: ``False``.
        rope_base (float): The base of ``ops.rotary``, in ``m3``. Default: ``10000``.
        dec_rope_enable (bool): If ``False`` the decoder of ``m3`` rotates nothing.
            Default: ``True``.
        legacy (bool, optional): If ``True`` the convolution of a block reads the MLP
            branch of the block before it, not the block's output. Weights of ``m1``
            that were trained with Pointcept 1.5.1 or older need this: all released
            ones. By default as ``about.legacy`` says.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int = 0,
        variant: str = "m1",
        *,
        order: Sequence[str] = ORDERS,
        stride: Sequence[int] = STRIDE,
        enc_depths: Sequence[int] = ENC_DEPTHS,
        enc_channels: Sequence[int] = ENC_CHANNELS,
        enc_num_head: Sequence[int] = ENC_HEADS,
        enc_patch_size: Sequence[int] = ENC_PATCHES,
        dec_depths: Sequence[int] = DEC_DEPTHS,
        dec_channels: Sequence[int] = DEC_CHANNELS,
        dec_num_head: Sequence[int] = DEC_HEADS,
        dec_patch_size: Sequence[int] = DEC_PATCHES,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
        drop_path: float = 0.3,
        layer_scale: float | None = None,
        shuffle_orders: bool = True,
        enable_flash: bool = True,
        enable_rpe: bool = False,
        enc_mode: bool = False,
        rope_base: float = 10000.0,
        dec_rope_enable: bool = True,
        legacy: bool | None = None,
        dims: int = 3,
    ):
        super().__init__()
        encoder = enc_depths, enc_channels, enc_num_head, enc_patch_size
        decoder = dec_depths, dec_channels, dec_num_head, dec_patch_size
        levels = count_levels(stride, encoder, () if enc_mode else decoder)
        one_of(variant, VARIANTS, "variant")
        if variant == "m1" and any(s < 1 or s & (s - 1) for s in stride):
            raise ValueError(f"strides of m1 must be powers of two; got {stride}")
        if legacy and variant != "m1":
            raise ValueError(
                f"legacy=True is for m1; Pointcept 1.5.1 has no {variant}, so its "
                "weights are from newer code"
            )
        if enable_rpe and enable_flash:
            raise ValueError(
                "enable_rpe=True needs enable_flash=False, as published: scores with a "
                "bias are computed one by one, in patches that the smallest batch "
                "element fills"
            )
        self.variant, self.enc_mode, self._legacy = variant, enc_mode, legacy
        self.order = (order,) if isinstance(order, str) else tuple(order)
        if not self.order:
            raise ValueError("order must name one curve or more; got none")
        for curve in self.order:
            check_curve(curve, dims)
        self.stride, self.dims = tuple(stride), dims
        self.shuffle_orders, self.enable_flash = shuffle_orders, enable_flash
        self.rope_base = rope_base if variant == "m3" else None
        first, norm = enc_channels[0], nn.LayerNorm
        if variant == "m1":
            norm = partial(nn.BatchNorm, eps=1e-3, momentum=0.01)
            conv = getattr(nn, f"SubmConv{dims}d")
            stem = {"conv": conv(in_channels, first, 5, bias=False)}
        else:
            stem = {"linear": nn.Linear(in_channels, first)}
        self.embedding = nn.Module()
        self.embedding.stem = nn.Sequential(**stem, norm=norm(first), act=nn.GELU())

        def stage(sizes, s, drops, base) -> nn.Module:
            made = nn.Module()
            depths, channels, heads, patches = sizes
            for i in range(depths[s]):
                made[f"block{i}"] = SerializedBlock(
                    channels[s],
                    heads[s],
                    patches[s],
                    order_index=i,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                    qk_scale=qk_scale,
                    rope_base=base,
                    enable_rpe=enable_rpe,
                    proj_drop=proj_drop,
                    drop_path=drops[i],
                    layer_scale=layer_scale,
                    dims=dims,
                )
            return made

        self.enc, drops = nn.Module(), _ramp(drop_path, enc_depths)
        for s in range(levels):
            made = self.enc[f"enc{s}"] = stage(encoder, s, drops[s], self.rope_base)
            if s:
                wide, cell = enc_channels[s], stride[s - 1]
                made.down = nn.GridPooling(enc_channels[s - 1], wide, cell, norm(wide))
        deeper = [*dec_channels, enc_channels[-1]]
        last = sum(enc_channels) if enc_mode else deeper[0]
        if not enc_mode:
            self.dec, drops = nn.Module(), _ramp(drop_path, dec_depths)
            base = self.rope_base if dec_rope_enable else None
            for s in range(levels - 1):
                made = self.dec[f"dec{s}"] = stage(decoder, s, drops[s][::-1], base)
                wide = deeper[s + 1], enc_channels[s], deeper[s]
                made.up = nn.GridUnpooling(*wide, stride[s], norm)
        if num_classes:
            self.seg_head = nn.Linear(last, num_classes)

    @classmethod
    def of_config(
        cls,
        config: Mapping[str, Any],
        variant: str | None = None,
        legacy: bool | None = None,
    ) -> PTv3:
        """Return the net of a published configuration.

        Args:
            config: of Pointcept's ``DefaultSegmentorV2`` or of its backbone, or what
                Sonata, Concerto and Utonia keep with their weights.
            variant: as for the net, where the configuration has no ``type``.
            legacy: as for the net, since a configuration does not say it.

        Raises:
            ValueError: it asks for what this net does not do, such as ``pdnorm_bn``,
                or says no form.
        """
        return cls(**published_arguments(config, variant), legacy=legacy)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return self.stride

    def __call__(
        self, x: SparseTensor, positions: mx.array | None = None
    ) -> SparseTensor:
        """Return scores, or features where there are no classes.

        Args:
            x: input; its coordinates count from 0.
            positions: (N, dims) float of its rows, which ``m3`` needs; others do not
                read them.

        Returns:
            a tensor on the rows of ``x``, in their order; with ``enc_mode`` and no
            classes one on the coarsest cells, see ``encode`` and ``upcast``.

        Raises:
            ValueError: a coordinate is below 0, or positions are missing.
        """
        prepare_scan(self, x, positions=positions)
        levels = self._levels(x, positions)
        skips = self._encode(x, levels)
        if self.enc_mode:
            y = self.upcast(skips) if "seg_head" in self else skips[-1]
        else:
            y = self._decode(skips, levels)
        return self.seg_head(y) if "seg_head" in self else y

    def encode(
        self, x: SparseTensor, positions: mx.array | None = None
    ) -> list[SparseTensor]:
        """Return the encoder's features of each level, from the finest."""
        return self._encode(x, self._levels(x, positions))

    def upcast(self, levels: Sequence[SparseTensor]) -> SparseTensor:
        """Return the features of all levels on the rows of the finest, side by side.

        Args:
            levels: what ``encode`` returned.
        """
        *finer, y = levels
        for i, skip in reversed(list(enumerate(finer))):
            y = ops.cat([skip, upsample_nearest(y, self.stride[i], skip)])
        return y

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``.

        Raises:
            ValueError: the net has no classes.
        """
        if "seg_head" not in self:
            raise ValueError("this PTv3 has no classes: give num_classes")
        return super().score_voxels(voxels)

    @property
    def legacy(self) -> bool:
        """Whether the convolution of a block reads the MLP branch of the one before."""
        if self._legacy is None:
            return self.variant == "m1" and self.about.legacy
        return self._legacy

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of features that the net takes."""
        norm = self.embedding.stem.layers["norm"]
        return norm.weight.dtype if "weight" in norm else super().dtype

    def _levels(self, x: SparseTensor, positions: mx.array | None) -> list[Level]:
        """Return what the blocks of each level share."""
        expect_tensor(x)
        if self.rope_base and positions is None:
            raise ValueError(
                f"m3 rotates by positions: pass positions, ({len(x)}, {self.dims}) "
                "float, a row each"
            )
        low, high = x.coordinate_set.bounds
        if min(low[1:]) < 0:
            raise ValueError(
                f"coordinates must count from 0, since the curves do; got "
                f"{min(low[1:])}: subtract the least ones"
            )
        x.manager.cells(x.key, self.stride)
        most, legacy = max(high[1:]), self.legacy
        # Pointcept 1.5 counts the bits of the largest coordinate, 1.6 those of the
        # next one: another Hilbert curve if the largest is 2^k - 1.
        bits, levels, cell = (most + (not legacy)).bit_length(), [], 1
        for stride in (1, *self.stride):
            cell *= stride
            if self.variant == "m1":
                bits = max(0, bits - (stride - 1).bit_length())
            else:
                bits = (most // cell + 1).bit_length()
            orders = self.order
            if self.shuffle_orders and self.training:
                orders = tuple(random.sample(orders, len(orders)))
            levels.append(Level(orders, bits, self.enable_flash, legacy, None))
        if self.rope_base:
            here = x.replace(positions.astype(mx.float32))
            for s, level in enumerate(levels):
                # The mean of a cell's rows, which are means themselves.
                here = self.enc[f"enc{s}"].down.positions(here) if s else here
                levels[s] = level._replace(positions=here.feats)
        return levels

    def _encode(self, x: SparseTensor, levels: Sequence[Level]) -> list[SparseTensor]:
        x, found = self.embedding.stem(x), []
        for s, level in enumerate(levels):
            stage = self.enc[f"enc{s}"]
            x = stage.down(x) if s else x
            found.append(x := _blocks(stage, x, level))
        return found

    def _decode(
        self, skips: list[SparseTensor], levels: Sequence[Level]
    ) -> SparseTensor:
        x = skips.pop()
        while skips:
            s, skip = len(skips) - 1, skips.pop()
            stage = self.dec[f"dec{s}"]
            rows, cells = stage.up.branches(x, skip)
            # The first form's convolution there sees the rows' own branch alone.
            alone = rows if self.variant == "m1" else None
            x = _blocks(stage, rows + cells, levels[s], alone)
        return x


def _blocks(
    stage: nn.Module, x: SparseTensor, level: Level, first: SparseTensor | None = None
) -> SparseTensor:
    """Apply a stage's blocks; the first one's convolution may read something else."""
    i, convolved = 0, x if first is None else first
    while f"block{i}" in stage:
        x, convolved = stage[f"block{i}"](x, level, convolved)
        i += 1
    return x


def _ramp(most: float, depths: Sequence[int]) -> list[list[float]]:
    """Return for each stage what grows from 0 to ``most`` over all blocks."""
    steps = max(1, sum(depths) - 1)
    blocks = iter([most * i / steps for i in range(sum(depths))])
    return [[next(blocks) for _ in range(depth)] for depth in depths]

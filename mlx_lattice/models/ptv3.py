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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .. import memory, nn, ops
from ..checks import heads_of, one_of
from ..geometry.lattice import check_curve
from ..io.checkpoints import RENAMES
from ..io.safetensors import listed
from ..nn.fused import in_order
from ..ops.attention_calls import inside
from ..ops.pool import batch_rows, upsample_nearest
from ..prepare import prepare_scan
from ..tensor import SparseTensor, expect_tensor
from .blocks import spconv_norm
from .pretrained import Rules, Segmentor, pointcept
from .voxel_recipe import Voxels

__all__ = ["PTv3"]

VARIANTS = ("m1", "m2", "m3")
ORDERS = ("z", "z-trans", "hilbert", "hilbert-trans")
STRIDE = (2, 2, 2, 2)
ENC_DEPTHS, DEC_DEPTHS = (2, 2, 2, 6, 2), (2, 2, 2, 2)
ENC_CHANNELS, DEC_CHANNELS = (32, 64, 128, 256, 512), (64, 64, 128, 256)
ENC_HEADS, DEC_HEADS = (2, 4, 8, 16, 32), (4, 4, 8, 16)
ENC_PATCHES, DEC_PATCHES = (1024,) * 5, (1024,) * 4


class Level(NamedTuple):
    """Settings that the blocks of one level share."""

    orders: tuple[str, ...]  # of curves; block i takes number i, from the start again
    bits: int  # of the curves
    flash: bool  # whether patches keep their length if an element is shorter
    legacy: bool  # whether convolutions read the MLP branch of the block before
    positions: mx.array | None  # (N, D) float32, where queries and keys are rotated

    def patch(self, x: SparseTensor, most: int) -> int:
        """Return the rows of a patch."""
        if self.flash:
            return most
        return min([most, *(size for size in batch_rows(x).sizes if size)])


class SerializedAttention(nn.Module):
    """Multi-head self-attention in filled patches along a curve."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        patch_size: int,
        order_index: int = 0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        rope_base: float | None = None,
        enable_rpe: bool = False,
        dims: int = 3,
    ):
        super().__init__()
        self.num_heads: int = heads_of(channels, num_heads)
        self.patch_size: int = patch_size
        self.order_index: int = order_index
        self.scale: float | None = qk_scale
        self.rope_base = rope_base
        self.qkv: nn.Linear = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj: nn.Linear = nn.Linear(channels, channels)
        if enable_rpe:
            self.rpe: nn.RelativePositions = nn.RelativePositions(
                patch_size, num_heads, dims
            )

    def _extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, patch_size={self.patch_size}, "
            f"order_index={self.order_index}, rope_base={self.rope_base}"
        )

    def __call__(self, x: SparseTensor, level: Level) -> SparseTensor:
        """Attend; rows and key of ``x`` are kept."""
        count, heads = len(x), self.num_heads
        width = x.channels // heads
        qkv = self.qkv(x).feats
        if self.rope_base:
            qk, v = mx.split(qkv.reshape(count, 3 * heads, width), [2 * heads], axis=1)
            options = {"positions": level.positions, "pairs": "halves"}
            turned = ops.rotary(qk, x, base=self.rope_base, **options)
            given = *mx.split(turned, 2, axis=1), v
        else:
            given = qkv.reshape(count, 3, heads, width), None, None
        with inside(self):
            y = ops.serialized_attention(
                *given,
                x,
                level.patch(x, self.patch_size),
                order=level.orders[self.order_index % len(level.orders)],
                scale=self.scale,
                last_patch="fill",
                bits=level.bits,
                table=self.rpe.rpe_table if "rpe" in self else None,
            )
        return self.proj(x.replace(y.reshape(count, x.channels)))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, and a dropout after each."""

    def __init__(self, channels: int, hidden_channels: int, drop: float = 0.0):
        super().__init__()
        self.fc1: nn.Linear = nn.Linear(channels, hidden_channels)
        self.act: Any = nn.GELU()
        self.fc2: nn.Linear = nn.Linear(hidden_channels, channels)
        self.drop: nn.Dropout = nn.Dropout(drop)

    def __call__(self, x: SparseTensor) -> SparseTensor:
        """Apply the layers to each row; under a memory limit in blocks of rows."""
        if self.training or memory.active() is None:  # blocks would drop other entries
            return self._rows(x)
        row_bytes = 3 * self.fc1.bias.shape[0] * x.dtype.size
        return x.replace(memory.by_rows(self._rows, x.feats, row_bytes=row_bytes))

    def _rows(self, x: SparseTensor | mx.array) -> SparseTensor | mx.array:
        return in_order((self.fc1, self.act, self.drop, self.fc2, self.drop), x)


class AttentionBlock(nn.Module):
    """Attention and an MLP, each after a norm and beside a skip."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        patch_size: int,
        mlp_ratio: float,
        proj_drop: float,
        drop_path: float,
        layer_scale: float | None = None,
        **attention: Any,
    ):
        super().__init__()
        # Lists of one layer are named as the published parameters are.
        self.norm1: list[nn.LayerNorm] = [nn.LayerNorm(channels)]
        sizes = channels, num_heads, patch_size
        self.attn: SerializedAttention = SerializedAttention(*sizes, **attention)
        self.norm2: list[nn.LayerNorm] = [nn.LayerNorm(channels)]
        self.mlp: list[MLP] = [MLP(channels, int(channels * mlp_ratio), proj_drop)]
        self.drop: nn.Dropout = nn.Dropout(proj_drop)
        self.drop_path: nn.DropPath = nn.DropPath(drop_path)
        if layer_scale is not None:
            self.ls1: list[nn.LayerScale] = [nn.LayerScale(channels, layer_scale)]
            self.ls2: list[nn.LayerScale] = [nn.LayerScale(channels, layer_scale)]

    def attend(
        self, x: SparseTensor, level: Level
    ) -> tuple[SparseTensor, SparseTensor]:
        """Return features on the rows of ``x``, and the next block's ``convolved``."""
        x = self._added(x, self.drop(self.attn(self.norm1[0](x), level)), "ls1")
        branch = self.mlp[0](self.norm2[0](x))
        if level.legacy:
            branch = self._branch(branch, "ls2")
            return x + branch, branch
        x = self._added(x, branch, "ls2")
        return x, x

    def _added(self, x: SparseTensor, y: SparseTensor, scale: str) -> SparseTensor:
        """Return ``x`` with a branch added, in the launch of the branch's scale."""
        drops = self.training and self.drop_path.p
        if scale in self and not drops:
            return self[scale][0](y, residual=x)
        return x + self._branch(y, scale)

    def _branch(self, y: SparseTensor, scale: str) -> SparseTensor:
        return self.drop_path(self[scale][0](y) if scale in self else y)


class SerializedBlock(AttentionBlock):
    """A convolution, attention and an MLP, each beside a skip."""

    def __init__(self, channels: int, *sizes: Any, dims: int = 3, **attention: Any):
        super().__init__(channels, *sizes, dims=dims, **attention)
        self.cpe: list[Any] = convolution(channels, dims)

    def __call__(
        self, x: SparseTensor, level: Level, convolved: SparseTensor
    ) -> tuple[SparseTensor, SparseTensor]:
        """Return features on the rows of ``x``, and the next block's ``convolved``."""
        return self.attend(in_order(self.cpe, convolved, x), level)


def convolution(channels: int, dims: int) -> list[nn.Module]:
    """Return the convolution that a block begins with, a linear layer and a norm."""
    conv = getattr(nn, f"SubmConv{dims}d")(channels, channels, 3)
    return [conv, nn.Linear(channels, channels), nn.LayerNorm(channels)]


class PointTransformer(Segmentor):
    """The U-net that PTv3 and LitePT share: a stem, levels of blocks, a decoder.

    A block takes features, a ``Level``, and the features that its convolution reads; it
    returns its own features and those that the next block's convolution reads.
    """

    # What only PTv3 has other values of.
    variant: str = ""
    legacy: bool = False
    rope_base: float | None = None
    enable_flash: bool = True

    def _set_orders(self, order: Sequence[str], dims: int, shuffle: bool) -> None:
        """Set the curves, which are checked."""
        self.order: tuple[str, ...] = (
            (order,) if isinstance(order, str) else tuple(order)
        )
        if not self.order:
            raise ValueError("order must name one curve or more; got none")
        for curve in self.order:
            check_curve(curve, dims)
        self.dims: int = dims
        self.shuffle_orders: bool = shuffle

    def _build(
        self,
        stem: dict[str, nn.Module],
        norm: Callable[[int], nn.Module],
        encoder: Sequence[Sequence],
        decoder: Sequence[Sequence],
        blocks: Sequence[Callable[[int, int, float], nn.Module]],
        drop_path: float,
        num_classes: int,
    ) -> None:
        """Make the layers.

        Args:
            stem: the first layer, by its name.
            norm: makes the norms outside the blocks.
            encoder, decoder: depths, then channels of each level; no decoder if empty.
            blocks: make a block of the encoder and of the decoder, of a level, a number
                in it and the probability to leave its branches out.
        """
        channels = encoder[1]
        self.embedding: nn.Module = nn.Module()
        self.embedding.stem = nn.Sequential(
            **stem, norm=norm(channels[0]), act=nn.GELU()
        )
        self.enc: nn.Module = nn.Module()
        drops = _ramp(drop_path, encoder[0])
        for s, wide in enumerate(channels):
            stage = self.enc[f"enc{s}"] = nn.Module()
            for i, drop in enumerate(drops[s]):
                stage[f"block{i}"] = blocks[0](s, i, drop)
            if s:
                cell = self.stride[s - 1]
                stage.down = nn.GridPooling(channels[s - 1], wide, cell, norm(wide))
        last = sum(channels)
        if not self.enc_mode:
            self.dec: nn.Module = nn.Module()
            drops = _ramp(drop_path, decoder[0])
            deeper = [*decoder[1], channels[-1]]
            for s, cell in enumerate(self.stride):
                stage = self.dec[f"dec{s}"] = nn.Module()
                for i, drop in enumerate(drops[s][::-1]):
                    stage[f"block{i}"] = blocks[1](s, i, drop)
                wide = deeper[s + 1], channels[s], deeper[s]
                stage.up = nn.GridUnpooling(*wide, cell, norm)
            last = deeper[0]
        if num_classes:
            self.seg_head: nn.Linear = nn.Linear(last, num_classes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its coordinate levels, from the finest, for ``prepare``."""
        return self.stride

    def __call__(
        self, x: SparseTensor, positions: mx.array | None = None
    ) -> SparseTensor:
        """Return scores, or features if there are no classes.

        Args:
            x: input; its coordinates count from 0.
            positions: (N, dims) float of its rows, for ``m3`` of ``PTv3`` alone.

        Returns:
            A tensor on the rows of ``x``, in their order; with ``enc_mode`` and no
            classes on the coarsest cells, see ``encode`` and ``upcast``.

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
            raise ValueError(
                f"this {type(self).__name__} has no classes: give num_classes"
            )
        return super().score_voxels(voxels)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of features that the net takes."""
        norm = self.embedding.stem.layers["norm"]
        return norm.weight.dtype if "weight" in norm else super().dtype

    def _levels(self, x: SparseTensor, positions: mx.array | None) -> list[Level]:
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


class PTv3(PointTransformer):
    """Score each row with Point Transformer V3, in the three forms of Pointcept.

    ``m1``, the first form, has a 5x5x5 stem and batch norms outside its blocks, and its
    curves lose bits as cells grow. ``m2``, of Sonata and Concerto, has a linear stem
    and layer norms, and its curves fit each level. ``m3``, of Utonia, also rotates
    queries and keys by positions.

    Coordinates must start at 0, because the curves do.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels; with 0 the net returns the
            features of the decoder.
        variant (str): ``"m1"``, ``"m2"`` or ``"m3"``. Default: ``"m1"``.
        order (tuple): The curves, which blocks use in turn: see ``ops.curve_order``.
        stride (tuple): The extent of a level's cells in cells of the finer level.
        enc_depths, enc_channels, enc_num_head, enc_patch_size (tuple): The number of
            blocks, channels, heads and rows of a patch at each level, from the finest.
        dec_depths, dec_channels, dec_num_head, dec_patch_size (tuple): The same for the
            decoder, which has one level fewer.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        qkv_bias (bool): If ``True`` queries, keys and values have a bias.
        qk_scale (float, optional): The factor of the scores.
        proj_drop (float): The probability to zero an entry. Default: ``0``.
        drop_path (float): The probability to drop a row's branch in the last block; it
            grows from 0 in the first block. Default: ``0.3``.
        layer_scale (float, optional): The initial value of factors of the branches; by
            default the branches have no factors.
        shuffle_orders (bool): If ``True`` each level shuffles its curves while
            training, by Python's ``random``; evaluation never does. Default: ``True``.
        enable_flash (bool): If ``False`` no patch is longer than the smallest batch
            element, as in Pointcept without FlashAttention. Default: ``True``.
        enable_rpe (bool): If ``True`` each block adds a table of relative positions to
            its scores; this needs ``enable_flash=False``. Default: ``False``.
        enc_mode (bool): If ``True`` there is no decoder. Default: ``False``.
        rope_base (float): The base of ``ops.rotary`` in ``m3``. Default: ``10000``.
        dec_rope_enable (bool): If ``False`` the decoder of ``m3`` does not rotate.
            Default: ``True``.
        legacy (bool, optional): If ``True`` the convolution of a block reads the MLP
            branch of the previous block instead of the block's output. Weights of
            ``m1`` that were trained with Pointcept 1.5.1 or older need this, and so do
            all released ones. By default ``about.legacy``.
        dims (int): The number of spatial axes. Default: ``3``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = models.PTv3(8, 20).eval()
        >>> net(x).shape
        (64, 20)
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
        check_levels(stride, encoder, () if enc_mode else decoder)
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
        self.variant: str = variant
        self.enc_mode: bool = enc_mode
        self._legacy = legacy
        self._set_orders(order, dims, shuffle_orders)
        self.stride: tuple[int, ...] = tuple(stride)
        self.enable_flash: bool = enable_flash
        self.rope_base: float | None = rope_base if variant == "m3" else None
        first, norm = enc_channels[0], nn.LayerNorm
        if variant == "m1":
            norm = spconv_norm
            conv = getattr(nn, f"SubmConv{dims}d")
            stem = {"conv": conv(in_channels, first, 5, bias=False)}
        else:
            stem = {"linear": nn.Linear(in_channels, first)}

        def blocks(sizes, base) -> Callable[[int, int, float], nn.Module]:
            _, *levels = sizes
            return lambda s, i, drop: SerializedBlock(
                *(each[s] for each in levels),
                mlp_ratio,
                proj_drop,
                drop,
                layer_scale,
                dims=dims,
                order_index=i,
                qkv_bias=qkv_bias,
                qk_scale=qk_scale,
                rope_base=base,
                enable_rpe=enable_rpe,
            )

        turned = self.rope_base if dec_rope_enable else None
        both = blocks(encoder, self.rope_base), blocks(decoder, turned)
        self._build(stem, norm, encoder, decoder, both, drop_path, num_classes)

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
            variant: as for the net, if the configuration has no ``type``.
            legacy: as for the net, since a configuration does not say it.

        Raises:
            ValueError: it asks for what this net does not do, such as ``pdnorm_bn``,
                or says no form.
        """
        return cls(**published_arguments(config, variant), legacy=legacy)

    @property
    def legacy(self) -> bool:
        """Whether the convolution of a block reads the previous block's MLP branch."""
        if self._legacy is None:
            return self.variant == "m1" and self.about.legacy
        return self._legacy


def _blocks(
    stage: nn.Module, x: SparseTensor, level: Level, first: SparseTensor | None = None
) -> SparseTensor:
    i, convolved = 0, x if first is None else first
    while f"block{i}" in stage:
        x, convolved = stage[f"block{i}"](x, level, convolved)
        i += 1
    return x


def _ramp(most: float, depths: Sequence[int]) -> list[list[float]]:
    """Return values for each block of each stage, which grow from 0 to ``most``."""
    steps = max(1, sum(depths) - 1)
    blocks = iter([most * i / steps for i in range(sum(depths))])
    return [[next(blocks) for _ in range(depth)] for depth in depths]


# Published configurations

_SAME = (
    "in_channels", "order", "stride", "enc_depths", "enc_channels", "enc_num_head",
    "enc_patch_size", "dec_depths", "dec_channels", "dec_num_head", "dec_patch_size",
    "mlp_ratio", "qkv_bias", "qk_scale", "proj_drop", "drop_path", "layer_scale",
    "shuffle_orders", "enable_flash", "enable_rpe", "enc_mode", "rope_base",
    "dec_rope_enable",
)  # fmt: skip
# Defaults of published configurations, if they differ from those here.
_DEFAULTS = {
    "order": ("z", "z-trans"),
    "enc_patch_size": (48,) * 5,
    "dec_patch_size": (48,) * 4,
}
# What a net is without, or does in any case: only these values.
_ONLY = {
    "attn_drop": (0, None),
    "pre_norm": (True,),
    "pdnorm_bn": (False,),
    "pdnorm_ln": (False,),
}
# Of training alone, or of precisions that are the same here.
_UNREAD = (
    "type", "upcast_attention", "upcast_softmax", "traceable", "mask_token",
    "freeze_encoder", "shift_coords", "jitter_coords", "rescale_coords", "cls_mode",
    "pdnorm_decouple", "pdnorm_adaptive", "pdnorm_affine", "pdnorm_conditions",
)  # fmt: skip


def published_arguments(
    config: Mapping[str, Any], variant: str | None = None
) -> dict[str, Any]:
    """Return ``PTv3``'s arguments; see ``PTv3.of_config``."""
    backbone = config.get("backbone", config)
    kind = str(backbone.get("type", "")).removeprefix("PT-v3")
    if variant and kind in VARIANTS and kind != variant:
        raise ValueError(f"the configuration is of {kind}; got variant {variant!r}")
    variant = variant or kind
    if variant not in VARIANTS:
        raise ValueError(
            f"the configuration does not say which form it is of; pass variant, one of "
            f"{VARIANTS}"
        )
    given = _DEFAULTS | known_values("PTv3", backbone, _SAME)
    if backbone.get("cls_mode"):
        given["enc_mode"] = True
    given["num_classes"] = config.get("num_classes", 0) if "backbone" in config else 0
    return {"in_channels": 6, "variant": variant, **given}


def known_values(
    net: str, config: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return the values of ``names``; raise for what ``net`` does not do."""
    unknown = set(config) - {*names, *_ONLY, *_UNREAD}
    if unknown:
        raise ValueError(f"{net} has no {listed(sorted(unknown))}")
    for name, values in _ONLY.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(
                f"{net} does not do {name}={config[name]!r}; it has {name}="
                f"{values[0]!r}"
            )
    return {name: config[name] for name in config if name in names}


def check_levels(
    stride: Sequence[int],
    encoder: Sequence[Sequence[int]],
    decoder: Sequence[Sequence[int]],
) -> None:
    """Raise if the sizes of levels do not fit one another."""
    levels = len(stride) + 1
    lengths = [list(map(len, sizes)) for sizes in (encoder, decoder)]
    if lengths != [[levels] * len(encoder), [levels - 1] * len(decoder)]:
        raise ValueError(
            f"{levels - 1} strides make {levels} levels: depths, channels, heads and "
            f"so on must have {levels} entries in the encoder and {levels - 1}, a "
            f"level fewer, in the decoder; got {lengths[0]} and {lengths[1]}"
        )
    if decoder and tuple(decoder[3]) != tuple(encoder[3][:-1]):
        raise ValueError(
            "encoder and decoder share the cuts of a level, so their patches must be "
            f"of one size; got {tuple(encoder[3])} and {tuple(decoder[3])}"
        )


# The names of published checkpoints


def _ptv3_names(model: PTv3) -> Rules:
    """Return torch-pointcloud's names; it counts decoder stages from the coarsest."""
    stem = "embedding.stem." + ("conv." if model.variant == "m1" else "linear.")
    last = len(model.stride) - 1
    return Rules(
        (
            (r"(?:encoder\.)?stem\.stem\.", stem, 0),
            (r"(?:encoder\.)?stem\.norm\.", "embedding.stem.norm.", 0),
            (r"(?:encoder\.)?blocks\.(\d+)\.", "enc.enc{}.", 0),
            *(
                (rf"decoder\.blocks\.{i}\.", f"dec.dec{last - i}.", 0)
                for i in range(last + 1)
            ),
            (r"head\.", "seg_head.", 0),
        ),
        (
            (r"\bmodule\.", ""),
            (r"\bdownsample\.norm\.", "down.norm.0."),
            (r"\bdownsample\.proj\.", "down.proj."),
            (r"\bupsample\.(proj|proj_skip)\.", r"up.\1.0."),
            (r"\bupsample\.norm\.", "up.proj.1."),
            (r"\bupsample\.norm_skip\.", "up.proj_skip.1."),
            (r"\bblocks\.(\d+)\.", r"block\1."),
            (r"\bcpe_conv\.", "cpe.0."),
            (r"\bcpe_proj\.", "cpe.1."),
            (r"\bcpe_norm\.", "cpe.2."),
            (r"\bnorm([12])\.", r"norm\1.0."),
            (r"\bmlp\.0\.", "mlp.0.fc1."),
            (r"\bmlp\.3\.", "mlp.0.fc2."),
        ),
    )


def _ptv3(name: str) -> str | None:
    # Neither is read in evaluation: a token of training, and rotations that
    # ``rope_base`` says.
    if name.endswith((".mask_token", ".attn.rope.inv_freq")):
        return None
    return pointcept(name)


RENAMES[PTv3, "spconv"] = lambda model: (_ptv3, _ptv3_names(model))

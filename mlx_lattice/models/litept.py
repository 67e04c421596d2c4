"""LitePT: a U-net that convolves at its fine levels and attends at its coarse ones.

Yue et al., "LitePT: Lighter Yet Stronger Point Transformer", 2026 (MIT). Parameters are
named as in its checkpoints, but for the ``layers`` of a Sequential, which
``io.import_checkpoint`` leaves out by itself, as it does a segmentor's ``backbone``:

    embedding.stem.{conv, norm}               seg_head
    enc.enc<level>.down.{proj, norm.0}        dec.dec<level>.up.{proj, proj_skip}.{0, 1}
    enc.enc<level>.block<i>.conv.{0, 1, 2}    where the level convolves, else norm0.0
    enc.enc<level>.block<i>.{norm1.0, attn.{qkv, proj}, norm2.0, mlp.0.{fc1, fc2}}
                                              where it attends; dec alike
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import nn
from ..checks import one_of
from ..io.checkpoints import RENAMES
from ..io.safetensors import listed
from ..nn.fused import in_order
from ..tensor import SparseTensor
from .blocks import spconv_norm
from .pretrained import pointcept
from .ptv3 import (
    ORDERS,
    STRIDE,
    AttentionBlock,
    Level,
    PointTransformer,
    check_levels,
    convolution,
    known_values,
)

__all__ = ["LitePT"]

# What each level has, from the finest; the decoder has a level fewer.
_LEVELS = ("depths", "channels", "num_head", "patch_size", "rope_freq", "conv", "attn")
_ENCODER, _DECODER = ([f"{part}_{name}" for name in _LEVELS] for part in ("enc", "dec"))
_SMALL = {
    "enc_depths": (2, 2, 2, 6, 2),
    "enc_channels": (36, 72, 144, 252, 504),
    "enc_num_head": (2, 4, 8, 14, 28),
    "enc_patch_size": (1024,) * 5,
    "enc_rope_freq": (100.0,) * 5,
    "enc_conv": (True, True, True, False, False),
    "enc_attn": (False, False, False, True, True),
    "dec_depths": (0,) * 4,
    "dec_channels": (72, 72, 144, 252),
    "dec_num_head": (4, 4, 8, 14),
    "dec_patch_size": (1024,) * 4,
    "dec_rope_freq": (100.0,) * 4,
    "dec_conv": (False,) * 4,
    "dec_attn": (False,) * 4,
}
# The published sizes; "small*" has blocks in the decoder, for instances.
SIZES: dict[str, dict[str, Any]] = {
    "small": _SMALL,
    "small*": _SMALL
    | {
        "dec_depths": (2, 2, 2, 2),
        "dec_conv": (True, True, True, False),
        "dec_attn": (False, False, False, True),
    },
    "base": _SMALL
    | {
        "enc_depths": (3, 3, 3, 12, 3),
        "enc_channels": (54, 108, 216, 432, 576),
        "enc_num_head": (3, 6, 12, 24, 32),
        "dec_channels": (72, 108, 216, 432),
        "dec_num_head": (4, 6, 12, 24),
    },
    "large": _SMALL
    | {
        "enc_depths": (3, 3, 3, 12, 3),
        "enc_channels": (72, 144, 288, 576, 864),
        "enc_num_head": (4, 8, 16, 32, 48),
        "dec_channels": (72, 144, 288, 576),
        "dec_num_head": (4, 8, 16, 32),
    },
}


class LitePTBlock(AttentionBlock):
    """A convolution beside a skip, or a norm alone; then attention, if there is any."""

    def __init__(
        self,
        channels: int,
        *sizes: Any,
        conv: bool,
        attn: bool,
        dims: int,
        **options: Any,
    ):
        if attn:
            super().__init__(channels, *sizes, dims=dims, **options)
        else:
            nn.Module.__init__(self)
        if conv:
            self.conv: list[Any] = convolution(channels, dims)
        else:
            self.norm0: list[nn.LayerNorm] = [nn.LayerNorm(channels)]

    def __call__(
        self, x: SparseTensor, level: Level, convolved: SparseTensor
    ) -> tuple[SparseTensor, SparseTensor]:
        """Return features on the rows of ``x``, twice, as PTv3's blocks do."""
        x = in_order(self.conv, x, x) if "conv" in self else self.norm0[0](x)
        return self.attend(x, level) if "attn" in self else (x, x)


class LitePT(PointTransformer):
    """Score each row with LitePT, or encode it.

    A U-net with the stem, the pooling and the curves of ``PTv3``. Levels with ``conv``
    begin their blocks with a submanifold convolution. Levels with ``attn`` attend along
    curves, and rotate queries and keys by cells (``ops.rotary``).

    Coordinates must start at 0, because the curves do.

    Args:
        in_channels (int): The number of input channels.
        num_classes (int): The number of output channels; with 0 the net returns the
            features of the decoder.
        size (str): The published size: ``"small"``, ``"small*"`` (with blocks in its
            decoder), ``"base"`` or ``"large"``. Default: ``"small"``.
        order (tuple): The curves, which blocks use in turn: see ``ops.curve_order``.
        stride (tuple): The extent of a level's cells in cells of the finer level.
        mlp_ratio (float): Hidden channels for each channel. Default: ``4``.
        qkv_bias (bool): If ``True`` queries, keys and values have a bias.
        qk_scale (float, optional): The factor of the scores.
        proj_drop (float): The probability to zero an entry. Default: ``0``.
        drop_path (float): The probability to drop a row's branch in the last block; it
            grows from 0 in the first block. Default: ``0.3``.
        shuffle_orders (bool): If ``True`` each level shuffles its curves while
            training, by Python's ``random``; evaluation never does. Default: ``True``.
        enc_mode (bool): If ``True`` there is no decoder. Default: ``False``.
        dims (int): The number of spatial axes. Default: ``3``.
        **levels (tuple): Settings of the levels that replace those of the size, by
            their published names: ``enc_depths``, ``enc_channels``, ``enc_num_head``,
            ``enc_patch_size``, ``enc_rope_freq``, ``enc_conv`` and ``enc_attn``, from
            the finest level. The same names with ``dec_`` set the decoder, which has
            one level fewer.

    Raises:
        TypeError: levels have no setting of that name.
        ValueError: lengths do not fit each other, or the channels of a head are not a
            multiple of 2 * dims at a level with attention.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> net = models.LitePT(8, 20, "small").eval()
        >>> net(x).shape
        (64, 20)
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int = 0,
        size: str = "small",
        *,
        order: Sequence[str] = ORDERS,
        stride: Sequence[int] = STRIDE,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
        drop_path: float = 0.3,
        shuffle_orders: bool = True,
        enc_mode: bool = False,
        dims: int = 3,
        **levels: Sequence[Any],
    ):
        super().__init__()
        one_of(size, SIZES, "size")
        if unknown := levels.keys() - _SMALL.keys():
            raise TypeError(
                f"LitePT has no {listed(sorted(unknown))}; settings of levels are "
                f"{', '.join(_SMALL)}"
            )
        levels = SIZES[size] | levels
        encoder = [levels[name] for name in _ENCODER]
        decoder = [levels[name] for name in _DECODER]
        check_levels(stride, encoder, () if enc_mode else decoder)
        self._set_orders(order, dims, shuffle_orders)
        self.stride: tuple[int, ...] = tuple(stride)
        self.enc_mode: bool = enc_mode

        def blocks(settings: Sequence) -> Callable[[int, int, float], nn.Module]:
            def block(s: int, i: int, drop: float) -> nn.Module:
                channels, heads, patch, freq, conv, attn = (
                    setting[s] for setting in settings[1:]
                )
                if attn and channels % (2 * dims * heads):
                    raise ValueError(
                        f"heads that rotate in {dims} axes need a multiple of "
                        f"{2 * dims} channels; level {s} has {channels} channels for "
                        f"{heads} heads"
                    )
                return LitePTBlock(
                    *(channels, heads, patch, mlp_ratio, proj_drop, drop),
                    conv=conv,
                    attn=attn,
                    dims=dims,
                    order_index=i,
                    qkv_bias=qkv_bias,
                    qk_scale=qk_scale,
                    rope_base=freq,
                )

            return block

        conv = getattr(nn, f"SubmConv{dims}d")
        stem = {"conv": conv(in_channels, encoder[1][0], 5, bias=False)}
        both = blocks(encoder), blocks(decoder)
        self._build(stem, spconv_norm, encoder, decoder, both, drop_path, num_classes)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LitePT:
        """Return the net of a published configuration, with random weights.

        Args:
            config: of a ``DefaultSegmentorV2`` or of its backbone.

        Raises:
            ValueError: it asks for what this net does not do.
        """
        return cls(**published_arguments(config))


_SAME = (
    "in_channels", "order", "stride", "mlp_ratio", "qkv_bias", "qk_scale", "proj_drop",
    "drop_path", "shuffle_orders", "enc_mode", *_SMALL,
)  # fmt: skip


def published_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``LitePT``'s arguments; see ``LitePT.of_config``."""
    given = known_values("LitePT", config.get("backbone", config), _SAME)
    given["num_classes"] = config.get("num_classes", 0) if "backbone" in config else 0
    return {"in_channels": 4, **given}


RENAMES[LitePT, "spconv"] = lambda model: (pointcept,)

"""What Point Transformer V3's published configurations say, as arguments here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VARIANTS = ("m1", "m2", "m3")

_SAME = (
    "in_channels", "order", "stride", "enc_depths", "enc_channels", "enc_num_head",
    "enc_patch_size", "dec_depths", "dec_channels", "dec_num_head", "dec_patch_size",
    "mlp_ratio", "qkv_bias", "qk_scale", "proj_drop", "drop_path", "layer_scale",
    "shuffle_orders", "enable_flash", "enable_rpe", "enc_mode", "rope_base",
    "dec_rope_enable",
)  # fmt: skip
# What they are where they are left out, if that is something else here.
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
    unknown = set(backbone) - {*_SAME, *_ONLY, *_UNREAD}
    if unknown:
        from ..io.errors import listed

        raise ValueError(f"PTv3 has no {listed(sorted(unknown))}")
    for name, values in _ONLY.items():
        if backbone.get(name, values[0]) not in values:
            raise ValueError(
                f"PTv3 does not do {name}={backbone[name]!r}; it has {name}="
                f"{values[0]!r}"
            )
    given = {**_DEFAULTS, **{k: backbone[k] for k in backbone if k in _SAME}}
    if backbone.get("cls_mode"):
        given["enc_mode"] = True
    given["num_classes"] = config.get("num_classes", 0) if "backbone" in config else 0
    return {"in_channels": 6, "variant": variant, **given}


def count_levels(
    stride: Sequence[int],
    encoder: Sequence[Sequence[int]],
    decoder: Sequence[Sequence[int]],
) -> int:
    """Return the number of levels; raise where sizes do not fit one another.

    Args:
        stride: of each level but the first.
        encoder, decoder: depths, channels, heads and patches; no decoder is legal.
    """
    levels = len(stride) + 1
    lengths = [len(sizes) for sizes in encoder]
    if lengths != [levels] * len(encoder):
        raise ValueError(
            f"{levels - 1} strides make {levels} levels, so the encoder's depths, "
            f"channels, heads and patches must have {levels} entries; got {lengths}"
        )
    lengths = [len(sizes) for sizes in decoder]
    if lengths != [levels - 1] * len(decoder):
        raise ValueError(
            f"the decoder's depths, channels, heads and patches must have {levels - 1} "
            f"entries, a level fewer than the encoder's; got {lengths}"
        )
    if decoder and tuple(decoder[3]) != tuple(encoder[3][:-1]):
        raise ValueError(
            "encoder and decoder share the cuts of a level, so their patches must be "
            f"of one size; got {tuple(encoder[3])} and {tuple(decoder[3])}"
        )
    return levels

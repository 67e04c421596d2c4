"""TRELLIS.2's published nets: their configurations, and the names of parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from ...checks import DTYPES
from ...io.checkpoints import RENAMES
from ...io.errors import CheckpointError, shown
from ..pretrained import Pretrained

Model = TypeVar("Model", bound="Trellis2Net")


class Net(NamedTuple):
    """How a published net is one of ours."""

    kind: str  # our class
    fixed: dict[str, Any]  # what the published name decides
    taken: tuple[str, ...]  # arguments that are ours too
    only: dict[str, Any]  # what there is no choice of here
    apart: tuple[str, ...]  # of training alone, or of what is done with the output


_VAE = ("model_channels", "latent_channels", "num_blocks")
_BLOCKS = {"block_type": "SparseConvNeXtBlock3d"}
_UP, _DOWN = (
    _BLOCKS | {f"{word}_block_type": f"SparseResBlock{kind}3d"}
    for word, kind in (("up", "C2S"), ("down", "S2C"))
)
_FLOW = (
    "resolution", "in_channels", "model_channels", "cond_channels", "out_channels",
    "num_blocks", "num_heads", "num_head_channels", "mlp_ratio", "pe_mode", "rope_freq",
    "share_mod", "qk_rms_norm", "qk_rms_norm_cross",
)  # fmt: skip
_TRAINING = ("use_checkpoint", "initialization")
_DECODER = (*_VAE, "out_channels", "pred_subdiv")
_STRUCTURE = ("latent_channels", "num_res_blocks", "channels", "num_res_blocks_middle")
_SLAT = Net("SLatFlowModel", {}, _FLOW, {}, _TRAINING)

# By the name that a configuration has.
NETS = {
    "FlexiDualGridVaeDecoder": Net(
        "SparseVAEDecoder",
        {"out_channels": 7},
        (*_VAE, "voxel_margin"),
        _UP,
        (*_TRAINING, "resolution"),
    ),
    "SparseUnetVaeDecoder": Net("SparseVAEDecoder", {}, _DECODER, _UP, _TRAINING),
    "FlexiDualGridVaeEncoder": Net(
        "SparseVAEEncoder", {"in_channels": 6}, _VAE, _DOWN, _TRAINING
    ),
    "SparseUnetVaeEncoder": Net(
        "SparseVAEEncoder", {}, (*_VAE, "in_channels"), _DOWN, _TRAINING
    ),
    "SLatFlowModel": _SLAT,
    "ElasticSLatFlowModel": _SLAT,
    "SparseStructureFlowModel": _SLAT._replace(kind="SparseStructureFlowModel"),
    **{
        kind: Net(kind, {}, (*_STRUCTURE, channels), {"norm_type": "layer"}, _TRAINING)
        for kind, channels in (
            ("SparseStructureEncoder", "in_channels"),
            ("SparseStructureDecoder", "out_channels"),
        )
    },
}
# The sizes of TRELLIS.2-4B's flow models; the texture model is given the shape too.
FLOW = {
    "resolution": 32,
    "in_channels": 32,
    "model_channels": 1536,
    "cond_channels": 1024,
    "out_channels": 32,
    "num_blocks": 30,
    "num_heads": 12,
    "mlp_ratio": 5.3334,
    "pe_mode": "rope",
    "share_mod": True,
    "qk_rms_norm": True,
    "qk_rms_norm_cross": True,
}
STRUCTURE_FLOW = FLOW | {"resolution": 16, "in_channels": 8, "out_channels": 8}


class Trellis2Net(Pretrained):
    """A net of TRELLIS.2, which can be made from its published configuration."""

    @classmethod
    def of_config(cls: type[Model], config: Mapping[str, Any]) -> Model:
        """Return the net of a published configuration, with random weights.

        Args:
            config: the ``args`` of the JSON that is published beside the weights.

        Raises:
            ValueError: the configuration has an argument or a part that this class
                lacks.
        """
        kinds = {kind.__name__ for kind in cls.__mro__}
        names = [name for name, net in NETS.items() if net.kind in kinds]

        def known(name: str) -> int:
            return len({*NETS[name].taken, *NETS[name].apart} & {*config})

        # Two published nets may be one class here: take the one that fits.
        return cls(**arguments_of(max(names, key=known), config))


def arguments_of(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of our class for those of a published net."""
    net = NETS[name]
    taken = dict(net.fixed)
    for key in config:
        if key in net.apart:
            continue
        value = config[key]
        if key in net.taken:
            taken[key] = tuple(value) if isinstance(value, list) else value
        elif key in net.only:
            values = value if isinstance(value, list | tuple) else [value]
            if other := [v for v in values if v != net.only[key]]:
                raise ValueError(
                    f"{key} of {name} must be {net.only[key]} throughout; got "
                    f"{other[0]!r}"
                )
        elif key == "block_args":
            taken |= _block_arguments(value)
        elif key == "use_fp16":
            taken |= {"dtype": mx.float16} if value else {}
        elif key == "dtype" and "num_heads" in net.taken:
            taken["dtype"] = _dtype(value)
        else:
            raise ValueError(f"{name} here has no argument {key!r}")
    return taken


def _block_arguments(blocks: list[Mapping]) -> dict[str, Any]:
    """Return the arguments of all blocks, which must be the same."""
    rest = [
        {key: block[key] for key in block if key not in _TRAINING} for block in blocks
    ]
    if any(block != rest[0] or block.keys() - {"mlp_ratio"} for block in rest):
        raise ValueError(
            f"block_args must be mlp_ratio alone, the same in each stage; got {blocks}"
        )
    return rest[0] if rest else {}


def _dtype(name: Any) -> mx.Dtype:
    known = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    name = known.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return getattr(mx, name)


def trellis2(config: Mapping) -> tuple[str, dict]:
    """Return our class and its arguments for a configuration of TRELLIS.2's."""
    name, arguments = config.get("name"), config.get("args")
    if (
        not isinstance(name, str)
        or name not in NETS
        or not isinstance(arguments, Mapping)
    ):
        raise CheckpointError(
            f"the configuration is of {shown(repr(name))}; expected a name and args of "
            f"one of {', '.join(NETS)}"
        )
    try:
        return NETS[name].kind, arguments_of(name, arguments)
    except ValueError as error:
        raise CheckpointError(shown(str(error))) from None


def _trellis2(name: str) -> str:
    # Saved with spconv in FlexGEMM's place, convolutions are one module deeper.
    return re.sub(r"\.(conv[12]?)\.conv\.", r".\1.", name)


def _flow(name: str) -> str | None:
    # Tables that are computed here: rotations and places of a dense grid.
    return None if name in ("rope_phases", "pos_emb") else name


RENAMES.update(
    {
        (Trellis2Net, "trellis2"): lambda _: (_trellis2, _flow),
        (Trellis2Net, "spconv"): lambda _: (_trellis2,),
    }
)

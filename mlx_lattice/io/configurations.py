"""Published configurations: the JSON beside a checkpoint, as one of our models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .errors import CheckpointError, shown

# TRELLIS.2's nets by their published names: our class, and what the name decides.
NETS: dict[str, tuple[str, dict]] = {
    "FlexiDualGridVaeDecoder": ("SparseVAEDecoder", {"out_channels": 7}),
    "SparseUnetVaeDecoder": ("SparseVAEDecoder", {}),
}
# Arguments that are ours too; of the rest, what the net here is, or has no part in.
_TAKEN = ("out_channels", "model_channels", "latent_channels", "num_blocks")
_TAKEN += ("pred_subdiv",)
_FIXED = {
    "block_type": "SparseConvNeXtBlock3d",
    "up_block_type": "SparseResBlockC2S3d",
}
_APART = ("resolution", "voxel_margin", "use_fp16", "use_checkpoint")


def read_config(path: str | Path) -> dict:
    """Return the JSON object of a file.

    Raises:
        CheckpointError: the file holds none.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return config


def trellis2(config: Mapping) -> tuple[str, dict]:
    """Return our class and its arguments for a configuration of TRELLIS.2's.

    Args:
        config: ``{"name": ..., "args": {...}}``; other entries have no part in it.

    Raises:
        CheckpointError: the net is none of ours, or has parts that ours has not.
    """
    name, arguments = config.get("name"), config.get("args")
    if name not in NETS or not isinstance(arguments, Mapping):
        raise CheckpointError(
            f"the configuration is of {shown(repr(name))}; expected a name and args of "
            f"one of {', '.join(NETS)}"
        )
    kind, fixed = NETS[name]
    taken = dict(fixed)
    for key, value in arguments.items():
        if key in _TAKEN:
            taken[key] = tuple(value) if isinstance(value, list) else value
        elif key in _FIXED:
            other = [v for v in value if v != _FIXED[key]]
            if other:
                raise CheckpointError(
                    f"{key} of {name} must be {_FIXED[key]} throughout; got "
                    f"{shown(repr(other[0]))}"
                )
        elif key == "block_args":
            taken |= _block_arguments(value)
        elif key not in _APART:
            raise CheckpointError(f"{name} here has no argument {shown(repr(key))}")
    return kind, taken


def _block_arguments(blocks: list[Mapping]) -> dict:
    """Return the arguments of all blocks, which must be the same."""
    rest = [
        {key: value for key, value in block.items() if key not in _APART}
        for block in blocks
    ]
    if any(block != rest[0] or block.keys() - {"mlp_ratio"} for block in rest):
        raise CheckpointError(
            f"block_args must be mlp_ratio alone, the same in each stage; got {blocks}"
        )
    return rest[0] if rest else {}


def spvnas(config: Mapping) -> dict[str, float]:
    """Return the classes and the width that SPVNAS's ``net.config`` tells.

    Raises:
        CheckpointError: one of them is missing.
    """
    missing = [key for key in ("num_classes", "cr") if key not in config]
    if missing:
        raise CheckpointError(
            f"SPVNAS's configurations have num_classes and cr; {missing[0]} is missing"
        )
    return {"classes": int(config["num_classes"]), "width": float(config["cr"])}

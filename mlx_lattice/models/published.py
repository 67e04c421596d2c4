"""Published nets: names of parameters, voxels and classes, configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..checks import real, whole
from ..io.checkpoints import RENAMES
from ..io.safetensors import CheckpointError
from .pretrained import About, VoxelRecipe
from .ptv3 import PTv3
from .unets import SPVCNN, MinkUNet, SpUNet


class Rules(NamedTuple):
    """The names of one net in one library."""

    stages: tuple[tuple[str, str | None, int], ...]
    rest: tuple[tuple[str, str], ...]

    def __call__(self, name: str) -> str | None:
        """Return the name here; the name itself if no row matches."""
        for pattern, place, first in self.stages:
            match = re.match(pattern, name)
            if match is None:
                continue
            if place is None:
                return None
            stage = int(match[1]) - first if match.groups() else 0
            rest = name[match.end() :]
            for old, new in self.rest:
                rest = re.sub(old, new, rest)
            return place.format(stage) + rest
        return name


# MinkowskiEngine's examples/minkunet.py.
MINKOWSKI = Rules(
    (
        (r"conv0p1s1\.", "stem.0.conv.", 0),
        (r"bn0\.", "stem.0.norm.", 0),
        (r"conv([1-4])p\d+s2\.", "encoder.{}.down.conv.", 1),
        (r"bn([1-4])\.", "encoder.{}.down.norm.", 1),
        (r"block([1-4])\.", "encoder.{}.blocks.", 1),
        (r"convtr([4-7])p\d+s2\.", "decoder.{}.up.conv.", 4),
        (r"bntr([4-7])\.", "decoder.{}.up.norm.", 4),
        (r"block([5-8])\.", "decoder.{}.blocks.", 5),
        (r"final\.", "head.", 0),
    ),
    (
        (r"\bconv([123])\.", r"conv\1.conv."),
        (r"\bnorm([123])\.", r"conv\1.norm."),
        (r"\bdownsample\.0\.", "shortcut.conv."),
        (r"\bdownsample\.1\.", "shortcut.norm."),
    ),
)
# SPVNAS's core/models/semantic_kitti/minkunet.py, whose point branch is never called,
# and torchsparse's own backbones/unet.py, the same net without a head.
TORCHSPARSE = Rules(
    (
        (r"stem\.0\.", "stem.0.conv.", 0),
        (r"stem\.1\.", "stem.0.norm.", 0),
        (r"stem\.3\.", "stem.1.conv.", 0),
        (r"stem\.4\.", "stem.1.norm.", 0),
        (r"stage([1-4])\.0\.net\.0\.", "encoder.{}.down.conv.", 1),
        (r"stage([1-4])\.0\.net\.1\.", "encoder.{}.down.norm.", 1),
        (r"stage([1-4])\.1\.", "encoder.{}.blocks.0.", 1),
        (r"stage([1-4])\.2\.", "encoder.{}.blocks.1.", 1),
        (r"up([1-4])\.0\.net\.0\.", "decoder.{}.up.conv.", 1),
        (r"up([1-4])\.0\.net\.1\.", "decoder.{}.up.norm.", 1),
        (r"up([1-4])\.1\.", "decoder.{}.blocks.", 1),
        (r"encoders\.([0-3])\.0\.0\.", "encoder.{}.down.conv.", 0),
        (r"encoders\.([0-3])\.0\.1\.", "encoder.{}.down.norm.", 0),
        (r"encoders\.([0-3])\.1\.", "encoder.{}.blocks.0.", 0),
        (r"encoders\.([0-3])\.2\.", "encoder.{}.blocks.1.", 0),
        (r"decoders\.([0-3])\.upsample\.0\.", "decoder.{}.up.conv.", 0),
        (r"decoders\.([0-3])\.upsample\.1\.", "decoder.{}.up.norm.", 0),
        (r"decoders\.([0-3])\.fuse\.", "decoder.{}.blocks.", 0),
        (r"classifier\.0\.", "head.", 0),
        (r"point_transforms\.", None, 0),
    ),
    (
        (r"\b(?:net|main)\.0\.", "conv1.conv."),
        (r"\b(?:net|main)\.1\.", "conv1.norm."),
        (r"\b(?:net|main)\.3\.", "conv2.conv."),
        (r"\b(?:net|main)\.4\.", "conv2.norm."),
        (r"\b(?:downsample|shortcut)\.0\.", "shortcut.conv."),
        (r"\b(?:downsample|shortcut)\.1\.", "shortcut.norm."),
    ),
)

# torch-pointcloud 0.0.18, whose classes rename the layers of the nets that they port.
# Its batch norms are PyTorch Geometric's, which hold PyTorch's as their ``module``.
PYG_NORMS = ((r"\bmodule\.", ""), (r"\bnorm([12])\.", r"bn\1."))
_SPUNET = Rules(((r"head\.", "final.", 0), (r"(?:en|de)coder\.", "", 0)), PYG_NORMS)
_SPVCNN = Rules(
    (
        (r"encoder\.block3\.fusion\.lin\.", "point_transforms.0.0.", 0),
        (r"encoder\.block3\.fusion\.norm\.", "point_transforms.0.1.", 0),
        (r"decoder\.block1\.fusion\.lin\.", "point_transforms.1.0.", 0),
        (r"decoder\.block1\.fusion\.norm\.", "point_transforms.1.1.", 0),
        (r"decoder\.block3\.fusion\.lin\.", "point_transforms.2.0.", 0),
        (r"decoder\.block3\.fusion\.norm\.", "point_transforms.2.1.", 0),
        (r"stem\.", "stem.", 0),
        (r"encoder\.block([0-3])\.downsample\.", "encoder.{}.down.", 0),
        (r"encoder\.block([0-3])\.blocks\.", "encoder.{}.blocks.", 0),
        (r"decoder\.block([0-3])\.upsample\.conv\.", "decoder.{}.up.", 0),
        (r"decoder\.block([0-3])\.upsample\.residual\.", "decoder.{}.blocks.0.", 0),
        (r"decoder\.block([0-3])\.blocks\.0\.", "decoder.{}.blocks.1.", 0),
    ),
    (
        (r"\bmodule\.", ""),
        (r"\bconv([12])\.", r"conv\1.conv."),
        (r"\bnorm([12])\.", r"conv\1.norm."),
        (r"\b(conv|norm)_skip\.", r"shortcut.\1."),
    ),
)


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


def _pointcept(name: str) -> str:
    # Its segmentors hold the net as their backbone.
    return name.removeprefix("backbone.")


def _ptv3(name: str) -> str | None:
    # Neither is read in evaluation: a token of training, and rotations that
    # ``rope_base`` says.
    if name.endswith((".mask_token", ".attn.rope.inv_freq")):
        return None
    return _pointcept(name)


# A name is given to the rules in turn, until one returns a parameter's or drops it.
RENAMES.update(
    {
        (MinkUNet, "minkowski"): lambda _: (MINKOWSKI,),
        (MinkUNet, "torchsparse"): lambda _: (TORCHSPARSE,),
        (SPVCNN, "torchsparse"): lambda _: (_SPVCNN,),
        (SpUNet, "spconv"): lambda _: (_pointcept, _SPUNET),
        (PTv3, "spconv"): lambda model: (_ptv3, _ptv3_names(model)),
    }
)


# Voxels and classes, as published configurations have them


def _about(
    voxels: VoxelRecipe | None, classes: str, source: str, licence: str
) -> About:
    """Return an About; ``classes`` has names with their colours, ``name rrggbb``."""
    rows = [row.strip().rpartition(" ") for row in classes.split(",")]
    colours = tuple(tuple(bytes.fromhex(colour)) for _, _, colour in rows)
    return About(voxels, tuple(name for name, _, _ in rows), colours, source, licence)


# ScanNet's twenty classes, in the order and the colours of its benchmark.
SCANNET = """
    wall aec7e8, floor 98df8a, cabinet 1f77b4, bed ffbb78, chair bcbd22,
    sofa 8c564b, table ff9896, door d62728, window c5b0d5, bookshelf 9467bd,
    picture c49c94, counter 17becf, desk f7b6d2, curtain dbdb8d,
    refrigerator ff7f0e, shower curtain 9edae5, toilet 2ca02c, sink 708090,
    bathtub e377c2, other furniture 5254a3
"""
# SemanticKITTI's nineteen, in the order of SPVNAS, in the benchmark's colours.
SEMANTIC_KITTI = """
    car 6496f5, bicycle 64e6f5, motorcycle 1e3c96, truck 501eb4,
    other vehicle 0000ff, person ff1e1e, bicyclist ff28c8, motorcyclist 961e5a,
    road ff00ff, parking ff96ff, sidewalk 4b004b, other ground af004b,
    building ffc800, fence ff7832, vegetation 00af00, trunk 873c00, terrain 96f050,
    pole fff096, traffic sign ff0000
"""
# The classes of OpenPCDet's configurations for Waymo and nuScenes.
WAYMO = """
    Vehicle 1f77b4, Pedestrian d62728, Cyclist 2ca02c
"""
NUSCENES = """
    car ff9e00, truck ff6347, construction_vehicle e99646, bus ff7f50,
    trailer ff8c00, barrier 708090, motorcycle ff3d63, bicycle dc143c,
    pedestrian 0000e6, traffic_cone 2f4f4f
"""

# Pointcept's nets for ScanNet, trained before 1.6.0, which has colours from 0 to 1.
_POINTCEPT = _about(
    VoxelRecipe(
        0.02,
        ("colours", "normals"),
        centred=True,
        from_zero=True,
        colour_range=(-1.0, 1.0),
    ),
    SCANNET,
    "https://github.com/Pointcept/Pointcept",
    "MIT (the code); the data's own terms of use",
)
_OPENPCDET = "https://github.com/open-mmlab/OpenPCDet"

# What published configurations say, by net and data set.
PUBLISHED = {
    # semseg-spunet-v1m1-0-base and semseg-pt-v3m1-0-base.
    "spunet-scannet": _POINTCEPT,
    "ptv3-scannet": replace(_POINTCEPT, legacy=True),
    # MinkowskiEngine's examples/indoor.py.
    "minkunet-scannet": _about(
        VoxelRecipe(0.02, ("colours",), reduce="mean", colour_range=(-0.5, 0.5)),
        SCANNET,
        "https://github.com/NVIDIA/MinkowskiEngine",
        "MIT (the code); the data's own terms of use",
    ),
    # SPVNAS's core/datasets/semantic_kitti.py.
    "spvnas-semantic-kitti": _about(
        VoxelRecipe(
            0.05, ("coordinates", "intensity"), from_zero=True, rounding="nearest"
        ),
        SEMANTIC_KITTI,
        "https://github.com/mit-han-lab/spvnas",
        "MIT (the code); CC BY-NC-SA 4.0 (the data)",
    ),
    # A detector's voxels are in its own arguments.
    "openpcdet-waymo": _about(
        None,
        WAYMO,
        _OPENPCDET,
        "Apache-2.0 (the code); Waymo's terms of use (the data)",
    ),
    "openpcdet-nuscenes": _about(
        None, NUSCENES, _OPENPCDET, "Apache-2.0 (the code); CC BY-NC-SA 4.0 (the data)"
    ),
}


# Configurations: the JSON that is published beside a checkpoint


# SPVNAS's nets read coordinates and intensity.
SPVNAS_INPUTS = 4


def spvnas(config: Mapping, kind: str) -> tuple[dict[str, Any], float | None]:
    """Return the arguments of our class, and ``pres``, for SPVNAS's ``net.config``."""
    missing = [key for key in ("num_classes", "cr") if key not in config]
    if missing:
        raise CheckpointError(
            f"SPVNAS's configurations have num_classes and cr; {missing[0]} is missing"
        )
    if kind == "SPVCNN" and ("pres" in config) != ("vres" in config):
        raise CheckpointError("SPVCNN's configurations have both pres and vres")
    try:
        arguments = {
            "in_channels": SPVNAS_INPUTS,
            "num_classes": whole(config["num_classes"], "num_classes", 1),
            "width": real(config["cr"], "cr"),
        }
        if "trimmed" in config:
            arguments["trimmed"] = config["trimmed"]
            if not isinstance(config["trimmed"], bool):
                raise TypeError(f"trimmed must be a bool; got {config['trimmed']!r}")
        if kind == "SPVCNN" and "vres" in config:
            arguments["voxel_size"] = _size(config, "vres")
        pres = _size(config, "pres") if "pres" in config else None
        return arguments, pres
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration: {error}") from None


def _size(config: Mapping, key: str) -> float:
    size = real(config[key], key)
    if size <= 0:
        raise ValueError(f"{key} must be positive; got {size}")
    return size

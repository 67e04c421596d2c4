"""The names of our models' parts in published checkpoints, as tables.

A row is a pattern at the start of a name, its replacement (None drops the tensor), and
the number of the first stage in the pattern. The rules of the second table apply to the
rest of the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from mlx.nn import Module

from ..models import (
    SPVCNN,
    Detector,
    MinkUNet,
    PTv3,
    SparseVAEDecoder,
    SparseVAEEncoder,
    SpUNet,
    VoxelBackBone8x,
    VoxelResBackBone8xVoxelNeXt,
)
from ..models.trellis2 import FlowModel
from .layouts import OURS

Rename = Callable[[str], str | None]


class Rules(NamedTuple):
    """The names of one net in one library."""

    stages: tuple[tuple[str, str | None, int], ...]
    rest: tuple[tuple[str, str], ...]

    def __call__(self, name: str) -> str | None:
        """Return the name here; the name itself where no row matches."""
        for pattern, place, first in self.stages:
            found = re.match(pattern, name)
            if found is None:
                continue
            if place is None:
                return None
            stage = int(found[1]) - first if found.groups() else 0
            rest = name[found.end() :]
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
_NORMS = ((r"\bmodule\.", ""), (r"\bnorm([12])\.", r"bn\1."))
_SPUNET = Rules(((r"head\.", "final.", 0), (r"(?:en|de)coder\.", "", 0)), _NORMS)
_VOXELNEXT = Rules(
    ((r"head\.", "dense_head.", 0), (r"backbone_3d\.", "backbone_3d.", 0)), _NORMS
)
_VOXELS = Rules(((r"(?:backbone_3d\.)?(?=conv|shared_conv)", "", 0),), _NORMS)
_SPVCNN = Rules(
    (
        (r"stem\.0\.conv\.", "stem.0.", 0),
        (r"stem\.0\.norm\.", "stem.1.", 0),
        (r"stem\.1\.conv\.", "stem.3.", 0),
        (r"stem\.1\.norm\.", "stem.4.", 0),
        (r"encoder\.block([0-3])\.downsample\.conv\.", "stage{}.0.net.0.", -1),
        (r"encoder\.block([0-3])\.downsample\.norm\.", "stage{}.0.net.1.", -1),
        (r"encoder\.block([0-3])\.blocks\.0\.", "stage{}.1.", -1),
        (r"encoder\.block([0-3])\.blocks\.1\.", "stage{}.2.", -1),
        (r"decoder\.block([0-3])\.upsample\.conv\.conv\.", "up{}.0.net.0.", -1),
        (r"decoder\.block([0-3])\.upsample\.conv\.norm\.", "up{}.0.net.1.", -1),
        (r"decoder\.block([0-3])\.upsample\.residual\.", "up{}.1.0.", -1),
        (r"decoder\.block([0-3])\.blocks\.0\.", "up{}.1.1.", -1),
        (r"encoder\.block3\.fusion\.", "point_transforms.0.", 0),
        (r"decoder\.block1\.fusion\.", "point_transforms.1.", 0),
        (r"decoder\.block3\.fusion\.", "point_transforms.2.", 0),
        (r"head\.", "classifier.0.", 0),
    ),
    (
        (r"\bmodule\.", ""),
        (r"\bconv1\.", "net.0."),
        (r"\bnorm1\.", "net.1."),
        (r"\bconv2\.", "net.3."),
        (r"\bnorm2\.", "net.4."),
        (r"\bconv_skip\.", "downsample.0."),
        (r"\bnorm_skip\.", "downsample.1."),
        (r"\blin\.", "0."),  # of a fusion
        (r"\bnorm\.", "1."),
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


def _trellis2(name: str) -> str:
    # Saved with spconv in FlexGEMM's place, convolutions are one module deeper.
    return re.sub(r"\.(conv[12]?)\.conv\.", r".\1.", name)


def _flow(name: str) -> str | None:
    # Tables that are computed here: rotations and places of a dense grid.
    return None if name in ("rope_phases", "pos_emb") else name


def _pointcept(name: str) -> str:
    # Its segmentors hold the net as their backbone.
    return name.removeprefix("backbone.")


def _ptv3(name: str) -> str | None:
    # Neither is read in evaluation: a token of training, and rotations that
    # ``rope_base`` says.
    if name.endswith((".mask_token", ".attn.rope.inv_freq")):
        return None
    return _pointcept(name)


def _backbone_3d(name: str) -> str | None:
    # OpenPCDet's detectors hold the net so; what else they have is not of it.
    own, part, rest = name.rpartition("backbone_3d.")
    return None if not part or own else rest


def _openpcdet(name: str) -> str | None:
    return None if name == "global_step" else name  # a counter


# A name is given to the rules in turn, until one returns a parameter's or drops it.
_PUBLISHED: dict[tuple[type[Module], str], tuple[Rename, ...]] = {
    (MinkUNet, "minkowski"): (MINKOWSKI,),
    (MinkUNet, "torchsparse"): (TORCHSPARSE,),
    (SPVCNN, "torchsparse"): (_SPVCNN,),
    (SparseVAEDecoder, "trellis2"): (_trellis2,),
    (SparseVAEDecoder, "spconv"): (_trellis2,),
    (SparseVAEEncoder, "trellis2"): (_trellis2,),
    (SparseVAEEncoder, "spconv"): (_trellis2,),
    (FlowModel, "trellis2"): (_flow,),
    (SpUNet, "spconv"): (_pointcept, _SPUNET),
    (PTv3, "spconv"): (_ptv3,),
    (Detector, "spconv"): (_openpcdet, _VOXELNEXT),
    (VoxelBackBone8x, "spconv"): (_VOXELS, _backbone_3d),
    (VoxelResBackBone8xVoxelNeXt, "spconv"): (_VOXELS, _backbone_3d),
}


# Later versions keep the names.
_SAME = {"torchsparse2.1": "torchsparse", OURS: None}
_SAME |= dict.fromkeys(("spconv1", "spconv2.0", "spconv2.1"), "spconv")


def published(model: Module | None, library: str) -> tuple[Rename, ...]:
    """Return what renames a library's checkpoint of this model.

    What `mlx-lattice convert` writes without a model keeps the names of any library.
    """
    library = _SAME.get(library, library)
    rules = [
        rule
        for (kind, name), those in _PUBLISHED.items()
        if isinstance(model, kind) and library in (None, name)
        for rule in those
    ]
    if isinstance(model, PTv3) and library in (None, "spconv"):
        rules.append(_ptv3_names(model))
    return tuple(rules)

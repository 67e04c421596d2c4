"""LiDAR detectors: voxels, backbones, heads, boxes."""

from .backbones import VoxelBackBone8x, VoxelResBackBone8x
from .boxes import Boxes, Candidates, Decoding
from .dense import BaseBEVBackbone
from .detector import CenterPoint, Detector, VoxelNeXt
from .heads import CenterHead, VoxelNeXtHead
from .losses import detection_loss
from .published import published_arguments
from .unetv2 import UNetV2
from .voxelnext_backbone import VoxelResBackBone8xVoxelNeXt
from .voxels import (
    GridRecipe,
    HardVoxels,
    dynamic_voxels,
    hard_voxels,
    mean_vfe,
)

__all__ = [
    "BaseBEVBackbone",
    "Boxes",
    "Candidates",
    "CenterHead",
    "CenterPoint",
    "Decoding",
    "Detector",
    "GridRecipe",
    "HardVoxels",
    "UNetV2",
    "VoxelBackBone8x",
    "VoxelNeXt",
    "VoxelNeXtHead",
    "VoxelResBackBone8x",
    "VoxelResBackBone8xVoxelNeXt",
    "detection_loss",
    "dynamic_voxels",
    "hard_voxels",
    "mean_vfe",
    "published_arguments",
]

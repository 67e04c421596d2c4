"""LiDAR detectors: voxels, backbones, heads, boxes."""

from .backbones import (
    UNetV2,
    VoxelBackBone8x,
    VoxelResBackBone8x,
    VoxelResBackBone8xVoxelNeXt,
)
from .detector import (
    Boxes,
    Candidates,
    CenterPoint,
    Decoding,
    Detector,
    VoxelNeXt,
    detection_loss,
    published_arguments,
)
from .heads import BaseBEVBackbone, CenterHead, VoxelNeXtHead
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

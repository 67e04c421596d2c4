"""LiDAR detectors: voxels, backbones, heads, boxes."""

from .backbones import (
    GridRecipe,
    HardVoxels,
    UNetV2,
    VoxelBackBone8x,
    VoxelResBackBone8x,
    VoxelResBackBone8xVoxelNeXt,
    dynamic_voxels,
    hard_voxels,
    mean_vfe,
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

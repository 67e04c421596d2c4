"""LiDAR detectors: voxels, backbones, heads, boxes."""

from .backbones import VoxelBackBone8x, VoxelResBackBone8x
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
    "GridRecipe",
    "HardVoxels",
    "UNetV2",
    "VoxelBackBone8x",
    "VoxelResBackBone8x",
    "VoxelResBackBone8xVoxelNeXt",
    "dynamic_voxels",
    "hard_voxels",
    "mean_vfe",
]

"""Reference nets built from mlx_lattice.nn."""

from .about import PUBLISHED, About
from .blocks import BasicBlock, Bottleneck
from .decoder import DualGrid, SparseVAEDecoder, dual_grid
from .detection import (
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
from .minkunet import (
    MinkUNet,
    MinkUNet14,
    MinkUNet18,
    MinkUNet34,
    MinkUNet50,
    MinkUNet101,
    MinkUNetTorchSparse,
)
from .pretrained import Pretrained, from_pretrained
from .ptv3 import PTv3
from .recipe import VoxelRecipe, Voxels
from .resnet import SparseResNet, SparseResNet14, SparseResNet18, SparseResNet34
from .segmentor import Segmentor
from .spunet import SpUNet
from .spvcnn import SPVCNN

__all__ = [
    "PUBLISHED",
    "SPVCNN",
    "About",
    "BasicBlock",
    "Bottleneck",
    "DualGrid",
    "GridRecipe",
    "HardVoxels",
    "MinkUNet",
    "MinkUNet101",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNet50",
    "MinkUNetTorchSparse",
    "PTv3",
    "Pretrained",
    "Segmentor",
    "SpUNet",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
    "SparseVAEDecoder",
    "UNetV2",
    "VoxelBackBone8x",
    "VoxelRecipe",
    "VoxelResBackBone8x",
    "VoxelResBackBone8xVoxelNeXt",
    "Voxels",
    "dual_grid",
    "dynamic_voxels",
    "from_pretrained",
    "hard_voxels",
    "mean_vfe",
]

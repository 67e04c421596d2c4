"""Reference nets built from mlx_lattice.nn."""

from .about import PUBLISHED, About
from .blocks import BasicBlock, Bottleneck
from .decoder import DualGrid, SparseVAEDecoder, dual_grid
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
    "About",
    "BasicBlock",
    "Bottleneck",
    "DualGrid",
    "MinkUNet",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNet50",
    "MinkUNet101",
    "MinkUNetTorchSparse",
    "PTv3",
    "Pretrained",
    "SPVCNN",
    "Segmentor",
    "SpUNet",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
    "SparseVAEDecoder",
    "VoxelRecipe",
    "Voxels",
    "dual_grid",
    "from_pretrained",
]

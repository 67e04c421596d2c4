"""Reference nets built from mlx_lattice.nn."""

from . import trellis2
from .about import PUBLISHED, About
from .blocks import BasicBlock, Bottleneck
from .detection import (
    BaseBEVBackbone,
    Boxes,
    Candidates,
    CenterHead,
    CenterPoint,
    Decoding,
    Detector,
    GridRecipe,
    HardVoxels,
    UNetV2,
    VoxelBackBone8x,
    VoxelNeXt,
    VoxelNeXtHead,
    VoxelResBackBone8x,
    VoxelResBackBone8xVoxelNeXt,
    detection_loss,
    dynamic_voxels,
    hard_voxels,
    mean_vfe,
    published_arguments,
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
from .trellis2 import (
    DualGrid,
    SLatFlowModel,
    SparseStructureDecoder,
    SparseStructureEncoder,
    SparseStructureFlowModel,
    SparseVAEDecoder,
    SparseVAEEncoder,
    dual_grid,
)

__all__ = [
    "PUBLISHED",
    "SPVCNN",
    "About",
    "BaseBEVBackbone",
    "BasicBlock",
    "Bottleneck",
    "Boxes",
    "Candidates",
    "CenterHead",
    "CenterPoint",
    "Decoding",
    "Detector",
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
    "SLatFlowModel",
    "Segmentor",
    "SpUNet",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
    "SparseStructureDecoder",
    "SparseStructureEncoder",
    "SparseStructureFlowModel",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "UNetV2",
    "VoxelBackBone8x",
    "VoxelNeXt",
    "VoxelNeXtHead",
    "VoxelRecipe",
    "VoxelResBackBone8x",
    "VoxelResBackBone8xVoxelNeXt",
    "Voxels",
    "detection_loss",
    "dual_grid",
    "dynamic_voxels",
    "from_pretrained",
    "hard_voxels",
    "mean_vfe",
    "published_arguments",
    "trellis2",
]

"""Reference nets built from mlx_lattice.nn."""

from .blocks import BasicBlock
from .decoder import DualGrid, SparseVAEDecoder, dual_grid
from .minkunet import MinkUNet, MinkUNet14, MinkUNet18, MinkUNet34, MinkUNetTorchSparse
from .resnet import SparseResNet, SparseResNet14, SparseResNet18, SparseResNet34
from .spunet import SpUNet
from .spvcnn import SPVCNN

__all__ = [
    "BasicBlock",
    "DualGrid",
    "MinkUNet",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNetTorchSparse",
    "SPVCNN",
    "SpUNet",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
    "SparseVAEDecoder",
    "dual_grid",
]

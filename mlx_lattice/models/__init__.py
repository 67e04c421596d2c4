"""Reference nets built from mlx_lattice.nn."""

from .blocks import BasicBlock
from .minkunet import MinkUNet, MinkUNet14, MinkUNet18, MinkUNet34
from .resnet import SparseResNet, SparseResNet14, SparseResNet18, SparseResNet34

__all__ = [
    "BasicBlock",
    "MinkUNet",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
]

"""torchsparse.nn: layers."""

from ...torchsparse import layers as modules
from ...torchsparse.layers import (
    BatchNorm,
    GlobalAvgPool,
    GlobalMaxPool,
    GroupNorm,
    LeakyReLU,
    ReLU,
    SparseCrop,
)
from ..version1 import Conv3d
from . import functional, utils

__all__ = [
    "BatchNorm", "Conv3d", "GlobalAvgPool", "GlobalMaxPool", "GroupNorm", "LeakyReLU",
    "ReLU", "SparseCrop", "functional", "modules", "utils",
]  # fmt: skip

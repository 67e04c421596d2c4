"""torchsparse.nn: layers."""

from .. import layers as modules
from ..convolution import Conv3d
from ..layers import (
    BatchNorm,
    GlobalAvgPool,
    GlobalMaxPool,
    GroupNorm,
    InstanceNorm,
    LeakyReLU,
    ReLU,
    SiLU,
    SparseCrop,
)
from . import functional, utils

__all__ = [
    "BatchNorm", "Conv3d", "GlobalAvgPool", "GlobalMaxPool", "GroupNorm",
    "InstanceNorm", "LeakyReLU", "ReLU", "SiLU", "SparseCrop", "functional", "modules",
    "utils",
]  # fmt: skip

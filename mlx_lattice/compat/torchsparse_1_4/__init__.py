"""torchsparse 1.4 over mlx_lattice: coordinates are x, y, z, batch, undivided."""

from ..torchsparse import tensor as operators
from ..torchsparse.tensor import PointTensor, cat
from . import nn, utils, version1
from .version1 import SparseTensor

tensor = version1
__version__ = "1.4.0"

__all__ = [
    "PointTensor", "SparseTensor", "cat", "nn", "operators", "tensor", "utils",
]  # fmt: skip

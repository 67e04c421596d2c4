"""torchsparse 2.1 over mlx_lattice: coordinates are batch, x, y, z, in cells."""

from . import backend, nn, tensor, utils
from .tensor import PointTensor, SparseTensor, cat, generative_add

operators = tensor
__version__ = "2.1.0"

__all__ = [
    "PointTensor", "SparseTensor", "backend", "cat", "generative_add", "nn",
    "operators", "tensor", "utils",
]  # fmt: skip


def tune(*_: object, **__: object) -> None:
    """Do nothing: the route table of mlx_lattice chooses kernels."""

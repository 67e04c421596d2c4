"""MinkowskiEngine 0.5 over mlx_lattice, with the spellings of 0.4 that nets use."""

from . import (
    MinkowskiCommon,
    MinkowskiConvolution,
    MinkowskiCoordinateManager,
    MinkowskiFunctional,
    MinkowskiKernelGenerator,
    MinkowskiNonlinearity,
    MinkowskiOps,
    MinkowskiPooling,
    MinkowskiTensor,
    modules,
    utils,
)
from .MinkowskiCommon import *
from .MinkowskiCommon import Absent as _Absent
from .MinkowskiCommon import absent as _absent
from .MinkowskiConvolution import *
from .MinkowskiCoordinateManager import *
from .MinkowskiCoordinateManager import CoordinateManager as CoordsManager
from .MinkowskiKernelGenerator import *
from .MinkowskiNonlinearity import *
from .MinkowskiOps import *
from .MinkowskiOps import _sum as sum
from .MinkowskiPooling import *
from .MinkowskiTensor import *

__version__ = "0.5.4"

__all__ = [
    "MinkowskiCommon", "MinkowskiConvolution", "MinkowskiCoordinateManager",
    "MinkowskiFunctional", "MinkowskiKernelGenerator", "MinkowskiNonlinearity",
    "MinkowskiOps", "MinkowskiPooling", "MinkowskiTensor", "modules",
    "CoordsManager", "sum", "utils",
]  # fmt: skip


def is_cuda_available() -> bool:
    """Return False: nothing here is compiled for CUDA."""
    return False


def set_gpu_allocator(backend: object) -> None:
    """Do nothing."""


set_memory_manager_backend = set_gpu_allocator
MinkowskiSPMMFunction: _Absent = _absent(
    "MinkowskiSPMMFunction", "call torch.sparse.mm"
)
MinkowskiSPMMAverageFunction: _Absent = _absent(
    "MinkowskiSPMMAverageFunction", "call torch.sparse.mm"
)

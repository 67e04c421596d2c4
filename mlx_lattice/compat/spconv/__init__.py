"""spconv over mlx_lattice: spconv 2 in ``pytorch``, spconv 1.x's names at the top."""

from . import constants, core, pytorch, utils
from .core import AlgoHint, ConvAlgo
from .pytorch import functional, modules, ops, tables, version1
from .pytorch.modules import (
    Identity,
    RemoveGrid,
    SparseModule,
    SparseSequential,
    ToDense,
)
from .pytorch.tables import AddTable, ConcatTable, JoinTable
from .pytorch.version1 import *

conv = version1
__version__ = "2.3.8"
SPCONV_VERSION_NUMBERS = [2, 3, 8]

__all__ = [
    "AddTable",
    "AlgoHint",
    "ConcatTable",
    "ConvAlgo",
    "Identity",
    "JoinTable",
    "RemoveGrid",
    "SPCONV_VERSION_NUMBERS",
    "SparseModule",
    "SparseSequential",
    "ToDense",
    "constants",
    "conv",
    "core",
    "functional",
    "modules",
    "ops",
    "pytorch",
    "tables",
    "utils",
    *version1.__all__,
]

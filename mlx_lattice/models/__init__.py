"""Reference nets built from mlx_lattice.nn."""

from __future__ import annotations

from . import blocks, catalogue, detection, litept, pretrained, ptv3, trellis2, unets
from .blocks import *
from .catalogue import *
from .detection import *
from .litept import *
from .pretrained import *
from .ptv3 import *
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
from .unets import *

__all__ = [
    *blocks.__all__,
    *catalogue.__all__,
    *detection.__all__,
    *litept.__all__,
    *pretrained.__all__,
    *ptv3.__all__,
    *unets.__all__,
    "DualGrid",
    "SLatFlowModel",
    "SparseStructureDecoder",
    "SparseStructureEncoder",
    "SparseStructureFlowModel",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "dual_grid",
    "trellis2",
]


def __dir__() -> list[str]:
    return sorted(__all__)

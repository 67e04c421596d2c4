"""Reference nets built from mlx_lattice.nn, and scans of any size by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import (
    blocks,
    catalogue,
    detection,
    litept,
    pretrained,
    ptv3,
    trellis2,
    unets,
    voxel_recipe,
)
from .blocks import *

# Each file: mypy does not read the lists of the two folders.
from .catalogue.entries import *
from .catalogue.record import *
from .detection.backbones import *
from .detection.detector import *
from .detection.heads import *
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
from .voxel_recipe import *

if TYPE_CHECKING:
    from .scans import Segmented, segment_points

# Names of a module that needs NumPy.
_SCANS = ("Segmented", "segment_points")

__all__ = [
    *blocks.__all__,
    *catalogue.__all__,
    *detection.__all__,
    *litept.__all__,
    *pretrained.__all__,
    *ptv3.__all__,
    *unets.__all__,
    *voxel_recipe.__all__,
    "DualGrid",
    "Segmented",
    "SLatFlowModel",
    "SparseStructureDecoder",
    "SparseStructureEncoder",
    "SparseStructureFlowModel",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "dual_grid",
    "segment_points",
    "trellis2",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers find mistyped names

    def __getattr__(name: str) -> Any:
        if name in _SCANS:
            from . import scans

            return getattr(scans, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

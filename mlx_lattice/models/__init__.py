"""Reference nets built from mlx_lattice.nn."""

from . import detection, trellis2
from .blocks import (
    BasicBlock,
    Bottleneck,
    SparseResNet,
    SparseResNet14,
    SparseResNet18,
    SparseResNet34,
)
from .detection import *
from .pretrained import (
    About,
    Pretrained,
    Segmentor,
    VoxelRecipe,
    Voxels,
    from_pretrained,
)
from .ptv3 import PTv3
from .published import PUBLISHED
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
from .unets import (
    SPVCNN,
    MinkUNet,
    MinkUNet14,
    MinkUNet18,
    MinkUNet34,
    MinkUNet50,
    MinkUNet101,
    MinkUNetTorchSparse,
    SpUNet,
)

__all__ = [
    *detection.__all__,
    "PUBLISHED",
    "SPVCNN",
    "About",
    "BasicBlock",
    "Bottleneck",
    "DualGrid",
    "MinkUNet",
    "MinkUNet101",
    "MinkUNet14",
    "MinkUNet18",
    "MinkUNet34",
    "MinkUNet50",
    "MinkUNetTorchSparse",
    "PTv3",
    "Pretrained",
    "SLatFlowModel",
    "Segmentor",
    "SpUNet",
    "SparseResNet",
    "SparseResNet14",
    "SparseResNet18",
    "SparseResNet34",
    "SparseStructureDecoder",
    "SparseStructureEncoder",
    "SparseStructureFlowModel",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "VoxelRecipe",
    "Voxels",
    "dual_grid",
    "from_pretrained",
    "trellis2",
]


def __dir__() -> list[str]:
    return sorted(__all__)

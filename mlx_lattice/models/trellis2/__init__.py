"""TRELLIS.2: its decoders, encoder, flow models and samplers."""

from .blocks import FLOW, STRUCTURE_FLOW, ConvNeXtBlock, DownBlock, UpBlock
from .flow import FlowModel, SLatFlowModel, SparseStructureFlowModel
from .pipeline import (
    FORMS,
    SAMPLERS,
    FlowEulerCfgSampler,
    FlowEulerGuidanceIntervalSampler,
    FlowEulerSampler,
    Generated,
    Pipeline,
    Recipe,
    Samples,
    Step,
    nets_of,
    sizes_of,
)
from .vae import (
    DualGrid,
    SparseStructureDecoder,
    SparseStructureEncoder,
    SparseVAEDecoder,
    SparseVAEEncoder,
    dual_grid,
    dual_grid_features,
    occupied,
)

__all__ = [
    "FLOW",
    "FORMS",
    "SAMPLERS",
    "STRUCTURE_FLOW",
    "ConvNeXtBlock",
    "DownBlock",
    "DualGrid",
    "FlowEulerCfgSampler",
    "FlowEulerGuidanceIntervalSampler",
    "FlowEulerSampler",
    "FlowModel",
    "Generated",
    "Pipeline",
    "Recipe",
    "SLatFlowModel",
    "Samples",
    "SparseStructureDecoder",
    "SparseStructureEncoder",
    "SparseStructureFlowModel",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "Step",
    "UpBlock",
    "dual_grid",
    "dual_grid_features",
    "nets_of",
    "occupied",
    "sizes_of",
]

"""TRELLIS.2: its decoders, encoder, flow models and samplers."""

from .blocks import ConvNeXtBlock, DownBlock, UpBlock
from .flow import FlowModel, SLatFlowModel, SparseStructureFlowModel
from .pipeline import FORMS, Generated, Pipeline, Recipe, nets_of, sizes_of
from .published import FLOW, STRUCTURE_FLOW
from .sampler import (
    SAMPLERS,
    FlowEulerCfgSampler,
    FlowEulerGuidanceIntervalSampler,
    FlowEulerSampler,
    Samples,
    Step,
)
from .structure import SparseStructureDecoder, SparseStructureEncoder, occupied
from .vae import (
    DualGrid,
    SparseVAEDecoder,
    SparseVAEEncoder,
    dual_grid,
    dual_grid_features,
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

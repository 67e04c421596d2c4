"""TRELLIS.2: its decoders, encoder, flow models and samplers."""

from .blocks import ConvNeXtBlock, DownBlock, UpBlock
from .decoder import DualGrid, SparseVAEDecoder, dual_grid
from .encoder import SparseVAEEncoder, dual_grid_features
from .flow import FlowModel, SLatFlowModel, SparseStructureFlowModel
from .published import FLOW, STRUCTURE_FLOW
from .sampler import (
    SAMPLERS,
    FlowEulerCfgSampler,
    FlowEulerGuidanceIntervalSampler,
    FlowEulerSampler,
    Samples,
    Step,
)
from .structure import SparseStructureDecoder, occupied

__all__ = [
    "FLOW",
    "SAMPLERS",
    "STRUCTURE_FLOW",
    "ConvNeXtBlock",
    "DownBlock",
    "DualGrid",
    "FlowEulerCfgSampler",
    "FlowEulerGuidanceIntervalSampler",
    "FlowEulerSampler",
    "FlowModel",
    "SLatFlowModel",
    "Samples",
    "SparseStructureDecoder",
    "SparseStructureFlowModel",
    "SparseVAEDecoder",
    "SparseVAEEncoder",
    "Step",
    "UpBlock",
    "dual_grid",
    "dual_grid_features",
    "occupied",
]

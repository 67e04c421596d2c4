"""Contractions on Metal: kernels of ``metal/``, compiled by MLX when they first run."""

from . import metal_conv, metal_matrix, metal_quantized
from .metal_quantized import QUANTIZED

# Routes whose functions take ``bias``, (C_out,), and add it to their sums.
FUSED_BIAS = metal_matrix.FUSED_BIAS | metal_quantized.FUSED_BIAS
CONV = {**metal_conv.CONV, **metal_matrix.CONV}
WEIGHT_GRAD = {**metal_conv.WEIGHT_GRAD, **metal_matrix.WEIGHT_GRAD}

__all__ = ["CONV", "FUSED_BIAS", "QUANTIZED", "WEIGHT_GRAD"]

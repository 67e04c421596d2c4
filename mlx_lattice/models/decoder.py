"""TRELLIS.2's decoders under the name that they had first; see ``models.trellis2``."""

from .trellis2.blocks import ConvNeXtBlock, UpBlock
from .trellis2.decoder import DualGrid, SparseVAEDecoder, dual_grid

__all__ = ["ConvNeXtBlock", "DualGrid", "SparseVAEDecoder", "UpBlock", "dual_grid"]

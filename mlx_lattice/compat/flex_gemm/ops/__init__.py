"""flex_gemm.ops: ``spconv``, ``grid_sample`` and ``serialize``."""

from . import grid_sample, serialize, spconv

__all__ = ["grid_sample", "serialize", "spconv"]

"""flex_gemm over mlx_lattice: submanifold convolution and sampling, as TRELLIS.2's."""

from . import ops

__all__ = ["ops"]
__version__ = "1.0.0"

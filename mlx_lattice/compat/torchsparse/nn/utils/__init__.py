"""torchsparse.nn.utils."""

from ...layers import fapply
from ...points import get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]

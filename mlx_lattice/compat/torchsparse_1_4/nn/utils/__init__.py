"""torchsparse.nn.utils."""

from ....torchsparse.layers import fapply
from ....torchsparse.points import get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]

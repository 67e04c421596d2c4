"""torchsparse.utils."""

from .. import points as quantize
from .. import tensor as collate
from .. import tensor as tensor_cache
from ..points import make_divisible, make_ntuple, make_tensor
from ..tensor import to_dense

__all__ = [
    "collate", "make_divisible", "make_ntuple", "make_tensor", "quantize",
    "tensor_cache", "to_dense",
]  # fmt: skip

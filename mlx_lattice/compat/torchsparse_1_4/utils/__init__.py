"""torchsparse.utils."""

from ...torchsparse import tensor as collate
from ...torchsparse.points import make_ntuple
from .. import version1 as quantize

__all__ = ["collate", "make_ntuple", "quantize"]

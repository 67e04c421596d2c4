"""Functions of sparse tensors."""

from ..other_names import unknown_name
from . import (
    activation,
    attention,
    boxes,
    channels,
    conv,
    coordinates,
    dual_grid,
    groups,
    heads,
    interpolation,
    neighbours,
    norm,
    pool,
)
from .activation import *
from .attention import *
from .boxes import *
from .channels import *
from .conv import *
from .coordinates import *
from .dual_grid import *
from .groups import *
from .heads import *
from .interpolation import *
from .neighbours import *
from .norm import *
from .pool import *

_FILES = (
    activation, attention, boxes, channels, conv, coordinates, dual_grid, pool, groups,
    heads, interpolation, neighbours, norm, pool, interpolation, attention,
)  # fmt: skip
__all__ = [*(name for file in _FILES for name in file.__all__)]


def __getattr__(name: str) -> None:
    unknown_name(name, __name__)

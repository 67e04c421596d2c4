"""Modules over sparse tensors, in the manner of mlx.nn."""

from mlx.nn import Module

from ..other_names import unknown_name
from . import (
    attention,
    calibration,
    containers,
    convolution,
    distributed,
    elementwise,
    fake_quantized,
    integer,
    integer_files,
    linear,
    normalization,
    pooling,
    quantized,
)
from .attention import *
from .calibration import *
from .containers import *
from .convolution import *
from .distributed import *
from .elementwise import *
from .fake_quantized import *
from .integer import *
from .integer_files import *
from .linear import *
from .normalization import *
from .pooling import *
from .quantized import *

__all__ = [
    "Module",
    *elementwise.__all__,
    *attention.__all__,
    *calibration.__all__,
    *containers.__all__,
    *convolution.__all__,
    *distributed.__all__,
    *fake_quantized.__all__,
    *integer.__all__,
    *integer_files.__all__,
    *linear.__all__,
    *normalization.__all__,
    *pooling.__all__,
    *quantized.__all__,
]


def __getattr__(name: str) -> None:
    unknown_name(name, __name__)

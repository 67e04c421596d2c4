"""Modules over sparse tensors, in the manner of mlx.nn."""

from mlx.nn import Module

from ..other_names import unknown_name
from . import (
    attention,
    calibration,
    convolution,
    distributed,
    elementwise,
    fake_quantized,
    fused,
    integer_files,
    linear,
    normalization,
    pooling,
    quantized,
)
from .attention import *
from .calibration import *
from .convolution import *
from .distributed import *
from .elementwise import *
from .fake_quantized import *
from .fused import *
from .integer_files import *
from .linear import *
from .normalization import *
from .pooling import *
from .quantized import *

_FILES = (
    elementwise, attention, calibration, fused, convolution, distributed,
    fake_quantized, integer_files, linear, normalization, pooling, quantized,
)  # fmt: skip
__all__ = ["Module", *(name for file in _FILES for name in file.__all__)]


def __getattr__(name: str) -> None:
    unknown_name(name, __name__)

"""Modules over sparse tensors, in the manner of mlx.nn."""

from mlx.nn import Module

from ..other_names import unknown_name
from . import (
    activations,
    adaptive_norm,
    attention,
    bev,
    calibration,
    containers,
    convolution,
    cross_attention,
    distributed,
    dropout,
    fake_quantized,
    grid_pooling,
    integer,
    integer_files,
    linear,
    normalization,
    offsets,
    pooling,
    quantized,
    relative_positions,
)
from .activations import *
from .adaptive_norm import *
from .attention import *
from .bev import *
from .calibration import *
from .containers import *
from .convolution import *
from .cross_attention import *
from .distributed import *
from .dropout import *
from .fake_quantized import *
from .grid_pooling import *
from .integer import *
from .integer_files import *
from .linear import *
from .normalization import *
from .offsets import *
from .pooling import *
from .quantized import *
from .relative_positions import *

__all__ = [
    "Module",
    *activations.__all__,
    *adaptive_norm.__all__,
    *attention.__all__,
    *bev.__all__,
    *calibration.__all__,
    *containers.__all__,
    *convolution.__all__,
    *cross_attention.__all__,
    *distributed.__all__,
    *dropout.__all__,
    *fake_quantized.__all__,
    *grid_pooling.__all__,
    *integer.__all__,
    *integer_files.__all__,
    *linear.__all__,
    *normalization.__all__,
    *offsets.__all__,
    *pooling.__all__,
    *quantized.__all__,
    *relative_positions.__all__,
]


def __getattr__(name: str) -> None:
    unknown_name(name, __name__)

"""Modules over sparse tensors, in the manner of mlx.nn."""

from typing import TYPE_CHECKING

from mlx.nn import Module

from ..tensor import numbered_classes, unknown_name
from . import (
    attention,
    convolution,
    fused,
    int8,
    layers,
    linear,
    losses,
    metrics,
    normalization,
    pooling,
)
from .attention import *
from .convolution import *
from .fused import *
from .int8 import *
from .layers import *
from .linear import *
from .normalization import *
from .pooling import *

_NUMBERED = numbered_classes(
    __name__,
    convolution.Conv,
    convolution.SubmConv,
    convolution.ConvTranspose,
    convolution.GenerativeConvTranspose,
    convolution.QuantizedConv,
    convolution.QuantizedSubmConv,
    convolution.QuantizedConvTranspose,
    convolution.QuantizedGenerativeConvTranspose,
    pooling.MaxPool,
    pooling.SumPool,
    pooling.AvgPool,
    pooling.Upsample,
)
for _name, _class in _NUMBERED.items():
    globals()[_name] = _class
    if f"Quantized{_name}" in _NUMBERED:
        _class.twin = _NUMBERED[f"Quantized{_name}"]

if TYPE_CHECKING:  # type checkers do not see the loop
    Conv1d = convolution.Conv
    Conv2d = convolution.Conv
    Conv3d = convolution.Conv
    Conv4d = convolution.Conv
    SubmConv1d = convolution.SubmConv
    SubmConv2d = convolution.SubmConv
    SubmConv3d = convolution.SubmConv
    SubmConv4d = convolution.SubmConv
    ConvTranspose1d = convolution.ConvTranspose
    ConvTranspose2d = convolution.ConvTranspose
    ConvTranspose3d = convolution.ConvTranspose
    ConvTranspose4d = convolution.ConvTranspose
    GenerativeConvTranspose1d = convolution.GenerativeConvTranspose
    GenerativeConvTranspose2d = convolution.GenerativeConvTranspose
    GenerativeConvTranspose3d = convolution.GenerativeConvTranspose
    GenerativeConvTranspose4d = convolution.GenerativeConvTranspose
    MaxPool1d = pooling.MaxPool
    MaxPool2d = pooling.MaxPool
    MaxPool3d = pooling.MaxPool
    MaxPool4d = pooling.MaxPool
    SumPool1d = pooling.SumPool
    SumPool2d = pooling.SumPool
    SumPool3d = pooling.SumPool
    SumPool4d = pooling.SumPool
    AvgPool1d = pooling.AvgPool
    AvgPool2d = pooling.AvgPool
    AvgPool3d = pooling.AvgPool
    AvgPool4d = pooling.AvgPool
    Upsample1d = pooling.Upsample
    Upsample2d = pooling.Upsample
    Upsample3d = pooling.Upsample
    Upsample4d = pooling.Upsample

_FILES = (
    layers, attention, fused, convolution, int8, linear,
    normalization, pooling,
)  # fmt: skip
__all__ = [
    "Module",
    "losses",
    "metrics",
    *(name for file in _FILES for name in file.__all__),
    *_NUMBERED,
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers find mistyped names

    def __getattr__(name: str) -> None:
        unknown_name(name, __name__)

"""Functions of sparse tensors."""

from typing import TYPE_CHECKING

from ..tensor import numbered_functions, unknown_name
from . import (
    attention,
    boxes,
    channels,
    convolution,
    coordinates,
    dual_grid,
    norms,
    points,
    pool,
)
from .attention import *
from .boxes import *
from .channels import *
from .convolution import *
from .coordinates import *
from .dual_grid import *
from .norms import *
from .points import *
from .pool import *

_NUMBERED = numbered_functions(
    __name__,
    convolution.conv,
    convolution.subm_conv,
    convolution.conv_transpose,
    convolution.generative_conv_transpose,
    pool.max_pool,
    pool.avg_pool,
    pool.sum_pool,
    pool.avg_pool_transpose,
    pool.sum_pool_transpose,
    pool.upsample_nearest,
    points.upsample_linear,
)
globals().update(_NUMBERED)

if TYPE_CHECKING:  # type checkers do not see the loop
    conv1d = conv2d = conv3d = conv4d = convolution.conv
    subm_conv1d = subm_conv2d = subm_conv3d = subm_conv4d = convolution.subm_conv
    conv_transpose1d = conv_transpose2d = convolution.conv_transpose
    conv_transpose3d = conv_transpose4d = convolution.conv_transpose
    generative_conv_transpose1d = convolution.generative_conv_transpose
    generative_conv_transpose2d = convolution.generative_conv_transpose
    generative_conv_transpose3d = convolution.generative_conv_transpose
    generative_conv_transpose4d = convolution.generative_conv_transpose
    max_pool1d = max_pool2d = max_pool3d = max_pool4d = pool.max_pool
    avg_pool1d = avg_pool2d = avg_pool3d = avg_pool4d = pool.avg_pool
    sum_pool1d = sum_pool2d = sum_pool3d = sum_pool4d = pool.sum_pool
    upsample_nearest1d = upsample_nearest2d = pool.upsample_nearest
    upsample_nearest3d = upsample_nearest4d = pool.upsample_nearest
    avg_pool_transpose1d = avg_pool_transpose2d = pool.avg_pool_transpose
    avg_pool_transpose3d = avg_pool_transpose4d = pool.avg_pool_transpose
    sum_pool_transpose1d = sum_pool_transpose2d = pool.sum_pool_transpose
    sum_pool_transpose3d = sum_pool_transpose4d = pool.sum_pool_transpose
    upsample_linear1d = upsample_linear2d = points.upsample_linear
    upsample_linear3d = upsample_linear4d = points.upsample_linear

_FILES = (
    attention, boxes, channels, convolution, coordinates, dual_grid,
    norms, points, pool,
)  # fmt: skip
__all__ = [*(name for file in _FILES for name in file.__all__), *_NUMBERED]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers find mistyped names

    def __getattr__(name: str) -> None:
        unknown_name(name, __name__)

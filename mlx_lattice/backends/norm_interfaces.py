"""Interfaces of the kernels of norms by channel, the same on Metal and CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .gpu_kernel import Interface

# What CUDA's kernels of them share.
CUDA_FILES = "alignment.cuh", "channels.cuh", "epilogue.cuh", "norm_blocks.cuh"
# From a segment's weight and bias to the next one's; 0 where all segments share them.
STEP = "step", "0"


def _face(
    name: str, inputs: str, outputs: str, sizes: Sequence[tuple[str, str]]
) -> Interface:
    return Interface(name, tuple(inputs.split()), tuple(outputs.split()), tuple(sizes))


def _rows(segments: str) -> list[tuple[str, str]]:
    """Return the sizes of a kernel over rows; Metal's dispatches have some blocks."""
    sizes = [("first", "0"), ("rows", "x_shape[0]"), ("channels", "x_shape[1]")]
    return [*sizes, ("block_rows", "0"), ("segments", segments), STEP]


def _width(channels: str) -> tuple[str, str]:
    """Return the channels of a group, of a kernel with a threadgroup for each."""
    return "width", f"{channels} / gridDim.x"


_LINES = [("blocks", "partials_shape[0]"), ("channels", "partials_shape[2]")]
_LINES += [("segments", "gridDim.y"), STEP]
_FIT = "mean var weight bias residual"
MOMENTS = _face("ChannelNorm", "x order bounds", "partials", _rows("1"))
COMBINE_MOMENTS = _face(
    "Combine",
    "partials starts running_mean running_var norm_numbers",
    "mean var moved_mean moved_var",
    _LINES,
)
NORMALIZE = _face(
    "ChannelNorm", f"x {_FIT} of norm_numbers", "y", _rows("var_shape[0]")
)
GRADIENT_SUMS = _face(
    "ChannelNorm",
    f"dy x {_FIT} of order bounds norm_numbers",
    "partials",
    _rows("var_shape[0]"),
)
COMBINE_SUMS = _face(
    "Combine", "partials starts weight", "sums terms dweight dbias", _LINES
)
_BACK = f"dy x {_FIT} terms of norm_numbers"
GRADIENT = _face("ChannelNorm", _BACK, "dx", _rows("var_shape[0]"))
GRADIENTS = _face("ChannelNorm", _BACK, "dx dresidual", _rows("var_shape[0]"))
# Of groups of channels, one threadgroup or block a group and segment.
GROUP_MOMENTS = _face(
    "GroupMoment",
    "partials starts",
    "mean var",
    [*_LINES[:2], _width("partials_shape[2]")],
)
GROUP_TERMS = _face(
    "GroupTerm",
    "sums of_channels",
    "terms dweight dbias",
    [
        ("channels", "sums_shape[2]"),
        ("segments", "gridDim.y"),
        _width("sums_shape[2]"),
        STEP,
    ],
)
FACES = {
    "channel_moments": MOMENTS,
    "combine_moments": COMBINE_MOMENTS,
    "normalize_channels": NORMALIZE,
    "channel_gradient_sums": GRADIENT_SUMS,
    "combine_gradient_sums": COMBINE_SUMS,
    "combine_group_moments": GROUP_MOMENTS,
    "combine_group_terms": GROUP_TERMS,
    "channel_gradient": GRADIENT,
}

# Norms of few rows in one launch: of all rows, or of each segment.
_FEW_ROWS = [("rows", "x_shape[0]"), ("channels", "x_shape[1]")]
_FEW_ROWS += [("segments", "gridDim.x"), STEP]
_PARAMETERS = "weight bias residual"
_OF_ROWS = "order starts norm_numbers"
_STATISTICS = f"x {_PARAMETERS} running_mean running_var {_OF_ROWS}"
BATCH_NORM = _face(
    "BatchNorm", _STATISTICS, "y mean var moved_mean moved_var", _FEW_ROWS
)
SEGMENT_NORM = _face("BatchNorm", _STATISTICS, "y mean var", _FEW_ROWS)
_FEW_BACK = f"dy x mean var {_PARAMETERS} {_OF_ROWS}"
BATCH_GRADIENT = _face("BatchNorm", _FEW_BACK, "dx dweight dbias", _FEW_ROWS)
BATCH_GRADIENTS = _face("BatchNorm", _FEW_BACK, "dx dweight dbias dresidual", _FEW_ROWS)
SEGMENT_GRADIENT = _face("BatchNorm", _FEW_BACK, "dx sums", _FEW_ROWS)
SEGMENT_GRADIENTS = _face("BatchNorm", _FEW_BACK, "dx sums dresidual", _FEW_ROWS)

PLACE = (
    "threadgroup_position_in_grid, thread_position_in_threadgroup, "
    "threads_per_threadgroup"
)


@lru_cache(maxsize=1024)
def numbers(eps: float, momentum: float, slope: float) -> mx.array:
    """Return what kernels are told; eight, so that Metal has them in device memory."""
    return mx.array([eps, momentum, slope, 0, 0, 0, 0, 0], dtype=mx.float32)

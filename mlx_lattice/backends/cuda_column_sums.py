"""Sums of columns on CUDA, by one kernel: in one launch, or two of many rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import mlx.core as mx

from ..devices import CUDA
from ..routes import thresholds
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface
from .norm_interfaces import CUDA_FILES

FILES = *CUDA_FILES, "column_sums.cu"
FACE = Interface(
    "ColumnSums", ("x",), ("y",), (("rows", "x_shape[0]"), ("channels", "x_shape[1]"))
)
THREADS, THREADS_OF_WARP = 256, 32  # of a block, as of those of norms
LINES = 1024  # that the first of two launches writes
ROWS = 4  # of a thread at least, whose reads are on their way at once
# Neighbouring bytes of a row that a block reads: fewer in one launch, for more blocks.
BYTES, FEW_BYTES = 128, 32


class CudaColumnSums:
    """The sums over the rows of (N, C), which are not empty."""

    def sums(self, x: mx.array, kind: mx.Dtype) -> mx.array:
        """Return the (C,) sums in a dtype; float32 inside."""
        return _summing(x.shape, x.dtype, kind)([x])[0].reshape(-1)


Launch = Callable[[list[mx.array]], list[mx.array]]


@lru_cache(maxsize=4096)
def _summing(shape: tuple[int, int], dtype: mx.Dtype, kind: mx.Dtype) -> Launch:
    """Return what launches the sums, (1, C), of one array of this shape."""
    rows, channels = shape
    if rows <= thresholds.ONE_LAUNCH_SUMS:
        return _lines(_Block(channels, dtype, FEW_BYTES), 1, dtype, kind)
    block = _Block(channels, dtype, BYTES)
    share = ceil_div(rows, max(1, LINES // block.tiles))
    count = ceil_div(rows, max(share, ROWS * block.down))
    first = _lines(block, count, dtype, mx.float32)
    then = _summing((count, channels), mx.float32, kind)
    return lambda arrays: then(first(arrays))


class _Block:
    """How the threads of a block share the channels of its rows.

    Args:
        channels: of a row.
        dtype: its dtype.
        most: bytes of neighbouring channels.
    """

    def __init__(self, channels: int, dtype: mx.Dtype, most: int):
        wide = 16 // dtype.size
        self.channels, self.each = channels, 1 if channels % wide else wide
        vectors = channels // self.each
        fitting = most // (self.each * dtype.size)
        self.across = min(fitting, THREADS_OF_WARP, 1 << (vectors - 1).bit_length())
        self.tiles = ceil_div(vectors, self.across)
        self.down = THREADS // self.across


def _lines(block: _Block, count: int, dtype: mx.Dtype, kind: mx.Dtype) -> Launch:
    """Return what launches the sums of ``count`` shares of rows, a line each."""
    kernel = _kernel((("T", dtype), ("EACH", block.each), ("OUT", kind)))
    slots = [((count, block.channels), kind)]
    grid = count * block.across, block.tiles * block.down
    return kernel.launcher((True,), slots, grid, (block.across, block.down))


@cache
def _kernel(template: tuple) -> GpuKernel:
    return GpuKernel(CUDA, "column_sums", FILES, FACE, template, threads=THREADS)

"""Reductions on CUDA, without atomics: the same input gives the same bits."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import CUDA
from . import gpu_reductions as interfaces
from .cuda_sort import by_row, pieces
from .gpu_kernel import GpuKernel, Interface
from .gpu_segments import Segments, no_maxima
from .kernel_launches import THREADS, blocks_for

_TABLES = "alignment.cuh", "channels.cuh", "table_reductions.cu"
_SEGMENTS = *_TABLES, "segments.cu"


def _channels_each(x: mx.array) -> int:
    """Return how many channels a thread takes: 16 bytes of them, or one."""
    each = 16 // x.itemsize
    return 1 if x.shape[1] % each else each


def _threads(threads: int) -> int:
    """Return the threads to launch for so many that are wanted: whole blocks."""
    return THREADS * blocks_for(threads)


@cache
def _kernel(
    symbol: str,
    files: tuple[str, ...],
    interface: Interface,
    volume: int | None = None,
    **template: mx.Dtype | int,
) -> GpuKernel:
    """Return a kernel; ``volume`` where no input's shape says it."""
    sizes = () if volume is None else (("volume", volume),)
    template = tuple(template.items())
    return GpuKernel(CUDA, symbol, files, interface, template, sizes=sizes)


def _over_rows(
    symbol: str,
    files: tuple[str, ...],
    interface: Interface,
    inputs: list[mx.array | None],
    rows: int,
    dtypes: list[mx.Dtype],
    volume: int | None = None,
    **template: mx.Dtype,
) -> list[mx.array]:
    """Launch a kernel in which a thread has a row and neighbouring channels.

    Args:
        symbol: the function.
        files: its sources.
        interface: what it is called with.
        inputs: its arrays; the first is ``x``.
        rows: of the outputs.
        dtypes: of the outputs.
        volume: K of a table, where no input's shape says it.
        template: arguments besides the dtype of ``x`` and the channels of a thread.
    """
    x = inputs[0]
    channels = x.shape[1]
    each = _channels_each(x)
    types = {"T": x.dtype, "EACH": each, **template}
    slots = [((rows, channels), dtype) for dtype in dtypes]
    threads = _threads(rows * (channels // each))
    kernel = _kernel(symbol, files, interface, volume, **types)
    return kernel(inputs, slots, (threads,), (THREADS,))


# By tables


def gather_sum(
    x: mx.array,
    table: mx.array,
    weights: mx.array | None = None,
    divisors: mx.array | None = None,
) -> mx.array:
    """Return the (weighted) sums of the rows that a table names, or their means."""
    rows = table.shape[0]
    if table.size == 0 or x.size == 0:
        return mx.zeros((rows, x.shape[1]), dtype=x.dtype)
    face, inputs = interfaces.GATHER_SUM, [x, table, weights, divisors]
    return _over_rows("gather_sum", _TABLES, face, inputs, rows, [x.dtype])[0]


def gather_max(x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
    """Return the maxima over the rows that a table names, and their rows."""
    rows = table.shape[0]
    if table.size == 0 or x.size == 0:
        return no_maxima(x, rows)
    face, dtypes = interfaces.GATHER_MAX, [x.dtype, mx.int32]
    y, won = _over_rows("gather_max", _TABLES, face, [x, table], rows, dtypes)
    return y, won


def max_pool_backward(dy: mx.array, rows: mx.array, back: mx.array) -> mx.array:
    """Return to each row the sum of the results that it won."""
    n = back.shape[0]
    if back.size == 0 or dy.size == 0:
        return mx.zeros((n, dy.shape[1]), dtype=dy.dtype)
    face, inputs = interfaces.MAX_POOL_BACKWARD, [dy, rows, back]
    return _over_rows("max_pool_backward", _TABLES, face, inputs, n, [dy.dtype])[0]


def row_products(x: mx.array, y: mx.array, table: mx.array) -> mx.array:
    """Return the (M, K) float32 products of the rows that a table pairs."""
    if table.size == 0 or x.size == 0:
        return mx.zeros(table.shape)
    if x.dtype != y.dtype:
        x, y = x.astype(mx.float32), y.astype(mx.float32)
    kernel = _kernel("row_products", _TABLES, interfaces.ROW_PRODUCTS, T=x.dtype)
    threads = _threads(32 * table.size)
    slots = [(table.shape, mx.float32)]
    return kernel([x, y, table], slots, (threads,), (THREADS,))[0]


# By segments


def _sum_segments(
    x, entries, weights, starts, divisors, size, volume, dtype, most
) -> mx.array:
    """Return the sums of segments: ``entries`` are places in rows of ``volume``."""
    del size, most
    face, inputs = interfaces.SUM_SEGMENTS, [x, entries, weights, starts, divisors]
    rows = starts.size - 1
    return _over_rows(
        "sum_segments", _SEGMENTS, face, inputs, rows, [dtype], volume, OUT=dtype
    )[0]


def _max_segments(x, entries, names, starts, size, dtype, most):
    """Return the maxima of segments and their rows, or their pieces' names."""
    del size, most
    face, inputs = interfaces.MAX_SEGMENTS, [x, entries, names, starts]
    dtypes, rows = [dtype, mx.int32], starts.size - 1
    y, won = _over_rows(
        "max_segments", _SEGMENTS, face, inputs, rows, dtypes, OUT=dtype
    )
    return y, won


_segments = Segments(_sum_segments, _max_segments, by_row, pieces)


class CudaReductions:
    """The reductions of CUDA's kernels; see ``Reductions``."""

    gather_sum = staticmethod(gather_sum)
    scatter_sum = staticmethod(_segments.scatter_sum)
    order = staticmethod(_segments.order)
    counts = staticmethod(_segments.counts)
    gather_max = staticmethod(gather_max)
    scatter_max = staticmethod(_segments.scatter_max)
    max_pool_backward = staticmethod(max_pool_backward)
    row_products = staticmethod(row_products)
    segment_max = staticmethod(_segments.segment_max)

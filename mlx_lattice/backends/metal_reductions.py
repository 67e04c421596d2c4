"""Reductions on Metal, without atomics: the same input gives the same bits."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from . import gpu_reductions as interfaces
from .dispatch_bounds import by_rows, ceil_div, dispatch_limit
from .gpu_kernel import GpuKernel, Interface
from .gpu_segments import Segments, no_maxima

_TABLES = ("table_reductions",)
_SEGMENTS = *_TABLES, "segments"


@cache
def _kernel(
    symbol: str,
    files: tuple[str, ...],
    interface: Interface,
    **template: mx.Dtype,
) -> GpuKernel:
    place, template = "thread_position_in_grid.xy", tuple(template.items())
    return GpuKernel(METAL, symbol, files, interface, template, place=place)


def _over_rows(
    kernel: GpuKernel,
    inputs: list[mx.array | None],
    rows: int,
    channels: int,
    work: int,
    dtypes: list[mx.Dtype],
    volume: int = 1,
    most: int | None = None,
) -> list[mx.array]:
    """Launch over slices of output rows, 16 bytes of the first input's a thread.

    Args:
        kernel: what to launch.
        inputs: its arrays.
        rows: output rows.
        channels: of the outputs.
        work: features that are read.
        dtypes: of the outputs.
        volume: entries of a table's row.
        most: features that a single row may read; by default all read the same.
    """
    wide = 16 // inputs[0].dtype.size

    def launch(first: int, count: int) -> list[mx.array]:
        out = [((count, channels), dtype) for dtype in dtypes]
        sizes = {"first": first, "rows": count, "volume": volume, "channels": channels}
        return kernel(inputs, out, (ceil_div(channels, wide), count), **sizes)

    return by_rows(rows, work, dispatch_limit("elements"), launch, most=most)


def _over_table(
    symbol: str,
    interface: Interface,
    inputs: list[mx.array | None],
    table: mx.array,
    dtypes: list[mx.Dtype],
) -> list[mx.array]:
    """Launch a reduction over the rows of a table."""
    x, (rows, volume) = inputs[0], table.shape
    kernel, channels = _kernel(symbol, _TABLES, interface, T=x.dtype), x.shape[1]
    work = table.size * channels
    return _over_rows(kernel, inputs, rows, channels, work, dtypes, volume)


# By tables


def gather_sum(
    x: mx.array,
    table: mx.array,
    weights: mx.array | None = None,
    divisors: mx.array | None = None,
) -> mx.array:
    """Return the (weighted) sums of the rows that a table names, or their means."""
    if table.size == 0 or x.size == 0:
        return mx.zeros((table.shape[0], x.shape[1]), dtype=x.dtype)
    face, inputs = interfaces.GATHER_SUM, [x, table, weights, divisors]
    return _over_table("gather_sum", face, inputs, table, [x.dtype])[0]


def gather_max(x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
    """Return the maxima over the rows that a table names, and their rows."""
    if table.size == 0 or x.size == 0:
        return no_maxima(x, table.shape[0])
    face, dtypes = interfaces.GATHER_MAX, [x.dtype, mx.int32]
    y, won = _over_table("gather_max", face, [x, table], table, dtypes)
    return y, won


def max_pool_backward(dy: mx.array, rows: mx.array, back: mx.array) -> mx.array:
    """Return to each row the sum of the results that it won."""
    if back.size == 0 or dy.size == 0:
        return mx.zeros((back.shape[0], dy.shape[1]), dtype=dy.dtype)
    face, inputs = interfaces.MAX_POOL_BACKWARD, [dy, rows, back]
    return _over_table("max_pool_backward", face, inputs, back, [dy.dtype])[0]


def row_products(x: mx.array, y: mx.array, table: mx.array) -> mx.array:
    """Return the (M, K) float32 products of the rows that a table pairs."""
    (rows, volume), channels = table.shape, x.shape[1]
    if table.size == 0 or x.size == 0:
        return mx.zeros(table.shape)
    if x.dtype != y.dtype:
        x, y = x.astype(mx.float32), y.astype(mx.float32)
    kernel = _kernel("row_products", _TABLES, interfaces.ROW_PRODUCTS, T=x.dtype)

    def launch(first: int, count: int) -> list[mx.array]:
        sizes = {"first": first, "rows": count, "volume": volume, "channels": channels}
        out = [((count, volume), mx.float32)]
        return kernel([x, y, table], out, (volume, count), **sizes)

    return by_rows(rows, table.size * channels, dispatch_limit("elements"), launch)[0]


# By segments


def _sum_segments(
    x, entries, weights, starts, divisors, size, volume, dtype, most
) -> mx.array:
    """Return the sums of segments, each by one thread for a block of channels."""
    face, channels = interfaces.SUM_SEGMENTS, x.shape[1]
    return _over_rows(
        _kernel("sum_segments", _SEGMENTS, face, T=x.dtype, OUT=dtype),
        [x, entries, weights, starts, divisors],
        starts.size - 1,
        channels,
        size * channels,
        [dtype],
        volume,
        most * channels,
    )[0]


def _max_segments(x, entries, names, starts, size, dtype, most):
    """Return the maxima of segments and their rows, or their pieces' names."""
    face, channels = interfaces.MAX_SEGMENTS, x.shape[1]
    y, won = _over_rows(
        _kernel("max_segments", _SEGMENTS, face, T=x.dtype, OUT=dtype),
        [x, entries, names, starts],
        starts.size - 1,
        channels,
        size * channels,
        [dtype, mx.int32],
        most=most * channels,
    )
    return y, won


_segments = Segments(_sum_segments, _max_segments)
sum_segments = _segments.sum


class MetalReductions:
    """The reductions of Metal's kernels; see ``Reductions``."""

    gather_sum = staticmethod(gather_sum)
    scatter_sum = staticmethod(_segments.scatter_sum)
    order = staticmethod(_segments.order)
    counts = staticmethod(_segments.counts)
    gather_max = staticmethod(gather_max)
    scatter_max = staticmethod(_segments.scatter_max)
    max_pool_backward = staticmethod(max_pool_backward)
    row_products = staticmethod(row_products)
    segment_max = staticmethod(_segments.segment_max)

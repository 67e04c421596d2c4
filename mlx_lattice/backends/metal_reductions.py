"""Reductions on Metal, without atomics: the same input gives the same bits."""

from __future__ import annotations

import mlx.core as mx

from .dispatch_bounds import dispatch_limit
from .gpu_segments import Segments, no_maxima
from .metal_kernels import Kernel, by_rows, ceil_div, no_elements

_AT = "thread_position_in_grid.xy"
_GATHER_SUM = Kernel(
    "gather_sum",
    ("pooling",),
    ("x", "table", "weights", "sizes"),
    ("y",),
    f"gather_sum<T, WEIGHTED>(x, table, weights, sizes, y, {_AT});",
)
_GATHER_MAX = Kernel(
    "gather_max",
    ("pooling",),
    ("x", "table", "sizes"),
    ("y", "rows"),
    f"gather_max<T>(x, table, sizes, y, rows, {_AT});",
)
_MAX_POOL_BACKWARD = Kernel(
    "max_pool_backward",
    ("pooling",),
    ("dy", "rows", "back", "sizes"),
    ("x",),
    f"max_pool_backward<T>(dy, rows, back, sizes, x, {_AT});",
)
_PRODUCTS = Kernel(
    "row_products",
    ("pooling",),
    ("x", "y", "table", "sizes"),
    ("products",),
    f"row_products<T>(x, y, table, sizes, products, {_AT});",
)
_SUM_SEGMENTS = Kernel(
    "sum_segments",
    ("pooling", "segments"),
    ("x", "entries", "starts", "weights", "sizes"),
    ("y",),
    "sum_segments<T, OUT, ORDERED, WEIGHTED>(x, entries, starts, weights, sizes, y, "
    f"{_AT});",
)
_MAX_SEGMENTS = Kernel(
    "max_segments",
    ("pooling", "segments"),
    ("x", "entries", "starts", "names", "sizes"),
    ("y", "rows"),
    "max_segments<T, OUT, ORDERED, NAMED>(x, entries, starts, names, sizes, y, rows, "
    f"{_AT});",
)


def _none(dtype: mx.Dtype) -> mx.array:
    """Return what stands for an array that a kernel does not read."""
    return mx.zeros((1,), dtype=dtype)


def _over_rows(
    kernel, inputs, rows, volume, channels, work, dtypes, most=None, **template
):
    """Launch over slices of output rows, four channels a thread.

    Args:
        kernel: what to launch.
        inputs: its arrays.
        rows: output rows.
        volume: entries of a table's row: the second of the sizes.
        channels: of the outputs: the third of the sizes.
        work: features that are read.
        dtypes: of the outputs.
        most: features that a single row may read; by default all read the same.
        template: arguments of the kernel.
    """

    def launch(first: int, count: int) -> list[mx.array]:
        out = [((count, channels), dtype) for dtype in dtypes]
        sizes, grid = [first, volume, channels], (ceil_div(channels, 4), count)
        return kernel(inputs, sizes, out, grid, **template)

    return by_rows(rows, work, dispatch_limit("elements"), launch, most=most)


# By tables


def gather_sum(x, table, weights=None):
    """Return the (weighted) sums of the rows that a table names."""
    (rows, volume), channels = table.shape, x.shape[1]
    if no_elements((rows, volume)) or x.size == 0:
        return mx.zeros((rows, channels), dtype=x.dtype)
    weighted = weights is not None
    return _over_rows(
        _GATHER_SUM,
        [x, table, weights if weighted else _none(mx.float32)],
        rows,
        volume,
        channels,
        table.size * channels,
        [x.dtype],
        T=x.dtype,
        WEIGHTED=weighted,
    )[0]


def gather_max(x, table):
    """Return the maxima over the rows that a table names, and their rows."""
    (rows, volume), channels = table.shape, x.shape[1]
    if no_elements((rows, volume)) or x.size == 0:
        return no_maxima(x, rows)
    y, won = _over_rows(
        _GATHER_MAX,
        [x, table],
        rows,
        volume,
        channels,
        table.size * channels,
        [x.dtype, mx.int32],
        T=x.dtype,
    )
    return y, won


def max_pool_backward(dy, rows, back):
    """Return to each row the sum of the results that it won."""
    (n, volume), channels = back.shape, dy.shape[1]
    if no_elements((n, volume)) or dy.size == 0:
        return mx.zeros((n, channels), dtype=dy.dtype)
    return _over_rows(
        _MAX_POOL_BACKWARD,
        [dy, rows, back],
        n,
        volume,
        channels,
        back.size * channels,
        [dy.dtype],
        T=dy.dtype,
    )[0]


def row_products(x, y, table):
    """Return the (M, K) float32 products of the rows that a table pairs."""
    rows, volume = table.shape
    if no_elements(table.shape) or x.size == 0:
        return mx.zeros(table.shape)
    if x.dtype != y.dtype:
        x, y = x.astype(mx.float32), y.astype(mx.float32)

    def launch(first: int, count: int) -> list[mx.array]:
        return _PRODUCTS(
            [x, y, table],
            [first, volume, x.shape[1]],
            [((count, volume), mx.float32)],
            (volume, count),
            T=x.dtype,
        )

    work = table.size * x.shape[1]
    return by_rows(rows, work, dispatch_limit("elements"), launch)[0]


# By segments


def _sum_segments(x, entries, weights, starts, size, volume, dtype, most) -> mx.array:
    """Return the sums of segments, each by one thread for four channels."""
    return _over_rows(
        _SUM_SEGMENTS,
        [
            x,
            _none(mx.int32) if entries is None else entries,
            starts,
            _none(mx.float32) if weights is None else weights,
        ],
        starts.size - 1,
        volume,
        x.shape[1],
        size * x.shape[1],
        [dtype],
        most * x.shape[1],
        T=x.dtype,
        OUT=dtype,
        ORDERED=entries is not None,
        WEIGHTED=weights is not None,
    )[0]


def _max_segments(x, entries, names, starts, size, dtype, most):
    """Return the maxima of segments and their rows, or their pieces' names."""
    y, rows = _over_rows(
        _MAX_SEGMENTS,
        [
            x,
            _none(mx.int32) if entries is None else entries,
            starts,
            _none(mx.int32) if names is None else names,
        ],
        starts.size - 1,
        1,
        x.shape[1],
        size * x.shape[1],
        [dtype, mx.int32],
        most * x.shape[1],
        T=x.dtype,
        OUT=dtype,
        ORDERED=entries is not None,
        NAMED=names is not None,
    )
    return y, rows


_segments = Segments(_sum_segments, _max_segments)
sum_segments = _segments.sum


class MetalReductions:
    """The reductions of Metal's kernels; see ``Reductions``."""

    gather_sum = staticmethod(gather_sum)
    scatter_sum = staticmethod(_segments.scatter_sum)
    gather_max = staticmethod(gather_max)
    scatter_max = staticmethod(_segments.scatter_max)
    max_pool_backward = staticmethod(max_pool_backward)
    row_products = staticmethod(row_products)
    segment_sum = staticmethod(_segments.segment_sum)
    segment_max = staticmethod(_segments.segment_max)

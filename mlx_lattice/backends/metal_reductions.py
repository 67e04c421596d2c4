"""Reductions on Metal: what each computes stands in mlx_lattice.reductions.

Functions take and return arrays, lazily, and have no derivatives of their own. None
has atomics: the same input gives the same bits.
"""

from __future__ import annotations

import mlx.core as mx

from ..tuning import METAL_CUTS, dispatch_limit
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
_SPREAD_MAX = Kernel(
    "spread_max",
    ("pooling",),
    ("dy", "rows", "back", "sizes"),
    ("x",),
    f"spread_max<T>(dy, rows, back, sizes, x, {_AT});",
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
        return _no_maxima(x, rows)
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


def spread_max(dy, rows, back):
    """Return to each row the sum of the results that it won."""
    (n, volume), channels = back.shape, dy.shape[1]
    if no_elements((n, volume)) or dy.size == 0:
        return mx.zeros((n, channels), dtype=dy.dtype)
    return _over_rows(
        _SPREAD_MAX,
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


def scatter_sum(y, table, rows, weights=None):
    """Return the (weighted) sums of the rows that name each of ``rows``."""
    entries, starts = _by_row(table, rows)
    return sum_segments(y, starts, entries, table.shape[1], weights)


def scatter_max(x, table, rows):
    """Return the maxima over the rows that name each of ``rows``, and their rows."""
    return _max_segments(x, *_by_row(table, rows))


def segment_sum(x, rows):
    """Return the sums over batch elements."""
    starts = mx.array(rows.starts, dtype=mx.int32)
    return sum_segments(x, starts, rows.order)


def segment_max(x, rows):
    """Return the maxima over batch elements, and their rows."""
    return _max_segments(x, rows.order, mx.array(rows.starts, dtype=mx.int32))


def _no_maxima(x: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    shape = rows, x.shape[1]
    return mx.zeros(shape, dtype=x.dtype), mx.full(shape, -1, dtype=mx.int32)


def _by_row(table: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return a table's places ordered by the row they name, and where each begins.

    Places that name none come first: before the first row begins.
    """
    size = table.size
    if size == 0:
        none = mx.zeros((rows + 1,), dtype=mx.int32)
        return mx.zeros((0,), dtype=mx.int32), none
    place = mx.arange(size, dtype=mx.int64)
    keys = mx.sort((table.flatten().astype(mx.int64) + 1) * size + place)
    begin = (mx.arange(rows + 1, dtype=mx.int64) + 1) * size
    starts = mx.searchsorted(keys, begin).astype(mx.int32)
    return (keys % size).astype(mx.int32), starts


def long_segments(starts: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Cut segments of ``size`` entries in all into pieces that a thread can add up.

    Returns:
        (P + 1,) int32: where pieces begin, some of them empty, and ``size``; (S + 1,)
        int32: the first piece of each segment.
    """
    cuts = mx.arange(0, size, METAL_CUTS["piece"], dtype=mx.int32)
    bounds = mx.sort(mx.concatenate([starts, cuts]))
    return bounds, mx.searchsorted(bounds, starts).astype(mx.int32)


def sum_segments(x, starts, entries=None, volume=1, weights=None):
    """Return the sums of segments; long ones by sums of their pieces.

    Args:
        x: (N, C) features.
        starts: (S + 1,) int32: where segments begin.
        entries: places of a flat (N, K) table; by default rows in order.
        volume: K of the table.
        weights: float32 weight of each place, or None.
    """
    size = x.shape[0] * volume if entries is None else entries.size
    if no_elements((starts.size - 1, size, x.shape[1])):
        return mx.zeros((starts.size - 1, x.shape[1]), dtype=x.dtype)
    return _segments(_SUM_SEGMENTS, x, entries, starts, size, volume, WEIGHTED=weights)[
        0
    ]


def _max_segments(x, entries, starts):
    """Return the maxima of segments and their rows; long ones by those of pieces."""
    segments, size = starts.size - 1, x.shape[0]
    if no_elements((segments, size, x.shape[1])):
        return _no_maxima(x, segments)
    outcome = _segments(
        _MAX_SEGMENTS, x, entries, starts, size, 1, mx.int32, NAMED=None
    )
    return tuple(outcome)


def _segments(kernel, x, entries, starts, size, volume, *besides, **extra):
    """Reduce segments; long ones by their pieces, then pieces of pieces.

    Args:
        kernel: what reduces segments.
        x: features.
        entries: of all segments, or None where they are in order.
        starts: where segments begin.
        size: entries in all.
        volume: entries to a row of x.
        besides: dtype of what the kernel writes besides features: the next round's
            extra.
        extra: an array of its own that the kernel reads, or None, by the name of the
            template argument that says whether there is one.
    """
    ((told, more),) = extra.items()

    def run(most: int, dtype: mx.Dtype) -> list[mx.array]:
        channels = x.shape[1]
        unread = _none(besides[0] if besides else mx.float32)
        return _over_rows(
            kernel,
            [
                x,
                _none(mx.int32) if entries is None else entries,
                starts,
                unread if more is None else more,
            ],
            starts.size - 1,
            volume,
            channels,
            size * channels,
            [dtype, *besides],
            most * channels,
            T=x.dtype,
            OUT=dtype,
            ORDERED=entries is not None,
            **{told: more is not None},
        )

    dtype, longest, piece = x.dtype, size, METAL_CUTS["piece"]
    while longest > METAL_CUTS["longest"]:
        starts, owners = long_segments(starts, size)
        x, *written = run(piece, mx.float32)
        more = written[0] if written else None
        size, longest = starts.size - 1, longest // piece + 2
        starts, entries, volume = owners, None, 1
    return run(longest, dtype)

"""Pooling, segments and interpolation on Metal. Every gradient is a gather.

Functions take and return arrays, lazily, and have no derivatives of their own: each
linear one stands beside its transpose, for ``mx.custom_function`` to pair.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from . import metal_kernels as limits
from .metal_kernels import Kernel, by_rows, ceil_div, no_elements

# Rows of one part of a segment, and the most parts it is cut into.
PART_ROWS = 256
PARTS = 256

BY_NOTHING, BY_EDGES, BY_VOLUME, BY_COUNTS = range(4)
DIVISORS = {"sum": BY_NOTHING, "avg": BY_EDGES, "avgvol": BY_VOLUME}
REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "min": 3}

_MAX = Kernel(
    "max_pool",
    ("pooling",),
    ("x", "table", "sizes"),
    ("y", "winner"),
    "max_pool<T>(x, table, sizes, y, winner, thread_position_in_grid.xy);",
)
_SELECT = Kernel(
    "select_winners",
    ("pooling",),
    ("x", "table", "winner", "sizes"),
    ("y",),
    "select_winners<T>(x, table, winner, sizes, y, thread_position_in_grid.xy);",
)
_SPREAD = Kernel(
    "spread_winners",
    ("pooling",),
    ("y", "table", "winner", "sizes"),
    ("x",),
    "spread_winners<T>(y, table, winner, sizes, x, thread_position_in_grid.xy);",
)
_SUM = Kernel(
    "sum_pool",
    ("pooling",),
    ("x", "table", "counts", "sizes"),
    ("y",),
    "sum_pool<T, DIVISOR>(x, table, counts, sizes, y, thread_position_in_grid.xy);",
)
_REDUCE = Kernel(
    "reduce_parts",
    ("segments",),
    ("x", "order", "starts", "sizes"),
    ("partial", "winner"),
    "reduce_parts<T, REDUCTION, ORDERED>(x, order, starts, sizes, partial, winner, "
    "thread_position_in_grid);",
)
_MERGE = Kernel(
    "merge_parts",
    ("segments",),
    ("partial", "partial_winner", "starts", "sizes"),
    ("y", "winner"),
    "merge_parts<T, REDUCTION>(partial, partial_winner, starts, sizes, y, winner, "
    "thread_position_in_grid.xy);",
)
_SPREAD_SEGMENTS = Kernel(
    "spread_segments",
    ("segments",),
    ("y", "segment_of", "starts", "winner", "sizes"),
    ("x",),
    "spread_segments<T, REDUCTION>(y, segment_of, starts, winner, sizes, x, "
    "thread_position_in_grid.xy);",
)
_INTERPOLATE = Kernel(
    "interpolate",
    ("interpolation",),
    ("x", "rows", "weights", "sizes"),
    ("y",),
    "interpolate<T>(x, rows, weights, sizes, y, thread_position_in_grid.xy);",
)
_INTERPOLATE_T = Kernel(
    "interpolate_transposed",
    ("interpolation",),
    ("dy", "entries", "starts", "weights", "sizes"),
    ("dx",),
    "interpolate_transposed<T>(dy, entries, starts, weights, sizes, dx, "
    "thread_position_in_grid.xy);",
)
_PRODUCTS = Kernel(
    "corner_products",
    ("interpolation",),
    ("x", "dy", "rows", "sizes"),
    ("products",),
    "corner_products<T>(x, dy, rows, sizes, products, thread_position_in_grid.xy);",
)


def _over_rows(kernel, inputs, rows, inner, channels, dtypes, **template):
    """Launch over slices of output rows, four channels a thread.

    Args:
        kernel: what to launch.
        inputs: its arrays.
        rows: output rows.
        inner: gathered rows of an output row: the second of the sizes.
        channels: of the outputs: the third of the sizes.
        dtypes: of the outputs.
        template: arguments of the kernel.
    """

    def launch(first: int, count: int) -> list[mx.array]:
        out = [((count, channels), dtype) for dtype in dtypes]
        sizes, grid = [first, inner, channels], (ceil_div(channels, 4), count)
        return kernel(inputs, sizes, out, grid, **template)

    return by_rows(rows, rows * inner * channels, limits.ELEMENTS, launch)


def max_pool(x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
    """Return the greatest neighbour of each channel, and the offset it came by.

    Args:
        x: (N_in, C).
        table: (N_out, K) int32 neighbour table.

    Returns:
        (N_out, C) in the features' dtype, 0 without edges; (N_out, C) int32 offsets,
        the first of equal ones, or -1.
    """
    (n_out, volume), channels = table.shape, x.shape[1]
    if no_elements((n_out, channels)) or x.size == 0:
        shape = n_out, channels
        return mx.zeros(shape, dtype=x.dtype), mx.full(shape, -1, dtype=mx.int32)
    dtypes = x.dtype, mx.int32
    y, winner = _over_rows(_MAX, [x, table], n_out, volume, channels, dtypes, T=x.dtype)
    return y, winner


def select_winners(x: mx.array, table: mx.array, winner: mx.array) -> mx.array:
    """Return ``y[o, c] = x[table[o, winner[o, c]], c]``, 0 where winner is -1."""
    (n_out, volume), channels = table.shape, x.shape[1]
    if no_elements((n_out, channels)) or x.size == 0:
        return mx.zeros((n_out, channels), dtype=x.dtype)
    arrays = [x, table, winner]
    return _over_rows(_SELECT, arrays, n_out, volume, channels, [x.dtype], T=x.dtype)[0]


def spread_winners(
    y: mx.array, transposed_table: mx.array, winner: mx.array
) -> mx.array:
    """Return the transpose of ``select_winners``, over the (N_in, K) table."""
    (n_in, volume), channels = transposed_table.shape, y.shape[1]
    if no_elements((n_in, channels)) or y.size == 0:
        return mx.zeros((n_in, channels), dtype=y.dtype)
    arrays = [y, transposed_table, winner]
    return _over_rows(_SPREAD, arrays, n_in, volume, channels, [y.dtype], T=y.dtype)[0]


def sum_pool(
    x: mx.array, table: mx.array, mode: str = "sum", counts: mx.array | None = None
) -> mx.array:
    """Return the (N_out, C) sums of neighbours, added in float32; 0 without edges.

    The gradient of "sum" is "sum" over the transposed table; that of "avg" is "sum"
    over it with the ``counts`` of the rows that were averaged.

    Args:
        x: (N_in, C).
        table: (N_out, K) int32 neighbour table.
        mode: "sum", "avg" over the row's edges, or "avgvol" over K.
        counts: (N_in,) int32: divide each gathered row by its own; "sum" only.
    """
    if mode not in DIVISORS or (counts is not None and mode != "sum"):
        raise ValueError(
            f"mode must be one of {tuple(DIVISORS)}, and 'sum' with counts; got "
            f"{mode!r}"
        )
    (n_out, volume), channels = table.shape, x.shape[1]
    if no_elements((n_out, channels)) or x.size == 0:
        return mx.zeros((n_out, channels), dtype=x.dtype)
    divisor = DIVISORS[mode] if counts is None else BY_COUNTS
    arrays = [x, table, mx.zeros((1,), dtype=mx.int32) if counts is None else counts]
    return _over_rows(
        _SUM,
        arrays,
        n_out,
        volume,
        channels,
        [x.dtype],
        T=x.dtype,
        DIVISOR=divisor,
    )[0]


class Segments(NamedTuple):
    """Rows grouped into segments: ``order[starts[s]:starts[s + 1]]``."""

    starts: mx.array  # (S + 1,) int32
    segment_of: mx.array  # (N,) int32: the segment of each row, or -1
    order: mx.array | None  # (N,) int32, or None where segments are contiguous

    @classmethod
    def of(cls, segment_of: mx.array, segments: int) -> Segments:
        """Group (N,) int32 segment numbers, -1 for none; rows keep their order."""
        n = segment_of.size
        if n == 0:
            starts = mx.zeros((segments + 1,), dtype=mx.int32)
            return cls(starts, segment_of, None)
        rows = mx.arange(n, dtype=mx.int64)
        order = mx.argsort(segment_of.astype(mx.int64) * n + rows).astype(mx.int32)
        return cls(_starts(segment_of[order], segments), segment_of, order)

    @classmethod
    def contiguous(cls, segment_of: mx.array, segments: int) -> Segments:
        """Group ascending (N,) int32 segment numbers, as batch-contiguous rows are."""
        return cls(_starts(segment_of, segments), segment_of, None)


def _starts(ascending: mx.array, segments: int) -> mx.array:
    places = mx.arange(segments + 1, dtype=mx.int32)
    return mx.searchsorted(ascending, places).astype(mx.int32)


def reduce_segments(
    x: mx.array, segments: Segments, reduce: str
) -> tuple[mx.array, mx.array]:
    """Reduce (N, C) rows into (S, C), added in float32 in a fixed order.

    Args:
        x: (N, C).
        segments: which rows belong together.
        reduce: "sum", "mean", "max" or "min".

    Returns:
        (S, C) in the features' dtype, 0 for empty segments; (S, C) int32: the row of
        each maximum or minimum, the first of equal ones, else -1.
    """
    reduction, count = REDUCTIONS[reduce], segments.starts.size - 1
    shape = count, x.shape[1]
    if no_elements(shape) or x.shape[0] == 0:
        return mx.zeros(shape, dtype=x.dtype), mx.full(shape, -1, dtype=mx.int32)
    parts = max(1, min(PARTS, x.shape[0] // (count * PART_ROWS)))
    ordered = segments.order is not None
    order = segments.order if ordered else mx.zeros((1,), dtype=mx.int32)

    def launch(first: int, length: int) -> list[mx.array]:
        out = (length, *shape)
        return _REDUCE(
            [x, order, segments.starts],
            [*shape, parts, first],
            [(out, mx.float32), (out, mx.int32)],
            (shape[1], count, length),
            T=x.dtype,
            REDUCTION=reduction,
            ORDERED=ordered,
        )

    partial, winner = by_rows(parts, x.size, limits.ELEMENTS, launch)
    y, winner = _MERGE(
        [partial, winner, segments.starts],
        [*shape, parts],
        [(shape, x.dtype), (shape, mx.int32)],
        (shape[1], count),
        T=x.dtype,
        REDUCTION=reduction,
    )
    return y, winner


def spread_segments(
    y: mx.array, segments: Segments, reduce: str, winner: mx.array | None = None
) -> mx.array:
    """Return the transpose of a reduction: (N, C) of (S, C).

    Args:
        y: (S, C).
        segments: which rows belong together.
        reduce: "sum", "mean", "max" or "min".
        winner: (S, C) int32 rows, for "max" and "min".
    """
    n, channels = segments.segment_of.size, y.shape[1]
    if no_elements((n, channels)) or y.shape[0] == 0:
        return mx.zeros((n, channels), dtype=y.dtype)
    winner = mx.zeros((1,), dtype=mx.int32) if winner is None else winner

    def launch(first: int, rows: int) -> list[mx.array]:
        return _SPREAD_SEGMENTS(
            [y, segments.segment_of, segments.starts, winner],
            [first, channels],
            [((rows, channels), y.dtype)],
            (channels, rows),
            T=y.dtype,
            REDUCTION=REDUCTIONS[reduce],
        )

    return by_rows(n, n * channels, limits.ELEMENTS, launch)[0]


def interpolate(x: mx.array, rows: mx.array, weights: mx.array) -> mx.array:
    """Return ``y[q] = sum over j of weights[q, j] * x[rows[q, j]]``.

    Args:
        x: (N, C).
        rows: (Q, J) int32; -1 counts as zeros.
        weights: (Q, J) float32.
    """
    (queries, corners), channels = rows.shape, x.shape[1]
    if no_elements((queries, channels)) or x.size == 0:
        return mx.zeros((queries, channels), dtype=x.dtype)
    arrays = [x, rows, weights]
    return _over_rows(
        _INTERPOLATE, arrays, queries, corners, channels, [x.dtype], T=x.dtype
    )[0]


def interpolate_input_grad(
    dy: mx.array, rows: mx.array, weights: mx.array, n: int
) -> mx.array:
    """Return the transpose of ``interpolate``: (n, C) of (Q, C), by CSR."""
    (_, corners), channels = rows.shape, dy.shape[1]
    if no_elements((n, channels)) or rows.size == 0:
        return mx.zeros((n, channels), dtype=dy.dtype)
    flat = rows.flatten()
    places = mx.arange(flat.size, dtype=mx.int64)
    entries = mx.argsort(flat.astype(mx.int64) * flat.size + places).astype(mx.int32)
    arrays = [dy, entries, _starts(flat[entries], n), weights]

    def launch(first: int, count: int) -> list[mx.array]:
        return _INTERPOLATE_T(
            arrays,
            [first, corners, channels],
            [((count, channels), dy.dtype)],
            (ceil_div(channels, 4), count),
            T=dy.dtype,
        )

    return by_rows(n, rows.size * channels, limits.ELEMENTS, launch)[0]


def interpolate_weight_grad(x: mx.array, dy: mx.array, rows: mx.array) -> mx.array:
    """Return the (Q, J) float32 ``dy[q] . x[rows[q, j]]``, 0 where the row is -1."""
    queries, corners = rows.shape
    if no_elements(rows.shape) or x.size == 0:
        return mx.zeros(rows.shape)

    def launch(first: int, count: int) -> list[mx.array]:
        return _PRODUCTS(
            [x, dy, rows],
            [first, corners, x.shape[1]],
            [((count, corners), mx.float32)],
            (corners, count),
            T=x.dtype,
        )

    work = rows.size * x.shape[1]
    return by_rows(queries, work, limits.ELEMENTS, launch)[0]

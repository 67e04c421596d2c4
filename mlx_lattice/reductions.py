"""Sums and maxima over tables of rows, with derivatives of every order.

A table is (M, K) int32: the K rows that belong to each of M, -1 for none. Pooling,
interpolation, voxelising and global pooling stand on these. Each reduction is written
in MLX operations; where the device has a compiled one of the same name, that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from . import backends

_LEAST = -(1 << 31)


def fastest(portable: Callable) -> Callable:
    """Return the device's compiled function of the same name, or this one."""
    return getattr(backends.native(), portable.__name__, portable)


def spare_row(x: mx.array, value: float = 0) -> mx.array:
    """Append one row, which index -1 reads."""
    return mx.concatenate([x, mx.full((1, x.shape[1]), value, dtype=x.dtype)])


# Derivatives


def linear(forward, transpose, itself):
    """Wrap a linear function of one array with its derivatives."""
    # Forward mode would descend into operations that have no jvp.
    function = mx.custom_function(lambda x: forward(mx.stop_gradient(x)))
    function.vjp(lambda x, dy, y: transpose(dy))
    function.jvp(lambda x, dx: itself(dx))
    return function


def bilinear(forward, to_first, to_second, itself):
    """Wrap a bilinear function of two arrays with its derivatives."""
    function = mx.custom_function(
        lambda a, b: forward(mx.stop_gradient(a), mx.stop_gradient(b))
    )
    function.vjp(lambda at, dy, y: (to_first(dy, at[1]), to_second(at[0], dy)))

    @function.jvp
    def jvp(at, tangents):
        (a, b), (da, db) = at, tangents
        terms = [] if da is None else [itself(da, b)]
        terms += [] if db is None else [itself(a, db)]
        return sum(terms[1:], terms[0])

    return function


# The reductions in MLX operations. Sums accumulate in float32 and are rounded once.


def gather_sum(
    x: mx.array, table: mx.array, weights: mx.array | None = None
) -> mx.array:
    """Return ``y[o] = sum over k of weights[o, k] * x[table[o, k]]``."""
    padded = spare_row(x.astype(mx.float32))
    y = mx.zeros((table.shape[0], x.shape[1]))
    for k in range(table.shape[1]):
        part = padded[table[:, k]]
        y = y + (part if weights is None else weights[:, k : k + 1] * part)
    return y.astype(x.dtype)


def scatter_sum(
    y: mx.array, table: mx.array, rows: int, weights: mx.array | None = None
) -> mx.array:
    """Return ``x[i] = sum over table[o, k] == i of weights[o, k] * y[o]``."""
    x, wide = mx.zeros((rows + 1, y.shape[1])), y.astype(mx.float32)
    for k in range(table.shape[1] if y.size else 0):
        at = mx.where(table[:, k] < 0, rows, table[:, k])
        x = x.at[at].add(wide if weights is None else weights[:, k : k + 1] * wide)
    return x[:rows].astype(y.dtype)


def gather_max(x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
    """Return the greatest of x's rows in a table's row, and which row it is, or -1.

    The first of equal values wins; a NaN is greater than all else. No row gives 0.
    """
    padded = spare_row(sort_keys(x), _LEAST)
    shape = table.shape[0], x.shape[1]
    rows, best = mx.full(shape, -1, mx.int32), mx.full(shape, _LEAST, mx.int32)
    for k in range(table.shape[1]):
        value = padded[table[:, k]]
        rows = mx.where(value > best, table[:, k : k + 1], rows)
        best = mx.maximum(value, best)
    return take(x, rows), rows


def scatter_max(x: mx.array, table: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return the greatest of the rows o with ``table[o, 0] == i``, and which it is.

    Ties, NaN and rows without one are those of ``gather_max``.
    """
    n, shape = x.shape[0], (rows, x.shape[1])
    if n == 0:
        return mx.zeros(shape, x.dtype), mx.full(shape, -1, mx.int32)
    at, keys = table[:, 0], sort_keys(x)
    best = mx.full(shape, _LEAST, mx.int32).at[at].maximum(keys)
    places = mx.where(keys == best[at], mx.arange(n, dtype=mx.int32)[:, None], n)
    first = mx.full(shape, n, mx.int32).at[at].minimum(places)
    first = mx.where(first < n, first, -1)
    return take(x, first), first


def spread_max(dy: mx.array, rows: mx.array, back: mx.array) -> mx.array:
    """Return ``x[i] = sum over o = back[i, :] of dy[o] where rows[o] == i``.

    Args:
        dy: (N_out, C).
        rows: (N_out, C) int32, as the maxima return them.
        back: (N_in, K) int32: outputs that each row may have won, none of them twice.
    """
    padded, won = spare_row(dy.astype(mx.float32)), spare_row(rows, -1)
    x = mx.zeros((back.shape[0], dy.shape[1]))
    place = mx.arange(back.shape[0], dtype=mx.int32)[:, None]
    for k in range(back.shape[1]):
        at = back[:, k]
        x = x + mx.where(won[at] == place, padded[at], 0)
    return x.astype(dy.dtype)


def row_products(x: mx.array, y: mx.array, table: mx.array) -> mx.array:
    """Return (M, K) float32 ``w[o, k] = x[table[o, k]] . y[o]``, 0 without a row."""
    padded, wide = spare_row(x.astype(mx.float32)), y.astype(mx.float32)
    columns = [(padded[at] * wide).sum(axis=1) for at in table.T]
    return mx.stack(columns, axis=1) if columns else mx.zeros(table.shape)


def sort_keys(x: mx.array) -> mx.array:
    """Return int32 in the order of the floats; all NaN equal, above infinity."""
    # Adding zero makes one of the two zeros.
    bits = (x.astype(mx.float32) + 0.0).view(mx.int32)
    keys = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return mx.where(mx.isnan(x), 0x7FFFFFFF, keys)


def take(x: mx.array, rows: mx.array) -> mx.array:
    """Return ``y[o, c] = x[rows[o, c], c]``, 0 where the row is -1."""
    return mx.take_along_axis(spare_row(x), mx.where(rows < 0, x.shape[0], rows), 0)


# Sums


def sum_over(x: mx.array, table: mx.array, back: Callable[[], mx.array]) -> mx.array:
    """Sum the rows of each of a table's rows; a linear function of ``x``.

    Args:
        x: (N, C).
        table: (M, K) int32.
        back: called for the transposed table, (N, K) int32.
    """

    def transpose(dy):
        return sum_over(dy, back(), lambda: table)

    itself = partial(sum_over, table=table, back=back)
    return linear(partial(fastest(gather_sum), table=table), transpose, itself)(x)


def gathered(x: mx.array, table: mx.array) -> mx.array:
    """Sum the rows of each of a table's rows, any of them several times."""
    transpose = partial(scattered, table=table, rows=x.shape[0])
    itself = partial(gathered, table=table)
    return linear(partial(fastest(gather_sum), table=table), transpose, itself)(x)


def scattered(y: mx.array, table: mx.array, rows: int) -> mx.array:
    """Add each row to the ``rows`` that the table names: the transpose."""
    transpose = partial(gathered, table=table)
    itself = partial(scattered, table=table, rows=rows)
    run = partial(fastest(scatter_sum), table=table, rows=rows)
    return linear(run, transpose, itself)(y)


# Weighted sums: faces of ``T(x, w, y) = sum of w[o, k] * x[table[o, k]] . y[o]``.


def weighted(x: mx.array, w: mx.array, table: mx.array) -> mx.array:
    """Return ``y[o] = sum over k of w[o, k] * x[table[o, k]]``, w float32."""
    return bilinear(
        lambda x, w: fastest(gather_sum)(x, table, w),
        lambda dy, w: weighted_scatter(dy, w, table, x.shape[0]),
        lambda x, dy: products(x, dy, table),
        partial(weighted, table=table),
    )(x, w)


def weighted_scatter(y: mx.array, w: mx.array, table: mx.array, rows: int) -> mx.array:
    """Return ``x[i] = sum over table[o, k] == i of w[o, k] * y[o]``, w float32."""
    return bilinear(
        lambda y, w: fastest(scatter_sum)(y, table, rows, w),
        lambda dx, w: weighted(dx, w, table),
        lambda y, dx: products(dx, y, table),
        partial(weighted_scatter, table=table, rows=rows),
    )(y, w)


def products(x: mx.array, y: mx.array, table: mx.array) -> mx.array:
    """Return (M, K) float32 ``w[o, k] = x[table[o, k]] . y[o]``."""
    return bilinear(
        lambda x, y: fastest(row_products)(x, y, table),
        lambda dw, y: weighted_scatter(y, dw, table, x.shape[0]),
        lambda x, dw: weighted(x, dw, table),
        partial(products, table=table),
    )(x, y)


# Maxima


def greatest(
    x: mx.array, find: Callable, back: Callable[[], mx.array]
) -> tuple[mx.array, mx.array]:
    """Return maxima and their (M, C) int32 rows; gradients go to those rows.

    Args:
        x: (N, C).
        find: returns both of ``x``, as ``gather_max`` does.
        back: called for the (N, K) int32 results that each row may have won, none of
            them twice.
    """
    function = mx.custom_function(lambda x: find(mx.stop_gradient(x)))

    @function.vjp
    def vjp(x, dy, found):
        # What won is a choice, not a function of what it was chosen from.
        return given_back(dy[0], mx.stop_gradient(found[1]), back())

    @function.jvp
    def jvp(x, dx):
        rows = find(mx.stop_gradient(x))[1]
        return selected(dx, rows, back), mx.zeros_like(rows)

    return function(x)


def selected(x: mx.array, rows: mx.array, back: Callable) -> mx.array:
    """Return the channels of the rows that won; a linear function of ``x``."""
    itself = partial(selected, rows=rows, back=back)
    return linear(
        partial(take, rows=rows), lambda dy: given_back(dy, rows, back()), itself
    )(x)


def given_back(dy: mx.array, rows: mx.array, back: mx.array) -> mx.array:
    """Give each result to the row that won it, added up: the transpose."""
    run = partial(fastest(spread_max), rows=rows, back=back)
    transpose = partial(selected, rows=rows, back=lambda: back)
    return linear(run, transpose, partial(given_back, rows=rows, back=back))(dy)

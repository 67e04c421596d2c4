"""Sums and maxima over tables of rows, with derivatives of every order.

A table is (M, K) int32: the K rows that belong to each of M, -1 for none. Pooling,
interpolation, voxelising and global pooling stand on these. The reductions themselves
are the device's: see ``backends.registry``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from . import registry
from .checks import FLOATS
from .transformations import Function, filled


def padded(x: mx.array, value: float = 0) -> mx.array:
    """Append one row, which index -1 reads."""
    row = mx.full((1, x.shape[1]), value, dtype=x.dtype)
    return mx.concatenate([x, row.astype(x.dtype)])  # MLX makes int32 of bool


def take(x: mx.array, rows: mx.array) -> mx.array:
    """Return ``y[o, c] = x[rows[o, c], c]``, 0 where the row is -1."""
    return mx.take_along_axis(padded(x), mx.where(rows < 0, x.shape[0], rows), 0)


# Derivatives

Rule = Callable[..., Any]


def linear(forward: Rule, transpose: Rule, itself: Rule, **rules: Rule) -> Function:
    """Wrap a linear function of one array with its derivatives."""
    vjp, jvp = (lambda x, dy, y: transpose(dy)), (lambda x, dx: itself(dx))
    return Function(forward, vjp=vjp, jvp=jvp, **rules)


def bilinear(forward: Rule, to_first: Rule, to_second: Rule, itself: Rule) -> Function:
    """Wrap a bilinear function of two arrays with its derivatives."""

    def jvp(at, tangents):
        (a, b), (da, db) = at, tangents
        terms = [] if da is None else [itself(da, b)]
        terms += [] if db is None else [itself(a, db)]
        return sum(terms[1:], terms[0])

    def vjp(at, dy, _):
        return to_first(dy, at[1]), to_second(at[0], dy)

    return Function(forward, vjp=vjp, jvp=jvp)


# Sums


def sum_over(x: mx.array, table: mx.array, back: Callable[[], mx.array]) -> mx.array:
    """Sum the rows of each of a table's rows; a linear function of ``x``."""

    def transpose(dy):
        return sum_over(dy, back(), lambda: table)

    itself = partial(sum_over, table=table, back=back)
    return linear(
        partial(registry.reductions().gather_sum, table=table), transpose, itself
    )(x)


def mean_over(
    x: mx.array, table: mx.array, divisors: mx.array, back: Callable[[], mx.array]
) -> mx.array:
    """Return ``sum_over`` with each row over its divisor; linear in ``x``."""

    def transpose(dy):
        return sum_over(_shares(dy, divisors), back(), lambda: table)

    facts = {"table": table, "divisors": divisors}
    run = partial(registry.reductions().gather_sum, **facts)
    return linear(run, transpose, partial(mean_over, **facts, back=back))(x)


def _shares(y: mx.array, divisors: mx.array) -> mx.array:
    """Return rows over their divisors, rounded once."""
    itself = mx.arange(len(divisors), dtype=mx.int32)[:, None]
    run = partial(registry.reductions().gather_sum, table=itself, divisors=divisors)
    again = partial(_shares, divisors=divisors)
    return linear(run, again, again)(y)


def gathered(
    x: mx.array,
    table: mx.array,
    order: Callable[[], tuple[mx.array, ...]] = tuple,
    weights: mx.array | None = None,
) -> mx.array:
    """Sum the rows of each of a table's rows, any of them several times.

    A linear function of ``x`` alone: ``weights``, (M, K) float32, are constant.
    """
    rest = {"table": table, "order": order, "weights": weights}
    transpose = partial(scattered, rows=x.shape[0], **rest)
    run = partial(registry.reductions().gather_sum, table=table, weights=weights)
    return linear(run, transpose, partial(gathered, **rest))(x)


def scattered(
    y: mx.array,
    table: mx.array,
    rows: int,
    order: Callable[[], tuple[mx.array, ...]] = tuple,
    weights: mx.array | None = None,
) -> mx.array:
    """Add each row to the ``rows`` that the table names: the transpose."""
    rest = {"table": table, "order": order, "weights": weights}

    def run(y: mx.array) -> mx.array:
        given = {**rest, "rows": rows, "order": order()}
        return registry.reductions().scatter_sum(y, **given)

    itself = partial(scattered, rows=rows, **rest)
    return linear(run, partial(gathered, **rest), itself)(y)


def averaged(
    y: mx.array,
    table: mx.array,
    rows: int,
    order: Callable[[], tuple[mx.array, ...]] | None = None,
) -> mx.array:
    """Return the mean of the rows that name each of ``rows``, 0 if none does.

    The table is (M, 1).
    """
    kernels = registry.reductions()
    order = kernels.order(table, rows) if order is None else order()
    given = {"order": order, "divisors": kernels.counts(table, rows, order)}

    def transpose(dy: mx.array) -> mx.array:
        # A share of each place, which the places of no row do not ask for.
        shares = 1 / mx.maximum(given["divisors"], 1).astype(mx.float32)
        return gathered(dy, table, lambda: order, shares[table])

    run = partial(kernels.scatter_sum, table=table, rows=rows, **given)
    rest = {"table": table, "rows": rows, "order": lambda: order}
    return linear(run, transpose, partial(averaged, **rest))(y)


def move_rows(
    x: mx.array, places: mx.array, back: mx.array, whole: bool = False
) -> mx.array:
    """Return the row of ``x`` at each place, or zeros if the place is -1.

    No place comes twice but -1; ``back`` has the place of each row of ``x``, or -1.
    ``whole`` promises that no place is -1.
    """

    def forward(x):
        known = x.dtype in FLOATS and places.dtype == mx.int32
        if known and registry.serving() != registry.MLX:
            return registry.reductions().gather_sum(x, places[:, None])
        return x[places] if whole else padded(x)[places]

    transpose = partial(move_rows, places=back, back=places)
    itself = partial(move_rows, places=places, back=back, whole=whole)

    def vmap(x, axis):  # beside each other, rows of several arrays move as one's
        x = mx.moveaxis(x, axis, 1)
        moved = itself(x.reshape(x.shape[0], prod(x.shape[1:])))
        return moved.reshape(moved.shape[0], *x.shape[1:]), 1

    return linear(forward, transpose, itself, vmap=vmap)(x)


def put(x: mx.array, places: mx.array, n: int) -> mx.array:
    """Return n entries: those of ``x`` at their places, and zeros.

    MLX's own scatter has no forward mode.
    """
    facts = {"places": places, "n": n}

    def forward(x):
        return mx.zeros((n, *x.shape[1:]), dtype=x.dtype).at[places].add(x)

    return linear(forward, partial(_picked, **facts), partial(put, **facts))(x)


def _picked(y: mx.array, places: mx.array, n: int) -> mx.array:
    """Return the entries at places, of n: the transpose of ``put``."""
    facts = {"places": places, "n": n}
    rules = partial(put, **facts), partial(_picked, **facts)
    return linear(lambda y: y[places], *rules)(y)


def inverted(places: mx.array, n: int) -> mx.array:
    """Return (n,) int32: which of the places is each of n, or -1."""
    if places.dtype == mx.int32 and registry.serving() != registry.MLX:
        table = places.reshape(-1, 1)
        return registry.geometry().transpose_table(table, n).reshape(-1)
    found = mx.full((n + 1,), -1, dtype=mx.int32)
    # Those that are nowhere all write into the extra last one.
    found[mx.where(places >= 0, places, n)] = mx.arange(places.size, dtype=mx.int32)
    return found[:n]


# Weighted sums: faces of ``T(x, w, y) = sum of w[o, k] * x[table[o, k]] . y[o]``.
# ``order``: called for what ``Reductions.order`` made of the table, if that is kept.


def weighted(
    x: mx.array,
    w: mx.array,
    table: mx.array,
    order: Callable[[], tuple[mx.array, ...]] = tuple,
) -> mx.array:
    """Return ``y[o] = sum over k of w[o, k] * x[table[o, k]]``, w float32."""
    rows = x.shape[0]  # rules that held x would keep its memory
    return bilinear(
        lambda x, w: registry.reductions().gather_sum(x, table, w),
        lambda dy, w: weighted_scatter(dy, w, table, rows, order),
        lambda x, dy: products(x, dy, table, order),
        partial(weighted, table=table, order=order),
    )(x, w)


def weighted_scatter(
    y: mx.array,
    w: mx.array,
    table: mx.array,
    rows: int,
    order: Callable[[], tuple[mx.array, ...]] = tuple,
) -> mx.array:
    """Return ``x[i] = sum over table[o, k] == i of w[o, k] * y[o]``, w float32."""
    return bilinear(
        lambda y, w: registry.reductions().scatter_sum(y, table, rows, w, order()),
        lambda dx, w: weighted(dx, w, table, order),
        lambda y, dx: products(dx, y, table, order),
        partial(weighted_scatter, table=table, rows=rows, order=order),
    )(y, w)


def products(
    x: mx.array,
    y: mx.array,
    table: mx.array,
    order: Callable[[], tuple[mx.array, ...]] = tuple,
) -> mx.array:
    """Return (M, K) float32 ``w[o, k] = x[table[o, k]] . y[o]``."""
    rows = x.shape[0]
    return bilinear(
        lambda x, y: _products(x, y, table),
        lambda dw, y: weighted_scatter(y, dw, table, rows, order),
        lambda x, dw: weighted(x, dw, table, order),
        partial(products, table=table, order=order),
    )(x, y)


def _products(x: mx.array, y: mx.array, table: mx.array) -> mx.array:
    """Return ``products`` in MLX operations, a column after another."""
    rows, wide = padded(x.astype(mx.float32)), y.astype(mx.float32)
    columns = [(rows[at] * wide).sum(axis=1) for at in table.T]
    return mx.stack(columns, axis=1) if columns else mx.zeros(table.shape)


# Maxima


def greatest(
    x: mx.array, find: Callable[..., Any], back: Callable[[], mx.array]
) -> tuple[mx.array, mx.array]:
    """Return maxima and their (M, C) int32 rows; gradients go to those rows.

    ``find(x)`` returns both; ``back()`` the (N, K) results that each row may have won.
    """

    def vjp(x, dy, found):
        # What won is a choice, not a function of what it was chosen from.
        return scatter_selected(dy[0], mx.stop_gradient(found[1]), back())

    def jvp(x, dx):
        rows = find(mx.stop_gradient(x))[1]
        return selected(dx, rows, back), mx.zeros_like(rows)

    return Function(find, vjp=vjp, jvp=jvp)(x)


def selected(x: mx.array, rows: mx.array, back: Callable[..., Any]) -> mx.array:
    """Return the channels of selected rows; a linear function of ``x``."""
    return _by_rows(
        take,
        lambda dy, rows: scatter_selected(dy, rows, back()),
        partial(selected, back=back),
    )(x, rows)


def scatter_selected(dy: mx.array, rows: mx.array, back: mx.array) -> mx.array:
    """Add each gradient to the row that was selected: the transpose."""
    return _by_rows(
        partial(registry.reductions().max_pool_backward, back=back),
        partial(selected, back=lambda: back),
        partial(scatter_selected, back=back),
    )(dy, rows)


def _by_rows(forward: Callable, transpose: Callable, itself: Callable) -> Function:
    """Wrap a linear function of an array, by rows, which ``mx.vmap`` maps too."""
    return Function(
        forward,
        vjp=lambda at, dy, _: (transpose(dy, at[1]), mx.zeros_like(at[1])),
        jvp=lambda at, by: itself(filled(at, by)[0], at[1]),
    )

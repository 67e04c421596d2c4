"""Reductions in MLX operations: they run on every device."""

from __future__ import annotations

import mlx.core as mx

from .reductions_protocol import BatchRows

_LEAST = -(1 << 31)
BLOCK = 1024  # rows that are added up in one go: one long sum drifts


def padded(x: mx.array, value: float = 0) -> mx.array:
    """Append one row, which index -1 reads."""
    row = mx.full((1, x.shape[1]), value, dtype=x.dtype)
    return mx.concatenate([x, row.astype(x.dtype)])  # MLX makes int32 of bool


def sort_keys(x: mx.array) -> mx.array:
    """Return int32 in the order of the floats; all NaN equal, above infinity."""
    # Adding zero makes one of the two zeros.
    bits = (x.astype(mx.float32) + 0.0).view(mx.int32)
    keys = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return mx.where(mx.isnan(x), 0x7FFFFFFF, keys)


def take(x: mx.array, rows: mx.array) -> mx.array:
    """Return ``y[o, c] = x[rows[o, c], c]``, 0 where the row is -1."""
    return mx.take_along_axis(padded(x), mx.where(rows < 0, x.shape[0], rows), 0)


def divided(x: mx.array, divisors: mx.array | None) -> mx.array:
    """Return (N, C) rows over their (N,) divisors, those below 1 taken as 1."""
    return x if divisors is None else x / mx.maximum(divisors, 1)[:, None]


def row_sum(x: mx.array) -> mx.array:
    """Return the sum of (N, C) over its rows, by blocks: one long sum drifts."""
    if x.shape[0] == 0:  # MLX's CPU sum of no rows may run for minutes
        return mx.zeros((x.shape[1],), dtype=x.dtype)
    whole = x.shape[0] // BLOCK
    total = x[whole * BLOCK :].sum(axis=0)
    if whole:
        blocks = x[: whole * BLOCK].reshape(whole, BLOCK, -1).sum(axis=1)
        total = total + (row_sum(blocks) if whole > BLOCK else blocks.sum(axis=0))
    return total


def group_means(values: mx.array, groups: int) -> mx.array:
    """Return for each channel the mean over its group, in MLX operations."""
    channels = values.shape[-1]
    if groups == channels:
        return values
    shape = *values.shape[:-1], groups, channels // groups
    means = values.reshape(shape).mean(axis=-1, keepdims=True)
    return mx.broadcast_to(means, shape).reshape(values.shape)


def _slices(x: mx.array, rows: BatchRows) -> list[mx.array]:
    x = x if rows.order is None else x[rows.order]
    pairs = zip(rows.starts, rows.starts[1:], strict=False)
    return [x[start:end] for start, end in pairs]


def segment_sum(x: mx.array, rows: BatchRows) -> mx.array:
    """Return the (batch_size, C) sums over batch elements, a slice an element."""
    sums = [row_sum(part) for part in _slices(x, rows)]
    return mx.stack(sums) if sums else mx.zeros((0, x.shape[1]), dtype=x.dtype)


class MlxReductions:
    """The reductions in MLX operations; see ``Reductions``."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that a table names, or their means."""
        wide = padded(x.astype(mx.float32))
        y = mx.zeros((table.shape[0], x.shape[1]))
        for k in range(table.shape[1]):
            part = wide[table[:, k]]
            y = y + (part if weights is None else weights[:, k : k + 1] * part)
        return divided(y, divisors).astype(x.dtype)

    def scatter_sum(
        self,
        y: mx.array,
        table: mx.array,
        rows: int,
        weights: mx.array | None = None,
        order: tuple = (),
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that name each of ``rows``."""
        x, wide = mx.zeros((rows + 1, y.shape[1])), y.astype(mx.float32)
        for k in range(table.shape[1] if y.size else 0):
            at = mx.where(table[:, k] < 0, rows, table[:, k])
            x = x.at[at].add(wide if weights is None else weights[:, k : k + 1] * wide)
        return divided(x[:rows], divisors).astype(y.dtype)

    def order(self, table: mx.array, rows: int, longest: int | None = None) -> tuple:
        """Return nothing: a table is added up as it is."""
        return ()

    def counts(self, table: mx.array, rows: int, order: tuple) -> mx.array:
        """Return how often a table names each row."""
        at = mx.where(table < 0, rows, table).flatten()
        return mx.zeros((rows + 1,), dtype=mx.int32).at[at].add(1)[:rows]

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that a table names, and their rows."""
        keys = padded(sort_keys(x), _LEAST)
        shape = table.shape[0], x.shape[1]
        rows, best = mx.full(shape, -1, mx.int32), mx.full(shape, _LEAST, mx.int32)
        for k in range(table.shape[1]):
            value = keys[table[:, k]]
            rows = mx.where(value > best, table[:, k : k + 1], rows)
            best = mx.maximum(value, best)
        return take(x, rows), rows

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that name each of ``rows``, and which."""
        n, shape = x.shape[0], (rows, x.shape[1])
        if x.size == 0:
            return mx.zeros(shape, x.dtype), mx.full(shape, -1, mx.int32)
        at, keys = mx.where(table[:, 0] < 0, rows, table[:, 0]), sort_keys(x)
        more = rows + 1, x.shape[1]  # the last takes what belongs to no row
        best = mx.full(more, _LEAST, mx.int32).at[at].maximum(keys)
        places = mx.where(keys == best[at], mx.arange(n, dtype=mx.int32)[:, None], n)
        first = mx.full(more, n, mx.int32).at[at].minimum(places)[:rows]
        first = mx.where(first < n, first, -1)
        return take(x, first), first

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return to each row the sum of the results that it won."""
        wide, won = padded(dy.astype(mx.float32)), padded(rows, -1)
        x = mx.zeros((back.shape[0], dy.shape[1]))
        place = mx.arange(back.shape[0], dtype=mx.int32)[:, None]
        for k in range(back.shape[1]):
            at = back[:, k]
            x = x + mx.where(won[at] == place, wide[at], 0)
        return x.astype(dy.dtype)

    def row_products(self, x: mx.array, y: mx.array, table: mx.array) -> mx.array:
        """Return the (M, K) float32 products of the rows that a table pairs."""
        rows, wide = padded(x.astype(mx.float32)), y.astype(mx.float32)
        columns = [(rows[at] * wide).sum(axis=1) for at in table.T]
        return mx.stack(columns, axis=1) if columns else mx.zeros(table.shape)

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the maxima over batch elements, a slice an element, and their rows."""
        winners = []
        for start, part in zip(rows.starts, _slices(sort_keys(x), rows), strict=False):
            if part.size:
                winner = start + mx.argmax(part, axis=0).astype(mx.int32)
                winners.append(winner if rows.order is None else rows.order[winner])
            else:
                winners.append(mx.full((x.shape[1],), -1, dtype=mx.int32))
        none = mx.zeros((0, x.shape[1]), dtype=mx.int32)
        found = mx.stack(winners) if winners else none
        return take(x, found), found

"""What a backend's reductions are: every member that the library calls.

Tables are (M, K) int32: the K rows that belong to each of M, -1 for none. Functions
take and return arrays, lazily, and have no derivatives of their own: those stand in
``mlx_lattice.reductions``. Sums accumulate in float32 and are rounded once. The first
of equal maxima wins, a NaN is greater than all else, no row gives 0.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mlx.core as mx


class BatchRows(Protocol):
    """The rows of each batch element: ``order[starts[b]:starts[b + 1]]``."""

    starts: tuple[int, ...]  # (batch_size + 1,)
    order: mx.array | None  # (N,) int32, or None where the rows are contiguous

    @property
    def size(self) -> int:
        """Number of batch elements."""

    @property
    def block_batch(self) -> mx.array:
        """(B, 1) int32: the element of each block of its rows."""

    @property
    def blocks(self) -> mx.array:
        """(N, 1) int32: the block of each row."""


@runtime_checkable
class Reductions(Protocol):
    """Sums and maxima over tables of rows, and over batch elements."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return (M, C) ``y[o] = sum over k of weights[o, k] * x[table[o, k]]``.

        Args:
            x: (N, C).
            table: (M, K) int32.
            weights: (M, K) float32; all 1 where there are none.
            divisors: (M,) int32: y is divided by them before it is rounded; those
                below 1 count as 1.
        """

    def scatter_sum(
        self,
        y: mx.array,
        table: mx.array,
        rows: int,
        weights: mx.array | None = None,
        order: tuple[mx.array, ...] = (),
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return (rows, C) ``x[i] = sum over table[o, k] == i of w[o, k] * y[o]``.

        Args:
            y: (M, C).
            table: (M, K) int32, values below ``rows``.
            rows: rows of the result.
            weights: w, (M, K) float32; all 1 where there are none.
            order: of the table, or nothing: it is found then.
            divisors: (rows,) int32: x is divided by them before it is rounded; those
                below 1 count as 1.
        """

    def order(
        self, table: mx.array, rows: int, longest: int | None = None
    ) -> tuple[mx.array, ...]:
        """Return what ``scatter_sum`` finds out of a table, to keep for other calls.

        Nothing where it finds out nothing.

        Args:
            table, rows: as there.
            longest: no row is named more often; by default one may be by all.
        """

    def counts(
        self, table: mx.array, rows: int, order: tuple[mx.array, ...]
    ) -> mx.array:
        """Return (rows,) int32: how often a table names each row.

        ``order``: of the table.
        """

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the (M, C) greatest of x's rows in a table's row, and which, or -1."""

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the greatest of the rows o with ``table[o, 0] == i``, and which."""

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return ``x[i] = sum over o = back[i, :] of dy[o] where rows[o] == i``.

        Args:
            dy: (M, C).
            rows: (M, C) int32, as the maxima return them.
            back: (N, K) int32: outputs that each row may have won, none of them twice.
        """

    def row_products(self, x: mx.array, y: mx.array, table: mx.array) -> mx.array:
        """Return (M, K) float32 ``x[table[o, k]] . y[o]``, 0 without a row."""

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the (batch_size, C) maxima of each element, and their int32 rows."""

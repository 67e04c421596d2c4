"""Reductions on the CPU, by the C++ extension; all threads share each of them."""

from __future__ import annotations

import mlx.core as mx

from .cpu_extension import extension
from .mlx_reductions import MlxReductions, divided, take
from .reductions_protocol import BatchRows


class CpuReductions(MlxReductions):
    """The reductions of the CPU's extension, products by MLX; see ``Reductions``."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that a table names, or their means."""
        if divisors is None:
            return extension.gather_sum(x, table, weights)
        sums = extension.gather_sum(x.astype(mx.float32), table, weights)
        return divided(sums, divisors).astype(x.dtype)

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
        if divisors is None:
            return extension.scatter_sum(y, table, rows, weights)
        sums = extension.scatter_sum(y.astype(mx.float32), table, rows, weights)
        return divided(sums, divisors).astype(y.dtype)

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that a table names, and their rows."""
        return extension.gather_max(x, table)

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that name each of ``rows``, and which."""
        return extension.scatter_max(x, table, rows)

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return to each row the sum of the results that it won."""
        return extension.max_pool_backward(dy, rows, back)

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the maxima over batch elements, by blocks, and their rows."""
        best, places = extension.scatter_max(x, rows.blocks, len(rows.block_batch))
        y, block = extension.scatter_max(best, rows.block_batch, rows.size)
        return y, take(places + 1, block) - 1

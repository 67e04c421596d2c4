"""Biases of attention's scores by where a key lies from its query."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..problem import dtype_name
from ..reductions import gathered
from .groups import Groups


class RelativeBias:
    """What a table adds to the scores, by the difference of cells along each axis.

    Args:
        table: (axes * (2 * bound + 1), heads): of each axis, from ``-bound`` on;
            differences beyond are taken for the bound.
        coords: (N, 1 + axes) int32 rows.
        groups: of them.
    """

    def __init__(self, table: mx.array, coords: mx.array, groups: Groups):
        self.table = table
        cells = coords[:, 1:][mx.maximum(groups.row, 0)]
        self.cells, self.axes = cells, coords.shape[1] - 1
        self.entries = table.shape[0] // self.axes

    def between(
        self, start: int, end: int, shape: tuple[int, int]
    ) -> Callable[[slice, slice], mx.array]:
        """Return what gives the float32 (groups, heads, queries, keys) of a part.

        Args:
            start, end: slots of a bucket.
            shape: its groups, and the keys of each.
        """
        cells = self.cells[start:end].reshape(*shape, self.axes)
        bound, begin = self.entries // 2, mx.arange(self.axes) * self.entries

        def of(some: slice, asked: slice) -> mx.array:
            apart = cells[some, asked, None] - cells[some, None]
            entry = mx.clip(apart, -bound, bound) + bound + begin
            flat = entry.reshape(-1, self.axes).astype(mx.int32)
            bias = gathered(self.table.astype(mx.float32), flat)
            return bias.reshape(*entry.shape[:3], -1).transpose(0, 3, 1, 2)

        return of


def check_table(table: mx.array, axes: int, q: mx.array) -> None:
    """Raise unless a table fits the axes and the heads of (N, heads, D) queries."""
    entries = table.shape[0] // axes if table.ndim == 2 else 0
    fits = entries % 2 and table.shape == (axes * entries, *q.shape[1:2])
    if not fits:
        raise ValueError(
            f"table must have shape ({axes} * (2 * bound + 1), heads) for queries of "
            f"{tuple(q.shape)}; got {tuple(table.shape)}"
        )
    dtype_name(table.dtype)

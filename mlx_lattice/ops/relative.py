"""Biases of attention's scores by where a key lies from its query."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..coordinate_set import CoordinateSet
from ..dtypes import dtype_name
from ..geometry.keys import INT32_LIMIT
from ..reductions import gathered
from .groups import Groups


def biases(table: mx.array, apart: mx.array) -> mx.array:
    """Return the (..., heads) sums of a table's entries for (..., axes) differences."""
    axes, heads = apart.shape[-1], table.shape[1]
    entries = table.shape[0] // axes
    bound = entries // 2
    entry = mx.clip(apart, -bound, bound) + bound + mx.arange(axes) * entries
    flat = entry.reshape(-1, axes).astype(mx.int32)
    return gathered(table, flat).reshape(*apart.shape[:-1], heads)


class RelativeBias:
    """What a table adds to the scores, by the difference of cells along each axis.

    Args:
        table: (axes * (2 * bound + 1), heads): of each axis, from ``-bound`` on;
            differences beyond are taken for the bound.
        held: the rows.
        groups: of them.
    """

    def __init__(self, table: mx.array, held: CoordinateSet, groups: Groups):
        self.table, coords = table, held.coords
        low, high = held.bounds
        if any(b - a > INT32_LIMIT for a, b in zip(low, high, strict=True)):
            coords = coords.astype(mx.int64)
        self.cells = coords[mx.maximum(groups.row, 0), 1:]

    def between(
        self, start: int, end: int, shape: tuple[int, int]
    ) -> Callable[[slice, slice], mx.array]:
        """Return what gives the float32 (groups, heads, queries, keys) of a part.

        Args:
            start, end: slots of a bucket.
            shape: its groups, and the keys of each.
        """
        cells = self.cells[start:end].reshape(*shape, -1)

        def of(some: slice, asked: slice) -> mx.array:
            apart = cells[some, asked, None] - cells[some, None]
            return biases(self.table.astype(mx.float32), apart).transpose(0, 3, 1, 2)

        return of


def check_table(table: mx.array, axes: int, heads: int) -> None:
    """Raise unless a table fits the axes and the heads of queries."""
    entries = table.shape[0] // axes if table.ndim == 2 else 0
    fits = entries % 2 and table.shape == (axes * entries, heads)
    if not fits:
        raise ValueError(
            f"table must have shape ({axes} * (2 * bound + 1), {heads}) for queries of "
            f"{heads} heads; got {tuple(table.shape)}"
        )
    dtype_name(table.dtype)

"""Rows found by a binary search in sorted keys, and neighbour tables by that."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import sync
from ..checks import INT32_LIMIT
from .keys import (
    KEY_LIMIT,
    Bounds,
    Offsets,
    bounds_of,
    cell_count,
    column_weights,
    device_keys,
    grow,
    join,
    packed_keys,
    row_keys,
    scale,
)
from .lattice import negated, scaled, shifted
from .unique import true_positions


class SortedIndex:
    """The rows of a set in lexicographic order, in MLX operations.

    Args:
        order: (N,) int32: the set's rows in lexicographic order.
        ordered: (N, 1 + D) integers: the rows in that order.
        bounds: bounds of the rows; None until settled.
    """

    is_sorted = False  # nobody looks

    def __init__(self, order: mx.array, ordered: mx.array, bounds: Bounds | None):
        self.order, self.ordered, self.bounds = order, ordered, bounds

    @classmethod
    def of(cls, coords: mx.array, box: Bounds | None = None) -> SortedIndex:
        """Sort (N, 1 + D) int32 coordinates into an index.

        Without a box that holds the rows the device sorts by its own, and the index is
        to be settled before it is searched.
        """
        if box is None and coords.shape[0] == 0:
            box = bounds_of(coords)
        keys = device_keys(coords) if box is None else row_keys(coords, box)
        order = mx.argsort(keys).astype(mx.int32)
        return cls(order, coords[order], box)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that ``find`` and ``table`` read."""
        return self.order, self.ordered

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``: bounds, whether and which rows repeat."""
        equal = mx.all(self.ordered[1:] == self.ordered[:-1], axis=1)
        low, high = self.ordered.min(axis=0), self.ordered.max(axis=0)
        if not equal.size:
            return [low, high]
        later = mx.maximum(self.order[1:], self.order[:-1])
        at = mx.argmin(mx.where(equal, later, INT32_LIMIT - 1))
        return [low, high, equal[at], self.order[at], self.order[at + 1]]

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        low, high, *repeat = facts
        bounds = tuple(low), tuple(high)
        if self.bounds is None:
            self.bounds = bounds
            if cell_count(bounds) >= KEY_LIMIT:
                # The device's keys were too long: sort again by ranks, and look again.
                coords = mx.zeros_like(self.ordered)
                coords[self.order] = self.ordered
                other = SortedIndex.of(coords, bounds)
                self.order, self.ordered = other.order, other.ordered
                return self.settle(sync.read(*self.facts()))
        if not repeat or not repeat[0]:
            return bounds, None
        return bounds, (min(repeat[1:]), max(repeat[1:]))

    def scaled(self, stride: Sequence[int]) -> SortedIndex:
        """Return the index of the same rows on a lattice finer by ``stride``."""
        bounds = scale(self.bounds, stride)
        return SortedIndex(self.order, scaled(self.ordered, stride), bounds)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) rows its (Q,) int32 place, or -1.

        Reads the bounds of ``rows`` where they are not given.
        """
        n, q = self.ordered.shape[0], rows.shape[0]
        if n == 0 or q == 0:
            return mx.full((q,), -1, dtype=mx.int32)
        both = join(self.bounds, bounds or bounds_of(rows))
        if cell_count(both) < KEY_LIMIT:
            weights = column_weights(both)
            keys = packed_keys(self.ordered, both[0], weights)
            return self._search(keys, packed_keys(rows, both[0], weights))
        # Ranks mean something only within one set, so rank both together.
        keys = row_keys(mx.concatenate([self.ordered, rows]), both)
        return self._search(keys[:n], keys[n:])

    def _search(self, keys: mx.array, wanted: mx.array) -> mx.array:
        place = mx.minimum(mx.searchsorted(keys, wanted), keys.size - 1)
        return mx.where(keys[place] == wanted, self.order[place], -1)

    def columns(
        self, rows: mx.array, bounds: Bounds, offsets: Offsets
    ) -> list[mx.array]:
        """Return for each offset k the (Q,) places of ``rows + offset_k``, or -1."""
        n, q = self.ordered.shape[0], rows.shape[0]
        if n == 0 or q == 0 or not offsets:
            return [mx.full((q,), -1, dtype=mx.int32) for _ in offsets]
        both = join(self.bounds, grow(bounds, offsets))
        if cell_count(both) >= KEY_LIMIT:
            return [
                self.find(shifted(rows, offset), grow(bounds, [offset]))
                for offset in offsets
            ]
        # Within joint bounds a key is linear in its row: an offset is one addition.
        weights = column_weights(both)
        keys = packed_keys(self.ordered, both[0], weights)
        base = packed_keys(rows, both[0], weights)
        steps = [
            sum(v * w for v, w in zip(offset, weights[1:], strict=True))
            for offset in offsets
        ]
        return [self._search(keys, base + step) for step in steps]


def forward_table(
    index: SortedIndex,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
) -> mx.array:
    """Return (N_out, K) int32 places of ``in = out * stride + offset_k``, or -1."""
    rows, bounds = scaled(out_coords, stride), scale(out_bounds, stride)
    return mx.stack(index.columns(rows, bounds, offsets), axis=1)


def submanifold_table(index: SortedIndex, coords: mx.array, offsets: Offsets):
    """Return the (N, K) table of a point-symmetric kernel over its own rows.

    Searches half of the offsets; the edge (i, o, k) gives (o, i, K - 1 - k), as in
    FlexGEMM.
    """
    n, half = coords.shape[0], len(offsets) // 2
    found = index.columns(coords, index.bounds, offsets[:half])
    rows = mx.arange(n, dtype=mx.int32)
    columns = list(found)
    if len(offsets) % 2:
        columns.append(rows)
    for column in reversed(found):
        mirrored = mx.full((n + 1,), -1, dtype=mx.int32)
        mirrored[mx.where(column >= 0, column, n)] = rows
        columns.append(mirrored[:n])
    return mx.stack(columns, axis=1)


def transposed_table(
    index: SortedIndex,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
) -> mx.array:
    """Return (N_out, K) int32 places of the in with ``out = in * stride + offset_k``.

    The input set is searched on the fine lattice (its rows times ``stride``), where
    the rule is a plain shift: rows off the lattice simply are not found.
    """
    fine = index if set(stride) == {1} else index.scaled(stride)
    return mx.stack(fine.columns(out_coords, out_bounds, negated(offsets)), axis=1)


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``table`` that holds each entry, or -1."""
    n_out, volume = table.shape
    flat = mx.full((n_in * volume + 1,), -1, dtype=mx.int32)
    k = mx.arange(volume, dtype=mx.int64)
    place = mx.where(table >= 0, table.astype(mx.int64) * volume + k, n_in * volume)
    rows = mx.arange(n_out, dtype=mx.int32)[:, None]
    flat[place.flatten()] = mx.broadcast_to(rows, table.shape).flatten()
    return flat[: n_in * volume].reshape(n_in, volume)


def table_edges(table: mx.array) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of an (N_out, K) table by (k, o)."""
    n = max(1, table.shape[0])
    flat = table.T.flatten()
    at = true_positions(flat >= 0)
    out, k = (at % n).astype(mx.int32), (at // n).astype(mx.int32)
    return mx.stack([flat[at], out, k], axis=1)

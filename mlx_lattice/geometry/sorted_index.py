"""Finds the rows of one coordinate set by value, by a binary search in sorted keys."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import sync
from .keys import (
    INT32_LIMIT,
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
from .lattice import scaled, shifted


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
        """Return for each offset k the (Q,) int32 places of ``rows + offset_k``, or -1.

        Args:
            rows: (Q, 1 + D) integers; they may lie beyond int32.
            bounds: the bounds of ``rows``.
            offsets: D integers each.
        """
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

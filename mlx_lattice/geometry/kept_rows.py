"""The rows of a set that a mask keeps, in MLX operations: launched, read, gathered."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .keys import INT32_LIMIT
from .scans import running_sums


class KeptRows(NamedTuple):
    """Rows that a mask keeps, in their order."""

    rows: mx.array  # (M,) int32: which they are
    places: mx.array  # (N,) int32: where each row stands among them, or -1
    coords: mx.array  # (M, 1 + D) int32


def none_of(coords: mx.array, places: mx.array) -> KeptRows:
    """Return no rows at all of some, whose ``places`` are -1."""
    return KeptRows(mx.zeros((0,), dtype=mx.int32), places, coords[:0])


class StartedRows:
    """Rows that a mask keeps, launched; see ``geometry.protocol.StartedRows``."""

    def __init__(self, mask: mx.array, coords: mx.array):
        self._mask, self._coords = mask, coords
        self._ends = running_sums(mask.astype(mx.int32))
        # A sum, since MLX on CUDA reads a slice by moving the whole array to the CPU.
        self.count = self._ends[-1:] + 0

    def kept(self, count: int) -> KeptRows:
        """Return them."""
        rows = positions_of(self._mask, self._ends, count)
        places = mx.where(self._mask, self._ends - 1, -1)
        return KeptRows(rows, places, self._coords[rows])


def positions_of(mask: mx.array, ends: mx.array, count: int) -> mx.array:
    """Return the (count,) positions where a flat mask is true.

    Args:
        mask: (N,) bool.
        ends: its running sums; int64 of N that int32 does not hold.
        count: the last of them.
    """
    # MLX's GPU backends cannot scatter 64-bit integers.
    kind = mx.int32 if mask.size <= INT32_LIMIT else mx.int64
    positions = mx.zeros((count + 1,), dtype=kind)
    # False entries all write into an extra last slot.
    slots = mx.where(mask, ends - 1, count)
    positions[slots] = mx.arange(mask.size, dtype=kind)
    return positions[:count]

"""Cells of a set at several strides on CUDA, all sorted at once.

Keys number a box of the cells, which kernels work out: it need not be known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import mlx.core as mx

from ..geometry.keys import Bounds, cell_count, join
from ..geometry.protocol import SearchedRows
from ..routes import thresholds
from .cuda_lookups import RowTable
from .cuda_unique import CELLS, KEY_BITS, Launched, launched, ranges_of

# The bits that keys of earlier sets took, by the strides: what a set is tried with
# whose bounds nobody has read.
_bits_before: dict[tuple, int] = {}


class Levels:
    """Cells of several strides that were launched; see ``StartedLevels``.

    Args:
        made: what was launched.
        strides: of each level.
    """

    def __init__(self, made: Launched, strides: tuple[tuple[int, ...], ...]):
        self._made, self._strides = made, strides

    @property
    def counts(self) -> tuple[mx.array, ...]:
        """(1,) int64 each: how many rows there are up to the end of each level."""
        return self._made.ends

    def rows(self, counts: list, boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level, None where keys were too narrow for them."""
        bits = _bits(boxes)
        if bits <= KEY_BITS:  # of others nothing is to be learnt
            most = _bits_before.get(self._strides, 0)
            _bits_before[self._strides] = max(bits, most)
        if bits > self._made.capacity:
            return None
        made = self._made.rows(counts)
        return [made[a:b] for (a,), (b,) in pairwise([[0], *counts])]


def start_levels(
    source: SearchedRows,
    strides: Sequence[tuple[int, ...]],
    boxes: Sequence[Bounds] | None,
) -> Levels | None:
    """Launch the cells of each stride. See ``Geometry``."""
    n, strides = len(source.coords), tuple(strides)
    if len(strides) < 2 or not 0 < n <= thresholds.CUDA_ROWS_TOGETHER:
        return None
    if boxes is not None:
        bits, ranges = _bits(boxes), ranges_of(source.box)
    elif isinstance(source.lookup, RowTable):
        bits, ranges = _bits_before.get(strides, KEY_BITS + 1), source.lookup.ranges
    else:
        return None
    if bits > KEY_BITS:
        return None
    ones = (1,) * len(strides[0])
    return Levels(launched(source.coords, CELLS, strides, ones, bits, ranges), strides)


def _bits(boxes: Sequence[Bounds]) -> int:
    """Return the bits of keys of cells in boxes, with the numbers of these."""
    return (cell_count(reduce(join, boxes)) * len(boxes)).bit_length()

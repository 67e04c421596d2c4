"""Rows of new sets on Metal: candidates in a hash table, collected, sorted by keys.

Cells of several strides share one table, one sort and one read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from ..geometry import sync
from ..geometry.curves import stable_order
from ..geometry.keys import (
    KEY_LIMIT,
    Bounds,
    Offsets,
    bounds_of,
    cell_count,
    column_weights,
    join,
    row_keys,
)
from ..geometry.output_rows import Rule, is_empty
from ..geometry.protocol import SearchedRows
from ..routes import thresholds
from . import dispatch_bounds
from .dispatch_bounds import dispatch_limit
from .metal_lookups import (
    CANDIDATES,
    CELLS,
    candidate_kernel,
    insert,
    insert_cells,
    integers,
    table_interface,
)
from .metal_unique import unique_rows

_COLLECT = table_interface((*CANDIDATES, "slots", "ends", "packing"), "rows", "keys")


class _Numbers(NamedTuple):
    """How keys number the rows of a box, those of one level after the other's.

    Attributes:
        key: their dtype.
        values: least value and weight of each column, then the weight of a level;
            zeros of a box of more cells than keys can number.
    """

    key: mx.Dtype
    values: mx.array

    @staticmethod
    def of(box: Bounds, levels: int = 1) -> _Numbers:
        """Return those of a box that holds the rows of all levels."""
        cells, weights = cell_count(box), column_weights(box)
        if not _is_keyed(box, levels):
            cells, weights = 0, [0] * len(weights)
        key = mx.uint32 if cells * levels < 1 << 32 else mx.int64
        return _Numbers(key, integers([*box[0], *weights, cells], mx.int64))


def _is_keyed(box: Bounds, levels: int = 1) -> bool:
    """Whether keys can number the rows of a box at some levels."""
    return cell_count(box) * levels < KEY_LIMIT


def made_rows(
    rule: Rule,
    coords: mx.array,
    offsets: Offsets,
    stride: Sequence[int],
    box: Bounds,
    is_cut: bool,
    count: int | None = None,
) -> mx.array:
    """Return the sorted unique int32 rows that a rule makes within a box.

    Reads one size for each hash table of candidates, unless that of the only one is
    given. See ``Geometry``.
    """
    n, width = coords.shape
    none = mx.zeros((0, width), dtype=mx.int32)
    if n == 0 or is_empty(box):
        return none
    low, high = box
    limits = integers([*stride, *low[1:], *high[1:]], mx.int64)
    flat, numbers, parts = integers(offsets), _Numbers.of(box), []
    step = max(1, dispatch_bounds.METAL_CUTS["candidates"] // n)
    for first in range(0, len(offsets), step):
        part = flat[first * (width - 1) : (first + step) * (width - 1)]
        volume = min(step, len(offsets) - first)
        tables = insert(coords, rule, part, limits, volume)
        ends = [_taken(slots) for slots in tables]
        if count is not None and len(tables) == 1 and step >= len(offsets):
            counts = [count]
        else:
            counts = sync.read(mx.stack([each[-1] for each in ends]))[0]
        for slots, places, taken in zip(tables, ends, counts, strict=True):
            if taken:
                given = coords, part, limits, slots, places
                parts.append(_collected(rule, given, numbers, volume, taken))
    if not parts:
        return none
    rows, keys = (
        each[0] if len(each) == 1 else mx.concatenate(each)
        for each in zip(*parts, strict=True)
    )
    if step < len(offsets):  # two offsets may have made one row
        return unique_rows(rows).rows
    if not _is_keyed(box):
        return rows[stable_order(row_keys(rows, bounds_of(rows)))]
    return rows[mx.argsort(keys)]


def _taken(slots: mx.array) -> mx.array:
    """Return how many slots are taken up to each, itself included."""
    return mx.cumsum((slots >= 0).astype(mx.int32))


def _collected(
    rule: int, given: tuple[mx.array, ...], numbers: _Numbers, volume: int, count: int
) -> list[mx.array]:
    """Return the (count, 1 + D) rows of a table and their keys, in the table's order.

    Args:
        rule: what candidates are made by.
        given: coords, offsets, limits, slots, and what ``_taken`` returns of these.
        numbers: of keys.
        volume: as of the table.
        count: taken slots.
    """
    coords, slots = given[0], given[3]
    width = coords.shape[1]
    kernel = candidate_kernel("collect_candidates", _COLLECT, width, rule, numbers.key)
    return kernel(
        [*given, numbers.values],
        [((count, width), mx.int32), ((count,), numbers.key)],
        (slots.size,),
        first=0,
        volume=volume,
        last_slot=slots.size - 1,
        last_of_part=slots.size - 1,
    )


class Levels:
    """Cells of several strides that were launched; see ``StartedLevels``.

    Args:
        coords: (N, 1 + D) int32.
        strides: of each level.
    """

    def __init__(self, coords: mx.array, strides: Sequence[tuple[int, ...]]):
        self._coords, self._levels = coords, len(strides)
        none, limits = integers([0]), integers(strides, mx.int64)
        slots = insert_cells(coords, none, limits, self._levels)
        self._table, part = (none, limits, slots, _taken(slots)), len(slots)
        last = part // self._levels
        self.counts = (self._table[-1][last - 1 :: last],)

    def rows(self, counts: list, boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level, None of more cells than keys can number."""
        (ends,), box = counts, reduce(join, boxes)
        if not _is_keyed(box, self._levels):
            return None
        given, numbers = (self._coords, *self._table), _Numbers.of(box, self._levels)
        rows, keys = _collected(CELLS, given, numbers, len(self._coords), ends[-1])
        rows = rows[mx.argsort(keys)]
        return [rows[a:b] for a, b in pairwise([0, *ends])]


def start_levels(
    source: SearchedRows,
    strides: Sequence[tuple[int, ...]],
    boxes: Sequence[Bounds] | None,
) -> Levels | None:
    """Launch the cells of each stride. See ``Geometry``."""
    n, levels = len(source.coords), len(strides)
    together = thresholds.METAL_CANDIDATES_TOGETHER
    most = min(together, dispatch_limit("probes"))
    if levels < 2 or not 0 < n <= most // levels:
        return None
    if boxes is not None and not _is_keyed(reduce(join, boxes), levels):
        return None
    return Levels(source.coords, strides)

"""Geometry on Metal: look-ups, neighbour tables, rows of new sets, views.

Look-ups that would hold a GPU for long are cut into several dispatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from ... import sync
from ...devices import METAL
from ...geometry import lattice
from ...geometry.lattice import (
    KEY_LIMIT,
    WORD,
    Bounds,
    Curve,
    Offsets,
    Rule,
    UniqueRows,
    bounds_of,
    cell_count,
    column_weights,
    is_empty,
    join,
    row_keys,
    stable_order,
)
from ...geometry.tables import (
    Geometry,
    Keep,
    RelationViews,
    RowIndex,
    Rows,
    SearchedRows,
)
from ..gpu.kernel import (
    METAL_CUTS,
    GpuKernel,
    Interface,
    by_rows,
    ceil_div,
    dispatch_limit,
)

CELLS = len(Rule)  # the kernels' rule that makes cells of several strides
LANES, FOUR = 32, 4  # of a simdgroup
# Rows of candidates of levels that are made at once on Metal: 300 bytes a row more are
# read, in fewer launches. Not timed.
CANDIDATES_TOGETHER = 1 << 19
# Sort keys by their bits, which MLX's sort reads and writes.
GRAY_KEYS = {8: mx.uint8, 16: mx.uint16, 32: mx.uint32, 64: mx.uint64}


def _face(name: str, inputs: str, outputs: str, sizes: str = "") -> Interface:
    fields = tuple((size, "0") for size in sizes.split())
    return Interface(name, tuple(inputs.split()), tuple(outputs.split()), fields)


# `first` is a row of the table, or a slot of the part; `volume` counts offsets, or rows
# of CELLS; the last two are slots of the hash table, and of a part, less one. `limits`
# is int64: stride, least and greatest value of the D axes, or strides of CELLS.
_HASH = "HashTable", "first volume last_slot last_of_part"
_CANDIDATES = "coords offsets limits"
_INSERT = _face(_HASH[0], _CANDIDATES, "slots", _HASH[1])
_NEIGHBOURS = "slots in_coords out_coords offsets stride"
_NEIGHBOURS = _face(_HASH[0], _NEIGHBOURS, "table", _HASH[1])
_SUBMANIFOLD = _face(_HASH[0], "slots coords offsets", "table", _HASH[1])
_COLLECT = f"{_CANDIDATES} slots ends packing"
_COLLECT = _face(_HASH[0], _COLLECT, "rows keys", _HASH[1])
_PACK = _face("UniqueRows", "coords least weight", "keys")
_STARTS = _face("UniqueRows", "coords order", "starts")
_UNIQUE = _face("UniqueRows", "coords order starts ends", "rows inverse")
_CURVE_KEYS = _face("CurveKeys", "coords frame", "keys")
_TRANSPOSE = _face("TransposeTable", "table", "transposed", "volume rows")
_BLOCKS = "volume rows block blocks"
_COUNT = _face("ListEdges", "table", "counts", _BLOCKS)
_WRITE = _face("ListEdges", "table places", "edges", _BLOCKS)
_ORDERED = "volume rows block words"
_ORDERED = _face("OrderedTable", "table order", "ordered masks", _ORDERED)
_GRAY = _face("GrayKeys", "table", "keys", "volume rows words columns")
# Structs that a file names besides.
_BESIDE = {"relation_views": (_TRANSPOSE, _COUNT, _ORDERED, _GRAY)}


@cache
def _kernel(
    symbol: str, file: str, face: Interface, axes: str = "x", **template
) -> GpuKernel:
    """Return a kernel; ``axes`` are those of its grid."""
    return GpuKernel(
        METAL,
        symbol,
        (file,),
        face,
        tuple(template.items()),
        place=f"thread_position_in_grid.{axes}",
        also=tuple(f for f in _BESIDE.get(file, ()) if f.name != face.name),
        atomic=face is _INSERT,
    )


def _integers(values: Sequence, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return a flat array of numbers, or of the numbers in tuples."""
    return mx.array(list(values), dtype=dtype).flatten()


# Hash tables of rows


class RowTable(RowIndex):
    """Finds the rows of one coordinate set by value, through a hash table."""

    def __init__(self, coords: mx.array):
        self.coords: mx.array = coords
        n = coords.shape[0]
        self.slots: mx.array = mx.full((2,), -1, dtype=mx.int32)
        self.sizes: dict[str, int] = {"last_slot": 0, "last_of_part": 0}
        if n:
            none = _integers([0]), _integers([0], mx.int64)
            parts = insert(coords, Rule.ITSELF, *none, 1)
            self.slots = parts[0] if len(parts) == 1 else mx.concatenate(parts)
            self.sizes["last_slot"] = self.slots.size // 2 - 1
            self.sizes["last_of_part"] = parts[0].size // 2 - 1

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that ``find`` and ``table`` read."""
        return self.coords, self.slots

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``: bounds, the first repeat and its like."""
        n = self.coords.shape[0]
        if n == 0:
            return []
        before, rows = self.find(self.coords), mx.arange(n, dtype=mx.int32)
        at = mx.where(before == rows, n, rows).min()
        repeat = mx.stack([before[mx.minimum(at, n - 1)], at])
        return [self.coords.min(axis=0), self.coords.max(axis=0), repeat]

    def settle(self, facts: list[Any]) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        low, high, (before, at) = facts
        pair = None if at == self.coords.shape[0] else (before, at)
        return (tuple(low), tuple(high)), pair

    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge."""
        (n, width), volume = self.coords.shape, len(offsets)
        n_out, limit = out.coords.shape[0], dispatch_limit("probes")
        if n_out == 0 or n == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        inputs = [self.slots, self.coords]
        sizes = {"volume": volume, **self.sizes}
        half = volume // 2
        if mirrored and half and n * half <= limit:
            face = "submanifold_table", "hash_table", _SUBMANIFOLD, "xy"
            inputs.append(_integers(offsets[:half]))
            outputs, grid = [((n, volume), mx.int32)], (half, n)
            kernel = _kernel(*face, WIDTH=width)
            return kernel(inputs, outputs, grid, fill=-1, first=0, **sizes)[0]
        which = {"WIDTH": width, "TRANSPOSED": transposed}
        kernel = _kernel("neighbour_table", "hash_table", _NEIGHBOURS, "xy", **which)
        inputs += [out.coords, _integers(offsets), _integers(stride)]

        def launch(first: int, rows: int) -> list[mx.array]:
            outputs, grid = [((rows, volume), mx.int32)], (volume, rows)
            return kernel(inputs, outputs, grid, first=first, **sizes)

        return by_rows(n_out, n_out * volume, limit, launch)[0]


def _power_of_two(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def insert(
    coords: mx.array, rule: Rule, offsets: mx.array, limits: mx.array, volume: int
) -> list[mx.array]:
    """Return a hash table of a rule's candidates, in parts: a dispatch makes each."""
    candidates = coords.shape[0] * volume
    pieces = _power_of_two(ceil_div(candidates, dispatch_limit("probes")))
    # At least two slots a row. Parts fill alike, to a few in a thousand.
    part = max(16, _power_of_two(2 * candidates) // pieces)
    which = {"WIDTH": coords.shape[1], "RULE": int(rule)}
    kernel = _kernel("insert_candidates", "hash_table", _INSERT, **which)
    words = 2 if rule == Rule.ITSELF else 1
    return [
        kernel(
            [coords, offsets, limits],
            [((words * part,), mx.int32)],
            (candidates,),
            fill=-1,
            first=part * piece,
            volume=volume,
            last_slot=part * pieces - 1,
            last_of_part=part - 1,
        )[0]
        for piece in range(pieces)
    ]


# Rows of new sets: candidates in a hash table, collected, sorted by keys


class _Numbers(NamedTuple):
    """How keys number the rows of a box, one level after the other."""

    key: mx.Dtype  # their dtype
    values: mx.array

    @staticmethod
    def of(box: Bounds, levels: int = 1) -> _Numbers:
        """Return the numbers of a box that holds the rows of all levels."""
        cells, weights = cell_count(box), column_weights(box)
        if not _is_keyed(box, levels):
            cells, weights = 0, [0] * len(weights)
        key = mx.uint32 if cells * levels < 1 << 32 else mx.int64
        return _Numbers(key, _integers([*box[0], *weights, cells], mx.int64))


def _is_keyed(box: Bounds, levels: int = 1) -> bool:
    """Whether keys can number the rows of a box at some levels."""
    return cell_count(box) * levels < KEY_LIMIT


def _taken(slots: mx.array) -> mx.array:
    """Return how many slots are taken up to each, itself included."""
    return mx.cumsum((slots >= 0).astype(mx.int32))


def _collected(
    rule: int, inputs: tuple[mx.array, ...], numbers: _Numbers, volume: int, count: int
) -> list[mx.array]:
    """Return the (count, 1 + D) rows of a table and their keys, in its order."""
    width, slots = inputs[0].shape[1], inputs[3].size
    which = {"WIDTH": width, "RULE": int(rule), "KEY": numbers.key}
    return _kernel("collect_candidates", "hash_table", _COLLECT, **which)(
        [*inputs, numbers.values],
        [((count, width), mx.int32), ((count,), numbers.key)],
        (slots,),
        first=0,
        volume=volume,
        last_slot=slots - 1,
        last_of_part=slots - 1,
    )


class _Levels:
    """Cells of several strides that were launched; see ``StartedLevels``."""

    def __init__(self, coords: mx.array, strides: Sequence[tuple[int, ...]]):
        (n, width), self._coords, self._levels = coords.shape, coords, len(strides)
        none, limits = _integers([0]), _integers(strides, mx.int64)
        part, which = max(16, _power_of_two(2 * n)), {"WIDTH": width, "RULE": CELLS}
        (slots,) = _kernel("insert_candidates", "hash_table", _INSERT, **which)(
            [coords, none, limits],
            [((self._levels * part,), mx.int32)],
            (self._levels * n,),
            fill=-1,
            first=0,
            volume=n,
            last_slot=part - 1,
            last_of_part=part - 1,
        )
        self._table = none, limits, slots, _taken(slots)
        self.counts = (self._table[-1][part - 1 :: part],)

    def rows(self, counts: list, boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level, None if keys cannot number the cells."""
        (ends,), box = counts, reduce(join, boxes)
        if not _is_keyed(box, self._levels):
            return None
        inputs, numbers = (self._coords, *self._table), _Numbers.of(box, self._levels)
        rows, keys = _collected(CELLS, inputs, numbers, len(self._coords), ends[-1])
        rows = rows[mx.argsort(keys)]
        return [rows[a:b] for a, b in pairwise([0, *ends])]


# Views of a relation, from its neighbour table


def gray_order(table: mx.array, region: int | None = None) -> mx.array:
    """Return the (N_out,) int32 order of rows by the Gray-code rank of their mask.

    Ties keep the rows' own order: MLX's sorts are stable (on Metal a merge sort that
    takes the left of equals, ``sort.h``). So keys are ranks alone, and each region is a
    row of the array that is sorted, whose merges end with it.
    """
    n, volume = table.shape
    if n == 0:
        return mx.zeros((0,), dtype=mx.int32)
    region = min(region or n, n)
    regions = ceil_div(n, region)
    # One bit more than offsets: a rank is never all ones, as filled places are.
    bits = next((b for b in GRAY_KEYS if volume < b), max(GRAY_KEYS))
    words, columns = ceil_div(volume + 1, bits), regions * region
    key, mask = GRAY_KEYS[bits], mx.uint64 if bits == max(GRAY_KEYS) else mx.uint32
    kernel = _kernel("gray_keys", "relation_views", _GRAY, "xy", KEY=key, MASK=mask)
    sizes = {"volume": volume, "rows": n, "words": words, "columns": columns}
    outputs, grid = [((words, columns), key)], (LANES, ceil_div(columns, LANES))
    keys = kernel([table], outputs, grid, **sizes)[0].reshape(words, regions, region)
    order = mx.argsort(keys[-1], axis=1)
    for word in reversed(range(words - 1)):
        here = mx.take_along_axis(keys[word], order, axis=1)
        order = mx.take_along_axis(order, mx.argsort(here, axis=1), axis=1)
    order = order.astype(mx.int32)
    if regions > 1:
        order = order + region * mx.arange(regions, dtype=mx.int32)[:, None]
    return order.flatten()[:n]


def ordered_table(
    table: mx.array, order: mx.array, block: int
) -> tuple[mx.array, mx.array]:
    """Return the rows of a table in an order, and which offsets their blocks use."""
    n, volume = table.shape
    words, blocks = ceil_div(volume, 32), ceil_div(n, block)
    if n == 0:
        return table, mx.zeros((0, words), dtype=mx.uint32)
    kernel = _kernel("ordered_table", "relation_views", _ORDERED, "xy")
    sizes = {"volume": volume, "rows": n, "block": block, "words": words}
    outputs = [((n, volume), mx.int32), ((blocks, words), mx.uint32)]
    return tuple(kernel([table, order], outputs, (LANES, blocks), **sizes))


class MetalGeometry(Geometry):
    """The geometry of Metal's kernels; see ``Geometry``."""

    bounds = staticmethod(bounds_of)
    gray_order = staticmethod(gray_order)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords)

    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows, and the place of each row among them."""
        n, width = coords.shape
        if n == 0:
            return UniqueRows(coords, mx.zeros((0,), dtype=mx.int32))
        box, file, which = box or bounds_of(coords), "unique_rows", {"WIDTH": width}
        if cell_count(box) * n < KEY_LIMIT:
            # Keys of places too, so that they are unique.
            weights = [n * weight for weight in column_weights(box)]
            inputs = [coords, *(_integers(v, mx.int64) for v in (box[0], weights))]
            pack = _kernel("pack_rows", file, _PACK, **which)
            order = mx.argsort(pack(inputs, [((n,), mx.int64)], (n,))[0])
            order = order.astype(mx.int32)
        else:
            order = stable_order(row_keys(coords, box))
        group = _kernel("group_starts", file, _STARTS, **which)
        starts = group([coords, order], [((n,), mx.int32)], (n,))[0]
        ends = mx.cumsum(starts)
        count = sync.read(ends[-1])[0] if count is None else count
        write = _kernel("write_unique_rows", file, _UNIQUE, **which)
        outputs = [((count, width), mx.int32), ((n,), mx.int32)]
        return UniqueRows(*write([coords, order, starts, ends], outputs, (n,)))

    def rule_rows(
        self,
        rule: Rule,
        coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        box: Bounds,
        count: int | None = None,
    ) -> mx.array:
        """Return the sorted unique int32 rows within a box that a rule makes."""
        n, width = coords.shape
        none = mx.zeros((0, width), dtype=mx.int32)
        if n == 0 or is_empty(box):
            return none
        low, high = box
        limits = _integers([*stride, *low[1:], *high[1:]], mx.int64)
        flat, numbers, volume = _integers(offsets), _Numbers.of(box), len(offsets)
        tables = insert(coords, rule, flat, limits, volume)
        ends, counts = [_taken(slots) for slots in tables], [count]
        if count is None or len(tables) > 1:
            counts = sync.read(mx.stack([each[-1] for each in ends]))[0]
        parts = [
            _collected(rule, (coords, flat, limits, *table), numbers, volume, taken)
            for *table, taken in zip(tables, ends, counts, strict=True)
            if taken
        ]
        if not parts:
            return none
        rows, keys = map(mx.concatenate, zip(*parts, strict=True))
        if not _is_keyed(box):
            return rows[stable_order(row_keys(rows, bounds_of(rows)))]
        return rows[mx.argsort(keys)]

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> _Levels | None:
        """Launch the cells of each stride."""
        n, levels = len(source.coords), len(strides)
        most = min(CANDIDATES_TOGETHER, dispatch_limit("probes"))
        if levels < 2 or not 0 < n <= most // levels:
            return None
        if boxes is not None and not _is_keyed(reduce(join, boxes), levels):
            return None
        return _Levels(source.coords, strides)

    def curve_order(self, coords: mx.array, curve: Curve) -> mx.array:
        """Return the (N,) int32 order of rows by batch, then along a curve."""
        if not curve.is_numbered:
            return lattice.curve_order(coords, curve)
        n, width = coords.shape
        row_bits = n.bit_length()
        if curve.of_key + row_bits > WORD:
            row_bits = 0
        frame = _integers([*curve.low, curve.bits, row_bits])
        which = {"HILBERT": curve.is_hilbert, "SWAPPED": curve.is_swapped}
        kernel = _kernel("curve_keys", "curve_keys", _CURVE_KEYS, WIDTH=width, **which)
        keys = kernel([coords, frame], [((n,), mx.int64)], (n,))[0]
        if row_bits == 0:
            return mx.argsort(keys).astype(mx.int32)
        return (mx.sort(keys) & ((1 << row_bits) - 1)).astype(mx.int32)

    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) with the row of ``table`` that holds each entry, or -1."""
        n_out, volume = table.shape
        if n_out == 0 or n_in == 0:
            return mx.full((n_in, volume), -1, dtype=mx.int32)
        kernel = _kernel("transpose_table", "relation_views", _TRANSPOSE, "xy")
        outputs, grid = [((n_in, volume), mx.int32)], (volume, ceil_div(n_out, FOUR))
        sizes = {"volume": volume, "rows": n_out}
        return kernel([table], outputs, grid, fill=-1, **sizes)[0]

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o)."""
        n_out, volume = table.shape
        total = relation and relation.n_edges
        if n_out == 0 or total == 0:
            return mx.zeros((0, 3), dtype=mx.int32)
        block = METAL_CUTS["edge_block"]
        blocks = ceil_div(n_out, block)
        sizes = {"volume": volume, "rows": n_out, "block": block, "blocks": blocks}
        grid, file = (volume, blocks), "relation_views"
        count = _kernel("count_edges", file, _COUNT, "xy")
        outputs = [((volume * blocks * FOUR,), mx.int32)]
        counts = count([table], outputs, grid, **sizes)[0]
        ends = mx.cumsum(counts.astype(mx.int64))
        if total is None:
            total = sync.read(ends[-1])[0]
            if total == 0:
                return mx.zeros((0, 3), dtype=mx.int32)
        write = _kernel("write_edges", file, _WRITE, "xy")
        inputs = [table, ends[::FOUR] - counts[::FOUR]]
        return write(inputs, [((total, 3), mx.int32)], grid, **sizes)[0]

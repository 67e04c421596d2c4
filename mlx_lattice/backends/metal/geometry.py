"""Geometry on Metal: look-ups, neighbour tables, rows of new sets, views.

Long work is cut into several dispatches, each over a slice from `first` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from ... import sync
from ...devices import METAL
from ...geometry import curves, unique
from ...geometry.curves import WORD, Curve, stable_order
from ...geometry.keys import (
    KEY_LIMIT,
    Bounds,
    Offsets,
    bounds_of,
    cell_count,
    column_weights,
    join,
    row_keys,
)
from ...geometry.output_rows import Rule, is_empty
from ...geometry.protocol import Keep, OneByOne, RelationViews, Rows, SearchedRows
from ...geometry.unique import INFINITE, KeptRows, UniqueRows, none_of, running_sums
from ..gpu import kernel as gpu_kernel
from ..gpu.kernel import (
    METAL_CUTS,
    GpuKernel,
    Interface,
    by_rows,
    ceil_div,
    cuts,
    dispatch_limit,
)
from . import thresholds

CELLS = len(Rule)  # the kernels' rule that makes cells of several strides
# A float32 product of extents is compared with it; no rounding reaches twice as far.
SAFE_KEY_LIMIT = float(KEY_LIMIT // 2)
LANES, FOUR = 32, 4  # of a simdgroup
# Sort keys by their bits, which MLX's sort reads and writes.
GRAY_KEYS = {8: mx.uint8, 16: mx.uint16, 32: mx.uint32, 64: mx.uint64}


def _face(name: str, inputs: str, outputs: str, sizes: str) -> Interface:
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
# A dispatch covers places, or rows, from `first` on; others wrote `before` results.
_PLACES = "first before"
_PACK = _face("UniqueRows", "coords least weight", "keys", _PLACES)
_STARTS = _face("UniqueRows", "coords order", "starts", _PLACES)
_UNIQUE = _face("UniqueRows", "coords order starts ends", "rows inverse", _PLACES)
_KEPT = _face("KeptRows", "mask ends coords", "rows kept places", _PLACES)
_CURVE_KEYS = _face("CurveKeys", "coords frame", "keys", "first")
_SCORE_KEYS = _face("ScoreKeys", "coords scores", "keys", "first least row_bits")
_BEST = _face("MarkBest", "keys", "kept", "k low_bits row_bits")
_TRANSPOSE = _face("TransposeTable", "table", "transposed", "volume rows first columns")
_BLOCKS = "volume rows block blocks first"
_COUNT = _face("ListEdges", "table", "counts", _BLOCKS)
_WRITE = _face("ListEdges", "table places", "edges", _BLOCKS)
_ORDERED = "volume rows block words first"
_ORDERED = _face("OrderedTable", "table order", "ordered masks", _ORDERED)
_GRAY = _face("GrayKeys", "table", "keys", "volume rows words columns first")
# Structs that a file names besides.
_BESIDE = {
    "best_rows": (_SCORE_KEYS, _BEST),
    "relation_views": (_TRANSPOSE, _COUNT, _ORDERED, _GRAY),
}


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


def by_places(
    kernel: GpuKernel, inputs: list[mx.array], dtype: mx.Dtype, **sizes: int
) -> mx.array:
    """Launch over slices of the N places, one thread each, and return (N,) results."""
    n, width = inputs[0].shape

    def launch(first: int, length: int) -> list[mx.array]:
        outputs = [((length,), dtype)]
        return kernel(inputs, outputs, (length,), first=first, **sizes)

    return by_rows(n, 3 * n * width, dispatch_limit("elements"), launch)[0]


def _integers(values: Sequence, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return a flat array of numbers, or of the numbers in tuples."""
    return mx.array(list(values), dtype=dtype).flatten()


# Hash tables of rows


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    is_sorted = False  # not looked for

    def __init__(self, coords: mx.array):
        self.coords, n = coords, coords.shape[0]
        self.slots = mx.full((2,), -1, dtype=mx.int32)
        self.sizes = {"last_slot": 0, "last_of_part": 0}
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

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        low, high, (before, at) = facts
        pair = None if at == self.coords.shape[0] else (before, at)
        return (tuple(low), tuple(high)), pair

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self._searched(rows, [(0,) * dims], (1,) * dims, False)[:, 0]

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
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge.

        A mirrored one is searched by halves, as FlexGEMM does, if one dispatch may do
        it. If rows repeat, it is some table, which is not kept.
        """
        n, volume = self.coords.shape[0], len(offsets)
        if mirrored and n and volume > 1 and n <= dispatch_limit("probes"):
            return self._mirrored(offsets)
        return self._searched(out.coords, offsets, stride, transposed)

    def _searched(
        self, out: mx.array, offsets: Offsets, stride: Sequence[int], transposed: bool
    ) -> mx.array:
        """Return the (N_out, K) table, one look-up an entry."""
        n_out, volume = out.shape[0], len(offsets)
        if n_out == 0 or self.coords.shape[0] == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        which = {"WIDTH": out.shape[1], "TRANSPOSED": transposed}
        kernel = _kernel("neighbour_table", "hash_table", _NEIGHBOURS, "xy", **which)
        inputs = [self.slots, self.coords, out, _integers(offsets), _integers(stride)]

        def launch(first: int, rows: int) -> list[mx.array]:
            sizes = {"first": first, "volume": volume, **self.sizes}
            return kernel(inputs, [((rows, volume), mx.int32)], (volume, rows), **sizes)

        return by_rows(n_out, n_out * volume, dispatch_limit("probes"), launch)[0]

    def _mirrored(self, offsets: Offsets) -> mx.array:
        """Return the (N, K) table of a point-symmetric kernel over the set itself."""
        (n, width), volume = self.coords.shape, len(offsets)
        half = volume // 2
        pieces = list(cuts(half, n * half, dispatch_limit("probes")))
        face = "submanifold_table", "hash_table", _SUBMANIFOLD, "xy"
        kernel = _kernel(*face, WIDTH=width)

        def launch(first: int, count: int) -> mx.array:
            columns = volume if len(pieces) == 1 else 2 * count
            some = _integers(offsets[first : first + count])
            inputs, out = [self.slots, self.coords, some], (n, columns)
            sizes = {"first": 0, "volume": columns, **self.sizes}
            return kernel(inputs, [(out, mx.int32)], (count, n), fill=-1, **sizes)[0]

        parts = [launch(*piece) for piece in pieces]
        if len(parts) == 1:
            return parts[0]
        halves = [mx.split(part, 2, axis=1) for part in parts]
        centre = [mx.arange(n, dtype=mx.int32)[:, None]] * (volume % 2)
        left, right = zip(*halves, strict=True)
        return mx.concatenate([*left, *centre, *reversed(right)], axis=1)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def insert(
    coords: mx.array, rule: Rule, offsets: mx.array, limits: mx.array, volume: int
) -> list[mx.array]:
    """Return a hash table of a rule's candidates, in parts: a dispatch makes each.

    A slot has one int, or two if the candidates are the rows themselves: see the
    kernel.

    Args:
        coords: (N, 1 + D) int32.
        rule: what candidates are made by.
        offsets: flat offsets, D integers each.
        limits: int64 stride, least and greatest value of the D axes.
        volume: number of offsets.
    """
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
    """How keys number the rows of a box, one level after the other.

    Attributes:
        key: their dtype.
        values: least value and weight of each column, then the weight of a level; zeros
            if the box has more cells than keys can number.
    """

    key: mx.Dtype
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

    Reads one size for each hash table of candidates, unless the size of a single one is
    given. See ``Geometry``.
    """
    n, width = coords.shape
    none = mx.zeros((0, width), dtype=mx.int32)
    if n == 0 or is_empty(box):
        return none
    low, high = box
    limits = _integers([*stride, *low[1:], *high[1:]], mx.int64)
    flat, numbers, parts = _integers(offsets), _Numbers.of(box), []
    step = max(1, gpu_kernel.METAL_CUTS["candidates"] // n)
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
        given: coords, offsets, limits, slots, and ``_taken(slots)``.
        numbers: of keys.
        volume: as of the table.
        count: taken slots.
    """
    coords, slots = given[0], given[3]
    width = coords.shape[1]
    which = {"WIDTH": width, "RULE": int(rule), "KEY": numbers.key}
    return _kernel("collect_candidates", "hash_table", _COLLECT, **which)(
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

    They share one hash table, with a part of equal size for each stride.
    """

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


# Sorted unique rows: keys that compare as rows do, and MLX's sort


def unique_rows(
    coords: mx.array, box: Bounds | None = None, count: int | None = None
) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32 coordinates.

    Reads one size, unless it is given. If 64-bit keys cannot number the cells of the
    box, rows are sorted by ranks, in MLX operations. See ``Geometry``.
    """
    n, width = coords.shape
    if n == 0:
        none = mx.zeros((0,), dtype=mx.int32)
        return UniqueRows(coords, none)
    if box is not None and cell_count(box) * n < KEY_LIMIT:
        weights = [n * weight for weight in column_weights(box)]
        numbers = (mx.array(list(v), dtype=mx.int64) for v in (box[0], weights))
        order = mx.argsort(_pack(coords, *numbers)).astype(mx.int32)
        starts, ends = _group_starts(coords, order)
        count = sync.read(ends[-1])[0] if count is None else count
        return UniqueRows(*_write_unique(coords, order, starts, ends, count))
    least = coords.min(axis=0).astype(mx.int64)
    extents = coords.max(axis=0).astype(mx.int64) - least + 1
    after = mx.concatenate([extents[1:], mx.array([n], dtype=mx.int64)])
    keys = _pack(coords, least, mx.cumprod(after, reverse=True))
    order = mx.argsort(keys).astype(mx.int32)
    starts, ends = _group_starts(coords, order)
    # In float32 a product too great for 64 bits stays great.
    cells = extents.astype(mx.float32).prod() * n
    fits = (cells < SAFE_KEY_LIMIT).astype(mx.int32)
    count, fits = sync.read(mx.stack([ends[-1], fits]))[0]
    if not fits:
        order = stable_order(row_keys(coords, bounds_of(coords)))
        starts, ends = _group_starts(coords, order)
        count = sync.read(ends[-1])[0]
    return UniqueRows(*_write_unique(coords, order, starts, ends, count))


def _pack(coords: mx.array, least: mx.array, weights: mx.array) -> mx.array:
    """Return (N,) int64 unique keys in the order of the rows, and of their places.

    Args:
        coords: (N, 1 + D) int32, which may repeat.
        least: (1 + D,) int64 of their box.
        weights: (1 + D,) int64: what a step along each column counts, multiples of N.
    """
    kernel = _kernel("pack_rows", "unique_rows", _PACK, WIDTH=coords.shape[1])
    return by_places(kernel, [coords, least, weights], mx.int64, before=0)


def _group_starts(coords: mx.array, order: mx.array) -> tuple[mx.array, mx.array]:
    """Return (N,) int32: 1 for the first of equal rows in order; running totals."""
    kernel = _kernel("group_starts", "unique_rows", _STARTS, WIDTH=coords.shape[1])
    starts = by_places(kernel, [coords, order], mx.int32, before=0)
    return starts, mx.cumsum(starts)


def _write_unique(coords, order, starts, ends, count) -> tuple[mx.array, mx.array]:
    """Return the unique rows, and of each given row its place among them."""
    n, width = coords.shape
    pieces = list(cuts(n, 3 * n * width, dispatch_limit("elements")))
    bounds = _piece_bounds(pieces, ends, count)
    kernel = _kernel("write_unique_rows", "unique_rows", _UNIQUE, WIDTH=width)
    rows, inverse = [], None
    for (first, length), a, b in zip(pieces, bounds[:-1], bounds[1:], strict=True):
        listed, places = kernel(
            [coords, order, starts, ends],
            [((max(1, b - a), width), mx.int32), ((n,), mx.int32)],
            (length,),
            fill=-1,
            first=first,
            before=a,
        )
        rows.append(listed[: b - a])
        inverse = places if inverse is None else mx.maximum(inverse, places)
    return rows[0] if len(rows) == 1 else mx.concatenate(rows), inverse


def _piece_bounds(pieces: list[tuple[int, int]], ends: mx.array, count: int) -> list:
    """Return how many rows there are up to each piece's start, and in all.

    Args:
        pieces: (first, length) of the places, one after another.
        ends: (N,) rows up to each place, itself included; read if there are several
            pieces.
        count: in all.
    """
    if len(pieces) < 2:
        return [0, count]
    lasts = mx.array([first + length - 1 for first, length in pieces])
    return [0, *sync.read(ends[lasts])[0]]


class StartedRows:
    """Rows that a mask keeps, launched; see ``geometry.protocol.StartedRows``."""

    def __init__(self, mask: mx.array, coords: mx.array):
        self._given = mask, running_sums(mask.astype(mx.int32)), coords
        self.count = self._given[1][-1:]

    def kept(self, count: int) -> KeptRows:
        """Return the rows."""
        _, ends, coords = self._given
        n, width = coords.shape
        pieces = list(cuts(n, 3 * n * width, dispatch_limit("elements")))
        bounds, parts = _piece_bounds(pieces, ends, count), []
        kernel = _kernel("kept_rows", "kept_rows", _KEPT, WIDTH=width)
        for (first, length), a, b in zip(pieces, bounds[:-1], bounds[1:], strict=True):
            if a == b:
                nowhere = mx.full((length,), -1, dtype=mx.int32)
                parts.append(none_of(coords, nowhere))
                continue
            shapes = (b - a,), (b - a, width), (length,)
            outputs = [(shape, mx.int32) for shape in shapes]
            rows, kept, places = kernel(
                self._given, outputs, (length,), first=first, before=a
            )
            parts.append(KeptRows(rows, places, kept))
        if len(parts) == 1:
            return parts[0]
        return KeptRows(*map(mx.concatenate, zip(*parts, strict=True)))


# Orders: a kernel of keys, and MLX's sort


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve."""
    if not curve.is_numbered:
        return curves.curve_order(coords, curve)
    n, width = coords.shape
    row_bits = n.bit_length()
    if curve.of_key + row_bits > WORD:
        row_bits = 0
    frame = mx.array([*curve.low, curve.bits, row_bits], dtype=mx.int32)
    which = {"WIDTH": width, "HILBERT": curve.is_hilbert, "SWAPPED": curve.is_swapped}
    kernel = _kernel("curve_keys", "curve_keys", _CURVE_KEYS, **which)
    keys = by_places(kernel, [coords, frame], mx.int64)
    if row_bits == 0:
        return mx.argsort(keys).astype(mx.int32)
    return (mx.sort(keys) & ((1 << row_bits) - 1)).astype(mx.int32)


def best_rows(
    scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
) -> mx.array:
    """Return (N,) bool: which rows are the best of their element. See ``Geometry``."""
    scores = scores if scores.dtype in INFINITE else scores.astype(mx.float32)
    infinite, word = INFINITE[scores.dtype]
    n, width = coords.shape
    row_bits, (least, greatest) = n.bit_length(), batches
    low_bits = row_bits + 8 * word.size
    fits = low_bits + (greatest - least).bit_length() <= WORD
    if not fits or n > dispatch_limit("elements"):
        return unique.best_rows(scores, coords, batches, k)
    which = {"WIDTH": width, "INFINITE": infinite}
    keys = by_places(
        _kernel("score_keys", "best_rows", _SCORE_KEYS, **which),
        [coords, scores.view(word)],
        mx.int64,
        least=least,
        row_bits=row_bits,
    )
    sizes = {"k": k, "low_bits": low_bits, "row_bits": row_bits}
    kernel = _kernel("mark_best", "best_rows", _BEST)
    return kernel([mx.sort(keys)], [((n,), mx.bool_)], (n,), **sizes)[0]


def gray_order(table: mx.array, region: int | None = None) -> mx.array:
    """Return the (N_out,) int32 order of rows by the Gray-code rank of their mask.

    Ties keep the rows' own order: MLX's sorts are stable (on Metal a merge sort that
    takes the left of equals, ``sort.h``). So keys are ranks alone, and each region is a
    row of the array that is sorted, whose merges end with it.

    Args:
        table: (N_out, K) int32.
        region: rows that are ordered among themselves; by default all of them.
    """
    n, volume = table.shape
    if n == 0:
        return mx.zeros((0,), dtype=mx.int32)
    region = min(region or n, n)
    regions = ceil_div(n, region)
    # One bit more than offsets: a rank is never all ones, as filled places are.
    bits = next((b for b in GRAY_KEYS if volume < b), max(GRAY_KEYS))
    words, rows = ceil_div(volume + 1, bits), regions * region
    key, mask = GRAY_KEYS[bits], mx.uint64 if bits == max(GRAY_KEYS) else mx.uint32
    kernel = _kernel("gray_keys", "relation_views", _GRAY, "xy", KEY=key, MASK=mask)
    sizes = {"volume": volume, "rows": n, "words": words}

    def launch(first: int, columns: int) -> list[mx.array]:
        out, grid = [((words, columns), key)], (LANES, ceil_div(columns, LANES))
        return kernel([table], out, grid, first=first, columns=columns, **sizes)

    work, limit = rows * volume, dispatch_limit("elements")
    keys = by_rows(rows, work, limit, launch, axis=1)[0]
    keys = keys.reshape(words, regions, region)
    order = mx.argsort(keys[-1], axis=1)
    for word in reversed(range(words - 1)):
        here = mx.take_along_axis(keys[word], order, axis=1)
        order = mx.take_along_axis(order, mx.argsort(here, axis=1), axis=1)
    order = order.astype(mx.int32)
    if regions > 1:
        order = order + region * mx.arange(regions, dtype=mx.int32)[:, None]
    return order.flatten()[:n]


# Views of a relation, from its neighbour table


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``table`` that holds each entry, or -1.

    Args:
        table: (N_out, K) int32; no row may hold another's entry in the same column.
        n_in: number of input rows.
    """
    n_out, volume = table.shape
    if n_out == 0 or n_in == 0:
        return mx.full((n_in, volume), -1, dtype=mx.int32)

    def launch(first: int, columns: int) -> list[mx.array]:
        whole, face = columns == volume, ("transpose_table", "relation_views")
        return _kernel(*face, _TRANSPOSE, "xy", WHOLE=whole)(
            [table],
            [((n_in, columns), mx.int32)],
            (columns, ceil_div(n_out, FOUR) if whole else n_out),
            fill=-1,
            volume=volume,
            rows=n_out,
            first=first,
            columns=columns,
        )

    # By columns: the rows of a slice of rows would be anywhere.
    work = max(n_in, n_out) * volume
    return by_rows(volume, work, dispatch_limit("elements"), launch, axis=1)[0]


def edges(table: mx.array, total: int | None = None) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o).

    Counted by blocks of rows, placed by a scan: deterministic. Reads sizes, unless one
    launch writes all edges and ``total``, their number, is given.
    """
    n_out, volume = table.shape
    if n_out == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    block = METAL_CUTS["edge_block"]
    blocks = ceil_div(n_out, block)
    sizes = {"volume": volume, "rows": n_out, "block": block, "blocks": blocks}
    # Each edge is three elements more.
    work, limit = 4 * table.size, dispatch_limit("elements")
    pieces = list(cuts(volume, work, limit))
    # Every fourth row is counted apart if one launch reads the whole table.
    apart = FOUR if len(pieces) == 1 else 1

    def count(first: int, columns: int) -> list[mx.array]:
        face = "count_edges", "relation_views", _COUNT, "xy"
        out = [((columns, blocks, apart), mx.int32)]
        kernel = _kernel(*face, WHOLE=apart > 1)
        return kernel([table], out, (columns, blocks), first=first, **sizes)

    def write(piece: tuple[int, int], start: int, total: int) -> mx.array:
        first, columns = piece
        here = slice(first * blocks, (first + columns) * blocks)
        kernel = _kernel("write_edges", "relation_views", _WRITE, "xy")
        inputs, out = [table, starts[here] - start], [((total, 3), mx.int32)]
        return kernel(inputs, out, (columns, blocks), first=first, **sizes)[0]

    counts = by_rows(volume, work, limit, count)[0].flatten()
    ends = mx.cumsum(counts.astype(mx.int64))
    starts = (ends - counts)[::apart]
    if total is not None and len(pieces) == 1:
        return write(pieces[0], 0, total) if total else mx.zeros((0, 3), mx.int32)
    last = [(first + length) * blocks - 1 for first, length in pieces]
    ends = ends[apart - 1 :: apart][mx.array(last)]
    bounds = pairwise([0, *sync.read(ends)[0]])
    parts = [
        write(piece, start, stop - start)
        for piece, (start, stop) in zip(pieces, bounds, strict=True)
        if stop > start
    ]
    if not parts:
        return mx.zeros((0, 3), dtype=mx.int32)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def ordered_table(
    table: mx.array, order: mx.array, block: int
) -> tuple[mx.array, mx.array]:
    """Return the rows of a table in an order, and which offsets their blocks use.

    Args:
        table: (N, K) int32.
        order: (N,) int32.
        block: rows of a block.

    Returns:
        (N, K) int32, and (ceil(N / block), ceil(K / 32)) uint32 masks: bit b of word w
        stands for offset 32 w + b.
    """
    n, volume = table.shape
    words = ceil_div(volume, 32)
    if n == 0:
        return table, mx.zeros((0, words), dtype=mx.uint32)
    kernel = _kernel("ordered_table", "relation_views", _ORDERED, "xy")
    sizes = {"volume": volume, "rows": n, "block": block, "words": words}

    def launch(first: int, count: int) -> list[mx.array]:
        rows = min(n - first * block, count * block)
        out = [((rows, volume), mx.int32), ((count, words), mx.uint32)]
        return kernel([table, order], out, (LANES, count), first=first, **sizes)

    work, limit = 2 * table.size, dispatch_limit("elements")
    ordered, masks = by_rows(ceil_div(n, block), work, limit, launch)
    return ordered, masks


class MetalGeometry(OneByOne):
    """The geometry of Metal's kernels; see ``Geometry``."""

    bounds = staticmethod(bounds_of)
    unique_rows = staticmethod(unique_rows)
    made_rows = staticmethod(made_rows)
    start_kept = staticmethod(StartedRows)
    best_rows = staticmethod(best_rows)
    start_levels = staticmethod(start_levels)
    transpose_table = staticmethod(transpose_table)
    gray_order = staticmethod(gray_order)
    curve_order = staticmethod(curve_order)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords)

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k), sorted by (k, o). Reads one size."""
        return edges(table, relation and relation.n_edges)

"""Geometry on CUDA: sorted unique rows, cells of several strides, and its object.

Each new set is read once, for its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from ... import sync
from ...geometry import output_rows, unique
from ...geometry.curves import by_region
from ...geometry.keys import KEY_LIMIT, Bounds, Offsets, cell_count, join
from ...geometry.output_rows import Rule, is_empty
from ...geometry.protocol import BoxedRows, SearchedRows
from ...geometry.unique import UniqueRows
from ...kernel_spec import KernelSpec
from ..gpu import sort as cuda_sort
from ..gpu.nvrtc import rehearsal
from ..gpu.sort import (
    KEYS,
    READ_KEYS,
    SCRATCH,
    SORT,
    SORT_THREADS,
    SORT_TILE,
    cleared,
    constant,
    digits_of,
    geometry_kernel,
    key_dtype,
    rule_constant,
    run,
    scratch_words,
    sort_keys,
    sorts,
    striding_blocks,
)
from . import tables as cuda_tables
from . import thresholds
from .tables import RowTable, bounds

CELLS = len(Rule)  # the kernel's rule that makes cells of several strides
KEY_BITS = KEY_LIMIT.bit_length() - 1  # of a key, at most
_UNIQUE = (*SORT, "unique_rows.cu")
# By strides: the bits of keys of earlier sets. A set whose bounds were not read is
# tried with as many.
_bits_before: dict[tuple, int] = {}


def unique_rows(
    coords: mx.array, box: Bounds | None = None, count: int | None = None
) -> UniqueRows:
    """Return the sorted unique rows and the place of each row among them.

    Reads the bounds and one size, unless they are given. See ``Geometry``.
    """
    dims, box = coords.shape[1] - 1, box or bounds(coords)
    if coords.shape[0] == 0 or not _is_keyed(len(coords), box):
        return unique.unique_rows(coords, box, count)
    still = [(0,) * dims], (1,) * dims
    bits, ranges = cell_count(box).bit_length(), _ranges_of(box)
    made = _launch(coords, Rule.ITSELF, *still, bits, ranges, places=True)
    ends = sync.read(*made.ends) if count is None else [[count]]
    return UniqueRows(made.rows(ends), made.places)


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

    Reads one size, unless that is given. See ``Geometry``.
    """
    candidates = coords.shape[0] * len(offsets)
    if candidates == 0 or is_empty(box):
        return mx.zeros((0, coords.shape[1]), dtype=mx.int32)
    if not _is_keyed(candidates, box):
        return output_rows.made_rows(rule, coords, offsets, stride, box, count)
    bits, ranges = cell_count(box).bit_length(), _ranges_of(box)
    given = coords, rule, offsets, stride, bits, ranges
    made = _launch(*given, is_distinct=count == candidates)
    return made.rows(sync.read(*made.ends) if count is None else [[count]])


class _Launched(NamedTuple):
    """Sorted unique rows that were launched, and not read.

    Attributes:
        listed: their keys, as many as there were candidates.
        ends: (1,) int64 each: how many there are, up to the end of each level; none if
            every candidate is one.
        places: (candidates,) int32, the place of each among them, or None.
        ranges: of each column, that keys are counted in.
        capacity: bits of keys that were sorted.
    """

    listed: mx.array
    ends: tuple[mx.array, ...]
    places: mx.array | None
    ranges: Sequence[mx.array]
    capacity: int

    def rows(self, ends: list) -> mx.array:
        """Return all rows, from the values of ``ends``."""
        (count,), columns = ends[-1], len(self.ranges)
        names, passed, ranges = _ranges(columns)
        kernel = geometry_kernel(
            "unpack_keys",
            _UNIQUE,
            "UnpackKeys",
            ("unique", "found", *names),
            ("rows",),
            template=(("COLUMNS", columns), ("KEY", KEYS[self.listed.dtype])),
            arguments=(
                ("unique", "reinterpret_cast<const KEY*>(unique)"),
                ("found", "reinterpret_cast<const long long*>(found)"),
                *passed,
            ),
            before=ranges,
        )
        inputs = [self.listed, self.ends[-1] if self.ends else None, *self.ranges]
        outputs = [((max(1, count), columns), mx.int32)]
        made = run(kernel, inputs, striding_blocks(count), outputs)[0]
        return made if count else made[:0]


def _is_keyed(candidates: int, box: Bounds) -> bool:
    """Whether keys can number a box, and the sort so many of them."""
    return cell_count(box) < KEY_LIMIT and sorts(candidates)


def _ranges_of(box: Bounds) -> list[mx.array]:
    """Return the least and the greatest of each column, as kernels take them."""
    return [mx.array(pair, dtype=mx.int32) for pair in zip(*box, strict=True)]


def _launch(
    coords: mx.array,
    rule: int,
    offsets: Offsets,
    stride: Sequence[int],
    bits: int,
    ranges: Sequence[mx.array],
    *,
    places: bool = False,
    is_distinct: bool = False,
) -> _Launched:
    """Launch the kernels that make rows from others, at least one, by a rule.

    Args:
        coords, rule, offsets, stride: as for ``made_rows``; for CELLS the strides are
            given as offsets.
        bits: of keys.
        ranges: of a box that holds the wanted rows; for CELLS, the given rows.
        places: whether those are wanted.
        is_distinct: whether all candidates are different rows of the box.
    """
    n, columns = coords.shape
    candidates, parts = n * len(offsets), len(offsets) if rule == CELLS else 1
    passes, each = digits_of(bits)
    key = key_dtype(bits)
    digits = constant(len(offsets), each, passes, 0)
    scratch = cleared(scratch_words(candidates, passes))
    listed = [((candidates,), key)]
    constants = rule_constant(tuple(map(tuple, offsets)), tuple(stride))
    boxes = [((2,), mx.int32)] * columns * (rule == CELLS)
    keys, *boxes = run(
        _pack_keys(columns, rule, KEYS[key]),
        [coords, constants, *ranges, digits, scratch],
        striding_blocks(candidates),
        [*listed, *boxes],
    )
    ranges = boxes or ranges
    keys, rows = sort_keys(keys, digits, scratch, rows=places, keep=True)
    capacity = min(passes * each, 8 * key.size, KEY_BITS)
    if is_distinct:
        return _Launched(keys, (), None, ranges, capacity)
    outputs = [*listed, *[((1,), mx.int64)] * parts]
    if places:
        outputs.append(((candidates,), mx.int32))
    listed, *rest = run(
        _unique_keys(columns, KEYS[key], places, parts),
        [keys, keys if rows is None else rows, *ranges, digits, scratch],
        -(-candidates // SORT_TILE),
        outputs,
    )
    ends, place = tuple(rest[:parts]), rest[parts] if places else None
    return _Launched(listed, ends, place, ranges, capacity)


def _ranges(columns: int) -> tuple[list[str], tuple[tuple[str, str], ...], str]:
    """Return inputs for each column's range, their arguments, and C++ of an array."""
    names = [f"range{c}" for c in range(columns)]
    passed = (names[0], "ranges"), *((name, "") for name in names[1:])
    return names, passed, f"const int* const ranges[] = {{{', '.join(names)}}};"


def _pack_keys(columns: int, rule: int, numeric: str):
    names, passed, ranges = _ranges(columns)
    boxes = tuple(f"box{c}" for c in range(columns) if rule == CELLS)
    return geometry_kernel(
        "pack_keys",
        _UNIQUE,
        "PackKeys",
        ("coords", "rule", *names, "digits", "scratch"),
        ("keys", *boxes),
        template=(("COLUMNS", columns), ("RULE", int(rule)), ("KEY", numeric)),
        arguments=(
            *passed,
            ("digits", ""),
            ("scratch", SCRATCH),
            ("keys", "reinterpret_cast<KEY*>(keys), boxes"),
            *dict.fromkeys(boxes, "").items(),
        ),
        before=f"{ranges}\n  int* const boxes[COLUMNS] = {{{', '.join(boxes)}}};",
    )


def _unique_keys(columns: int, numeric: str, places: bool, parts: int):
    names, passed, ranges = _ranges(columns)
    found = tuple(f"found{k}" for k in range(parts))
    pointers = (f"reinterpret_cast<long long*>({name})" for name in found)
    return geometry_kernel(
        "unique_keys",
        _UNIQUE,
        "UniqueKeys",
        ("keys", "rows", *names, "digits", "scratch"),
        ("unique", *found, *["places"] * places),
        SORT_THREADS,
        template=(
            ("COLUMNS", columns),
            ("KEY", numeric),
            ("ROWS", places),
            ("LEVELS", parts),
        ),
        arguments=(
            READ_KEYS,
            ("rows", "reinterpret_cast<const int*>(rows)"),
            *passed,
            ("digits", ""),
            ("scratch", SCRATCH),
            ("unique", "reinterpret_cast<KEY*>(unique)"),
            (found[0], "ends" if places else "ends, nullptr"),
            *((name, "") for name in found[1:]),
        ),
        before=f"{ranges}\n  long long* const ends[] = {{{', '.join(pointers)}}};",
    )


class Levels:
    """Cells of several strides that were launched; see ``StartedLevels``.

    Keys number a box of the cells, which kernels find: it need not be known before.
    """

    def __init__(self, made: _Launched, strides: tuple[tuple[int, ...], ...]):
        self._made, self._strides = made, strides

    @property
    def counts(self) -> tuple[mx.array, ...]:
        """(1,) int64 each: how many rows there are up to the end of each level."""
        return self._made.ends

    def rows(self, counts: list, boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level, None if keys were too narrow for them."""
        bits = _bits(boxes)
        if bits <= KEY_BITS:
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
        bits, ranges = _bits(boxes), _ranges_of(source.box)
    elif isinstance(source.lookup, RowTable):
        bits, ranges = _bits_before.get(strides, KEY_BITS + 1), source.lookup.ranges
    else:
        return None
    if bits > KEY_BITS:
        return None
    ones = (1,) * len(strides[0])
    return Levels(_launch(source.coords, CELLS, strides, ones, bits, ranges), strides)


def _bits(boxes: Sequence[Bounds]) -> int:
    """Return the bits of keys of cells in boxes, with the numbers of these."""
    return (cell_count(reduce(join, boxes)) * len(boxes)).bit_length()


class CudaGeometry:
    """The geometry of CUDA's kernels; see ``Geometry``."""

    counts_edges = True

    bounds = staticmethod(bounds)
    unique_rows = staticmethod(unique_rows)
    made_rows = staticmethod(made_rows)
    transpose_table = staticmethod(cuda_tables.transpose_table)
    edges = staticmethod(cuda_tables.edges)
    start = edge_count = staticmethod(cuda_tables.start)
    curve_order = staticmethod(cuda_sort.curve_order)
    start_kept = staticmethod(cuda_sort.start_kept)
    best_rows = staticmethod(cuda_sort.best_rows)
    start_levels = staticmethod(start_levels)

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) order of rows by the Gray-code rank of their mask."""
        return by_region(cuda_tables.gray_order(table), region)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords, box is not None)


# Size and stride of kernels, and whether they are transposed.
_COMMON = (5, 1, False), (3, 1, False), (2, 2, False), (2, 2, True)
_LEVELS = 4  # that are made at once


def rehearse(dims: int) -> None:
    """Compile the kernels of common relations in ``dims`` dimensions, side by side.

    For kernels of size 3 and 5, and of size and stride 2 both ways, with the views that
    matrix routes and gradients read.
    """
    # Sizes are nominal: rows are not computed.
    rows = BoxedRows(mx.zeros((64, 1 + dims), dtype=mx.int32), None)
    with rehearsal("all"):
        found = RowTable(rows.coords)
        cuda_tables.identity_tiles(rows.coords)
        for size, stride, transposed in _COMMON:
            spec = KernelSpec.of(dims, kernel_size=size, stride=stride)
            table = found.table(
                rows,
                spec.offsets,
                spec.stride,
                transposed=transposed,
                keep=lambda name, view: None,
                wanted=cuda_tables.TILES if size < 5 else None,
            )
            if size == 5:  # of a stem, of which a net has one: see cuda_tables.start
                cuda_tables.relation_tiles(cuda_tables.table_source(table))
        for extent in (1 << 4, 1 << 14):  # keys of one word and of two
            box = (0,) * (1 + dims), (extent,) * (1 + dims)
            facts = Rule.CELL, rows.coords, [(0,) * dims], spec.stride, box, False
            made_rows(*facts, count=1)  # given, so that nothing is read
            strides = [(2**k,) * dims for k in range(1, 1 + _LEVELS)]
            start_levels(BoxedRows(rows.coords, box), strides, [box] * _LEVELS)
        swapped = cuda_tables.transpose_table(table, len(rows.coords))
        cuda_tables.relation_tiles(cuda_tables.table_source(swapped))
        counts = cuda_tables.band_counts_of(swapped)
        cuda_tables.listed(swapped, counts, 2, swapped.shape[1], 1)

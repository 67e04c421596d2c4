"""Sorted unique rows on CUDA: of a set, of its cells, of what a convolution reaches.

Each new set is read once, for its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from itertools import pairwise

import mlx.core as mx

from ..geometry import output_rows, sync, unique
from ..geometry.keys import KEY_LIMIT, Bounds, Offsets, cell_count, join
from ..geometry.output_rows import Rule, is_empty
from ..geometry.unique import UniqueRows
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .cuda_lookups import bounds
from .cuda_sort import (
    KEYS,
    MOST_KEYS,
    SORT,
    SORT_THREADS,
    SORT_TILE,
    THREADS,
    blocks_for,
    cleared,
    constant,
    digits_of,
    rule_constant,
    scratch_words,
    sort_keys,
)

CELLS = len(Rule)  # the kernel's rule that makes cells of several strides
MOST_TOGETHER = 1 << 20  # rows whose levels are made at once
_UNIQUE = (*SORT, "unique_rows.cu")


def unique_rows(coords: mx.array) -> UniqueRows:
    """Return the sorted unique rows and the place of each row among them.

    Reads the bounds and one size.
    """
    dims, box = coords.shape[1] - 1, bounds(coords)
    made = _made_rows(coords, Rule.ITSELF, [(0,) * dims], (1,) * dims, box, places=True)
    return UniqueRows(*made) if made else unique.unique_rows(coords)


def made_rows(
    rule: Rule,
    coords: mx.array,
    offsets: Offsets,
    stride: Sequence[int],
    box: Bounds,
    is_cut: bool,
) -> mx.array:
    """Return the sorted unique int32 rows that a rule makes within a box.

    Reads one size. See ``Geometry``.
    """
    made = _made_rows(coords, rule, offsets, stride, box)
    return (
        made[0] if made else output_rows.made_rows(rule, coords, offsets, stride, box)
    )


def levels(
    coords: mx.array, strides: Sequence[Sequence[int]], boxes: Sequence[Bounds]
) -> list[mx.array] | None:
    """Return the sorted unique cells of each stride, all made of the rows at once.

    Reads all sizes together. None where that is not to be had: keys cannot number the
    boxes, or there are many rows, of which it takes longer.
    """
    n, columns = coords.shape
    if len(strides) < 2 or not 0 < n <= MOST_TOGETHER:
        return None
    box, ones = reduce(join, boxes), (1,) * (columns - 1)
    made = _made_rows(coords, CELLS, strides, ones, box, parts=len(strides))
    return made and made[0]


def _made_rows(coords, rule, offsets, stride, box, places=False, parts=1):
    """Return (rows, places or None), or None where keys cannot number the box.

    Of several parts, as many candidates each, rows are a list.
    """
    n, columns = coords.shape
    candidates, cells = n * len(offsets), cell_count(box) * parts
    if candidates == 0 or is_empty(box):
        none = mx.zeros((0,), dtype=mx.int32)
        return mx.zeros((0, columns), dtype=mx.int32), none
    if cells >= KEY_LIMIT or candidates > MOST_KEYS:
        return None
    bits = cells.bit_length()
    passes, each = digits_of(bits)
    key = mx.uint32 if bits <= 32 else mx.uint64
    digits = constant(len(offsets), each, passes, 0)
    ranges = [mx.array(pair, dtype=mx.int32) for pair in zip(*box, strict=True)]
    scratch = cleared(scratch_words(candidates, passes))
    numbers = [((candidates,), key)]
    numeric = KEYS[key]
    constants = rule_constant(tuple(map(tuple, offsets)), tuple(stride))
    keys = run(
        _pack_keys(columns, rule, numeric),
        [coords, constants, *ranges, digits, scratch],
        blocks_for(candidates),
        THREADS,
        numbers,
    )[0]
    keys, rows = sort_keys(keys, digits, scratch, rows=places, keep=True)
    tiles = -(-candidates // SORT_TILE)
    outputs = [*numbers, *[((1,), mx.int64)] * parts]
    if places:
        outputs.append(((candidates,), mx.int32))
    listed, *rest = run(
        _unique_keys(columns, numeric, places, parts),
        [keys, keys if rows is None else rows, *ranges, digits, scratch],
        tiles,
        SORT_THREADS,
        outputs,
    )
    found, place = rest[:parts], rest[parts:]
    ends = [values[0] for values in sync.read(*found)]
    count = ends[-1]
    made = run(
        _unpack_keys(columns, numeric),
        [listed, found[-1], *ranges],
        blocks_for(count),
        THREADS,
        [((max(1, count), columns), mx.int32)],
    )[0]
    made = made if count else made[:0]
    if parts > 1:
        made = [made[a:b] for a, b in pairwise([0, *ends])]
    return made, place[0] if places else None


def _ranges(columns: int) -> tuple[list[str], tuple[tuple[str, str], ...], str]:
    """Return inputs for each column's range, how they are passed, and as what array."""
    names = [f"range{c}" for c in range(columns)]
    passed = (names[0], "ranges"), *((name, "") for name in names[1:])
    return names, passed, f"const int* const ranges[] = {{{', '.join(names)}}};"


@cache
def _pack_keys(columns: int, rule: int, numeric: str):
    names, passed, ranges = _ranges(columns)
    return geometry_kernel(
        "pack_keys",
        _UNIQUE,
        "PackKeys",
        ("coords", "rule", *names, "digits", "scratch"),
        ("keys",),
        template=(("COLUMNS", columns), ("RULE", int(rule)), ("KEY", numeric)),
        arguments=(
            *passed,
            ("digits", ""),
            ("scratch", SCRATCH),
            ("keys", "reinterpret_cast<KEY*>(keys)"),
        ),
        before=ranges,
        threads=THREADS,
    )


@cache
def _unique_keys(columns: int, numeric: str, places: bool, parts: int):
    names, passed, ranges = _ranges(columns)
    found = [f"found{k}" for k in range(parts)]
    pointers = (f"reinterpret_cast<long long*>({name})" for name in found)
    return geometry_kernel(
        "unique_keys",
        _UNIQUE,
        "UniqueKeys",
        ("keys", "rows", *names, "digits", "scratch"),
        ("unique", *found, *["places"] * places),
        template=(
            ("COLUMNS", columns),
            ("KEY", numeric),
            ("ROWS", places),
            ("LEVELS", parts),
        ),
        arguments=(
            ("keys", "reinterpret_cast<const KEY*>(keys)"),
            ("rows", "reinterpret_cast<const int*>(rows)"),
            *passed,
            ("digits", ""),
            ("scratch", SCRATCH),
            ("unique", "reinterpret_cast<KEY*>(unique)"),
            (found[0], "ends" if places else "ends, nullptr"),
            *((name, "") for name in found[1:]),
        ),
        before=f"{ranges}\n  long long* const ends[] = {{{', '.join(pointers)}}};",
        threads=SORT_THREADS,
    )


@cache
def _unpack_keys(columns: int, numeric: str):
    names, passed, ranges = _ranges(columns)
    return geometry_kernel(
        "unpack_keys",
        _UNIQUE,
        "UnpackKeys",
        ("unique", "found", *names),
        ("rows",),
        template=(("COLUMNS", columns), ("KEY", numeric)),
        arguments=(
            ("unique", "reinterpret_cast<const KEY*>(unique)"),
            ("found", "reinterpret_cast<const long long*>(found)"),
            *passed,
        ),
        before=ranges,
        threads=THREADS,
    )

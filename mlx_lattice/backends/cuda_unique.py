"""Sorted unique rows on CUDA: of a set, of its cells, of what a convolution reaches.

Each new set is read once, for its size.
"""

from __future__ import annotations

from functools import cache
from math import prod

import mlx.core as mx

from ..geometry import output_rows as rules
from ..geometry import portable, sync
from ..geometry.output_rows import CELL, EXPAND, ITSELF, REACH
from ..geometry.portable import Bounds, UniqueRows
from .cuda_kernels import kernel, run
from .cuda_sort import (
    KEYS,
    MOST_KEYS,
    SCRATCH,
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

_UNIQUE = (*SORT, "unique_rows.cu")


def unique_rows(coords: mx.array, *, bounds: Bounds | None = None) -> UniqueRows:
    """Return the sorted unique rows and the place of each row among them.

    Reads one size, and the bounds where they are not given.
    """
    box = bounds or portable.bounds_of(coords)
    dims = coords.shape[1] - 1
    made = _made_rows(coords, ITSELF, [(0,) * dims], (1,) * dims, box, places=True)
    return UniqueRows(*made) if made else portable.unique_rows(coords)


def cell_rows(coords, stride, *, bounds=None) -> mx.array:
    """Return the sorted unique ``floor(row / stride)``. Reads one size."""
    return _ruled(coords, CELL, [(0,) * len(stride)], stride, None, bounds)


def reached_rows(coords, offsets, stride, *, spatial_shape=None, bounds=None):
    """Return the sorted unique rows that some input reaches; all fit into int32.

    Reads one size. ``spatial_shape`` keeps only the rows in ``[0, spatial_shape)``.
    """
    return _ruled(coords, REACH, offsets, stride, spatial_shape, bounds)


def expanded_rows(coords, offsets, stride, *, spatial_shape=None, bounds=None):
    """Return the sorted unique ``in * stride + offset_k``; all fit into int32.

    Takes what ``reached_rows`` does.
    """
    return _ruled(coords, EXPAND, offsets, stride, spatial_shape, bounds)


def _ruled(coords, rule, offsets, stride, shape, bounds) -> mx.array:
    bounds = bounds or portable.bounds_of(coords)
    box = rules.cut(rules.box_of(rule, bounds, offsets, stride), shape)
    made = _made_rows(coords, rule, offsets, stride, box)
    return made[0] if made else rules.made_rows(coords, rule, offsets, stride, box)


def _made_rows(coords, rule, offsets, stride, box, places=False):
    """Return (rows, places or None), or None where keys cannot number the box."""
    n, columns = coords.shape
    extents = [high - low + 1 for low, high in zip(*box, strict=True)]
    candidates, cells = n * len(offsets), prod(extents)
    if candidates == 0 or min(extents) <= 0:
        none = mx.zeros((0,), dtype=mx.int32)
        return mx.zeros((0, columns), dtype=mx.int32), none
    if cells >= portable.KEY_LIMIT or candidates > MOST_KEYS:
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
    keys, rows = sort_keys(keys, digits, scratch, passes, rows=places, keep=True)
    tiles = -(-candidates // SORT_TILE)
    outputs = [*numbers, ((1,), mx.int64)]
    if places:
        outputs.append(((candidates,), mx.int32))
    unique, found, *place = run(
        _unique_keys(columns, numeric, places),
        [keys, keys if rows is None else rows, *ranges, digits, scratch],
        tiles,
        SORT_THREADS,
        outputs,
    )
    count = sync.read(found)[0][0]
    made = run(
        _unpack_keys(columns, numeric),
        [unique, found, *ranges],
        blocks_for(count),
        THREADS,
        [((count, columns), mx.int32)],
    )[0]
    return made, place[0] if places else None


def _ranges(columns: int) -> tuple[list[str], str]:
    names = [f"range{c}" for c in range(columns)]
    return names, f"const int* const ranges[] = {{{', '.join(names)}}};\n"


@cache
def _pack_keys(columns: int, rule: str, numeric: str):
    names, ranges = _ranges(columns)
    return kernel(
        f"pack_keys_{columns}_{rule}_{len(numeric)}",
        _UNIQUE,
        ("coords", "rule", *names, "digits", "scratch"),
        ("keys",),
        f"using Key = {numeric};\n{ranges}"
        f"lattice::pack_keys<{columns}, lattice::{rule}>(coords, rule, ranges, digits, "
        f"reinterpret_cast<Key*>(keys), {SCRATCH}, coords_shape[0]);",
        threads=THREADS,
    )


@cache
def _unique_keys(columns: int, numeric: str, places: bool):
    names, ranges = _ranges(columns)
    return kernel(
        f"unique_keys_{columns}_{len(numeric)}_{places}",
        _UNIQUE,
        ("keys", "rows", *names, "digits", "scratch"),
        ("unique", "found", "places") if places else ("unique", "found"),
        f"using Key = {numeric};\n{ranges}"
        f"lattice::unique_keys<{columns}, Key, {str(places).lower()}>("
        "reinterpret_cast<const Key*>(keys), reinterpret_cast<const int*>(rows), "
        "ranges, digits, reinterpret_cast<Key*>(unique), "
        "reinterpret_cast<long long*>(found), "
        f"{'places' if places else 'nullptr'}, {SCRATCH}, keys_shape[0]);",
        threads=SORT_THREADS,
    )


@cache
def _unpack_keys(columns: int, numeric: str):
    names, ranges = _ranges(columns)
    return kernel(
        f"unpack_keys_{columns}_{len(numeric)}",
        _UNIQUE,
        ("unique", "found", *names),
        ("rows",),
        f"using Key = {numeric};\n{ranges}"
        f"lattice::unpack_keys<{columns}>(reinterpret_cast<const Key*>(unique), "
        "reinterpret_cast<const long long*>(found), ranges, rows);",
        threads=THREADS,
    )

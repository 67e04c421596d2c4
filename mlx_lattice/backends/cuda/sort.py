"""A radix sort on CUDA: orders of rows, and the rows of new sets, sorted and unique.

Sizes that change from set to set come as an array on the device, ``digits``: kernels
are not compiled for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from itertools import count, pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from ... import sync
from ...devices import CUDA, current
from ...geometry import lattice
from ...geometry.lattice import (
    KEY_LIMIT,
    Bounds,
    Curve,
    Offsets,
    Rule,
    cell_count,
    join,
)
from ..gpu.kernel import GpuKernel, Interface, Output

_DIGITS = (
    ("volume", "digits[0]"),
    ("digit_bits", "digits[1]"),
    ("passes", "digits[2]"),
)
_TABLE = ("rows", "neighbours_shape[0]"), ("volume", "neighbours_shape[1]")
# The fields of each struct of sizes, and how a kernel reads them.
SIZES: dict[str, tuple[tuple[str, str], ...]] = {
    "HashRows": (("rows", "coords_shape[0]"),),
    "Table": (
        ("rows", "n"),
        ("volume", "facts[0]"),
        ("digit_bits", "facts[1]"),
        ("passes", "facts[2]"),
        ("chunk_rows", "chunk_rows_of(n, facts[0], gridDim.x)"),
    ),
    "RadixSort": (("keys", "keys_shape[0]"), *_DIGITS[1:]),
    "PackKeys": (("rows", "coords_shape[0]"), *_DIGITS),
    "CurveKeys": (("rows", "coords_shape[0]"), *_DIGITS[1:]),
    "UniqueKeys": (("keys", "keys_shape[0]"), ("passes", "digits[2]")),
    "UnpackKeys": (("keys", "keys_shape[0]"),),
    "TransposeTable": _TABLE,
    "ScanCounts": (("bands", "counts_shape[1]"),),
    "WriteEdges": (*_TABLE, ("bands", "starts_shape[1]"), ("listed", "sums_shape[0]")),
}
THREADS, STRIDING_BLOCKS = 256, 8  # of a block, and on a multiprocessor
BINS = 512  # of a digit of the sort, at most
HEADER = 32  # words of a sort's scratch before the histograms
SORT_THREADS, SORT_BLOCKS = 512, 2  # of a block, and on a multiprocessor
SORT_TILE = 8 * SORT_THREADS  # keys of one block of the sort
MOST_KEYS = 1 << 30  # of a sort; the kernel's sums are below SUM_OF_TILE
KEYS = {mx.uint32: "unsigned", mx.uint64: "unsigned long long"}
KEY_BITS = KEY_LIMIT.bit_length() - 1  # of a key, at most
CELLS = len(Rule)  # the kernel's rule that makes cells of several strides

SORT = ("rows.cuh", "radix_sort.cu")
_UNIQUE = (*SORT, "unique_rows.cu")


# Launches


@cache
def geometry_kernel(
    symbol: str,
    files: tuple[str, ...],
    struct: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    threads: int = THREADS,
    arguments: tuple[tuple[str, str], ...] = (),
    **more: object,
) -> GpuKernel:
    """Return a kernel of geometry, one object for equal arguments."""
    face = Interface(struct, inputs, outputs, SIZES[struct])
    passed = {name: f"reinterpret_cast<const KEY*>({name})" for name in inputs}
    passed |= {name: f"reinterpret_cast<KEY*>({name})" for name in outputs}
    passed = {name: cast for name, cast in passed.items() if name.endswith("keys")}
    # Words that blocks share, in an array that MLX takes for an input.
    scratch = "reinterpret_cast<unsigned*>(const_cast<uint32_t*>(scratch))"
    passed |= {"digits": "", "scratch": scratch, **dict(arguments)}
    return GpuKernel(
        CUDA,
        symbol,
        files,
        face,
        also=structs(but=struct),
        threads=threads,
        arguments=tuple(passed.items()),
        geometry=True,
        **more,
    )


def structs(but: str = "") -> tuple[Interface, ...]:
    """Return an interface for every struct of sizes: files name several."""
    return tuple(
        Interface(name, (), (), sizes) for name, sizes in SIZES.items() if name != but
    )


def run(
    kernel: GpuKernel,
    inputs: Sequence[mx.array],
    blocks: int,
    outputs: Sequence[Output],
    fill: int | None = None,
) -> list[mx.array]:
    """Launch so many blocks."""
    threads = kernel.threads
    grid = (blocks * threads,), (threads,)
    return list(kernel(inputs, outputs, *grid, fill=fill))


@lru_cache(maxsize=1024)
def constant(*values: int) -> mx.array:
    """Return cached integers on the device, where a kernel reads them fast."""
    array = mx.array(values, dtype=mx.int32) + 0
    sync.compute([array])
    return array


def cleared(words: int) -> mx.array:
    """Return words of 0; the value is read on the device.

    ``mx.compile`` makes one array of arrays that are made alike, which launches would
    then share. In a graph that may be traced, each has a zero of its own.
    """
    place = next(_places) % len(_zeros()) if sync.is_transforming() else 0
    return mx.full((words,), _zeros()[place])


_places = count()


@cache
def _zeros() -> list[mx.array]:
    """Return more arrays of one 0 than a graph has launches that need scratch."""
    zeros = mx.split(mx.zeros((1024,), dtype=mx.uint32), 1024)
    sync.compute(zeros)
    return zeros


@cache
def multiprocessors() -> int:
    """Return how many multiprocessors the device has."""
    return current().cores


def striding_blocks(elements: int) -> int:
    """Return how many blocks of THREADS stride over some elements."""
    most = multiprocessors() * STRIDING_BLOCKS
    return max(1, min(most, -(-elements // THREADS)))


# A radix sort, and orders by it


def digits_of(bits: int) -> tuple[int, int]:
    """Return into how many digits the radix sort cuts a key, and their bits."""
    passes = -(-bits // 9)
    return passes, -(-bits // passes)


def scratch_words(n: int, passes: int) -> int:
    """Return the words that the passes of a sort of n keys share; even."""
    tiles = -(-n // SORT_TILE)
    return HEADER + passes * (1 + tiles) * BINS + tiles + tiles % 2


def key_dtype(bits: int) -> mx.Dtype:
    """Return the dtype of keys of so many bits."""
    return mx.uint32 if bits <= 32 else mx.uint64


def sort_keys(
    keys: mx.array, digits: mx.array, scratch: mx.array, *, rows: bool, keep: bool
) -> tuple[mx.array, mx.array | None]:
    """Sort (N,) keys whose histograms stand in scratch, in one launch; stable."""
    n = keys.shape[0]
    outputs = "sorted_keys", "work_keys", "sorted_rows", "work_rows"
    no_rows = "reinterpret_cast<KEY*>(work_keys), nullptr, nullptr"
    kernel = geometry_kernel(
        "radix_sort",
        SORT,
        "RadixSort",
        ("keys", "digits", "scratch"),
        outputs if rows else outputs[:2],
        SORT_THREADS,
        () if rows else (("work_keys", no_rows),),
        template=(("KEY", KEYS[keys.dtype]), ("ROWS", rows), ("KEEP", keep)),
        blocks_per_multiprocessor=SORT_BLOCKS,
    )
    blocks = min(multiprocessors() * SORT_BLOCKS, -(-n // SORT_TILE))
    made = [((n,), keys.dtype)] * 2 + [((n,), mx.int32)] * 2 * rows
    sorted_keys, _, *places = run(kernel, [keys, digits, scratch], blocks, made)
    return sorted_keys, places[0] if rows else None


def curve_order(coords: mx.array, curve: Curve) -> mx.array:
    """Return the (N,) int32 order of rows by batch, then along a curve."""
    n, columns = coords.shape
    if not curve.is_numbered:
        return lattice.curve_order(coords, curve)
    (passes, each), key = digits_of(curve.of_key), key_dtype(curve.of_key)
    kernel = geometry_kernel(
        "curve_keys",
        (*SORT, "curve_keys.cu"),
        "CurveKeys",
        ("coords", "frame", "digits", "scratch"),
        ("keys",),
        template=(
            ("COLUMNS", columns),
            ("HILBERT", curve.is_hilbert),
            ("SWAPPED", curve.is_swapped),
            ("KEY", KEYS[key]),
        ),
    )
    frame = constant(*curve.low, curve.bits)
    digits, scratch = constant(0, each, passes, 0), cleared(scratch_words(n, passes))
    inputs, outputs = [coords, frame, digits, scratch], [((n,), key)]
    (keys,) = run(kernel, inputs, striding_blocks(n), outputs)
    return sort_keys(keys, digits, scratch, rows=True, keep=False)[1]


# Rows of new sets: keys of candidate rows, sorted, without repeats


class NewRows(NamedTuple):
    """Sorted unique rows that were launched, uncounted; see ``StartedLevels``."""

    keys: mx.array  # those of the rows first, as many as there were candidates
    counts: tuple[mx.array, ...]  # rows up to the end of each level; () if all are rows
    places: mx.array | None  # (candidates,) int32: of each among the rows
    ranges: Sequence[mx.array]  # of each column, that keys are counted in
    capacity: int  # bits of keys that were sorted

    def rows(self, counts: list[Any], boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level, None if keys were too narrow for them."""
        if key_bits(boxes) > self.capacity:
            return None
        made = self.all_rows(counts)
        return [made[a:b] for (a,), (b,) in pairwise([[0], *counts])]

    def all_rows(self, counts: list[Any]) -> mx.array:
        """Return all rows, from the values of ``counts``."""
        (count,), columns = counts[-1], len(self.ranges)
        names, passed, ranges = _ranges(columns)
        kernel = geometry_kernel(
            "unpack_keys",
            _UNIQUE,
            "UnpackKeys",
            ("keys", "found", *names),
            ("rows",),
            arguments=(
                ("found", "reinterpret_cast<const long long*>(found)"),
                *passed,
            ),
            template=(("COLUMNS", columns), ("KEY", KEYS[self.keys.dtype])),
            before=ranges,
        )
        inputs = [self.keys, self.counts[-1] if self.counts else None, *self.ranges]
        outputs = [((max(1, count), columns), mx.int32)]
        made = run(kernel, inputs, striding_blocks(count), outputs)[0]
        return made if count else made[:0]


def _ranges(columns: int) -> tuple[list[str], tuple[tuple[str, str], ...], str]:
    """Return inputs for each column's range, their arguments, and C++ of an array."""
    names = [f"range{c}" for c in range(columns)]
    passed = (names[0], "ranges"), *((name, "") for name in names[1:])
    return names, passed, f"const int* const ranges[] = {{{', '.join(names)}}};"


def ranges_of(box: Bounds) -> list[mx.array]:
    """Return the least and the greatest of each column, as kernels take them."""
    return [mx.array(pair, dtype=mx.int32) for pair in zip(*box, strict=True)]


def start_rows(
    coords: mx.array,
    rule: int,
    offsets: Offsets,
    stride: Sequence[int],
    bits: int,
    ranges: Sequence[mx.array],
    *,
    places: bool = False,
    is_distinct: bool = False,
) -> NewRows:
    """Launch the kernels that make rows from others, at least one, by a rule."""
    n, columns = coords.shape
    candidates, levels = n * len(offsets), len(offsets) if rule == CELLS else 1
    if candidates > MOST_KEYS:
        raise ValueError(
            f"a rule makes {candidates:,} candidates of {n:,} rows, and no more than "
            f"{MOST_KEYS:,} are sorted; use fewer rows or a smaller kernel"
        )
    (passes, each), key = digits_of(bits), key_dtype(bits)
    digits = constant(len(offsets), each, passes, 0)
    scratch = cleared(scratch_words(candidates, passes))
    listed = [((candidates,), key)]
    numbers = constant(*(v for offset in offsets for v in offset), *stride, 0, 0)
    boxes = [((2,), mx.int32)] * columns * (rule == CELLS)
    keys, *boxes = run(
        _pack_keys(columns, rule, KEYS[key]),
        [coords, numbers, *ranges, digits, scratch],
        striding_blocks(candidates),
        [*listed, *boxes],
    )
    ranges = boxes or ranges
    keys, rows = sort_keys(keys, digits, scratch, rows=places, keep=True)
    capacity = min(passes * each, 8 * key.size, KEY_BITS)
    if is_distinct:
        return NewRows(keys, (), None, ranges, capacity)
    outputs = [*listed, *[((1,), mx.int64)] * levels]
    if places:
        outputs.append(((candidates,), mx.int32))
    keys, *rest = run(
        _unique_keys(columns, KEYS[key], places, levels),
        [keys, keys if rows is None else rows, *ranges, digits, scratch],
        -(-candidates // SORT_TILE),
        outputs,
    )
    place = rest[levels] if places else None
    return NewRows(keys, tuple(rest[:levels]), place, ranges, capacity)


def _pack_keys(columns: int, rule: int, numeric: str) -> GpuKernel:
    names, passed, ranges = _ranges(columns)
    boxes = tuple(f"box{c}" for c in range(columns) if rule == CELLS)
    return geometry_kernel(
        "pack_keys",
        _UNIQUE,
        "PackKeys",
        ("coords", "rule", *names, "digits", "scratch"),
        ("keys", *boxes),
        arguments=(
            *passed,
            ("keys", "reinterpret_cast<KEY*>(keys), boxes"),
            *((name, "") for name in boxes),
        ),
        template=(("COLUMNS", columns), ("RULE", int(rule)), ("KEY", numeric)),
        before=f"{ranges}\n  int* const boxes[COLUMNS] = {{{', '.join(boxes)}}};",
    )


def _unique_keys(columns: int, numeric: str, places: bool, levels: int) -> GpuKernel:
    names, passed, ranges = _ranges(columns)
    found = tuple(f"found{k}" for k in range(levels))
    pointers = (f"reinterpret_cast<long long*>({name})" for name in found)
    return geometry_kernel(
        "unique_keys",
        _UNIQUE,
        "UniqueKeys",
        ("keys", "rows", *names, "digits", "scratch"),
        ("distinct_keys", *found, *["places"] * places),
        SORT_THREADS,
        arguments=(
            ("rows", "reinterpret_cast<const int*>(rows)"),
            *passed,
            (found[0], "ends" if places else "ends, nullptr"),
            *((name, "") for name in found[1:]),
        ),
        template=(
            ("COLUMNS", columns),
            ("KEY", numeric),
            ("ROWS", places),
            ("LEVELS", levels),
        ),
        before=f"{ranges}\n  long long* const ends[] = {{{', '.join(pointers)}}};",
    )


def key_bits(boxes: Sequence[Bounds]) -> int:
    """Return the bits of keys of cells in boxes, with the numbers of these."""
    return (cell_count(reduce(join, boxes)) * len(boxes)).bit_length()

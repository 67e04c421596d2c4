"""Coordinate sets on CUDA: hash look-ups, neighbour tables, their counts and tiles.

Everything is launched without waiting for the device; what Python must know it reads
once, through ``sync.read``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..geometry import sync
from ..geometry.keys import Bounds, Offsets, bounds_of
from ..geometry.protocol import Keep, Rows
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .cuda_rules import lookup_rule, rule_kind
from .cuda_sort import (
    HEADER,
    MOST_KEYS,
    SORT_THREADS,
    THREADS,
    cleared,
    constant,
    digits_of,
    multiprocessors,
    scratch_words,
)

TILES = "cuda_sorted"  # the name of a relation's view
BAND = 64  # rows of one count of edges
HASH_BLOCKS = 1056  # at most: each writes bounds
TABLE_WORDS = 8  # after the slots of a hash, before the bounds: BOUNDS of rows.cuh
CHUNK_ROWS = 256  # of a block's work chunk, where there are up to 32 offsets
COUNTING_BLOCKS, TILING_BLOCKS = 4, 2  # of the two kernels, on a multiprocessor
FIRST_OFFSETS = 27  # of the first relation, whose scratch is cleared with the hash
RANKED_OFFSETS = 64  # offsets of a mask that has a rank of one word
ROW_ALIGNMENT = 384  # every tile height divides it: 64, 128, 192
TILE_SCRATCH = 4 * (SORT_THREADS // 32) * 32 * 33  # bytes of shared memory

_TABLE = ("rows.cuh", "neighbour_table.cu")
_TILES = (*_TABLE, "radix_sort.cu", "sort_table.cu", "relation_tiles.cu")


class BandCounts(NamedTuple):
    """Edges counted while a table is made.

    Attributes:
        bands: (K, bands) int32: edges of each offset in each band of 64 rows.
        edges: (1,) int64: all edges.
    """

    bands: mx.array
    edges: mx.array


class Sorted(NamedTuple):
    """A relation's rows by the Gray-code rank of their masks, laid out for tiles.

    Attributes:
        table: (K, pitch) int32.
        rows: (N_out,) int32.
        masks: (pitch / 32, words) uint32: the offsets that any of 32 rows uses.
        mirrored: whether offset k stands for K - 1 - k.
    """

    table: mx.array
    rows: mx.array
    masks: mx.array
    mirrored: bool = False


class Code(NamedTuple):
    """How a kernel comes by the entries of a table.

    Attributes:
        type: C++ type of the source of them.
        inputs: names of its inputs.
        values: C++ that the source is made of, in brackets.
        rows: C++ of the number of rows.
        is_new: whether the kernel makes the table; else it is the first input.
    """

    type: str
    inputs: tuple[str, ...]
    values: str
    rows: str
    is_new: bool


class Source(NamedTuple):
    """Where the entries of an (n, K) table come from: code and its inputs."""

    code: Code
    inputs: tuple[mx.array, ...]
    n: int
    volume: int


def is_ranked(n: int, volume: int) -> bool:
    """Whether masks have a rank of one word, which the radix sort takes."""
    return volume <= RANKED_OFFSETS and n < MOST_KEYS


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    def __init__(self, coords: mx.array):
        self.coords, (n, columns) = coords, coords.shape
        if n == 0:
            return
        capacity = max(16, 1 << (2 * n - 1).bit_length())
        blocks = min(HASH_BLOCKS, -(-n // THREADS))
        words = 2 * capacity + TABLE_WORDS + 2 * columns * blocks
        # Written by the kernel, and so by no other: nobody else holds it. The value is
        # on the device already; a number would be fetched from the CPU's memory.
        self.slots = mx.full((words,), constant(-1))
        # Cleared beside, for the set's first relation.
        scratch = scratch_words(n, *digits_of(FIRST_OFFSETS)[:1])
        pair = (2,), mx.int32
        *self.found, self.order, self.scratch = run(
            _hash_rows(columns),
            [coords, self.slots, constant(scratch, 0, 0, 0)],
            blocks,
            THREADS,
            [
                *[pair] * (1 + columns),
                ((capacity + n,), mx.int32),
                ((scratch,), mx.uint32),
            ],
        )

    def _take_scratch(self, words: int) -> mx.array:
        scratch, self.scratch = self.scratch, None
        if scratch is None or scratch.size < words:
            return cleared(words)
        return scratch

    def facts(self) -> list[mx.array]:
        """Return small arrays: (first repeat or -1, 0), then each column's range."""
        return self.found if self.coords.shape[0] else []

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        # Computed by now, and good for once: a traced graph would use it at every call.
        self.scratch = None
        (later, _), *ranges = facts
        low, high = zip(*ranges, strict=True)
        if later < 0:
            return (low, high), None
        first = self.find(self.coords[later : later + 1])
        return (low, high), (sync.read(first)[0][0], later)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self._table(rows, [(0,) * dims], (1,) * dims)[:, 0]

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
        """Return the (N_out, K) int32 neighbour table, -1 where there is no edge.

        Args:
            out: the output rows.
            offsets: K offsets of D integers.
            stride: D integers.
            transposed: whether ``out = in * stride + offset_k``, not
                ``in = out * stride + offset_k``.
            mirrored: not used: a search of half of the offsets scatters the other half.
            keep: called with a name and what is made with the table: its
                ``BandCounts``, and its tiles if wanted.
            wanted: ``TILES`` where these are wanted too.
        """
        return self._table(out.coords, offsets, stride, transposed, keep, wanted)

    def _table(
        self, out_coords, offsets, stride, transposed=False, keep=None, wanted=None
    ) -> mx.array:
        (n_in, columns), n_out = self.coords.shape, out_coords.shape[0]
        volume = len(offsets)
        if n_in * n_out * volume == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        offsets = tuple(map(tuple, offsets))
        kind, offsets = rule_kind(offsets, tuple(stride), transposed)
        rule = lookup_rule(offsets, tuple(stride), kind)
        inputs = self.coords, self.slots, self.order, out_coords, rule
        source = Source(_find(columns, kind), inputs, n_out, volume)
        if keep and wanted == TILES and is_ranked(n_out, volume):
            table, counts, tiles = relation_tiles(source, self._take_scratch)
            keep(TILES, tiles)
        else:
            table, counts = counted_table(source, self._take_scratch)
        if keep:
            keep("band_counts", counts)
        return table


def bounds(coords: mx.array) -> Bounds:
    """Return the least and the greatest value of every column of (N, 1 + D) int32."""
    if coords.shape[0] == 0:
        return bounds_of(coords)
    rows = RowTable(coords)
    return rows.settle(sync.read(*rows.facts()))[0]


def table_source(table: mx.array) -> Source:
    """Return the source that reads a table that is there; it has rows and offsets."""
    return Source(_READ, (table,), *table.shape)


def counted_table(source: Source, clear=cleared) -> tuple[mx.array, BandCounts]:
    """Return the table of a source, and what was counted."""
    n, volume = source.n, source.volume
    blocks = multiprocessors() * COUNTING_BLOCKS
    rows = _chunk_rows(n, volume, blocks)
    *made, counts, edges = run(
        _band_counts_kernel(source.code, _key(volume)),
        [*source.inputs, constant(volume, 0, 0, rows), clear(HEADER)],
        min(blocks, -(-n // rows)),
        THREADS,
        _outputs(source),
    )
    return made[0] if made else source.inputs[0], BandCounts(counts, edges)


def relation_tiles(
    source: Source, clear=cleared
) -> tuple[mx.array, BandCounts, Sorted]:
    """Return the table of a source, what was counted, and its tiles: one launch."""
    n, volume = source.n, source.volume
    passes, bits = digits_of(volume)
    blocks = multiprocessors() * TILING_BLOCKS
    rows = _chunk_rows(n, volume, blocks)
    pitch = pitch_of(n)
    work = ((3 * n,), mx.uint32) if volume <= 32 else ((3 * n,), mx.uint64)
    *made, counts, edges, order, table, masks, _ = run(
        _relation_tiles(source.code, _key(volume)),
        [
            *source.inputs,
            constant(volume, bits, passes, rows),
            clear(scratch_words(n, passes)),
        ],
        min(blocks, -(-n // rows)),
        SORT_THREADS,
        [
            *_outputs(source),
            ((n,), mx.int32),
            ((volume, pitch), mx.int32),
            ((pitch // 32, -(-volume // 32)), mx.uint32),
            work,
        ],
    )
    tiles = Sorted(table, order, masks)
    return made[0] if made else source.inputs[0], BandCounts(counts, edges), tiles


def pitch_of(n: int) -> int:
    """Return the rows that tiles of n rows are padded to."""
    return -(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _outputs(source: Source) -> list:
    """Return shapes and dtypes of the table, if it is new, of counts and of edges."""
    n, volume = source.n, source.volume
    counted = ((volume, -(-n // BAND)), mx.int32), ((1,), mx.int64)
    return [*[((n, volume), mx.int32)] * source.code.is_new, *counted]


def _chunk_rows(n: int, volume: int, blocks: int) -> int:
    """Return the rows of a work chunk: fewer where some blocks would have none."""
    rows = CHUNK_ROWS if volume <= 32 else CHUNK_ROWS // 2
    while rows > BAND and n < 2 * rows * blocks:
        rows //= 2
    return rows


def _key(volume: int) -> str:
    return "unsigned" if volume <= 32 else "unsigned long long"


_READ = Code(
    "Read",
    ("neighbours",),
    "{neighbours, neighbours_shape[1]}",
    "neighbours_shape[0]",
    False,
)


@cache
def _find(columns: int, kind: str) -> Code:
    return Code(
        f"Find<{columns}, {kind}>",
        ("coords", "slots", "order", "out_rows", "rule"),
        "(coords, slots, order, out_rows, rule, coords_shape[0])",
        "out_rows_shape[0]",
        True,
    )


@cache
def _band_counts_kernel(code: Code, key: str):
    tables = "neighbours" if code.is_new else "nullptr"
    return _table_kernel(
        "band_counts",
        _TABLE,
        code,
        key,
        ("counts", "edges"),
        tables,
        threads=THREADS,
        blocks_per_multiprocessor=COUNTING_BLOCKS,
    )


@cache
def _relation_tiles(code: Code, key: str):
    tables = "neighbours, neighbours" if code.is_new else "neighbours, nullptr"
    return _table_kernel(
        "relation_tiles",
        _TILES,
        code,
        key,
        ("counts", "edges", "rows", "sorted", "masks", "work"),
        tables,
        threads=SORT_THREADS,
        blocks_per_multiprocessor=TILING_BLOCKS,
        shared_bytes=TILE_SCRATCH,
    )


def _table_kernel(symbol, files, code, key, outputs, tables: str, **more):
    """Return a kernel over a source's rows.

    Args:
        symbol: the function.
        files: its sources.
        code: where entries come from.
        key: C++ type of a mask.
        outputs: the kernel's own, after a new table.
        tables: C++ of the tables that the function takes before them.
        more: how it is launched.
    """
    first, *others = code.inputs
    new = ("neighbours",) * code.is_new
    arguments = {
        **dict.fromkeys(others, ""),
        "digits": "",
        "scratch": SCRATCH,
        "counts": f"{tables}, counts",
        "edges": "reinterpret_cast<long long*>(edges)",
        "work": "reinterpret_cast<KEY*>(work)",
        **dict.fromkeys(new, ""),
        first: "source",
    }
    return geometry_kernel(
        symbol,
        files,
        "Table",
        (*code.inputs, "digits", "scratch"),
        (*new, *outputs),
        template=(("KEY", key), ("SOURCE", code.type)),
        sizes=(("rows", code.rows),),
        arguments=tuple(arguments.items()),
        before=f"const SOURCE source{code.values};",
        **more,
    )


@cache
def _hash_rows(columns: int):
    names = [f"range{c}" for c in range(columns)]
    return geometry_kernel(
        "hash_rows",
        ("rows.cuh", "hash_rows.cu"),
        "HashRows",
        ("coords", "slots", "words"),
        ("repeat", *names, "order", "scratch"),
        template=(("COLUMNS", columns),),
        arguments=(
            ("slots", "const_cast<int*>(slots)"),
            ("words", ""),
            (names[0], "ranges"),
            *((name, "") for name in names[1:]),
            ("scratch", "reinterpret_cast<unsigned*>(scratch)"),
        ),
        before=f"int* const ranges[] = {{{', '.join(names)}}};",
        threads=THREADS,
        blocks_per_multiprocessor=4,
    )

"""Neighbour tables on CUDA: made with counts of their edges, and tiles, in one launch.

Entries come from a ``Source``: a table that is there, or a look-up (``cuda_lookups``).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from .cuda_interfaces import SCRATCH, geometry_kernel, run
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
CHUNK_ROWS = 256  # of a block's work chunk, where there are up to 32 offsets
COUNTING_BLOCKS, TILING_BLOCKS = 4, 2  # of the two kernels, on a multiprocessor
RANKED_OFFSETS = 64  # offsets of a mask that has a rank of one word
ROW_ALIGNMENT = 384  # every tile height divides it: 64, 128, 192
TILE_SCRATCH = 4 * (SORT_THREADS // 32) * 32 * 33  # bytes of shared memory

_TABLE = ("rows.cuh", "table_sources.cuh", "neighbour_table.cu")
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

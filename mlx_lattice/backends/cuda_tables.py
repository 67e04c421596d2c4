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
    KEYS,
    SORT_THREADS,
    THREADS,
    cleared,
    constant,
    digits_of,
    key_dtype,
    multiprocessors,
    scratch_words,
    striding_blocks,
)

TILES, COUNTS = "cuda_sorted", "band_counts"  # names of a relation's views
BAND = 64  # rows of one count of edges
COUNTING_BLOCKS, TILING_BLOCKS = 4, 2  # of the two kernels, on a multiprocessor
MASK_OFFSETS, RANKED_OFFSETS = 64, 63  # of a mask, and of a rank where there are more
ROW_ALIGNMENT = 384  # heights of WideTile divide it: 64, 128, 192
TILE_SCRATCH = 4 * (SORT_THREADS // 32) * 32 * 33  # bytes of shared memory

_TABLE = ("rows.cuh", "table_sources.cuh", "neighbour_table.cu")
TILES_FILES = (*_TABLE, "radix_sort.cu", "sort_table.cu", "relation_tiles.cu")


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

    Of more than 64 offsets the last 63 rank.

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
        values: what the source is made of: inputs, and extents of them.
        rows: the extent that is the number of rows.
        is_new: whether the kernel makes the table; else it is the first input.
    """

    type: str
    inputs: tuple[str, ...]
    values: tuple[str, ...]
    rows: str
    is_new: bool


class Source(NamedTuple):
    """Where the entries of an (n, K) table come from: code and its inputs."""

    code: Code
    inputs: tuple[mx.array, ...]
    n: int
    volume: int


def rank_bits(volume: int) -> int:
    """Return the bits of a rank, by which the radix sort puts rows in order."""
    return volume if volume <= MASK_OFFSETS else RANKED_OFFSETS


def table_source(table: mx.array) -> Source:
    """Return the source that reads a table that is there; it has rows and offsets."""
    return Source(_READ, (table,), *table.shape)


def counted_table(source: Source, clear=cleared) -> tuple[mx.array, BandCounts]:
    """Return the table of a source, and what was counted."""
    n, volume = source.n, source.volume
    *made, counts, edges = run(
        _band_counts_kernel(source.code, key_of(volume)),
        [*source.inputs, constant(volume, 0, 0, 0), clear(HEADER)],
        min(multiprocessors() * COUNTING_BLOCKS, -(-n // BAND)),
        THREADS,
        _outputs(source),
    )
    return made[0] if made else source.inputs[0], BandCounts(counts, edges)


def relation_tiles(
    source: Source, clear=cleared
) -> tuple[mx.array, BandCounts, Sorted]:
    """Return the table of a source, what was counted, and its tiles: one launch."""
    n, volume = source.n, source.volume
    passes, bits = digits_of(rank_bits(volume))
    *made, counts, edges, rows, table, masks, _ = run(
        _relation_tiles(source.code, key_of(volume)),
        [
            *source.inputs,
            constant(volume, bits, passes, 0),
            clear(scratch_words(n, passes)),
        ],
        min(multiprocessors() * TILING_BLOCKS, -(-n // BAND)),
        SORT_THREADS,
        [
            *_outputs(source),
            ((n,), mx.int32),
            *tiles_outputs(n, volume),
            ((ranking_fours(n, volume), 4), mx.uint32),
        ],
    )
    tiles = Sorted(table, rows, masks)
    return made[0] if made else source.inputs[0], BandCounts(counts, edges), tiles


def identity_tiles(rows: mx.array) -> Sorted:
    """Return tiles of rows that each feed themselves.

    Args:
        rows: an array of as many, at least one; its values are not read.
    """
    n = len(rows)
    outputs = [((n,), mx.int32), *tiles_outputs(n, 1)]
    blocks = striding_blocks(pitch_of(n))
    made = run(_identity_tiles(), [rows], blocks, THREADS, outputs)
    return Sorted(made[1], made[0], made[2])


def key_of(volume: int) -> str:
    """Return the C++ type of the masks that rank rows."""
    return KEYS[key_dtype(rank_bits(volume))]


def pitch_of(n: int) -> int:
    """Return the rows that tiles of n rows are padded to."""
    return -(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT


def tiles_outputs(n: int, volume: int) -> list:
    """Return shapes and dtypes of the table and masks of tiles."""
    pitch = pitch_of(n)
    masks = pitch // 32, -(-volume // 32)
    return [((volume, pitch), mx.int32), (masks, mx.uint32)]


def ranking_fours(n: int, volume: int) -> int:
    """Return the words that rows are ranked in, by four."""
    return -(-3 * n * key_dtype(rank_bits(volume)).size // 16)


def _outputs(source: Source) -> list:
    """Return shapes and dtypes of the table, if it is new, of counts and of edges."""
    n, volume = source.n, source.volume
    counted = ((volume, -(-n // BAND)), mx.int32), ((1,), mx.int64)
    return [*[((n, volume), mx.int32)] * source.code.is_new, *counted]


EDGES = "reinterpret_cast<long long*>(edges)"  # as kernels take them
_READ = Code(
    "Read",
    ("neighbours",),
    ("neighbours", "neighbours_shape[1]"),
    "neighbours_shape[0]",
    False,
)


@cache
def _band_counts_kernel(code: Code, key: str):
    return _table_kernel(
        "band_counts",
        _TABLE,
        code,
        key,
        (),
        threads=THREADS,
        blocks_per_multiprocessor=COUNTING_BLOCKS,
    )


@cache
def _relation_tiles(code: Code, key: str):
    return _table_kernel(
        "relation_tiles",
        TILES_FILES,
        code,
        key,
        ("rows", "sorted", "masks", "work"),
        threads=SORT_THREADS,
        blocks_per_multiprocessor=TILING_BLOCKS,
        shared_bytes=TILE_SCRATCH,
    )


@cache
def _identity_tiles():
    return geometry_kernel(
        "identity_tiles",
        ("rows.cuh", "sort_table.cu"),
        "IdentityTiles",
        ("fed",),
        ("rows", "sorted", "masks"),
        arguments=(("fed", ""),),
        threads=THREADS,
    )


def _table_kernel(symbol, files, code, key, outputs, **more):
    """Return a kernel over the rows of a source.

    Args:
        symbol: the function.
        files: its sources.
        code: where entries come from.
        key: C++ type of a mask.
        outputs: the kernel's own, after a new table, its counts and edges.
        more: how it is launched.
    """
    inputs = *code.inputs, "digits", "scratch"
    # A table that is made, and one that is read in the order of its rows.
    passed = ["neighbours" if code.is_new else "nullptr", "counts", EDGES, *outputs]
    if outputs:
        passed = ["neighbours", *passed[:-1], "reinterpret_cast<KEY*>(work)"]
    made = *["neighbours"] * code.is_new, "counts", "edges", *outputs
    return geometry_kernel(
        symbol,
        files,
        "Table",
        inputs,
        made,
        template=(("KEY", key), ("SOURCE", code.type)),
        arguments=(
            *dict.fromkeys((*inputs, *made), "").items(),
            ("scratch", f"source, {SCRATCH}"),
            (made[0], ", ".join(passed)),
        ),
        before=f"""const int n = {code.rows};
  const int* facts = digits;
  const SOURCE source{{{", ".join(code.values)}}};""",
        **more,
    )

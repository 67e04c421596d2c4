"""Neighbour tables on CUDA: made with counts of their edges, and tiles, in one launch.

Entries come from a ``Source``: a table that is there, or a look-up (``cuda_lookups``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from .cuda_interfaces import SCRATCH, chosen, geometry_kernel, of_job, run
from .cuda_sort import (
    HEADER,
    MOST_KEYS,
    SORT_THREADS,
    THREADS,
    blocks_for,
    cleared,
    constant,
    digits_of,
    multiprocessors,
    scratch_words,
)

TILES, COUNTS = "cuda_sorted", "band_counts"  # names of a relation's views
BAND = 64  # rows of one count of edges
CHUNK_ROWS = 256  # of a block's work chunk, where there are up to 32 offsets
COUNTING_BLOCKS, TILING_BLOCKS = 4, 2  # of the two kernels, on a multiprocessor
MASK_OFFSETS, RANKED_OFFSETS = 64, 63  # of a mask, and of a rank where there are more
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


class CountsInSeveral(NamedTuple):
    """The counts of one of several tables of a launch.

    Attributes:
        bands: (words,) int32: of each table, one after another.
        edges: (tables,) int64.
        at, first: which table, and its first word.
        shape: of its own counts.
    """

    bands: mx.array
    edges: mx.array
    at: int
    first: int
    shape: tuple[int, int]

    def alone(self) -> BandCounts:
        """Return the table's own counts."""
        offsets, bands = self.shape
        own = self.bands[self.first : self.first + offsets * bands]
        return BandCounts(own.reshape(self.shape), self.edges[self.at : self.at + 1])


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


def is_ranked(n: int) -> bool:
    """Whether the radix sort takes so many rows."""
    return n < MOST_KEYS


def rank_bits(volume: int) -> int:
    """Return the bits of a rank, by which the radix sort puts rows in order."""
    return volume if volume <= MASK_OFFSETS else RANKED_OFFSETS


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
    *tables, (counts, tiles) = _tiles([source], clear)
    return tables[0] if tables else source.inputs[0], counts, tiles


def tiles_of_each(
    sources: Sequence[Source],
) -> list[tuple[BandCounts | CountsInSeveral, Sorted]]:
    """Return counts and tiles of some look-ups of one ``kind_of_tiles``: one launch.

    Their tables are not kept.
    """
    return _tiles(sources)[-len(sources) :]


def _tiles(sources: Sequence[Source], clear=cleared) -> list:
    """Return the counts and tiles of each source; of one alone its table before them.

    Counts of several are in one array, and tables stand in the memory that they work
    in: MLX takes the longer over a launch the more outputs it has, by their square.
    """
    code, key = kind_of_tiles(sources[0])
    most, jobs = multiprocessors() * TILING_BLOCKS, len(sources)
    inputs, digits, outputs, words, work, blocks = [], [], [], 0, 0, 1
    counted, firsts = [], [0]
    for source in sources:
        n, volume = source.n, source.volume
        passes, bits = digits_of(rank_bits(volume))
        rows, pitch = _chunk_rows(n, volume, most), pitch_of(n)
        blocks = max(blocks, -(-n // rows))
        words += scratch_words(n, passes)
        work += _work_fours(source, jobs)
        inputs += source.inputs
        digits += volume, bits, passes, rows
        counted.append(_bands(source))
        firsts.append(firsts[-1] + volume * counted[-1][1])
        outputs += [
            ((n,), mx.int32),
            ((volume, pitch), mx.int32),
            ((pitch // 32, -(-volume // 32)), mx.uint32),
        ]
    inputs += constant(*digits), clear(words)
    if jobs == 1:
        outputs = [*_outputs(source), *outputs]
    else:
        outputs = [((firsts[-1],), mx.int32), ((jobs,), mx.int64), *outputs]
    outputs.append(((work, 4), mx.uint32))
    # Blocks take what is left to do, so those of several jobs may be fewer.
    blocks = jobs * min(blocks, -(-2 * most // jobs) if jobs > 1 else most)
    kernel = _relation_tiles(code, key, jobs)
    *made, _ = run(kernel, inputs, blocks, SORT_THREADS, outputs)
    found = made[: jobs == 1 and code.is_new]  # the table
    bands, edges, *made = made[len(found) :]
    for at, (first, shape) in enumerate(zip(firsts, counted, strict=False)):
        if jobs == 1:
            counts = BandCounts(bands, edges)
        else:
            counts = CountsInSeveral(bands, edges, at, first, shape)
        order, table, masks = made[3 * at : 3 * at + 3]
        found.append((counts, Sorted(table, order, masks)))
    return found


def identity_tiles(sets: Sequence[mx.array]) -> list[Sorted]:
    """Return tiles of rows that each feed themselves, of several sets: one launch.

    Args:
        sets: arrays of as many rows each, at least one; their values are not read.
    """
    jobs, outputs, most = len(sets), [], max(map(len, sets))
    for rows in sets:
        n, pitch = len(rows), pitch_of(len(rows))
        outputs += [
            ((n,), mx.int32),
            ((1, pitch), mx.int32),
            ((pitch // 32, 1), mx.uint32),
        ]
    blocks = jobs * blocks_for(pitch_of(most))
    made = run(_identity_tiles(jobs), sets, blocks, THREADS, outputs)
    each = zip(made[::3], made[1::3], made[2::3], strict=True)
    return [Sorted(table, rows, masks) for rows, table, masks in each]


def kind_of_tiles(source: Source) -> tuple[Code, str]:
    """Return what sources have in common whose tiles one launch can make."""
    return source.code, _key(source.volume)


def pitch_of(n: int) -> int:
    """Return the rows that tiles of n rows are padded to."""
    return -(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _outputs(source: Source) -> list:
    """Return shapes and dtypes of the table, if it is new, of counts and of edges."""
    table = (source.n, source.volume), mx.int32
    counted = (_bands(source), mx.int32), ((1,), mx.int64)
    return [*[table] * source.code.is_new, *counted]


def _bands(source: Source) -> tuple[int, int]:
    return source.volume, -(-source.n // BAND)


def _work_fours(source: Source, jobs: int) -> int:
    """Return the words that a source's tiles are made in, by four."""
    n, volume = source.n, source.volume
    table, ranking = n * volume, 3 * n * (1 if volume <= 32 else 2)
    return -(-table // 4) * (jobs > 1) + -(-ranking // 4)


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
        ("counts", "edges"),
        threads=THREADS,
        blocks_per_multiprocessor=COUNTING_BLOCKS,
    )


@cache
def _relation_tiles(code: Code, key: str, jobs: int):
    return _table_kernel(
        "relation_tiles",
        _TILES,
        code,
        key,
        ("counts", "edges", "rows", "sorted", "masks"),
        jobs,
        threads=SORT_THREADS,
        blocks_per_multiprocessor=TILING_BLOCKS,
        shared_bytes=TILE_SCRATCH,
    )


@cache
def _identity_tiles(jobs: int):
    outputs = "rows", "sorted", "masks"
    made = [of_job(name, j) for j in range(jobs) for name in outputs]
    passed = ", ".join(chosen(name, jobs) for name in outputs)
    inputs = [of_job("fed", j) for j in range(jobs)]
    job = "const int job = blockIdx.x % JOBS;\n  " * (jobs > 1)
    return geometry_kernel(
        "identity_tiles",
        ("rows.cuh", "sort_table.cu"),
        "IdentityTiles",
        inputs,
        made,
        defines=(("JOBS", jobs),),
        arguments=(*dict.fromkeys((*inputs, *made), "").items(), (made[0], passed)),
        before=f"{job}const int n = {chosen('fed_shape[0]', jobs)};",
        threads=THREADS,
    )


_SHARED = "counts", "edges"  # arrays of all jobs
_TYPES = {"edges": "long long"}  # that an output is passed as


def _table_kernel(symbol, files, code, key, outputs, jobs: int = 1, **more):
    """Return a kernel over the rows of a source, or of several.

    Args:
        symbol: the function.
        files: its sources.
        code: where entries come from.
        key: C++ type of a mask.
        outputs: the kernel's own of a source, after a new table.
        jobs: sources of one launch; of several, tables stand in the work.
        more: how it is launched.
    """
    inputs = [of_job(n, j) for j in range(jobs) for n in code.inputs]
    made = ["neighbours"] * (code.is_new and jobs == 1) + [*_SHARED]
    own = [name for name in outputs if name not in _SHARED]
    made += [of_job(name, j) for j in range(jobs) for name in own]
    # A table that is made, and one that is read in the order of its rows.
    table = "neighbours" if jobs == 1 else "table"
    passed = [table if code.is_new else "nullptr"]
    for name in outputs:
        array = name if name in _SHARED else chosen(name, jobs)
        is_cast = name in _TYPES
        passed += [f"reinterpret_cast<{_TYPES[name]}*>({array})" if is_cast else array]
    before = [
        f"const int job = blockIdx.x % {jobs};" * (jobs > 1),
        f"const int n = {chosen(code.rows, jobs)};",
        "const int* facts = digits;",
        f"const SOURCE source{{{', '.join(chosen(v, jobs) for v in code.values)}}};",
        f"unsigned* words = {SCRATCH};",
    ]
    if jobs > 1:  # each has its own words, counts and work, one after another
        before += [
            "for (int j = 0; j < job; ++j, facts += 4) {",
            f"  const int rows = {chosen(code.rows, jobs, 'j')};",
            "  words += scratch_words(rows, facts[2]);",
            "  counts += facts[0] * ((rows + BAND - 1) / BAND), ++edges;",
            "  work += table_words(rows, facts[0]) + ranking_words<KEY>(rows);",
            "}",
            "int* const table = reinterpret_cast<int*>(work);",
            "work += table_words(n, facts[0]);",
        ]
    if "sorted" in outputs:
        made.append("work")
        passed = [table, *passed, "reinterpret_cast<KEY*>(work)"]
    return geometry_kernel(
        symbol,
        files,
        "Table",
        (*inputs, "digits", "scratch"),
        made,
        template=(("KEY", key), ("SOURCE", code.type)),
        defines=(("JOBS", jobs),) * (jobs > 1),
        arguments=(
            *dict.fromkeys((*inputs, "digits", *made), "").items(),
            ("scratch", "source, words"),
            (made[0], ", ".join(passed)),
        ),
        before="\n  ".join(line for line in before if line),
        **more,
    )

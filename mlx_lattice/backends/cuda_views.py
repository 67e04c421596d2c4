"""Views of a relation on CUDA, from its table and what was counted with it."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..geometry import curves, sync
from ..geometry.protocol import RelationViews
from .cuda_interfaces import geometry_kernel, run
from .cuda_sort import THREADS, sorts, striding_blocks
from .cuda_tables import (
    BAND,
    COUNTS,
    MASK_OFFSETS,
    TILES,
    BandCounts,
    Sorted,
    counted_table,
    identity_tiles,
    pitch_of,
    relation_tiles,
    table_source,
    tiles_outputs,
)

EDGE_ROWS = 256  # rows of a block that writes edges: four bands
STAGE_PAIRS = 32, 64  # of a stage of a weight gradient


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (N_in, K) int32: the row of ``table`` that holds each entry, or -1."""
    shape = n_in, table.shape[1]
    if table.size == 0 or n_in == 0:
        return mx.full(shape, -1, dtype=mx.int32)
    outputs = [(shape, mx.int32)]
    blocks = striding_blocks(table.size)
    return run(_transpose_table(), [table], blocks, THREADS, outputs, fill=-1)[0]


def band_counts_of(table: mx.array) -> BandCounts:
    """Return what is counted of a table that was made without it; it has rows."""
    return counted_table(table_source(table))[1]


def gray_order(table: mx.array) -> mx.array:
    """Return the (N,) order of rows by the Gray-code rank of their mask."""
    n, volume = table.shape
    if table.size and sorts(n) and volume <= MASK_OFFSETS:
        return relation_tiles(table_source(table))[2].rows
    return curves.gray_order(table >= 0)


def sorted_table(table: mx.array, rows: mx.array) -> tuple[mx.array, mx.array]:
    """Return the (K, pitch) table of rows in sorted order, and a mask per 32 rows."""
    outputs, blocks = tiles_outputs(*table.shape), pitch_of(len(table)) // 128
    return tuple(run(_sort_table(), [table, rows], blocks, 128, outputs))


def sorted_rows(relation: RelationViews) -> Sorted:
    """Return the relation's tiles. A mirrored relation and its transpose share them."""
    base, straight = tiled(relation)
    view = base.view(TILES, lambda: _tiles(base))
    return view if straight else view._replace(mirrored=True)


def sorted_arrays(relation: RelationViews) -> tuple[mx.array, ...]:
    """Return the arrays of the relation's tiles, as contractions read them."""
    view = sorted_rows(relation)
    return view.table, view.rows, view.masks


def tiled(relation: RelationViews) -> tuple[RelationViews, bool]:
    """Return the relation whose tiles it reads, and whether that is itself."""
    straight = not (relation.mirrored and relation.is_transposed)
    return (relation if straight else relation.T), straight


def keep_tiles(relation: RelationViews, tiles: Sorted) -> None:
    """Let tiles stand for the table, which holds the same."""
    relation.release_table(lambda: table_of(tiles))


def _tiles(relation: RelationViews) -> Sorted:
    if relation.is_identity and relation.n_out:  # rows are in order
        rows = relation.in_coords  # of any array that has as many
        tiles = identity_tiles(relation.out_in if rows is None else rows)
        keep_tiles(relation, tiles)
        return tiles
    table = relation.table_with(TILES)
    tiles = relation.kept(TILES)
    if tiles is None and sorts(table.shape[0]):
        _, counts, tiles = relation_tiles(table_source(table))
        relation.keep(COUNTS, counts)
    elif tiles is None:
        tiles = _in_order(table, gray_order(table))
    keep_tiles(relation, tiles)
    return tiles


def release_table(relation: RelationViews) -> None:
    """Keep no table beside tiles, which hold the same."""
    if tiles := relation.kept(TILES):
        keep_tiles(relation, tiles)


def _in_order(table: mx.array, rows: mx.array) -> Sorted:
    """Return the tiles of a table, for an order of its rows."""
    sorted_, masks = sorted_table(table, rows)
    return Sorted(sorted_, rows, masks)


def table_of(tiles: Sorted) -> mx.array:
    """Return the (N, K) table that tiles were made of."""
    n, volume = len(tiles.rows), len(tiles.table)
    if n == 0:
        return mx.zeros((0, volume), dtype=mx.int32)
    outputs = [((n, volume), mx.int32)]
    inputs = [tiles.table, tiles.rows]
    return run(_unsort_table(), inputs, -(-n // 128), 128, outputs)[0]


def band_counts(relation: RelationViews) -> BandCounts:
    """Return what is counted of a relation's table."""
    counts = relation.kept(COUNTS)
    if counts is None:
        table = relation.out_in  # may bring its BandCounts
        return relation.view(COUNTS, lambda: band_counts_of(table))
    return counts


def start(relation: RelationViews) -> mx.array | None:
    """Build the table and, where matrix routes will read them, the tiles.

    Returns:
        The number of edges: to be read together with the check of the set.
    """
    if relation.n_out * relation.n_in == 0:
        return None
    # Edges of a large kernel are counted sooner without tiles, which are made of the
    # table then: of 5x5x5 and 100 000 rows in 0.11 ms, not 0.25.
    if 1 < relation.volume <= MASK_OFFSETS:
        relation.table_with(TILES)
    counts = band_counts(relation)
    release_table(relation)
    return counts.edges


def edges(table: mx.array, relation: RelationViews | None = None) -> mx.array:
    """Return the kernel-major (E, 3) edges of a table.

    Reads their number, unless the table is a relation's that knows it.
    """
    if table.size == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    if relation is None:
        counts = band_counts_of(table)
        total = sync.read(counts.edges)[0][0]
    else:
        counts, total = band_counts(relation), relation.n_edges
    made, starts = listed(table, counts, 3, table.shape[1], total)
    if relation is not None:
        relation.keep("cuda_starts", starts)
        release_table(relation)
    return made


def listed(
    table: mx.array, counts: BandCounts, words: int, offsets: int, total: int
) -> tuple[mx.array, ...]:
    """Return the edges of the first offsets of a table, and where each one's start.

    Of two words the others are spans, those of the transpose, and the first stages.

    Args:
        table: (N, K) int32.
        counts: of it.
        words: 3 of (i, o, k), or 2 of (i, o).
        offsets: how many.
        total: their edges.
    """
    n = len(table)
    lines = offsets, -(-n // BAND)
    starts, sums = run(
        _scan_counts(),
        [counts.bands],
        offsets,
        1024,
        [(lines, mx.int32), ((offsets,), mx.int32)],
    )
    outputs, volume = [((max(1, total), words), mx.int32)], table.shape[1]
    if words == 2:
        outputs += [((volume, 2), mx.int32)] * 2
        outputs += [((volume + 1,), mx.int32)] * len(STAGE_PAIRS)
    else:
        outputs.append(((offsets + 1,), mx.int32))
    blocks = -(-n // EDGE_ROWS)
    kernel = _write_edges(words)
    made, *places = run(kernel, [table, starts, sums], blocks, THREADS, outputs)
    return made if total else made[:0], *places


_VIEWS = ("rows.cuh", "sort_table.cu", "relation_views.cu")


@cache
def _transpose_table():
    inputs, outputs = ("neighbours",), ("swapped",)
    return geometry_kernel(
        "transpose_table", _VIEWS, "TransposeTable", inputs, outputs, threads=THREADS
    )


@cache
def _sort_table():
    inputs, outputs = ("neighbours", "rows"), ("sorted", "masks")
    return geometry_kernel(
        "sort_table", _VIEWS, "SortTable", inputs, outputs, threads=128
    )


@cache
def _unsort_table():
    inputs, outputs = ("sorted", "rows"), ("table",)
    return geometry_kernel(
        "unsort_table", _VIEWS, "UnsortTable", inputs, outputs, threads=128
    )


@cache
def _scan_counts():
    inputs, outputs = ("counts",), ("starts", "sums")
    return geometry_kernel(
        "scan_counts", _VIEWS, "ScanCounts", inputs, outputs, threads=1024
    )


@cache
def _write_edges(words: int):
    inputs, outputs = ("neighbours", "starts", "sums"), ("edges", "offset_starts")
    if words == 2:
        outputs = "edges", "spans", "turned", *(f"firsts_{n}" for n in STAGE_PAIRS)
    template = (("WORDS", words),)
    return geometry_kernel(
        "write_edges",
        _VIEWS,
        "WriteEdges",
        inputs,
        outputs,
        template=template,
        threads=THREADS,
    )

"""Views of a relation on CUDA, from its table and what was counted with it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from .. import geometry, host, order
from ..relation import Relation
from .cuda_geometry import (
    BAND,
    MOST_OFFSETS,
    RANKED_OFFSETS,
    Survey,
    survey_kernel,
)
from .cuda_kernels import kernel, run
from .cuda_sort import MOST_KEYS, THREADS, blocks_for, sort_keys

ROW_ALIGNMENT = 384  # every tile height divides it: 64, 128, 192
EDGE_ROWS = 256  # rows of a block that writes edges: four bands


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (N_in, K) int32: the row of ``table`` that holds each entry, or -1."""
    shape = n_in, table.shape[1]
    if table.size == 0 or n_in == 0:
        return mx.full(shape, -1, dtype=mx.int32)
    outputs = [(shape, mx.int32)]
    blocks = blocks_for(table.size)
    return run(_transpose_table(), [table], blocks, THREADS, outputs, fill=-1)[0]


def survey_table(table: mx.array) -> Survey:
    """Return the survey of a table that was made without one; it has rows."""
    n, volume = table.shape
    survey = Survey.blank(n, volume)
    inputs = [table, survey.digits, survey.scratch]
    function = _survey_table(volume)
    surveyed = run(function, inputs, survey.blocks, THREADS, survey.outputs)
    return survey.with_(*surveyed)


def gray_order(table: mx.array) -> mx.array:
    """Return the (N,) order of rows by the Gray-code rank of their mask."""
    if table.size == 0 or not _is_ranked(*table.shape):
        return order.gray_order(table >= 0)
    return _gray_order(table, survey_table(table))


def _is_ranked(n: int, volume: int) -> bool:
    """Whether masks have a rank of one word, which the radix sort takes."""
    return volume <= RANKED_OFFSETS and n < MOST_KEYS


def _gray_order(table: mx.array, survey: Survey) -> mx.array:
    volume = table.shape[1]
    if survey.ranks is None:  # a sort uses them up
        survey = survey_table(table)
    passes = -(-volume // 9)
    ranks, digits, scratch = survey.ranks, survey.digits, survey.scratch
    return sort_keys(ranks, digits, scratch, passes, rows=True, keep=False)[1]


def sorted_table(table: mx.array, rows: mx.array, pitch: int):
    """Return the (K, pitch) table of rows in sorted order, and a mask per 32 rows."""
    volume = table.shape[1]
    outputs = [
        ((volume, pitch), mx.int32),
        ((pitch // 32, -(-volume // 32)), mx.uint32),
    ]
    return run(_sort_table(), [table, rows], pitch // 128, 128, outputs)


class Sorted(NamedTuple):
    """A relation's rows by Gray-code rank, laid out for tiles."""

    table: mx.array  # (K, pitch) int32
    rows: mx.array  # (N_out,) int32
    masks: mx.array  # (pitch / 32, words) uint32
    mirrored: bool  # whether offset k stands for K - 1 - k


def sorted_rows(relation: Relation) -> Sorted:
    """Return the relation's tiles. A mirrored relation and its transpose share them."""
    straight = not (relation.mirrored and relation.is_transposed)
    base = relation if straight else relation.T

    def build() -> Sorted:
        table = base.out_in
        pitch = -(-table.shape[0] // ROW_ALIGNMENT) * ROW_ALIGNMENT
        if not _is_ranked(*table.shape):
            rows = gray_order(table)
        else:
            survey = _surveyed(base)
            rows = _gray_order(table, survey)
            base.keep("survey", survey._replace(ranks=None, scratch=None))
        return Sorted(*_in_order(sorted_table(table, rows, pitch), rows), False)

    view = base.view("cuda_sorted", build)
    return view if straight else view._replace(mirrored=True)


def _in_order(tiles, rows: mx.array):
    return tiles[0], rows, tiles[1]


def _surveyed(relation: Relation) -> Survey:
    table = relation.out_in  # may bring its survey
    return relation.view("survey", lambda: survey_table(table))


def start(relation: Relation) -> mx.array | None:
    """Launch the table and the tiles; return the number of edges, on the device.

    Every matrix route reads the tiles; launched here, they are made while the host
    waits for the set's check.
    """
    if relation.n_out * relation.n_in == 0 or relation.volume > MOST_OFFSETS:
        return None
    count = _surveyed(relation).edges
    mx.async_eval(relation.out_in, count)
    if 1 < relation.volume <= RANKED_OFFSETS:
        mx.async_eval(*sorted_rows(relation)[:3])
    return count


def edges(table: mx.array, relation: Relation | None = None) -> mx.array:
    """Return the kernel-major (E, 3) edges of a table.

    Reads their number, unless the table is a relation's that knows it.
    """
    if table.size == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    if table.shape[1] > MOST_OFFSETS:
        return geometry.table_edges(table)
    survey = survey_table(table) if relation is None else _surveyed(relation)
    total = relation.known_edges if relation is not None else None
    total = host.read(survey.edges)[0][0] if total is None else total
    n, volume = table.shape
    bands = -(-n // BAND)
    starts, sums = run(
        _scan_counts(),
        [survey.counts],
        volume,
        1024,
        [((volume, bands), mx.int32), ((volume,), mx.int32)],
    )
    outputs = [((max(1, total), 3), mx.int32), ((volume + 1,), mx.int32)]
    blocks = -(-n // EDGE_ROWS)
    listed, offset_starts = run(
        _write_edges(), [table, starts, sums], blocks, THREADS, outputs
    )
    if relation is not None:
        relation.keep("cuda_starts", offset_starts)
    return listed if total else listed[:0]


def offset_starts(relation: Relation) -> mx.array:
    """Return (K + 1,) int32: where the edges of each offset start."""
    listed = relation.edges  # may bring its starts

    def build() -> mx.array:
        ends = mx.arange(relation.volume + 1, dtype=mx.int32)
        return mx.searchsorted(mx.contiguous(listed[:, 2]), ends).astype(mx.int32)

    return relation.view("cuda_starts", build)


@cache
def _transpose_table():
    return kernel(
        "transpose_table",
        _VIEWS,
        ("neighbours",),
        ("swapped",),
        "lattice::transpose_table(neighbours, swapped, neighbours_shape[0], "
        "neighbours_shape[1]);",
        threads=THREADS,
    )


@cache
def _survey_table(volume: int):
    return survey_kernel(
        "survey_table",
        ("rows.cuh", "neighbour_table.cu"),
        ("neighbours",),
        "survey_table<(neighbours",
        "neighbours_shape[0]",
        volume,
    )


@cache
def _sort_table():
    return kernel(
        "sort_table",
        _VIEWS,
        ("neighbours", "rows"),
        ("sorted", "masks"),
        "lattice::sort_table(neighbours, rows, sorted, masks, rows_shape[0], "
        "(int)(gridDim.x * blockDim.x), neighbours_shape[1]);",
        threads=128,
    )


@cache
def _scan_counts():
    return kernel(
        "scan_counts",
        _VIEWS,
        ("counts",),
        ("starts", "sums"),
        "lattice::scan_counts(counts, starts, sums, counts_shape[1]);",
        threads=1024,
    )


@cache
def _write_edges():
    return kernel(
        "write_edges",
        _VIEWS,
        ("neighbours", "starts", "sums"),
        ("edges", "offset_starts"),
        "lattice::write_edges(neighbours, starts, sums, edges, offset_starts, "
        "neighbours_shape[0], neighbours_shape[1], starts_shape[1]);",
        threads=THREADS,
    )


_VIEWS = ("rows.cuh", "relation_views.cu")

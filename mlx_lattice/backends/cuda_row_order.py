"""Places of a table by the row that they name, on CUDA: kernels around a sort."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from . import gpu_segments
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .cuda_sort import SORT, THREADS, sorted_places, sorts, striding_blocks
from .dispatch_bounds import SEGMENT_CUTS

_FILES = (*SORT, "row_order.cu")


def by_row(table: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return ``gpu_segments.by_row`` of a table and the rows that it names."""
    n = table.size
    if n == 0 or not sorts(n):
        return gpu_segments.by_row(table, rows)
    bits, inputs = max(1, rows.bit_length()), [table.flatten()]
    keys, entries = sorted_places(_row_keys, inputs, n, bits, keep=True)
    inputs, outputs = [keys, mx.array([rows])], [((rows + 1,), mx.int32)]
    (starts,) = run(_row_starts(), inputs, striding_blocks(rows + 1), THREADS, outputs)
    return entries, starts


def pieces(starts: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Return ``gpu_segments.pieces`` of segments, in one launch."""
    piece, count = SEGMENT_CUTS["piece"], starts.size
    whole = count + -(-size // piece)
    outputs = [((n,), mx.int32) for n in (whole, count)]
    inputs = [starts, mx.array([size])]
    bounds, firsts = run(
        _cut_pieces(piece), inputs, striding_blocks(whole), THREADS, outputs
    )
    return bounds, firsts


@cache
def _row_keys(numeric: str):
    del numeric  # 32 bits hold every row
    return geometry_kernel(
        "row_keys",
        _FILES,
        "RowKeys",
        ("table", "digits", "scratch"),
        ("keys",),
        arguments=(("digits", ""), ("scratch", SCRATCH)),
        threads=THREADS,
    )


@cache
def _row_starts():
    return geometry_kernel(
        "row_starts",
        _FILES,
        "RowStarts",
        ("keys", "rows"),
        ("starts",),
        threads=THREADS,
    )


@cache
def _cut_pieces(piece: int):
    return geometry_kernel(
        "cut_pieces",
        _FILES,
        "CutPieces",
        ("starts", "size"),
        ("bounds", "firsts"),
        template=(("PIECE", piece),),
        threads=THREADS,
    )

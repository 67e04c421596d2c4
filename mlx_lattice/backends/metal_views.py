"""Views of a relation on Metal, from its neighbour table: transpose, edges, orders.

The same results, bit for bit, as the portable builders of ``geometry`` and ``order``.
"""

from __future__ import annotations

import mlx.core as mx

from .. import host
from ..order import WORD, fold
from ..views import Csr, SortedRows
from .metal_kernels import Kernel, ceil_div, stable_order

# Rows that one thread lists edges of: short enough to fill the GPU, long enough that
# the counts stay small.
EDGE_BLOCK = 64

_TRANSPOSE = Kernel(
    "transpose_table",
    ("relation_views",),
    ("table", "sizes"),
    ("transposed",),
    "transpose_table(table, sizes, transposed, thread_position_in_grid.xy);",
)
_COUNT = Kernel(
    "count_edges",
    ("relation_views",),
    ("table", "sizes"),
    ("counts",),
    "count_edges(table, sizes, counts, thread_position_in_grid.xy);",
)
_WRITE = Kernel(
    "write_edges",
    ("relation_views",),
    ("table", "counts", "ends", "sizes"),
    ("edges",),
    "write_edges(table, counts, ends, sizes, edges, thread_position_in_grid.xy);",
)
_COUNT_ROWS = Kernel(
    "count_row_edges",
    ("relation_views",),
    ("table", "sizes"),
    ("counts",),
    "count_row_edges(table, sizes, counts, thread_position_in_grid.x);",
)
_WRITE_ROWS = Kernel(
    "write_row_edges",
    ("relation_views",),
    ("table", "starts", "sizes"),
    ("edges",),
    "write_row_edges(table, starts, sizes, edges, thread_position_in_grid.x);",
)
_MASKS = Kernel(
    "occupancy_masks",
    ("relation_views",),
    ("table", "sizes"),
    ("masks",),
    "occupancy_masks(table, sizes, masks, thread_position_in_grid.xy);",
)
_GRAY = Kernel(
    "gray_keys",
    ("relation_views",),
    ("table", "sizes"),
    ("keys",),
    "gray_keys(table, sizes, keys, thread_position_in_grid.x);",
)


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``table`` that holds each entry, or -1.

    Args:
        table: (N_out, K) int32; no row may hold another's entry in the same column.
        n_in: number of input rows.
    """
    n_out, volume = table.shape
    if n_out == 0 or n_in == 0:
        return mx.full((n_in, volume), -1, dtype=mx.int32)
    return _TRANSPOSE(
        [table], [volume], [((n_in, volume), mx.int32)], (volume, n_out), init=-1
    )[0]


def edges(table: mx.array) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o).

    Reads one size. Counted by blocks of rows, placed by a scan: deterministic.
    """
    n_out, volume = table.shape
    if n_out == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    blocks = ceil_div(n_out, EDGE_BLOCK)
    sizes, grid = [volume, n_out, EDGE_BLOCK, blocks], (volume, blocks)
    counts = _COUNT([table], sizes, [((volume, blocks), mx.int32)], grid)[0]
    ends = mx.cumsum(counts.flatten().astype(mx.int64))
    total = host.read(ends[-1])[0]
    if total == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    return _WRITE([table, counts, ends], sizes, [((total, 3), mx.int32)], grid)[0]


def output_csr(table: mx.array) -> Csr:
    """Return the edges (i, o, k) of a table grouped by output row, sorted by (o, k).

    Reads one size.
    """
    n_out, volume = table.shape
    if n_out == 0:
        none = mx.zeros((0, 3), dtype=mx.int32)
        return Csr(mx.zeros((1,), dtype=mx.int32), none)
    counts = _COUNT_ROWS([table], [volume], [((n_out,), mx.int32)], (n_out,))[0]
    start = mx.zeros((1,), dtype=mx.int64)
    indptr = mx.concatenate([start, mx.cumsum(counts.astype(mx.int64))])
    total, indptr = host.read(indptr[-1])[0], indptr.astype(mx.int32)
    if total == 0:
        return Csr(indptr, mx.zeros((0, 3), dtype=mx.int32))
    listed = _WRITE_ROWS([table, indptr], [volume], [((total, 3), mx.int32)], (n_out,))[
        0
    ]
    return Csr(indptr, listed)


def occupancy_masks(table: mx.array, block: int = 1) -> mx.array:
    """Return (ceil(N / block), ceil(K / 32)) uint32: offsets any row of a block uses.

    Bit b of word w stands for offset 32 w + b.
    """
    n_out, volume = table.shape
    blocks, words = ceil_div(n_out, block), ceil_div(volume, 32)
    if blocks == 0:
        return mx.zeros((0, words), dtype=mx.uint32)
    return _MASKS(
        [table],
        [volume, n_out, block, words],
        [((blocks, words), mx.uint32)],
        (words, blocks),
    )[0]


def gray_order(table: mx.array) -> mx.array:
    """Return the (N_out,) int32 order of rows by the Gray-code rank of their mask.

    Ties keep the rows' own order.
    """
    n_out, volume = table.shape
    if n_out == 0:
        return mx.zeros((0,), dtype=mx.int32)
    ties = (n_out - 1).bit_length()
    if volume + ties > WORD:
        ties = 0
    words = ceil_div(volume, WORD)
    keys = _GRAY(
        [table],
        [volume, n_out, WORD, ties],
        [((words, n_out), mx.int64)],
        (n_out,),
    )[0]
    if ties or n_out == 1:
        return mx.argsort(keys[0]).astype(mx.int32)
    return stable_order(fold([keys[w] for w in range(words)]))


def sorted_rows(table: mx.array, block: int = 16) -> SortedRows:
    """Return the output rows by Gray-code rank, their table and a mask per block."""
    rows = gray_order(table)
    ordered = mx.take(table, rows, axis=0)
    return SortedRows(rows, ordered, occupancy_masks(ordered, block), block)

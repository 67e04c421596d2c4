"""Views of a relation on Metal, from its neighbour table: transpose, edges, orders."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import sync
from ..geometry.curves import WORD, fold, stable_order
from .dispatch_bounds import METAL_CUTS, by_rows, ceil_div, cuts, dispatch_limit
from .gpu_kernel import GpuKernel, Interface


def _sizes(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "0") for name in names)


_TRANSPOSE = Interface(
    "TransposeTable", ("table",), ("transposed",), _sizes("volume", "first", "columns")
)
_BLOCKS = _sizes("volume", "rows", "block", "blocks", "first")
_COUNT = Interface("ListEdges", ("table",), ("counts",), _BLOCKS)
_WRITE = Interface("ListEdges", ("table", "places"), ("edges",), _BLOCKS)
_MASKS = Interface(
    "OccupancyMasks",
    ("table",),
    ("masks",),
    _sizes("volume", "rows", "block", "words", "first"),
)
_GRAY = Interface(
    "GrayKeys",
    ("table",),
    ("keys",),
    _sizes("volume", "first", "rows", "word_bits", "tie_bits"),
)


@cache
def _kernel(symbol: str, interface: Interface, axes: str = "xy") -> GpuKernel:
    faces = _TRANSPOSE, _COUNT, _MASKS, _GRAY
    return GpuKernel(
        METAL,
        symbol,
        ("relation_views",),
        interface,
        place=f"thread_position_in_grid.{axes}",
        also=tuple(face for face in faces if face.name != interface.name),
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

    kernel = _kernel("transpose_table", _TRANSPOSE)

    def launch(first: int, columns: int) -> list[mx.array]:
        return kernel(
            [table],
            [((n_in, columns), mx.int32)],
            (columns, n_out),
            fill=-1,
            volume=volume,
            first=first,
            columns=columns,
        )

    # By columns: the rows of a slice of rows would be anywhere.
    work = max(n_in, n_out) * volume
    return by_rows(volume, work, dispatch_limit("elements"), launch, axis=1)[0]


def edges(table: mx.array) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o).

    Reads one size. Counted by blocks of rows, placed by a scan: deterministic.
    """
    n_out, volume = table.shape
    if n_out == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    block = METAL_CUTS["edge_block"]
    blocks = ceil_div(n_out, block)
    sizes = {"volume": volume, "rows": n_out, "block": block, "blocks": blocks}
    limit = dispatch_limit("elements")

    def count(first: int, columns: int) -> list[mx.array]:
        kernel, out = _kernel("count_edges", _COUNT), [((columns, blocks), mx.int32)]
        return kernel([table], out, (columns, blocks), first=first, **sizes)

    def write(piece: tuple[int, int], start: int, total: int) -> list[mx.array]:
        first, columns = piece
        here = slice(first * blocks, (first + columns) * blocks)
        places = ends[here] - counts[here] - start
        kernel, out = _kernel("write_edges", _WRITE), [((total, 3), mx.int32)]
        return kernel([table, places], out, (columns, blocks), first=first, **sizes)

    # Each edge is three elements more.
    counts = by_rows(volume, 4 * table.size, limit, count)[0].flatten()
    ends = mx.cumsum(counts.astype(mx.int64))
    pieces = list(cuts(volume, 4 * table.size, limit))
    return _listed(ends, pieces, blocks, write)


def _listed(ends: mx.array, pieces, step: int, write) -> mx.array:
    """Return the edges that ``write`` lists piece by piece; reads where they end.

    Args:
        ends: running totals of edges.
        pieces: (first, length) slices of offsets or rows.
        step: entries of ``ends`` in each unit of a slice.
        write: called with (piece, edges before it, its edges).
    """
    last = [(first + length) * step - 1 for first, length in pieces]
    bounds = [0, *sync.read(ends[mx.array(last)])[0]]
    parts = [
        write(piece, start, stop - start)[0]
        for piece, start, stop in zip(pieces, bounds[:-1], bounds[1:], strict=True)
        if stop > start
    ]
    if not parts:
        return mx.zeros((0, 3), dtype=mx.int32)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def occupancy_masks(table: mx.array, block: int = 1) -> mx.array:
    """Return (ceil(N / block), ceil(K / 32)) uint32: offsets any row of a block uses.

    Bit b of word w stands for offset 32 w + b.
    """
    n_out, volume = table.shape
    blocks, words = ceil_div(n_out, block), ceil_div(volume, 32)
    if blocks == 0:
        return mx.zeros((0, words), dtype=mx.uint32)

    kernel = _kernel("occupancy_masks", _MASKS)
    sizes = {"volume": volume, "rows": n_out, "block": block, "words": words}

    def launch(first: int, count: int) -> list[mx.array]:
        out = [((count, words), mx.uint32)]
        return kernel([table], out, (words, count), first=first, **sizes)

    return by_rows(blocks, table.size, dispatch_limit("elements"), launch)[0]


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

    kernel = _kernel("gray_keys", _GRAY, "x")
    sizes = {"volume": volume, "word_bits": WORD, "tie_bits": ties}

    def launch(first: int, rows: int) -> list[mx.array]:
        out = [((words, rows), mx.int64)]
        return kernel([table], out, (rows,), first=first, rows=rows, **sizes)

    keys = by_rows(n_out, table.size, dispatch_limit("elements"), launch, axis=1)[0]
    if ties or n_out == 1:
        return mx.argsort(keys[0]).astype(mx.int32)
    return stable_order(fold([keys[w] for w in range(words)]))

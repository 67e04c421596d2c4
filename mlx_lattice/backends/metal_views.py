"""Views of a relation on Metal, from its neighbour table: transpose, edges, orders."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import sync
from .dispatch_bounds import METAL_CUTS, by_rows, ceil_div, cuts, dispatch_limit
from .gpu_kernel import GpuKernel, Interface


def _sizes(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "0") for name in names)


_TRANSPOSE = Interface(
    "TransposeTable",
    ("table",),
    ("transposed",),
    _sizes("volume", "rows", "first", "columns"),
)
_BLOCKS = _sizes("volume", "rows", "block", "blocks", "first")
_COUNT = Interface("ListEdges", ("table",), ("counts",), _BLOCKS)
_WRITE = Interface("ListEdges", ("table", "places"), ("edges",), _BLOCKS)
_ORDERED = Interface(
    "OrderedTable",
    ("table", "order"),
    ("ordered", "masks"),
    _sizes("volume", "rows", "block", "words", "first"),
)
_GRAY = Interface(
    "GrayKeys",
    ("table",),
    ("keys",),
    _sizes("volume", "rows", "words", "columns", "first"),
)
# Lanes of a simdgroup; sort keys by their bits, which MLX's sort reads and writes.
LANES, FOUR = 32, 4
KEYS = {8: mx.uint8, 16: mx.uint16, 32: mx.uint32, 64: mx.uint64}


@cache
def _kernel(
    symbol: str, interface: Interface, **template: mx.Dtype | bool
) -> GpuKernel:
    faces = _TRANSPOSE, _COUNT, _ORDERED, _GRAY
    return GpuKernel(
        METAL,
        symbol,
        ("relation_views",),
        interface,
        tuple(template.items()),
        place="thread_position_in_grid.xy",
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

    def launch(first: int, columns: int) -> list[mx.array]:
        whole = columns == volume
        return _kernel("transpose_table", _TRANSPOSE, WHOLE=whole)(
            [table],
            [((n_in, columns), mx.int32)],
            (columns, ceil_div(n_out, FOUR) if whole else n_out),
            fill=-1,
            volume=volume,
            rows=n_out,
            first=first,
            columns=columns,
        )

    # By columns: the rows of a slice of rows would be anywhere.
    work = max(n_in, n_out) * volume
    return by_rows(volume, work, dispatch_limit("elements"), launch, axis=1)[0]


def edges(table: mx.array, total: int | None = None) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o).

    Counted by blocks of rows, placed by a scan: deterministic. Reads sizes, unless one
    launch writes all edges and ``total``, their number, is given.
    """
    n_out, volume = table.shape
    if n_out == 0:
        return mx.zeros((0, 3), dtype=mx.int32)
    block = METAL_CUTS["edge_block"]
    blocks = ceil_div(n_out, block)
    sizes = {"volume": volume, "rows": n_out, "block": block, "blocks": blocks}
    # Each edge is three elements more.
    work, limit = 4 * table.size, dispatch_limit("elements")
    pieces = list(cuts(volume, work, limit))
    # Every fourth row is counted apart where one launch reads all of the table.
    apart = FOUR if len(pieces) == 1 else 1

    def count(first: int, columns: int) -> list[mx.array]:
        kernel = _kernel("count_edges", _COUNT, WHOLE=apart > 1)
        out = [((columns, blocks, apart), mx.int32)]
        return kernel([table], out, (columns, blocks), first=first, **sizes)

    def write(piece: tuple[int, int], start: int, total: int) -> list[mx.array]:
        first, columns = piece
        here = slice(first * blocks, (first + columns) * blocks)
        places = starts[here] - start
        kernel, out = _kernel("write_edges", _WRITE), [((total, 3), mx.int32)]
        return kernel([table, places], out, (columns, blocks), first=first, **sizes)

    counts = by_rows(volume, work, limit, count)[0].flatten()
    ends = mx.cumsum(counts.astype(mx.int64))
    starts = (ends - counts)[::apart]
    if total is not None and len(pieces) == 1:
        return write(pieces[0], 0, total)[0] if total else mx.zeros((0, 3), mx.int32)
    return _listed(ends[apart - 1 :: apart], pieces, blocks, write)


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


def ordered_table(
    table: mx.array, order: mx.array, block: int
) -> tuple[mx.array, mx.array]:
    """Return the rows of a table in an order, and which offsets their blocks use.

    Args:
        table: (N, K) int32.
        order: (N,) int32.
        block: rows of a block.

    Returns:
        (N, K) int32, and (ceil(N / block), ceil(K / 32)) uint32 masks: bit b of word w
        stands for offset 32 w + b.
    """
    n, volume = table.shape
    words = ceil_div(volume, 32)
    if n == 0:
        return table, mx.zeros((0, words), dtype=mx.uint32)
    kernel = _kernel("ordered_table", _ORDERED)
    sizes = {"volume": volume, "rows": n, "block": block, "words": words}

    def launch(first: int, count: int) -> list[mx.array]:
        rows = min(n - first * block, count * block)
        out = [((rows, volume), mx.int32), ((count, words), mx.uint32)]
        return kernel([table, order], out, (LANES, count), first=first, **sizes)

    work, limit = 2 * table.size, dispatch_limit("elements")
    ordered, masks = by_rows(ceil_div(n, block), work, limit, launch)
    return ordered, masks


def gray_order(table: mx.array, region: int | None = None) -> mx.array:
    """Return the (N_out,) int32 order of rows by the Gray-code rank of their mask.

    Ties keep the rows' own order: MLX's sorts are stable (on Metal a merge sort that
    takes the left of equals, ``sort.h``). So keys are ranks and nothing else, and each
    region is a row of the array that is sorted, whose merges end with it.

    Args:
        table: (N_out, K) int32.
        region: rows that are ordered among themselves; by default all of them.
    """
    n, volume = table.shape
    if n == 0:
        return mx.zeros((0,), dtype=mx.int32)
    region = min(region or n, n)
    regions = ceil_div(n, region)
    # A bit more than there are offsets: no rank is all ones, as what fills up is.
    bits = next((b for b in KEYS if volume < b), max(KEYS))
    words, rows = ceil_div(volume + 1, bits), regions * region
    mask = mx.uint64 if bits == max(KEYS) else mx.uint32
    kernel = _kernel("gray_keys", _GRAY, KEY=KEYS[bits], MASK=mask)
    sizes = {"volume": volume, "rows": n, "words": words}

    def launch(first: int, columns: int) -> list[mx.array]:
        out, grid = [((words, columns), KEYS[bits])], (LANES, ceil_div(columns, LANES))
        return kernel([table], out, grid, first=first, columns=columns, **sizes)

    work, limit = rows * volume, dispatch_limit("elements")
    keys = by_rows(rows, work, limit, launch, axis=1)[0]
    keys = keys.reshape(words, regions, region)
    order = mx.argsort(keys[-1], axis=1)
    for word in reversed(range(words - 1)):
        here = mx.take_along_axis(keys[word], order, axis=1)
        order = mx.take_along_axis(order, mx.argsort(here, axis=1), axis=1)
    order = order.astype(mx.int32)
    if regions > 1:
        order = order + region * mx.arange(regions, dtype=mx.int32)[:, None]
    return order.flatten()[:n]

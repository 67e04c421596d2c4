"""The CUDA backend: geometry builders and contractions, by the kernels in ``cuda/``.

Compute capability 8.0 and later. On Hopper, half and bfloat16 go through wgmma.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..devices import current
from ..relation import Relation
from .cuda_geometry import (  # noqa: F401 (the backend's geometry)
    bounds,
    cell_rows,
    edges,
    expanded_rows,
    first_duplicate,
    gray_order,
    neighbour_table,
    reached_rows,
    sorted_table,
    transpose_table,
    unique_rows,
)
from .cuda_kernels import SHORT, TYPES, is_hopper, kernel, run

_HOPPER = ("tiles.cuh", "hopper.cuh")
_GENERAL = ("tiles.cuh", "tensor_core.cuh")
ROW_ALIGNMENT = 384  # every tile height divides it: 64, 128, 192


class Tile(NamedTuple):
    """Shape of a Hopper kernel: 64 rows a group, as in ``sorted_implicit_gemm_hopper``.

    The last field is how many blocks share a multiprocessor.
    """

    groups: int
    copiers: int
    width: int
    stages: int
    per_multiprocessor: int

    @property
    def rows(self) -> int:
        """Rows (of the output, or of dW) of a tile."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups + self.copiers

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * 128 * (self.rows + self.width) + 1024


# Measured on an H200, by the width of the output channels: best of 18 shapes each.
FORWARD_TILES = {
    32: Tile(2, 128, 32, 3, 3),
    64: Tile(2, 128, 64, 4, 2),
    128: Tile(3, 128, 128, 5, 1),
    256: Tile(2, 128, 256, 4, 1),
}
# The same where rows have few edges: lower tiles, more blocks.
THIN_TILES = {
    32: Tile(2, 128, 32, 3, 3),
    64: Tile(1, 128, 64, 3, 4),
    128: Tile(1, 128, 128, 4, 2),
    256: Tile(2, 128, 256, 4, 1),
}
THIN_EDGES = 4  # mean edges of a row below which relations count as thin
SORTED_ROWS = 1 << 18  # rows from which sorted_weight_grad pays
WEIGHT_GRAD_TILES = {
    32: Tile(1, 128, 32, 4, 4),
    64: Tile(1, 128, 64, 4, 3),
    128: Tile(2, 64, 128, 3, 2),
    256: Tile(2, 128, 256, 4, 1),
}


def _width(channels: int) -> int:
    """Return the tile width that wastes the least, the wider at a tie or nearly so."""
    for width in (32, 64, 128):
        if channels <= width:
            return width
    wide, narrow = -(-channels // 256) * 256, -(-channels // 128) * 128
    return 256 if wide <= 1.1 * narrow else 128


def _is_thin(relation: Relation) -> bool:
    """Whether the relation is known to have few edges a row."""
    known = relation.known_edges
    return known is not None and known < THIN_EDGES * relation.n_out


class Sorted(NamedTuple):
    """A relation's rows by Gray-code rank, laid out for tiles."""

    table: mx.array  # (K, pitch) int32
    rows: mx.array  # (N_out,) int32
    masks: mx.array  # (pitch / 32, words) uint32
    mirrored: bool  # whether offset k stands for K - 1 - k


def sorted_rows(relation: Relation) -> Sorted:
    """Return the relation's tiles. A mirrored relation and its transpose share them."""
    straight = not (relation.mirrored and relation._swapped)
    base = relation if straight else relation.T

    def build() -> Sorted:
        table = base.out_in
        rows = gray_order(table)
        pitch = -(-table.shape[0] // ROW_ALIGNMENT) * ROW_ALIGNMENT
        ordered, masks = sorted_table(table, rows, pitch)
        return Sorted(ordered, rows, masks, False)

    view = base.view("cuda_sorted", build)
    return view if straight else view._replace(mirrored=True)


def _offset_starts(relation: Relation) -> mx.array:
    """Return (K + 1,) int32: where the edges of each offset start."""

    def build() -> mx.array:
        ends = mx.arange(relation.volume + 1, dtype=mx.int32)
        column = mx.contiguous(relation.edges[:, 2])
        return mx.searchsorted(column, ends).astype(mx.int32)

    return relation.view("cuda_starts", build)


def _padded(array: mx.array, axis: int, multiple: int) -> mx.array:
    """Return the array with zeros up to a multiple of channels."""
    short = -array.shape[axis] % multiple
    if not short:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, short)
    return mx.pad(array, widths)


def _offset_list(volume: int) -> tuple[str, str]:
    """Return a name part and the define for kernels of many offsets."""
    if volume <= 512:
        return "", ""
    length = 1 << (volume - 1).bit_length()
    return f"_k{length}", f"#define LATTICE_MAX_OFFSETS {length}"


def _splits(tiles: int, per_multiprocessor: int, volume: int) -> int:
    """Return into how many shares the offsets are cut, so that few rows fill a GPU."""
    places = current().cores * per_multiprocessor
    return max(1, min(places // max(1, tiles), volume, 8))


def sorted_implicit_gemm(x, w, relation, groups, transposed):
    """Return y by matrix tiles over mask-sorted rows."""
    del groups  # the route takes one
    n_out, volume = relation.n_out, relation.volume
    in_axis, out_axis = (2, 1) if transposed else (1, 2)
    wanted = w.shape[out_axis]
    if n_out == 0 or relation.n_in == 0 or x.shape[1] == 0:
        return mx.zeros((n_out, wanted), dtype=x.dtype)
    multiple = 16 // x.itemsize
    x = _padded(x, 1, multiple)
    w = _padded(_padded(w, in_axis, multiple), out_axis, multiple)
    c_in, c_out = x.shape[1], w.shape[out_axis]
    view = sorted_rows(relation)
    flag, mirror = ("true" if f else "false" for f in (transposed, view.mirrored))
    suffix, define = _offset_list(volume)
    numeric = TYPES[x.dtype]
    hopper = x.dtype != mx.float32 and is_hopper()
    if hopper:
        tiles_by_width = THIN_TILES if _is_thin(relation) else FORWARD_TILES
        tile = tiles_by_width[_width(c_out)]
        height, width, threads = tile.rows, tile.width, tile.threads
        per, shared = tile.per_multiprocessor, tile.shared_bytes
        runs = 4 if c_in % 64 == 0 else 1 if c_in <= 16 else 2 if c_in <= 32 else 0
        family = "sorted_implicit_gemm_hopper"
        shape = (
            f"{tile.groups}, {tile.copiers}, {width}, {tile.stages}, {flag}, {runs}, "
        )
        files = (*_HOPPER, f"{family}.cu")
    else:
        height, width, threads, per, shared = 64, 64, 128, 2, 4 * 2 * 64 * 128
        family = "sorted_implicit_gemm"
        shape = f"{flag}, "
        files = (*_GENERAL, f"{family}.cu")
    tiles = -(-n_out // height) * -(-c_out // width)
    splits = _splits(tiles, per, volume)
    out = x.dtype if splits == 1 else mx.float32
    name = "_".join([family, SHORT[x.dtype], SHORT[out], *shape.split(", "), mirror])
    function = kernel(
        name + suffix,
        files,
        ("x", "w", "neighbours", "rows", "masks"),
        ("y",),
        f"lattice::{family}<{numeric}, {shape}{TYPES[out]}>(x, w, neighbours, rows, "
        f"masks, y, rows_shape[0], neighbours_shape[1], neighbours_shape[0], "
        f"x_shape[1], w_shape[{out_axis}], gridDim.y, {mirror});",
        threads=threads,
        blocks_per_multiprocessor=per,
        shared_bytes=shared,
        define=define,
    )
    shape = (n_out, c_out) if splits == 1 else (splits, n_out, c_out)
    inputs = [x, w, view.table, view.rows, view.masks]
    y = run(function, inputs, (tiles, splits), threads, [(shape, out)])[0]
    if splits > 1:
        y = y.sum(axis=0).astype(x.dtype)
    return y if c_out == wanted else y[:, :wanted]


def grouped_gemm_weight_grad(x, dy, relation, groups):
    """Return dW by matrix tiles over equal ranges of the kernel-major edges."""
    del groups  # the route takes one
    volume, wanted = relation.volume, (x.shape[1], dy.shape[1])
    n_edges = relation.n_edges
    if n_edges == 0 or 0 in wanted:
        return mx.zeros((volume, *wanted), dtype=x.dtype)
    multiple = 16 // x.itemsize
    x, dy = _padded(x, 1, multiple), _padded(dy, 1, multiple)
    c_in, c_out = x.shape[1], dy.shape[1]
    numeric = TYPES[x.dtype]
    if x.dtype != mx.float32 and is_hopper():
        tile = WEIGHT_GRAD_TILES[_width(max(c_in, c_out))]
        family, height, width = "grouped_gemm_hopper", tile.rows, tile.width
        threads, shared, per = tile.threads, tile.shared_bytes, tile.per_multiprocessor
        shape = f"{numeric}, {tile.groups}, {tile.copiers}, {width}, {tile.stages}"
        files = (*_HOPPER, f"{family}.cu")
    else:
        family, height, width, threads = "grouped_gemm", 64, 64, 128
        shared, per, shape = 4 * 2 * 64 * 128, 2, numeric
        files = (*_GENERAL, f"{family}.cu")
    tiles = -(-c_in // height) * -(-c_out // width)
    body = (
        f"const int tiles = (x_shape[1] + {height - 1}) / {height} * "
        f"((dy_shape[1] + {width - 1}) / {width});\n"
        f"const int n_edges = edges_shape[0], ranges = gridDim.x / tiles;\n"
        f"lattice::{family}<{shape}>(x, dy, edges, starts, partials, n_edges, "
        f"(n_edges + ranges - 1) / ranges, starts_shape[0] - 1, x_shape[1], "
        f"dy_shape[1]);"
    )
    function = kernel(
        "_".join([family, SHORT[x.dtype], str(height), str(width)]),
        files,
        ("x", "dy", "edges", "starts"),
        ("partials",),
        body,
        threads=threads,
        blocks_per_multiprocessor=per,
        shared_bytes=shared,
    )
    ranges = max(1, min(current().cores * per // tiles, -(-n_edges // 64)))
    inputs = [x, dy, relation.edges, _offset_starts(relation)]
    dw = _partial_sums(function, inputs, ranges, tiles, threads, c_in, c_out, relation)
    return dw if (c_in, c_out) == wanted else dw[:, : wanted[0], : wanted[1]]


def sorted_weight_grad(x, dy, relation, groups):
    """Return dW by tiles over mask-sorted rows, or over edges where that is better."""
    volume, wanted = relation.volume, (x.shape[1], dy.shape[1])
    n_out = relation.n_out
    fits = x.dtype != mx.float32 and is_hopper() and wanted[0] <= 64
    if not fits or n_out < SORTED_ROWS or 0 in wanted or _is_thin(relation):
        return grouped_gemm_weight_grad(x, dy, relation, groups)
    x, dy = _padded(x, 1, 8), _padded(dy, 1, 8)
    c_in, c_out = x.shape[1], dy.shape[1]
    view = sorted_rows(relation)
    pack = 4 if c_in <= 16 else 2 if c_in <= 32 else 1
    width = 32 if c_out <= 32 else 64
    warpgroups, stages = 4, 4
    threads = 128 * warpgroups + 256
    shared = stages * 128 * (64 * warpgroups + width) + 1024
    mirror = "true" if view.mirrored else "false"
    shape = f"{warpgroups}, {width}, {stages}, {pack}"
    function = kernel(
        "_".join(["sorted_weight_grad", SHORT[x.dtype], str(width), str(pack), mirror]),
        (*_HOPPER, "sorted_weight_grad_hopper.cu"),
        ("x", "dy", "neighbours", "rows", "masks"),
        ("partials",),
        "const int blocks = (rows_shape[0] + 63) / 64;\n"
        f"lattice::sorted_weight_grad_hopper<{TYPES[x.dtype]}, {shape}>(x, dy, "
        "neighbours, rows, masks, partials, rows_shape[0], neighbours_shape[1], "
        "neighbours_shape[0], x_shape[1], dy_shape[1], "
        f"(blocks + gridDim.y - 1) / gridDim.y, {mirror});",
        threads=threads,
        shared_bytes=shared,
    )
    tiles = -(-volume // (warpgroups * pack)) * -(-c_out // width)
    blocks = -(-n_out // 64)
    # At least 32 stages a range where there are as many: a range costs a partial dW.
    ranges = max(1, min(3 * current().cores // tiles, blocks // 32))
    ranges = max(ranges, -(-blocks // 1024))
    slots = [((ranges, volume, c_in, c_out), mx.float32)]
    inputs = [x, dy, view.table, view.rows, view.masks]
    partials = run(function, inputs, (tiles, ranges), threads, slots)[0]
    elements = volume * c_in * c_out
    add = kernel(
        f"add_ranges_{SHORT[x.dtype]}",
        (*_HOPPER, "sorted_weight_grad_hopper.cu"),
        ("partials",),
        ("dw",),
        f"lattice::add_ranges<{TYPES[x.dtype]}>(partials, dw, partials_shape[0], "
        "(long long)partials_shape[1] * partials_shape[2] * partials_shape[3]);",
    )
    blocks = -(-elements // 1024)
    result = [((volume, c_in, c_out), x.dtype)]
    dw = run(add, [partials], blocks, 256, result)[0]
    return dw if (c_in, c_out) == wanted else dw[:, : wanted[0], : wanted[1]]


def _partial_sums(
    function, inputs, ranges, tiles, threads, c_in, c_out, relation
) -> mx.array:
    """Launch a kernel that leaves partial sums of dW, and add them in order."""
    dtype = inputs[0].dtype
    slots = [((ranges + relation.volume, c_in, c_out), mx.float32)]
    partials = run(function, inputs, ranges * tiles, threads, slots)[0]
    add = kernel(
        f"add_partials_{SHORT[dtype]}",
        ("tiles.cuh",),
        ("partials", "edges", "starts"),
        ("dw",),
        "const int volume = starts_shape[0] - 1;\n"
        "const int ranges = partials_shape[0] - volume;\n"
        "const int span = (edges_shape[0] + ranges - 1) / ranges;\n"
        f"lattice::add_partials<{TYPES[dtype]}>(partials, starts, dw, span, volume, "
        "partials_shape[1] * partials_shape[2]);",
    )
    shape = relation.volume, c_in, c_out
    blocks = -(-relation.volume * c_in * c_out // 256)
    return run(add, [partials, inputs[2], inputs[3]], blocks, 256, [(shape, dtype)])[0]


def relation_traversal(x, w, relation, groups, transposed):
    """Return y: one thread an output row and channel walks the row's edges."""
    n_out = relation.n_out
    shape = n_out, w.shape[1] * groups if transposed else w.shape[2]
    if n_out == 0 or relation.n_in == 0 or x.shape[1] == 0 or relation.n_edges == 0:
        return mx.zeros(shape, dtype=x.dtype)
    csr = relation.output_csr
    flag = "true" if transposed else "false"
    each = "w_shape[1]", f"w_shape[2] / {groups}"
    in_each, out_each = reversed(each) if transposed else each
    function = kernel(
        f"relation_traversal_{SHORT[x.dtype]}_{flag}_{groups}",
        ("relation_traversal.cu",),
        ("x", "w", "indptr", "edges"),
        ("y",),
        f"lattice::relation_traversal<{TYPES[x.dtype]}, {flag}>(x, w, "
        "indptr, edges, y, indptr_shape[0] - 1, "
        f"{in_each}, {out_each}, {groups});",
    )
    blocks = max(1, min(1 << 20, -(-shape[0] * shape[1] // 256)))
    inputs = [x, w, csr.indptr, csr.edges]
    return run(function, inputs, blocks, 256, [(shape, x.dtype)])[0]


def relation_traversal_weight_grad(x, dy, relation, groups):
    """Return dW over ranges of the kernel-major edges, any groups."""
    in_each, c_out = x.shape[1] // groups, dy.shape[1]
    n_edges = relation.n_edges
    if n_edges == 0 or in_each * c_out == 0:
        return mx.zeros((relation.volume, in_each, c_out), dtype=x.dtype)
    tiles = -(-in_each // 16) * -(-c_out // 16)
    function = kernel(
        f"relation_traversal_weight_grad_{SHORT[x.dtype]}_{groups}",
        ("relation_traversal.cu",),
        ("x", "dy", "edges", "starts"),
        ("partials",),
        f"const int in_each = x_shape[1] / {groups};\n"
        "const int tiles = (in_each + 15) / 16 * ((dy_shape[1] + 15) / 16);\n"
        "const int n_edges = edges_shape[0], ranges = gridDim.x / tiles;\n"
        f"lattice::relation_traversal_weight_grad<{TYPES[x.dtype]}>(x, dy, edges, "
        "starts, partials, n_edges, (n_edges + ranges - 1) / ranges, "
        f"starts_shape[0] - 1, in_each, dy_shape[1], {groups});",
    )
    ranges = max(1, min(current().cores * 8 // tiles, -(-n_edges // 256)))
    inputs = [x, dy, relation.edges, _offset_starts(relation)]
    return _partial_sums(function, inputs, ranges, tiles, 256, in_each, c_out, relation)


# Routes whose functions take ``bias``, (C_out,), and add it to their sums.
FUSED_BIAS: frozenset[str] = frozenset()
CONV = {
    "sorted_implicit_gemm": sorted_implicit_gemm,
    "relation_traversal": relation_traversal,
}
WEIGHT_GRAD = {
    "sorted_implicit_gemm": sorted_weight_grad,
    "grouped_gemm": grouped_gemm_weight_grad,
    "relation_traversal": relation_traversal_weight_grad,
}

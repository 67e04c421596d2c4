"""Weight gradients on CUDA: dW[k] = sum over edges (i, o, k) of x[i]^T dy[o].

Every kernel leaves float32 partial sums, which are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..devices import Device, current
from ..problem import DTYPES, Problem
from ..relation import Relation
from ..routes import thresholds
from .cuda_compile import TYPES
from .cuda_kernels import SHORT, is_hopper, kernel, run
from .cuda_sorted import (
    GENERAL,
    GENERAL_SHARED,
    HOPPER,
    is_thin,
    known_chip,
    padded,
    tile_width,
)
from .cuda_views import offset_starts, sorted_rows

_WALK = "edge_walk.cuh"


class Plan(NamedTuple):
    """A kernel over ranges of edges, for one set of shapes."""

    function: Callable[..., list[mx.array]]
    tiles: int
    threads: int
    ranges: int  # at most, as many as run at once
    stage: int  # edges of a block


def grouped_gemm_weight_grad(x, dy, relation, groups):
    """Return dW by matrix tiles over ranges of the kernel-major edges."""
    del groups  # the route takes one
    volume, wanted = relation.volume, (x.shape[1], dy.shape[1])
    n_edges = relation.n_edges
    if n_edges == 0 or 0 in wanted:
        return mx.zeros((volume, *wanted), dtype=x.dtype)
    multiple = 16 // x.itemsize
    x, dy = padded(x, 1, multiple), padded(dy, 1, multiple)
    c_in, c_out = x.shape[1], dy.shape[1]
    plan = _grouped_plan(x.dtype, c_in, c_out, x.dtype != mx.float32 and is_hopper())
    ranges = max(1, min(plan.ranges, -(-n_edges // plan.stage)))
    firsts = _edge_blocks(relation, plan.stage)
    inputs = [x, dy, relation.edges, offset_starts(relation), firsts]
    slots = [((ranges + volume, c_in, c_out), mx.float32)]
    blocks = ranges * plan.tiles
    partials = run(plan.function, inputs, blocks, plan.threads, slots)[0]
    dw = _added(partials, firsts, x.dtype)
    return dw if (c_in, c_out) == wanted else dw[:, : wanted[0], : wanted[1]]


def _grouped_tile(c_in: int, c_out: int, hopper: bool) -> thresholds.Tile | None:
    """Return the tile of dW, for padded channels; None for the one of 64 x 64."""
    return thresholds.GRAD_TILES[tile_width(max(c_in, c_out))] if hopper else None


def _passes_rows(
    rows: int, c_in: int, thin: bool, dtype: mx.Dtype, hopper: bool
) -> bool:
    """Whether the kernel over mask-sorted rows is better than the one over edges."""
    fits = dtype != mx.float32 and hopper and c_in <= 64
    return fits and rows >= thresholds.SORTED_GRAD_ROWS and not thin


def parameters(
    route: str, p: Problem, device: Device
) -> tuple[tuple[str, object], ...]:
    """Return the kernel of a weight gradient and its tile, as a Choice says it."""
    if route not in ("sorted_implicit_gemm", "grouped_gemm") or not known_chip(device):
        return ()
    if 0 in (p.n_in, p.n_out, p.c_in, p.c_out):
        return ()
    dtype = DTYPES[p.dtype]
    hopper, multiple = device.family != "a100", 16 // p.itemsize
    thin = p.edges is not None and p.edges < thresholds.THIN_EDGES * p.n_out
    by_rows = _passes_rows(p.n_out, p.c_in, thin, dtype, hopper)
    c_in, c_out = (-(-c // multiple) * multiple for c in (p.c_in, p.c_out))
    if route == "sorted_implicit_gemm" and by_rows:
        pack, width = _row_tile(c_in, c_out)
        return (
            ("kernel", "sorted_weight_grad"),
            ("view", "sorted"),
            ("tile", f"{64 * _WARPGROUPS} x {width}"),
            ("offsets", pack * _WARPGROUPS),
        )
    tile = _grouped_tile(c_in, c_out, hopper and dtype != mx.float32)
    if tile is None:
        return (("kernel", "grouped_gemm"), ("tile", "64 x 64"))
    return (("kernel", "grouped_gemm_hopper"), ("tile", f"{tile.rows} x {tile.width}"))


@lru_cache(maxsize=1024)
def _grouped_plan(dtype: mx.Dtype, c_in: int, c_out: int, hopper: bool) -> Plan:
    tile = _grouped_tile(c_in, c_out, hopper)
    if tile is not None:
        family, height, width = "grouped_gemm_hopper", tile.rows, tile.width
        threads, per = tile.threads, tile.per_multiprocessor
        shared = thresholds.shared_bytes(tile)
        shape = f"{tile.groups}, {tile.copiers}, {width}, {tile.stages}"
        shape, stage, files = f", {shape}", 64, (*HOPPER, _WALK, f"{family}.cu")
    else:
        family, height, width, threads = "grouped_gemm", 64, 64, 128
        shared, per, shape, stage = GENERAL_SHARED, 2, "", 128 // dtype.size
        files = (*GENERAL, _WALK, f"{family}.cu")
    tiles = -(-c_in // height) * -(-c_out // width)
    function = kernel(
        "_".join([family, SHORT[dtype], str(height), str(width)]),
        files,
        ("x", "dy", "edges", "starts", "firsts"),
        ("partials",),
        f"const int tiles = (x_shape[1] + {height - 1}) / {height} * "
        f"((dy_shape[1] + {width - 1}) / {width});\n"
        f"lattice::{family}<{TYPES[dtype]}{shape}>(x, dy, edges, starts, firsts, "
        "partials, gridDim.x / tiles, starts_shape[0] - 1, x_shape[1], dy_shape[1]);",
        threads=threads,
        blocks_per_multiprocessor=per,
        shared_bytes=shared,
    )
    return Plan(function, tiles, threads, max(1, current().cores * per // tiles), stage)


def _edge_blocks(relation: Relation, size: int) -> mx.array:
    """Return (K + 1,) int32: where the offsets' blocks of ``size`` edges start."""

    def build() -> mx.array:
        starts = offset_starts(relation)
        blocks = (starts[1:] - starts[:-1] + (size - 1)) // size
        return mx.pad(mx.cumsum(blocks), (1, 0)).astype(mx.int32)

    return relation.view(f"cuda_blocks_{size}", build)


def _added(partials: mx.array, firsts: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return dW: the partial sums of each offset, added in order of their ranges."""
    volume = firsts.shape[0] - 1
    shape = volume, *partials.shape[1:]
    blocks = -(-shape[0] * shape[1] * shape[2] // 256)
    return run(_add_partials(dtype), [partials, firsts], blocks, 256, [(shape, dtype)])[
        0
    ]


@cache
def _add_partials(dtype: mx.Dtype):
    return kernel(
        f"add_partials_{SHORT[dtype]}",
        (_WALK,),
        ("partials", "firsts"),
        ("dw",),
        "const int volume = firsts_shape[0] - 1;\n"
        f"lattice::add_partials<{TYPES[dtype]}>(partials, firsts, dw, "
        "partials_shape[0] - volume, volume, partials_shape[1] * partials_shape[2]);",
    )


def sorted_weight_grad(x, dy, relation, groups):
    """Return dW by tiles over mask-sorted rows, or over edges where that is better."""
    volume, wanted = relation.volume, (x.shape[1], dy.shape[1])
    n_out = relation.n_out
    by_rows = _passes_rows(n_out, wanted[0], is_thin(relation), x.dtype, is_hopper())
    if not by_rows or 0 in wanted:
        return grouped_gemm_weight_grad(x, dy, relation, groups)
    x, dy = padded(x, 1, 8), padded(dy, 1, 8)
    c_in, c_out = x.shape[1], dy.shape[1]
    view = sorted_rows(relation)
    pack, width = _row_tile(c_in, c_out)
    tiles = -(-volume // (_WARPGROUPS * pack)) * -(-c_out // width)
    blocks = -(-n_out // 64)
    # At least 32 stages a range where there are as many: a range costs a partial dW.
    ranges = max(1, min(3 * current().cores // tiles, blocks // 32))
    ranges = max(ranges, -(-blocks // 1024))
    slots = [((ranges, volume, c_in, c_out), mx.float32)]
    inputs = [x, dy, view.table, view.rows, view.masks]
    function = _sorted_kernel(x.dtype, width, pack, view.mirrored)
    threads = 128 * _WARPGROUPS + 256
    partials = run(function, inputs, (tiles, ranges), threads, slots)[0]
    blocks = -(-volume * c_in * c_out // 1024)
    result = [((volume, c_in, c_out), x.dtype)]
    dw = run(_add_splits(x.dtype), [partials], blocks, 256, result)[0]
    return dw if (c_in, c_out) == wanted else dw[:, : wanted[0], : wanted[1]]


def _row_tile(c_in: int, c_out: int) -> tuple[int, int]:
    """Return the offsets that share a warpgroup's 64 rows of dW, and its columns."""
    return 4 if c_in <= 16 else 2 if c_in <= 32 else 1, 32 if c_out <= 32 else 64


_WARPGROUPS, _STAGES = 4, 4  # of sorted_weight_grad_hopper: 223 KB of shared memory


@cache
def _sorted_kernel(dtype: mx.Dtype, width: int, pack: int, mirrored: bool):
    mirror = "true" if mirrored else "false"
    shape = f"{TYPES[dtype]}, {_WARPGROUPS}, {width}, {_STAGES}, {pack}"
    return kernel(
        "_".join(["sorted_weight_grad", SHORT[dtype], str(width), str(pack), mirror]),
        (*HOPPER, "sorted_weight_grad_hopper.cu"),
        ("x", "dy", "neighbours", "rows", "masks"),
        ("partials",),
        "const int blocks = (rows_shape[0] + 63) / 64;\n"
        f"lattice::sorted_weight_grad_hopper<{shape}>(x, dy, neighbours, rows, masks, "
        "partials, rows_shape[0], neighbours_shape[1], neighbours_shape[0], "
        "x_shape[1], dy_shape[1], (blocks + gridDim.y - 1) / gridDim.y, "
        f"{mirror});",
        threads=128 * _WARPGROUPS + 256,
        shared_bytes=_STAGES * 128 * (64 * _WARPGROUPS + width) + 1024,
    )


@cache
def _add_splits(dtype: mx.Dtype):
    return kernel(
        f"add_splits_{SHORT[dtype]}",
        (*HOPPER, "sorted_weight_grad_hopper.cu"),
        ("partials",),
        ("dw",),
        f"lattice::add_splits<{TYPES[dtype]}>(partials, dw, partials_shape[0], "
        "(long long)partials_shape[1] * partials_shape[2] * partials_shape[3]);",
    )


def relation_traversal_weight_grad(x, dy, relation, groups):
    """Return dW over ranges of the kernel-major edges, any groups."""
    in_each, c_out = x.shape[1] // groups, dy.shape[1]
    n_edges = relation.n_edges
    if n_edges == 0 or in_each * c_out == 0:
        return mx.zeros((relation.volume, in_each, c_out), dtype=x.dtype)
    tiles = -(-in_each // 16) * -(-c_out // 16)
    ranges = max(1, min(current().cores * 8 // tiles, -(-n_edges // 256)))
    starts = offset_starts(relation)
    slots = [((ranges + relation.volume, in_each, c_out), mx.float32)]
    inputs = [x, dy, relation.edges, starts]
    function = _traversal_kernel(x.dtype, groups)
    partials = run(function, inputs, ranges * tiles, 256, slots)[0]
    return _added(partials, starts, x.dtype)


@cache
def _traversal_kernel(dtype: mx.Dtype, groups: int):
    return kernel(
        f"relation_traversal_weight_grad_{SHORT[dtype]}_{groups}",
        ("relation_traversal.cu",),
        ("x", "dy", "edges", "starts"),
        ("partials",),
        f"const int in_each = x_shape[1] / {groups};\n"
        "const int tiles = (in_each + 15) / 16 * ((dy_shape[1] + 15) / 16);\n"
        "const int n_edges = edges_shape[0], ranges = gridDim.x / tiles;\n"
        f"lattice::relation_traversal_weight_grad<{TYPES[dtype]}>(x, dy, edges, "
        "starts, partials, n_edges, (n_edges + ranges - 1) / ranges, "
        f"starts_shape[0] - 1, in_each, dy_shape[1], {groups});",
    )

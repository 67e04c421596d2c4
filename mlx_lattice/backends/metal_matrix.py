"""Contractions on Metal by matrix tiles over sorted rows: a planner for each route.

Sums are float32 and their order depends on sizes only.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from ..devices import METAL, Device
from ..problem import DTYPES, WEIGHT_GRAD, Problem
from ..routes.plan import AFTER, IN_KERNEL, IN_SUM, Dispatch, Plan
from . import metal_weight_grad
from .dispatch_bounds import ceil_div
from .metal_counts import EIGHTS, TENSOR, sorted_multiply_adds
from .metal_plans import adding, edges_of, kernel, strides
from .metal_tiles import (
    TENSOR_COLUMNS,
    THREADS,
    TILE_ROWS,
    sorted_tile,
    tile_dispatches,
    tiles,
    tiles_together,
)
from .metal_weight_grad import TENSOR_FILES
from .signatures import SORTED_TILES, finishing, packed, sorted_tiles

SIMDGROUP_FILES = "matrix_tiles", "epilogue", "sorted_implicit_gemm"


def _sorted_plan(
    p: Problem,
    device: Device,
    name: str,
    files: tuple[str, ...],
    sums: str,
    narrowest: int = 16,
    product: tuple[int, int, int] = EIGHTS,
) -> Plan:
    """Return the plan of a kernel over mask-sorted tiles, dense weights or packed ones.

    Args:
        p: the facts.
        device: whose tiles.
        name: the route.
        files: of the kernel.
        sums: the type that has a simdgroup's sums.
        narrowest: fewest columns of a tile that the kernel has.
        product: rows, depth and columns of a product of matrices.
    """
    is_packed, dtype = name.startswith("quantized"), DTYPES[p.dtype]
    (c_x, c_y), n = p.channels, p.rows_written
    tile = sorted_tile(n, (c_x, c_y), p.volume, p.itemsize, narrowest, device)
    pieces, placed = tile_dispatches(n, tile.region, edges_of(p) * c_x * c_y, device)
    # Wide rows are cut into slices of channels where there are no splits of edges.
    sliced = tile.splits == 1 and tile.slices > 1
    splits = tile.slices if sliced else tile.splits
    across, lines = ceil_div(c_y, tile.columns), ceil_div(c_y, 4)
    dispatches = []
    for first, count in pieces:
        rows = min(n - first * TILE_ROWS, count * TILE_ROWS)
        grid, add = (across * count * THREADS, 1, splits), (lines, rows)
        dispatches.append(Dispatch(first, count, grid, add if splits > 1 else ()))
    weight_bytes = p.weight_bytes if is_packed else p.dense_weight_bytes
    together = tiles_together(weight_bytes // tile.slices, tile.region, device)
    sizes = {"volume": p.volume, "c_x": c_x, "c_y": c_y}
    sizes |= {"splits": splits, "together": together}
    after = dict(p.epilogue.template) if p.epilogue else {}
    where = IN_KERNEL if splits == 1 else IN_SUM if placed else AFTER
    across_weights = {"TRANSPOSED": p.rows_are_summed}
    interface = finishing(SORTED_TILES)
    if is_packed:
        across_weights = {"BITS": p.bits, "GROUP": p.group_size}
        interface = packed(interface)
    sizes |= strides(p, p.layout, interface)
    gpu = kernel(
        name,
        files,
        interface,
        f"{sums}<T, COLUMNS, {'true' if is_packed else 'TRANSPOSED'}>::Tile::FLOATS",
        T=dtype,
        OUT=dtype if splits == 1 else mx.float32,
        COLUMNS=tile.columns,
        **across_weights,
        PLACED=placed and splits == 1,
        SLICED=sliced,
        **(after if where == IN_KERNEL else {}),
    )
    held = max((d.add[1] for d in dispatches if d.add), default=0)
    return Plan(
        p,
        METAL,
        name,
        "sorted",
        sorted_tiles,
        tile=(TILE_ROWS, tile.columns),
        splits=splits,
        sliced=sliced,
        partials=(splits, n, c_y) if splits > 1 else (),
        placed=placed,
        read=partial(tiles, region=tile.region),
        epilogue=where if p.epilogue else "",
        weights="unpacked in tiles" if is_packed else "",
        reads_stored=not is_packed,
        scratch=4 * splits * held * c_y,
        sizes=tuple(sizes.items()),
        gpu=gpu,
        add=adding(dtype, **(after if where == IN_SUM else {})) if splits > 1 else None,
        threadgroup=(THREADS, 1, 1),
        dispatches=tuple(dispatches),
        count=partial(sorted_multiply_adds, product=product, region=tile.region),
    )


def sorted_implicit_gemm(p: Problem, device: Device) -> Plan:
    """Plan sorted_implicit_gemm: simdgroup matrices."""
    name = "sorted_implicit_gemm"
    return _sorted_plan(p, device, name, SIMDGROUP_FILES, "GemmSums")


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan quantized_sorted: packed weights, unpacked into the tiles."""
    files = *SIMDGROUP_FILES, "quantized_sorted"
    return _sorted_plan(p, device, "quantized_sorted", files, "GemmSums")


def tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan tensor_ops: the same tiles through TensorOps."""
    if p.pass_ == WEIGHT_GRAD:
        return metal_weight_grad.tensor_ops(p, device)
    kind = "TensorSums", TENSOR_COLUMNS, TENSOR
    return _sorted_plan(p, device, "tensor_ops", TENSOR_FILES, *kind)


def quantized_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan quantized_tensor_ops: packed weights, unpacked into TensorOps tiles."""
    name = "quantized_tensor_ops"
    files = *TENSOR_FILES, "quantized_sorted", name
    kind = "TensorSums", TENSOR_COLUMNS, TENSOR
    return _sorted_plan(p, device, name, files, *kind)

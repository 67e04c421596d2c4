"""Contractions on Metal by matrix tiles over sorted rows: a planner for each route.

Sums are float32 and their order depends on sizes only.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..devices import METAL, Device
from ..dtypes import DTYPES
from ..problem import WEIGHT_GRAD, Problem
from ..routes import thresholds
from ..routes.plan import (
    AFTER,
    IN_KERNEL,
    IN_SUM,
    IN_TILES,
    PROOF_SPLITS,
    Dispatch,
    Plan,
    Proof,
)
from . import metal_weight_grad
from .dispatch_bounds import ceil_div
from .metal_counts import EIGHTS, TENSOR, sorted_multiply_adds
from .metal_plans import TILE_PLACE, adding, kernel, products, strides
from .metal_tiles import (
    PROOF_TAIL,
    TILE_ROWS,
    Matrices,
    SortedTile,
    matrix_dtype,
    sorted_tile,
    tensor_tile,
    tile_dispatches,
    tiles_of,
    tiles_together,
)
from .runners import sorted_tiles
from .signatures import SORTED_TILES, finishing, packed, with_moments

SHARED_FILES = "matrix_tiles", "epilogue", "tile_moments"
SIMDGROUP_FILES = *SHARED_FILES, "sorted_implicit_gemm"
TENSOR_FILES = *SHARED_FILES, "tensor_ops"


class _Kind(NamedTuple):
    """A kernel over mask-sorted tiles, dense weights or packed ones.

    Attributes:
        name: the route.
        files: of the kernel.
        product: rows, depth and columns of a product of matrices.
        sums_moments: whether it sums statistics of its rows where it is asked to.
    """

    name: str
    files: tuple[str, ...]
    product: tuple[int, int, int] = EIGHTS
    sums_moments: bool = False


class Cut(NamedTuple):
    """How the work of such a kernel is cut.

    Attributes:
        tile: its columns, splits and slices.
        pieces: (first, count) tiles of each dispatch.
        placed: whether rows are written to their own places.
        together: tiles of rows that pass a column of tiles before the next column.
        matrices: dtype of simdgroup matrices.
        is_far: whether 32 bits do not hold the place of every element.
        moments: whether statistics of the rows are summed.
    """

    tile: SortedTile
    pieces: list[tuple[int, int]]
    placed: bool
    together: int
    matrices: str
    is_far: bool
    moments: bool = False


def _sorted_plan(p: Problem, device: Device, kind: _Kind) -> Plan:
    """Return the plan of a kernel over mask-sorted tiles."""
    (c_x, c_y), n = p.channels, p.rows_written
    is_packed = kind.name.startswith("quantized")
    matrices, edges = matrix_dtype(p.dtype, device), p.edges_at_most
    if kind.product == TENSOR:
        tile = tensor_tile(n, edges // p.volume, (c_x, c_y), p.volume, device)
    else:
        of = Matrices(is_packed or p.rows_are_summed, matrices == "float32")
        facts = n, edges, (c_x, c_y), p.volume, p.itemsize
        tile = sorted_tile(*facts, 16, device, of)
    weight_bytes = p.weight_bytes if is_packed else p.dense_weight_bytes
    many = not thresholds.is_one_launch(n, p.itemsize, METAL)
    able = kind.sums_moments and tile.partial_sums[1] == 1
    cut = cut_of(p, device, tile, weight_bytes)
    cut = cut._replace(matrices=matrices, moments=p.sums_moments and able and many)
    return _as_cut(p, kind, cut)


def cut_of(p: Problem, device: Device, tile: SortedTile, weight_bytes: int) -> Cut:
    """Return how the work of a tile is cut; ``matrices`` is left open.

    weight_bytes: of all offsets.
    """
    (c_x, c_y), n = p.channels, p.rows_written
    work = p.edges_at_most * c_x * c_y
    pieces, placed = tile_dispatches(n, tile.region, work, device)
    together = tiles_together(weight_bytes // tile.slices, tile.region, device)
    return Cut(tile, pieces, placed, together, "", _is_far(p, tile))


def _shape(tile: SortedTile) -> str:
    """Return a shape of simdgroup matrices in words."""
    groups, width, step, buffers = tile.shape
    rows = TILE_ROWS * tile.columns // (groups * width)
    staged = f"steps of {step} bytes in {buffers} buffer{'s' * (buffers > 1)}"
    return f"{groups} simdgroups of {rows} x {width}, {staged}"


def _is_far(p: Problem, tile: SortedTile) -> bool:
    """Whether 32 bits do not hold the place of an element of every array."""
    (c_x, c_y), splits = p.channels, max(tile.splits, tile.slices)
    read = p.n_out if p.transposed else p.n_in
    largest = max(
        read * c_x,
        p.rows_written * max(splits * c_y, p.volume),
        p.volume * c_x * c_y,
    )
    return largest >= thresholds.FAR_ELEMENTS["*"]


def small_cut(p: Problem, cut: Cut) -> Cut:
    """Return how a small problem is cut for the kernel of another cut."""
    tile, tiles = cut.tile, ceil_div(p.rows_written, TILE_ROWS)
    # No slice of the channels may be empty: there are two chunks of them.
    few = min(tile.splits, PROOF_SPLITS), min(tile.slices, 2)
    tile = tile._replace(splits=few[0], slices=few[1])
    pieces = [(0, tiles)] if cut.placed else [(0, 2), (2, tiles - 2)]
    together = min(cut.together, 2)
    return cut._replace(tile=tile, pieces=pieces, together=together)


def dispatches_of(p: Problem, cut: Cut, splits: int) -> tuple[Dispatch, ...]:
    """Return the dispatches of work that is cut, and of what adds its splits."""
    (_, c_y), n, tile = p.channels, p.rows_written, cut.tile
    across, lines = ceil_div(c_y, tile.columns), ceil_div(c_y, 4)
    dispatches = []
    for first, count in cut.pieces:
        rows = min(n - first * TILE_ROWS, count * TILE_ROWS)
        grid, add = (across * count * tile.threads, 1, splits), (lines, rows)
        dispatches.append(Dispatch(first, count, grid, add if splits > 1 else ()))
    return tuple(dispatches)


def _again(p: Problem, kind: _Kind, cut: Cut) -> Plan:
    return _as_cut(p, kind, small_cut(p, cut))


def _as_cut(p: Problem, kind: _Kind, cut: Cut) -> Plan:
    """Return the plan of work that is cut already."""
    name, files, product, _ = kind
    tile, pieces, placed, together, matrices, is_far, has_moments = cut
    is_packed, dtype = name.startswith("quantized"), DTYPES[p.dtype]
    (c_x, c_y), n = p.channels, p.rows_written
    sliced, splits = tile.partial_sums
    dispatches = dispatches_of(p, cut, splits)
    sizes = {"volume": p.volume, "c_x": c_x, "c_y": c_y}
    sizes |= {"splits": splits, "together": together}
    after = dict(p.epilogue.template) if p.epilogue else {}
    where = IN_KERNEL if splits == 1 else IN_SUM if placed else AFTER
    across_weights = {"TRANSPOSED": p.rows_are_summed}
    interface = with_moments(SORTED_TILES) if has_moments else finishing(SORTED_TILES)
    if is_packed:
        across_weights = {"BITS": p.bits, "GROUP": p.group_size}
        interface = packed(interface)
    sizes |= strides(p, p.layout, interface)
    memory, own, variant, as_what = "", {}, "", ""
    if tile.height:  # nothing is staged; tails are steps of 16 channels
        variant = tile.said
        own = {"HEIGHT": tile.height, "DEEP": tile.step // product[1]}
    else:
        groups, side, step, buffers = tile.shape
        own = {"M": DTYPES[matrices], "SIDE": side, "GROUPS": groups}
        own |= {"BYTES": step, "KEPT": buffers, "FAR": is_far}
        across_tile = "true" if is_packed else "TRANSPOSED"
        held = f"T, M, COLUMNS, {across_tile}, SIDE, GROUPS, BYTES, KEPT"
        memory = f"GemmSums<{held}>::Tile::FLOATS"
        as_what = products(p, DTYPES[matrices])
    gpu = kernel(
        name,
        files,
        interface,
        memory,
        TILE_PLACE,
        T=dtype,
        OUT=dtype if splits == 1 else mx.float32,
        COLUMNS=tile.columns,
        **own,
        **across_weights,
        PLACED=placed and splits == 1,
        SLICED=sliced,
        **({"FAR": is_far} if tile.height else {}),
        **(after if where == IN_KERNEL else {}),
    )
    held = max((d.add[1] for d in dispatches if d.add), default=0)
    # A line for a tile, or for each of TensorOps' simdgroups over its rows.
    lines = has_moments * sum([count for _, count in pieces])
    lines *= TILE_ROWS // (tile.height or TILE_ROWS)
    # Two chunks of summed channels, two groups of packed ones, two columns of tiles.
    group = p.group_size if is_packed and p.group_size else 32
    tried = max(group, tile.step) + PROOF_TAIL, tile.columns + PROOF_TAIL
    return Plan(
        p,
        METAL,
        name,
        "sorted",
        sorted_tiles,
        variant=variant,
        tile=(TILE_ROWS, tile.columns),
        region=tile.region,
        splits=splits,
        sliced=sliced,
        partials=(splits, n, c_y) if splits > 1 else (),
        placed=placed,
        moments=lines,
        read=tiles_of(tile.region),
        epilogue=where if p.epilogue else "",
        weights=IN_TILES if is_packed else "",
        reads_stored=not is_packed,
        scratch=4 * (splits * held + 3 * lines) * c_y,
        sizes=tuple(sizes.items()),
        gpu=gpu,
        add=adding(dtype, **(after if where == IN_SUM else {})) if splits > 1 else None,
        products=as_what,
        threadgroup=(tile.threads, 1, 1),
        dispatches=dispatches,
        count=partial(sorted_multiply_adds, product=product, region=tile.region),
        proof=Proof(
            tried[::-1] if p.transposed else tried,
            partial(_again, kind=kind, cut=cut),
        ),
    )


def sorted_implicit_gemm(p: Problem, device: Device) -> Plan:
    """Plan sorted_implicit_gemm: simdgroup matrices."""
    kind = _Kind("sorted_implicit_gemm", SIMDGROUP_FILES, sums_moments=True)
    return _sorted_plan(p, device, kind)


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan quantized_sorted: packed weights, unpacked into the tiles."""
    files = *SIMDGROUP_FILES, "quantized_sorted"
    return _sorted_plan(p, device, _Kind("quantized_sorted", files))


def tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan tensor_ops: sorted rows and weights from device memory to TensorOps."""
    if p.pass_ == WEIGHT_GRAD:
        return metal_weight_grad.tensor_ops(p, device)
    kind = _Kind("tensor_ops", TENSOR_FILES, TENSOR, sums_moments=True)
    return _sorted_plan(p, device, kind)


def quantized_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan quantized_tensor_ops: packed weights, unpacked into TensorOps' operands."""
    name = "quantized_tensor_ops"
    files = *TENSOR_FILES, name
    return _sorted_plan(p, device, _Kind(name, files, TENSOR))

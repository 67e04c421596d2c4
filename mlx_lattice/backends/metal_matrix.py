"""Contractions on Metal by matrix tiles over sorted rows: a planner for each route.

Float sums are float32, in an order that depends on sizes only. Sums of int8 features
are exact: TensorOps (M5 and later) add in int32, and simdgroup matrices multiply int8
as half and add in float32, which is exact while a sum stays below 2**24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx

from ..devices import METAL, Device
from ..dtypes import DTYPES
from ..integer_facts import ALIGNMENT, FOLLOWING
from ..problem import WEIGHT_GRAD, Problem
from ..quantized import IntegerWeight
from ..relation import Relation
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
    integers_unpacked,
)
from . import metal_weight_grad
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface, Value
from .metal_tiles import (
    EIGHTS,
    PROOF_TAIL,
    TENSOR,
    TILE_PLACE,
    TILE_ROWS,
    SortedTile,
    adding,
    kernel,
    matrix_dtype,
    products,
    sorted_multiply_adds,
    sorted_tile,
    strides,
    tensor_tile,
    tile_dispatches,
    tiles_of,
    tiles_together,
)
from .runners import sorted_tiles
from .signatures import (
    ADD_SPLITS,
    SORTED_TILES,
    W_OFFSET,
    W_ROW,
    finishing,
    packed,
    with_moments,
)

SHARED_FILES = "matrix_tiles", "epilogue", "tile_moments"
SIMDGROUP_FILES = *SHARED_FILES, "sorted_implicit_gemm"
TENSOR_FILES = *SHARED_FILES, "tensor_ops"
INTEGER_FILES = *SHARED_FILES, "integer_epilogue"
FILES = {
    "sorted_implicit_gemm": SIMDGROUP_FILES,
    "quantized_sorted": (*SIMDGROUP_FILES, "quantized_sorted"),
    "tensor_ops": TENSOR_FILES,
    "quantized_tensor_ops": (*TENSOR_FILES, "quantized_tensor_ops"),
}
HALF = mx.float16  # holds every int8
INTEGER_TILES = replace(SORTED_TILES, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
INTEGER_SPLITS = replace(ADD_SPLITS, inputs=("partial", "rows", *FOLLOWING))
UNPACK_INT4 = Interface(
    "UnpackInt4", ("words", "multipliers"), ("w",), (("words", "0"),)
)


def sorted_implicit_gemm(p: Problem, device: Device) -> Plan:
    """Plan sorted_implicit_gemm: simdgroup matrices."""
    return _float_plan(p, device, "sorted_implicit_gemm")


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan quantized_sorted: packed weights; or int8 rows and weights, as half."""
    if not p.integer:
        return _float_plan(p, device, "quantized_sorted")
    facts = p.rows_written, p.edges_at_most, p.channels, p.volume, HALF.size
    tile = sorted_tile(*facts, device, across=True, in_float=False)
    return _integer_plan(p, device, tile)


def tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan tensor_ops: sorted rows and weights from device memory to TensorOps."""
    if p.pass_ == WEIGHT_GRAD:
        return metal_weight_grad.tensor_ops(p, device)
    return _float_plan(p, device, "tensor_ops")


def quantized_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan quantized_tensor_ops: packed weights, unpacked into TensorOps' operands."""
    return _float_plan(p, device, "quantized_tensor_ops")


def int8_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan int8_tensor_ops: sorted rows and weights, both int8, to TensorOps."""
    shared = p.edges_at_most // p.volume
    sizes = p.rows_written, shared, p.channels, p.volume
    return _integer_plan(p, device, tensor_tile(*sizes, device, item=1))


class Cut(NamedTuple):
    """How the work of tiles is cut.

    Attributes:
        tile: its columns, splits and slices.
        pieces: (first, count) tiles of each dispatch.
        placed: whether rows are written to their own places.
        together: tiles of rows that pass a column of tiles before the next column.
        is_far: whether 32 bits do not hold the place of every element.
        matrices: dtype of simdgroup matrices of floats.
        moments: whether statistics of the rows are summed.
    """

    tile: SortedTile
    pieces: list[tuple[int, int]]
    placed: bool
    together: int
    is_far: bool
    matrices: str = ""
    moments: bool = False


def _cut(p: Problem, device: Device, tile: SortedTile, weight_bytes: int) -> Cut:
    """Return how the work of a tile is cut; ``weight_bytes`` are of all offsets."""
    (c_x, c_y), n = p.channels, p.rows_written
    work = p.edges_at_most * c_x * c_y
    pieces, placed = tile_dispatches(n, tile.region, work, device)
    together = tiles_together(weight_bytes // tile.slices, tile.region, device)
    return Cut(tile, pieces, placed, together, _is_far(p, tile))


def _is_far(p: Problem, tile: SortedTile) -> bool:
    """Whether 32 bits do not hold the place of an element of every array."""
    (c_x, c_y), splits = p.channels, max(tile.splits, tile.slices)
    read = p.n_out if p.transposed else p.n_in
    largest = max(
        read * c_x, p.rows_written * max(splits * c_y, p.volume), p.volume * c_x * c_y
    )
    return largest >= thresholds.FAR_ELEMENTS["*"]


def _small_cut(p: Problem, cut: Cut) -> Cut:
    """Return how a small problem is cut for the kernel of another cut."""
    tile, tiles = cut.tile, ceil_div(p.rows_written, TILE_ROWS)
    # No slice of the channels may be empty: there are two chunks of them.
    few = min(tile.splits, PROOF_SPLITS), min(tile.slices, 2)
    tile = tile._replace(splits=few[0], slices=few[1])
    pieces = [(0, tiles)] if cut.placed else [(0, 2), (2, tiles - 2)]
    together = min(cut.together, 2)
    return cut._replace(tile=tile, pieces=pieces, together=together)


def _plan(
    p: Problem, cut: Cut, name: str, gpu: GpuKernel, sizes: dict[str, int], **facts
) -> Plan:
    """Return the plan of a kernel over mask-sorted tiles, its work cut.

    ``sizes`` are the kernel's own; ``facts`` have ``scratch`` beside partial sums.
    """
    (c_x, c_y), n, tile = p.channels, p.rows_written, cut.tile
    sliced, splits = tile.partial_sums
    across, lines = ceil_div(c_y, tile.columns), ceil_div(c_y, 4)
    dispatches, held = [], 0
    for first, count in cut.pieces:
        rows = min(n - first * TILE_ROWS, count * TILE_ROWS)
        grid, add = (across * count * tile.threads, 1, splits), ()
        if splits > 1:
            add, held = (lines, rows), max(held, rows)
        dispatches.append(Dispatch(first, count, grid, add))
    common = {"volume": p.volume, "c_x": c_x, "c_y": c_y}
    common |= {"splits": splits, "together": cut.together}
    product = TENSOR if tile.height else EIGHTS
    facts["scratch"] += 4 * splits * held * c_y
    return Plan(
        p,
        METAL,
        name,
        "sorted",
        tile=(TILE_ROWS, tile.columns),
        region=tile.region,
        splits=splits,
        sliced=sliced,
        partials=(splits, n, c_y) if splits > 1 else (),
        placed=cut.placed,
        read=tiles_of(tile.region),
        sizes=tuple((common | sizes).items()),
        gpu=gpu,
        threadgroup=(tile.threads, 1, 1),
        dispatches=tuple(dispatches),
        count=partial(sorted_multiply_adds, product=product, region=tile.region),
        **facts,
    )


def _float_plan(p: Problem, device: Device, name: str) -> Plan:
    """Plan a kernel on floats, by simdgroup matrices or TensorOps."""
    (c_x, c_y), n = p.channels, p.rows_written
    is_packed = name.startswith("quantized")
    matrices, edges = matrix_dtype(p.dtype, device), p.edges_at_most
    if name.endswith("tensor_ops"):
        tile = tensor_tile(n, edges // p.volume, (c_x, c_y), p.volume, device)
    else:
        of = is_packed or p.rows_are_summed, matrices == "float32"
        facts = n, edges, (c_x, c_y), p.volume, p.itemsize
        tile = sorted_tile(*facts, device, *of)
    weight_bytes = p.weight_bytes if is_packed else p.dense_weight_bytes
    many = not thresholds.is_one_launch(n, p.itemsize, METAL)
    able = not is_packed and tile.partial_sums[1] == 1
    moments = p.sums_moments and able and many
    cut = _cut(p, device, tile, weight_bytes)
    return _floats_as_cut(p, name, cut._replace(matrices=matrices, moments=moments))


def _floats_again(p: Problem, name: str, cut: Cut) -> Plan:
    return _floats_as_cut(p, name, _small_cut(p, cut))


def _floats_as_cut(p: Problem, name: str, cut: Cut) -> Plan:
    """Return the plan of work that is cut already."""
    tile, is_packed, dtype = cut.tile, name.startswith("quantized"), DTYPES[p.dtype]
    sliced, splits = tile.partial_sums
    after = dict(p.epilogue.template) if p.epilogue else {}
    where = IN_KERNEL if splits == 1 else IN_SUM if cut.placed else AFTER
    across_weights = {"TRANSPOSED": p.rows_are_summed}
    interface = with_moments(SORTED_TILES) if cut.moments else finishing(SORTED_TILES)
    if is_packed:
        across_weights = {"BITS": p.bits, "GROUP": p.group_size}
        interface = packed(interface)
    memory, variant, as_what = "", "", ""
    if tile.height:  # nothing is staged; tails are steps of 16 channels
        variant = tile.said
        own = {"HEIGHT": tile.height, "DEEP": tile.step // TENSOR[1], **across_weights}
    else:
        groups, side, step, buffers = tile.shape
        own = {"M": DTYPES[cut.matrices], "SIDE": side, "GROUPS": groups}
        own |= {"BYTES": step, "KEPT": buffers, "FAR": cut.is_far, **across_weights}
        across_tile = "true" if is_packed else "TRANSPOSED"
        held = f"T, M, COLUMNS, {across_tile}, SIDE, GROUPS, BYTES, KEPT"
        memory = f"GemmSums<{held}>::Tile::FLOATS"
        as_what = products(p, DTYPES[cut.matrices])
    gpu = kernel(
        name,
        FILES[name],
        interface,
        memory,
        TILE_PLACE,
        T=dtype,
        OUT=dtype if splits == 1 else mx.float32,
        COLUMNS=tile.columns,
        **own,
        PLACED=cut.placed and splits == 1,
        SLICED=sliced,
        **({"FAR": cut.is_far} if tile.height else {}),
        **(after if where == IN_KERNEL else {}),
    )
    # A line for a tile, or for each of TensorOps' simdgroups over its rows.
    lines = cut.moments * sum([count for _, count in cut.pieces])
    lines *= TILE_ROWS // (tile.height or TILE_ROWS)
    # Two chunks of summed channels, two groups of packed ones, two columns of tiles.
    group = p.group_size if is_packed and p.group_size else 32
    tried = max(group, tile.step) + PROOF_TAIL, tile.columns + PROOF_TAIL
    again = partial(_floats_again, name=name, cut=cut)
    return _plan(
        p,
        cut,
        name,
        gpu,
        strides(p, p.layout, interface),
        bind=sorted_tiles,
        variant=variant,
        moments=lines,
        epilogue=where if p.epilogue else "",
        weights=IN_TILES if is_packed else "",
        reads_stored=not is_packed,
        scratch=12 * lines * p.channels[1],
        add=adding(dtype, **(after if where == IN_SUM else {})) if splits > 1 else None,
        products=as_what,
        proof=Proof(tried[::-1] if p.transposed else tried, again),
    )


def _integer_plan(p: Problem, device: Device, tile: SortedTile) -> Plan:
    """Plan a kernel on integers by a tile."""
    weight_bytes = p.volume * p.c_out * p.packed_channels
    return _integers_as_cut(p, _cut(p, device, tile, weight_bytes))


def _integers_again(p: Problem, cut: Cut) -> Plan:
    return _integers_as_cut(p, _small_cut(p, cut))


def _integers_as_cut(p: Problem, cut: Cut) -> Plan:
    """Return the plan of work that is cut already."""
    tile, placed, facts, c_y = cut.tile, cut.placed, p.integer, p.channels[1]
    sliced, splits = tile.partial_sums
    is_split, stored, dtype = splits > 1, p.packed_channels, DTYPES[p.dtype]
    out, residual = facts.out_dtype(dtype), mx.int8 if facts.residual_int8 else dtype
    after = {"R": residual, "ACTIVATION": facts.act.code}
    symbol, files, own = _integer_kernel(tile)
    sums = "GemmSums<M, M, COLUMNS, true, SIDE, GROUPS, BYTES, KEPT>::Tile::FLOATS"
    gpu = kernel(
        symbol,
        files,
        INTEGER_TILES,
        "" if tile.height else sums,
        TILE_PLACE,
        OUT=mx.int32 if is_split else out,
        COLUMNS=tile.columns,
        **own,
        PLACED=placed and not is_split,
        SLICED=sliced,
        FAR=cut.is_far,
        **(dict(R=dtype, ACTIVATION=0) if is_split else after),
    )
    name = "quantized_sorted"
    variant = "int8 as half, exact while sums stay below 2^24"
    if tile.height:
        name, variant = "int8_tensor_ops", tile.said
    add = None
    if is_split:
        files = *INTEGER_FILES, "add_integer_splits"
        template = {"T": out, "PLACED": placed, **after}
        add = kernel("add_integer_splits", files, INTEGER_SPLITS, **template)
    # Rows of whole words, and a tail.
    step = tile.step or tile.shape.step // HALF.size
    deep = max(p.group_size or ALIGNMENT, step) + PROOF_TAIL // 4 * 4
    tried, again = (deep, tile.columns + PROOF_TAIL), partial(_integers_again, cut=cut)
    return _plan(
        p,
        cut,
        name,
        gpu,
        {W_OFFSET: c_y * stored, W_ROW: stored},
        bind=_bind_integers,
        variant=variant,
        epilogue=IN_SUM if is_split else IN_KERNEL,
        weights=integers_unpacked(p),
        scratch=p.volume * c_y * stored if p.bits == 4 else 0,
        add=add,
        proof=Proof(tried, again),
    )


def _integer_kernel(tile: SortedTile) -> tuple[str, tuple[str, ...], dict[str, Value]]:
    """Return symbol, files and own template arguments of a tile's kernel."""
    if tile.height:
        own = {"HEIGHT": tile.height, "DEEP": tile.step // TENSOR[1]}
        return "int8_tensor_ops", (*INTEGER_FILES, "tensor_ops", "int8_tensor_ops"), own
    groups, side, step, buffers = tile.shape
    own = {"M": HALF, "SIDE": side, "GROUPS": groups, "BYTES": step, "KEPT": buffers}
    name = "quantized_sorted_int8"
    return name, (*INTEGER_FILES, SIMDGROUP_FILES[-1], name), own


def _bind_integers(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over sorted rows; int4 weights become int8 before."""
    call = sorted_tiles(plan, relation)

    def called(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        values = w.values
        if w.bits == 4:
            values = _unpacker(values.shape, w.group_size)(list(w.arrays))[0]
        return call(x, values, *added)

    return called


@lru_cache(maxsize=1024)
def _unpacker(shape: tuple[int, ...], group_size: int) -> Callable:
    """Return the launch that makes int4 words of a shape int8: (K, C_out, channels)."""
    volume, c_out, words = shape
    count = volume * c_out * words
    files = "matrix_tiles", "unpack_int4"
    gpu = kernel("unpack_int4", files, UNPACK_INT4, GROUP=group_size)
    made = (volume, c_out, 8 * words), mx.int8
    return gpu.launcher((True, True), [made], (count,), words=count)

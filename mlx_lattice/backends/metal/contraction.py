"""Contractions on Metal: for each route of the table a planner returns its Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx

from ...checks import DTYPES
from ...devices import METAL, Device
from ...problem import (
    AFTER,
    ALIGNMENT,
    FOLLOWING,
    IN_KERNEL,
    IN_SUM,
    IN_TILES,
    KERNEL_MAJOR,
    PROOF_SPLITS,
    WEIGHT_GRAD,
    Dispatch,
    Plan,
    Problem,
    Proof,
    integers_unpacked,
)
from ...relation import Relation
from ..gpu import kernel as gpu_kernel
from ..gpu.contraction import (
    ADD_SPLITS,
    PER_ROW,
    PER_ROW_OF_EDGES,
    SORTED_TILES,
    W_OFFSET,
    W_ROW,
    copied,
    finishing,
    integer_tiles,
    packed,
    per_row,
    sorted_tiles,
    with_moments,
)
from ..gpu.kernel import (
    SEGMENT_CUTS,
    GpuKernel,
    Interface,
    Value,
    ceil_div,
    dispatch_limit,
    fitting_threadgroup,
)
from ..gpu.reductions import GpuReductions, pieces
from . import weight_grad as metal_weight_grad
from .tiles import (
    EIGHTS,
    FAR_ELEMENTS,
    PER_EDGE,
    PROOF_TAIL,
    TENSOR,
    TILE_PLACE,
    TILE_ROWS,
    SortedTile,
    adding,
    dispatched,
    kernel,
    matrix_dtype,
    products,
    sorted_multiply_adds,
    sorted_tile,
    strides,
    table,
    table_multiply_adds,
    tensor_tile,
    tile_dispatches,
    tiles_of,
)

# Rows of a thread; then rows of a threadgroup, and its threads.
VEC4_ROWS, HALF_ROWS = 4, 2
DENSE_ROWS, COUT16_ROWS, TILE_THREADS = 64, 128, 128
TRAVERSAL = ("relation_traversal",)


def _output_csr(relation: Relation) -> tuple[mx.array, ...]:
    """Return the start of each row's edges, and the edges (i, o, k) by row."""
    return tuple(relation.output_csr)


def _pieces(relation: Relation) -> tuple[mx.array, ...]:
    """Return the starts of the pieces of rows, and the edges by row."""
    return _cut_rows(relation)[0], relation.output_csr.edges


def _cut_rows(relation: Relation) -> tuple[mx.array, mx.array]:
    """Return the starts of the pieces of rows, and the first piece of each row."""
    starts, edges = relation.output_csr
    name = f"output_csr_pieces_{SEGMENT_CUTS['piece']}"
    return relation.view(name, lambda: pieces(starts, len(edges)))


def _in_pieces(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by float32 sums of pieces of rows, added in order."""
    sums, pieces_of_rows = per_row(plan, relation), _cut_rows(relation)[1]

    def call(x, w, bias=None) -> mx.array:
        y = GpuReductions(METAL).sum_segments(sums(x, w), pieces_of_rows)
        return (y if bias is None else y + bias).astype(x.dtype)

    return call


def _by_rows(
    p: Problem,
    name: str,
    gpu: GpuKernel,
    grid: Callable[[int], tuple[int, ...]],
    limit: int,
    most: int | None = None,
    **facts,
) -> Plan:
    """Return the plan of a kernel over slices of output rows."""
    edge = p.c_in // p.groups * p.c_out
    most = None if most is None else most * edge
    rows = facts["partials"][0] if facts.get("partials") else p.rows_written
    dispatches = dispatched(rows, p.edges_at_most * edge, limit, grid, most)
    c_x, c_y = (c // p.groups for c in p.channels)
    sizes = {"volume": p.volume, "groups": p.groups, "c_x": c_x, "c_y": c_y}
    layout = p.layout if facts.get("reads_stored") else KERNEL_MAJOR
    sizes |= strides(p, layout, gpu.interface)
    # A tile's threads are side by side: they are one threadgroup.
    threads = dispatches and fitting_threadgroup((*dispatches[0].grid, 1)[:3])
    plan = {
        "view": "out_in",
        "bind": per_row,
        "read": table,
        "variant": "" if gpu.symbol == name else gpu.symbol,
        "sizes": tuple(sizes.items()),
        "threadgroup": threads,
        "gpu": gpu,
        "dispatches": dispatches,
        **facts,
    }
    return Plan(p, METAL, name, **plan)


def _four_channels(p: Problem) -> Callable[[int], tuple[int, ...]]:
    """Return the grid of a kernel whose threads have a row and four channels."""
    across = p.groups * ceil_div(p.channels[1] // p.groups, 4)
    return lambda rows: (across, rows)


def relation_traversal(p: Problem, device: Device) -> Plan:
    """Plan relation_traversal: a thread walks the edges of a row, in order."""
    name, dtype = "relation_traversal", DTYPES[p.dtype]
    if p.pass_ == WEIGHT_GRAD:
        return metal_weight_grad.relation_traversal(p, device)
    grid, limit = _four_channels(p), dispatch_limit("multiply_adds")
    if p.table:
        template = {"T": dtype, "TRANSPOSED": p.rows_are_summed}
        gpu = kernel(name, TRAVERSAL, PER_ROW, **template)
        facts = {"most": p.volume, "reads_stored": True}
        return _by_rows(p, name, gpu, grid, limit, **facts)
    edges, most, out = p.edges_at_most, SEGMENT_CUTS["longest"], dtype
    facts = {"view": "output_csr", "read": _output_csr, "reads_stored": True}
    if edges > most:
        # Long rows are cut in pieces: one thread would be slow to add them up.
        most, out = SEGMENT_CUTS["piece"], mx.float32
        sums = p.rows_written + ceil_div(edges, most), p.channels[1]
        facts |= {"read": _pieces, "bind": _in_pieces, "partials": sums}
        facts["scratch"] = 4 * sums[0] * sums[1]
    template = {"T": dtype, "OUT": out, "TRANSPOSED": p.rows_are_summed}
    gpu = kernel(f"{name}_csr", TRAVERSAL, PER_ROW_OF_EDGES, **template)
    return _by_rows(p, name, gpu, grid, limit, min(edges, most), **facts)


def _by_table(p: Problem, name: str, rows: int, across: int, **template: bool) -> Plan:
    """Plan threads of ``rows`` rows by 4 channels, ``across`` threads for each row."""
    gpu = kernel(name, (name,), PER_ROW, **template, TRANSPOSED=p.rows_are_summed)
    limit = dispatch_limit("multiply_adds")
    facts = {"most": p.volume, "reads_stored": True}
    return _by_rows(p, name, gpu, lambda n: (across, ceil_div(n, rows)), limit, **facts)


def vec4(p: Problem, device: Device) -> Plan:
    """Plan vec4: a thread has four rows of four channels."""
    return _by_table(p, "vec4", VEC4_ROWS, p.c_out // 4, WIDE=p.c_in % 4 == 0)


def fp16_gather(p: Problem, device: Device) -> Plan:
    """Plan fp16_gather: a thread has two rows of four channels."""
    return _by_table(p, "fp16_gather", HALF_ROWS, ceil_div(p.channels[1], 4))


def depthwise(p: Problem, device: Device) -> Plan:
    """Plan depthwise: a thread has one row of four independent channels."""
    if p.pass_ == WEIGHT_GRAD:
        return metal_weight_grad.depthwise(p, device)
    symbol = "depthwise_transposed" if p.transposed else "depthwise"
    gpu = kernel(symbol, (*TRAVERSAL, "depthwise"), PER_ROW, T=DTYPES[p.dtype])
    across = ceil_div(p.channels[1], 4)
    return _by_rows(
        p,
        "depthwise",
        gpu,
        lambda rows: (across, rows),
        dispatch_limit("elements"),
        most=p.volume,
        weights=copied(p),
    )


def quantized_traversal(p: Problem, device: Device) -> Plan:
    """Plan quantized_traversal: a thread walks the edges of a row, in order."""
    name, facts = "quantized_traversal", {"weights": IN_TILES}
    symbol, interface = name, PER_ROW
    if not p.table:
        symbol, interface = f"{name}_csr", PER_ROW_OF_EDGES
        facts |= {"view": "output_csr", "read": _output_csr}
    template = {"T": DTYPES[p.dtype], "BITS": p.bits, "GROUP": p.group_size}
    gpu = kernel(symbol, (*TRAVERSAL, name), packed(interface), **template)
    limit = dispatch_limit("multiply_adds")
    return _by_rows(p, name, gpu, _four_channels(p), limit, **facts)


def dense_channel(p: Problem, device: Device) -> Plan:
    """Plan dense_channel: tiles of unsorted rows, with the channels compiled in."""
    name, (c_x, c_y) = "dense_channel", p.channels
    gpu = kernel(
        name,
        ("matrix_tiles", name),
        PER_ROW,
        "TableTile<T, C_Y, 2, C_X, TRANSPOSED>::FLOATS",
        T=DTYPES[p.dtype],
        M=DTYPES[matrix_dtype(p.dtype, device)],
        C_X=c_x,
        C_Y=c_y,
        TRANSPOSED=p.rows_are_summed,
    )
    proof = Proof((p.c_in, p.c_out), partial(dense_channel, device=device))
    return _table_tiles(p, device, name, gpu, DENSE_ROWS, proof)


def cout16(p: Problem, device: Device) -> Plan:
    """Plan cout16: tiles of unsorted rows, each with all 16 channels of y."""
    gpu = kernel(
        "cout16",
        ("matrix_tiles", "dense_channel", "cout16"),
        PER_ROW,
        "TableTile<T, 16, 4, 0, TRANSPOSED>::FLOATS",
        T=DTYPES[p.dtype],
        M=DTYPES[matrix_dtype(p.dtype, device)],
        TRANSPOSED=p.rows_are_summed,
    )
    proof = Proof((32 + PROOF_TAIL, p.c_out), partial(cout16, device=device))
    return _table_tiles(p, device, "cout16", gpu, COUT16_ROWS, proof)


def _table_tiles(
    p: Problem, device: Device, name: str, gpu: GpuKernel, height: int, proof: Proof
):
    """Return the plan of matrix tiles that have all channels of their rows."""
    return _by_rows(
        p,
        name,
        gpu,
        lambda rows: (TILE_THREADS, ceil_div(rows, height)),
        gpu_kernel.matrix_limit(device),
        tile=(height, p.channels[1]),
        threadgroup=(TILE_THREADS, 1, 1),
        count=table_multiply_adds,
        products=products(p, dict(gpu.template)["M"]),
        reads_stored=True,
        proof=proof,
    )


def fp32_atomic(p: Problem, device: Device) -> Plan:
    """Plan fp32_atomic: a thread adds four channels of one edge to its row."""
    c_x, c_y = p.channels
    across, limit = ceil_div(c_y, 4), dispatch_limit("multiply_adds")
    edges = p.edges_at_most
    dispatches = dispatched(edges, edges * c_x * c_y, limit, lambda n: (across, n))
    files = (*TRAVERSAL, "fp32_atomic")
    sizes = {"c_x": c_x, "c_y": c_y, **strides(p, p.layout, PER_EDGE)}
    return Plan(
        p,
        METAL,
        "fp32_atomic",
        "edges",
        _add_edges,
        sizes=tuple(sizes.items()),
        gpu=kernel("fp32_atomic", files, PER_EDGE, TRANSPOSED=p.rows_are_summed),
        reads_stored=True,
        threadgroup=dispatches and fitting_threadgroup((*dispatches[0].grid, 1)),
        dispatches=dispatches,
    )


def _add_edges(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by atomic addition of edges: the order of sums is not fixed."""
    edges, sizes = relation.edges, dict(plan.sizes)
    out = [((relation.n_out, plan.problem.channels[1]), mx.float32)]

    def call(x, w, bias=None) -> mx.array:
        parts = []
        for d in plan.dispatches:
            # Without counted edges the plan covers the most there can be.
            count = min(d.count, len(edges) - d.first)
            if count > 0:
                inputs, grid = [x, w, edges], (d.grid[0], count)
                sizes["first"] = d.first
                parts += plan.gpu(inputs, out, grid, plan.threadgroup, fill=0, **sizes)
        y = sum(parts[1:], parts[0]) if parts else mx.zeros(out[0][0])
        return y if bias is None else y + bias

    return call


SHARED_FILES = "matrix_tiles", "activations", "epilogue", "tile_moments"
SIMDGROUP_FILES = *SHARED_FILES, "sorted_implicit_gemm"
TENSOR_FILES = *SHARED_FILES, "tensor_ops"
INTEGER_FILES = *SHARED_FILES, "integer_epilogue"
FILES: dict[str, tuple[str, ...]] = {
    "sorted_implicit_gemm": SIMDGROUP_FILES,
    "quantized_sorted": (*SIMDGROUP_FILES, "quantized_sorted"),
    "tensor_ops": TENSOR_FILES,
    "quantized_tensor_ops": (*TENSOR_FILES, "quantized_tensor_ops"),
}
HALF = mx.float16  # represents every int8
INTEGER_TILES = replace(SORTED_TILES, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
INTEGER_SPLITS = replace(ADD_SPLITS, inputs=("partial", "rows", *FOLLOWING))
UNPACK_INT4 = Interface(
    "UnpackInt4", ("words", "multipliers"), ("w",), (("words", "0"),)
)


def sorted_implicit_gemm(p: Problem, device: Device) -> Plan:
    """Plan sorted_implicit_gemm: simdgroup matrices."""
    return _by_matrices(p, device, "sorted_implicit_gemm")


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan quantized_sorted: packed weights; or int8 rows and weights, as half."""
    return _by_matrices(p, device, "quantized_sorted")


def tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan tensor_ops: sorted rows and weights from device memory to TensorOps."""
    if p.pass_ == WEIGHT_GRAD:
        return metal_weight_grad.tensor_ops(p, device)
    return _by_tensors(p, device, "tensor_ops")


def quantized_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan quantized_tensor_ops: packed weights, unpacked into TensorOps' operands."""
    return _by_tensors(p, device, "quantized_tensor_ops")


def int8_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan int8_tensor_ops: sorted rows and weights, both int8, to TensorOps."""
    return _by_tensors(p, device, "int8_tensor_ops")


class Cut(NamedTuple):
    """The division of a contraction into tiles and dispatches."""

    name: str  # of the route
    tile: SortedTile  # its columns and splits
    pieces: list[tuple[int, int]]  # (first, count) tiles of each dispatch
    placed: bool  # whether rows are written in unsorted order
    is_far: bool  # whether an element's offset needs 64 bits
    matrices: mx.Dtype  # dtype of simdgroup matrices
    moments: bool = False  # whether statistics of the rows are summed


def _by_matrices(p: Problem, device: Device, name: str) -> Plan:
    """Plan a kernel of simdgroup matrices; int8 is multiplied as half."""
    matrices = HALF if p.integer else DTYPES[matrix_dtype(p.dtype, device)]
    item = HALF.size if p.integer else p.itemsize
    facts = p.rows_written, p.edges_at_most, p.channels, p.volume, item, device
    tile = sorted_tile(*facts, matrices == mx.float32)
    return _by_tiles(p, device, name, tile, matrices)


def _by_tensors(p: Problem, device: Device, name: str) -> Plan:
    """Plan a kernel of TensorOps."""
    shared = p.edges_at_most // p.volume
    facts = p.rows_written, shared, p.channels, p.volume, device
    tile = tensor_tile(*facts, item=1 if p.integer else 2)
    return _by_tiles(p, device, name, tile, DTYPES[p.dtype])


def _by_tiles(
    p: Problem, device: Device, name: str, tile: SortedTile, matrices: mx.Dtype
) -> Plan:
    """Plan a kernel over mask-sorted tiles."""
    (c_x, c_y), n, is_packed = p.channels, p.rows_written, name.startswith("quantized")
    pieces, placed = tile_dispatches(
        n, tile.region, p.edges_at_most * c_x * c_y, device
    )
    moments = p.sums_moments and not is_packed and tile.splits == 1
    far = _is_far(p, tile)
    return _plan_of_cut(p, Cut(name, tile, pieces, placed, far, matrices, moments))


def _is_far(p: Problem, tile: SortedTile) -> bool:
    """Return whether the offset of an element in some array needs 64 bits."""
    c_x, c_y = p.channels
    read = p.n_out if p.transposed else p.n_in
    written = p.rows_written * max(tile.splits * c_y, p.volume)
    largest = max(read * c_x, written, p.volume * c_x * c_y)
    return largest >= FAR_ELEMENTS["*"]


def _proof_plan(p: Problem, cut: Cut) -> Plan:
    """Return the plan of a small problem that runs the kernel of ``cut``."""
    tile, tiles = cut.tile, ceil_div(p.rows_written, TILE_ROWS)
    tile = tile._replace(splits=min(tile.splits, PROOF_SPLITS))
    pieces = [(0, tiles)] if cut.placed else [(0, 2), (2, tiles - 2)]
    return _plan_of_cut(p, cut._replace(tile=tile, pieces=pieces))


def _plan_of_cut(p: Problem, cut: Cut) -> Plan:
    """Return the plan of a problem with a given cut."""
    (c_x, c_y), n, tile = p.channels, p.rows_written, cut.tile
    splits, is_packed = tile.splits, cut.name.startswith("quantized")
    across, dispatches, most = ceil_div(c_y, tile.columns), [], 0
    for first, count in cut.pieces:
        rows = min(n - first * TILE_ROWS, count * TILE_ROWS)
        grid, add = (across * count * tile.threads, 1, splits), ()
        if splits > 1:
            add, most = (ceil_div(c_y, 4), rows), max(most, rows)
        dispatches.append(Dispatch(first, count, grid, add))
    gpu, add = (_integer_kernels if p.integer else _float_kernels)(p, cut)
    sizes = {"volume": p.volume, "c_x": c_x, "c_y": c_y, "splits": splits}
    variant = tile.description if tile.height else ""
    if p.integer:
        stored = p.packed_channels
        sizes |= {W_OFFSET: c_y * stored, W_ROW: stored}
        variant = variant or "int8 as half, exact while sums stay below 2^24"
    else:
        sizes |= strides(p, p.layout, gpu.interface)
    where = IN_KERNEL if splits == 1 else IN_SUM if cut.placed or p.integer else AFTER
    # A line of statistics for each tile, or for each simdgroup of TensorOps.
    lines = cut.moments * sum([count for _, count in cut.pieces])
    lines *= TILE_ROWS // (tile.height or TILE_ROWS)
    scratch = 12 * lines * c_y + 4 * (splits > 1) * splits * most * c_y
    if p.integer and p.bits == 4:
        scratch += p.volume * c_y * p.packed_channels
    weights = IN_TILES if is_packed else ""
    product = TENSOR if tile.height else EIGHTS
    return Plan(
        p,
        METAL,
        cut.name,
        "sorted",
        _integers if p.integer else sorted_tiles,
        variant=variant,
        tile=(TILE_ROWS, tile.columns),
        region=tile.region,
        splits=splits,
        partials=(splits, n, c_y) if splits > 1 else (),
        placed=cut.placed,
        moments=lines,
        read=tiles_of(tile.region),
        epilogue=where if p.epilogue or p.integer else "",
        weights=integers_unpacked(p) if p.integer else weights,
        reads_stored=not is_packed and not p.integer,
        products="" if tile.height or p.integer else products(p, cut.matrices),
        scratch=scratch,
        sizes=tuple(sizes.items()),
        gpu=gpu,
        add=add,
        threadgroup=(tile.threads, 1, 1),
        dispatches=tuple(dispatches),
        count=partial(sorted_multiply_adds, product=product, region=tile.region),
        proof=Proof(_proof_channels(p, cut), partial(_proof_plan, cut=cut)),
    )


def _proof_channels(p: Problem, cut: Cut) -> tuple[int, int]:
    """Return two chunks of summed channels, or two packed groups; two columns."""
    tile, columns = cut.tile, cut.tile.columns + PROOF_TAIL
    if p.integer:  # rows of whole words, and a tail
        step = tile.step or tile.shape.step // HALF.size
        return max(p.group_size or ALIGNMENT, step) + PROOF_TAIL // 4 * 4, columns
    is_packed = cut.name.startswith("quantized") and p.group_size
    deep = max(p.group_size if is_packed else 32, tile.step) + PROOF_TAIL
    return (columns, deep) if p.transposed else (deep, columns)


def _tile_template(cut: Cut) -> dict[str, Value]:
    """Return the template arguments of a tile's shape."""
    tile = cut.tile
    if tile.height:  # nothing is staged; tails are steps of 16 channels
        return {"HEIGHT": tile.height, "DEEP": tile.step // TENSOR[1]}
    side, step = tile.shape
    return {"M": cut.matrices, "SIDE": side, "BYTES": step}


def _float_kernels(p: Problem, cut: Cut) -> tuple[GpuKernel, GpuKernel | None]:
    """Return the kernel of tiles of floats, and the one that adds splits."""
    tile, dtype, is_split = cut.tile, DTYPES[p.dtype], cut.tile.splits > 1
    after = dict(p.epilogue.template) if p.epilogue else {}
    interface = with_moments(SORTED_TILES) if cut.moments else finishing(SORTED_TILES)
    weights, across = {"TRANSPOSED": p.rows_are_summed}, "TRANSPOSED"
    if cut.name.startswith("quantized"):
        weights, across = {"BITS": p.bits, "GROUP": p.group_size}, "true"
        interface = packed(interface)
    memory = f"GemmSums<T, M, COLUMNS, {across}, SIDE, BYTES>::Tile::FLOATS"
    far = {"FAR": cut.is_far}
    first, last = ({}, far) if tile.height else (far, {})
    gpu = kernel(
        cut.name,
        FILES[cut.name],
        interface,
        "" if tile.height else memory,
        TILE_PLACE,
        T=dtype,
        OUT=mx.float32 if is_split else dtype,
        COLUMNS=tile.columns,
        **_tile_template(cut),
        **first,
        **weights,
        PLACED=cut.placed and not is_split,
        **last,
        **({} if is_split else after),
    )
    add = adding(dtype, **(after if cut.placed else {})) if is_split else None
    return gpu, add


def _integer_kernels(p: Problem, cut: Cut) -> tuple[GpuKernel, GpuKernel | None]:
    """Return the kernel of tiles of integers, and the one that adds splits."""
    tile, facts, dtype = cut.tile, p.integer, DTYPES[p.dtype]
    is_split, out = tile.splits > 1, facts.out_dtype(dtype)
    residual = mx.int8 if facts.residual_int8 else dtype
    after = {"R": residual, "ACTIVATION": facts.act.code}
    symbol, files = "quantized_sorted_int8", (*INTEGER_FILES, SIMDGROUP_FILES[-1])
    memory = "GemmSums<M, M, COLUMNS, true, SIDE, BYTES>::Tile::FLOATS"
    if tile.height:
        symbol, files, memory = "int8_tensor_ops", (*INTEGER_FILES, "tensor_ops"), ""
    gpu = kernel(
        symbol,
        (*files, symbol),
        INTEGER_TILES,
        memory,
        TILE_PLACE,
        OUT=mx.int32 if is_split else out,
        COLUMNS=tile.columns,
        **_tile_template(cut),
        PLACED=cut.placed and not is_split,
        FAR=cut.is_far,
        **({"R": dtype, "ACTIVATION": 0} if is_split else after),
    )
    add, files = None, (*INTEGER_FILES, "add_integer_splits")
    if is_split:
        template = {"T": out, "PLACED": cut.placed, **after}
        add = kernel("add_integer_splits", files, INTEGER_SPLITS, **template)
    return gpu, add


@lru_cache(maxsize=1024)
def _unpacker(shape: tuple[int, ...], group_size: int) -> Callable:
    """Return the launcher that unpacks int4 words to int8 (K, C_out, channels)."""
    volume, c_out, words = shape
    count = volume * c_out * words
    files = "matrix_tiles", "unpack_int4"
    gpu = kernel("unpack_int4", files, UNPACK_INT4, GROUP=group_size)
    made = (volume, c_out, 8 * words), mx.int8
    return gpu.launcher((True, True), [made], (count,), words=count)


_integers = partial(integer_tiles, unpacker=_unpacker)

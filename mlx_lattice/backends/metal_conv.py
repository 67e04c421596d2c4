"""Contractions on Metal by rows, or by edges: a planner for each route."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ..devices import METAL, Device
from ..dtypes import DTYPES
from ..problem import KERNEL_MAJOR, WEIGHT_GRAD, Problem
from ..relation import Relation
from ..routes.plan import IN_TILES, Plan, Proof
from . import dispatch_bounds, metal_weight_grad
from .dispatch_bounds import SEGMENT_CUTS, ceil_div, dispatch_limit
from .gpu_kernel import GpuKernel, fitting_threadgroup
from .gpu_reductions import GpuReductions, pieces
from .metal_tiles import (
    PER_EDGE,
    PROOF_TAIL,
    dispatched,
    kernel,
    matrix_dtype,
    products,
    strides,
    table,
    table_multiply_adds,
)
from .runners import per_row
from .signatures import PER_ROW, PER_ROW_OF_EDGES, copied, packed

# Rows of a thread, or of a threadgroup, of which each has 128 threads.
VEC4_ROWS, HALF_ROWS = 4, 2
DENSE_ROWS, COUT16_ROWS, TILE_THREADS = 64, 128, 128
TRAVERSAL = ("relation_traversal",)


def _output_csr(relation: Relation) -> tuple[mx.array, ...]:
    """Return where each row's edges begin, and the edges (i, o, k) by row."""
    return tuple(relation.output_csr)


def _pieces(relation: Relation) -> tuple[mx.array, ...]:
    """Return where the pieces of rows begin, and the edges by row."""
    return _cut_rows(relation)[0], relation.output_csr.edges


def _cut_rows(relation: Relation) -> tuple[mx.array, mx.array]:
    """Return where pieces of rows begin, and the first piece of each row."""
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
    """Return the plan of a kernel over slices of output rows.

    Args:
        p: the facts.
        name: the route.
        gpu: the kernel.
        grid: returns the threads for so many rows.
        limit: multiply-adds of a dispatch.
        most: the most edges of a row; by default all have the same.
        facts: fields that differ from a plan over the neighbour table.
    """
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
        # A row may have many edges, which one thread would add up.
        most, out = SEGMENT_CUTS["piece"], mx.float32
        sums = p.rows_written + ceil_div(edges, most), p.channels[1]
        facts |= {"read": _pieces, "bind": _in_pieces, "partials": sums}
        facts["scratch"] = 4 * sums[0] * sums[1]
    template = {"T": dtype, "OUT": out, "TRANSPOSED": p.rows_are_summed}
    gpu = kernel(f"{name}_csr", TRAVERSAL, PER_ROW_OF_EDGES, **template)
    return _by_rows(p, name, gpu, grid, limit, min(edges, most), **facts)


def _by_table(p: Problem, name: str, rows: int, across: int, **template: bool) -> Plan:
    """Plan a thread for so many rows of four channels, ``across`` of them a row."""
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
    """Plan depthwise: a thread has a row of four channels, each a sum of its own."""
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
    """Plan dense_channel: tiles of rows in their own order, channels compiled in."""
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
    """Plan cout16: tiles of rows in their own order, all 16 channels of y in each."""
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
        dispatch_bounds.matrix_limit(device),
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
            # If edges were not counted, the plan has room for the most.
            count = min(d.count, len(edges) - d.first)
            if count > 0:
                inputs, grid = [x, w, edges], (d.grid[0], count)
                sizes["first"] = d.first
                parts += plan.gpu(inputs, out, grid, plan.threadgroup, fill=0, **sizes)
        y = sum(parts[1:], parts[0]) if parts else mx.zeros(out[0][0])
        return y if bias is None else y + bias

    return call

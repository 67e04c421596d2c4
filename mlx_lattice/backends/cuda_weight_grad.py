"""Weight gradients on CUDA: dW[k] = sum over edges (i, o, k) of x[i]^T dy[o].

Kernels write float32 partial sums, which are added in a fixed order; of few edges dW
itself, see ``cuda_whole_grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

import mlx.core as mx

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..problem import MLX_LAYOUT, Problem
from ..relation import Relation
from ..routes import thresholds
from ..routes.plan import PROOF_SPLITS, Dispatch, LayerPlanner, Plan, Proof
from . import (
    cuda_counts,
    cuda_epilogue,
    cuda_grad_sums,
    cuda_grad_tiles,
    cuda_operands,
    cuda_splits,
    cuda_tiles,
    cuda_whole_grad,
)
from .cuda_tables import (
    STAGE_PAIRS,
    first_stages,
    offset_starts,
    pair_arrays,
    sorted_arrays,
)
from .gpu_kernel import GpuKernel, Interface
from .runners import edges_to_weight_grad
from .signatures import PER_ROW_OF_EDGES, WEIGHT_GRAD, kept

OF_EDGES = replace(
    WEIGHT_GRAD, sizes=(*WEIGHT_GRAD.sizes, ("n_edges", "edges_shape[0]"))
)


def _of(inputs: tuple[str, ...], **sizes: str) -> Interface:
    """Return the interface over another view, whose sizes are read in another way."""
    read = {**dict(WEIGHT_GRAD.sizes), **sizes}
    return replace(WEIGHT_GRAD, inputs=("x", "dy", *inputs), sizes=tuple(read.items()))


# Stages of edges: where those of each offset start.
OF_STAGES = _of(("pairs", "spans", "firsts"), volume="spans_shape[0]")
OF_ROWS = _of(
    ("table", "rows", "masks"),
    n_out="rows_shape[0]",
    volume="table_shape[0]",
    pitch="table_shape[1]",
)

TRAVERSAL_FILES = *cuda_epilogue.FILES, "relation_traversal.cu"
DEPTHWISE_FILES = *cuda_grad_sums.SUM_FILES, "depthwise_weight_grad.cu"
SIDE = 16  # of a tile of relation_traversal


def _plan(
    p: Problem,
    route: str,
    view: str,
    read: Callable[[Relation], tuple[mx.array, ...]],
    kernel: GpuKernel,
    partials: tuple[int, ...],
    blocks: tuple[int, ...],
    add: GpuKernel | None = None,
    each: int = 1,
    shares: int = 1,
    **more,
) -> Plan:
    """Plan one launch and, if ``add`` is given, another that adds ``partials``.

    ``each``: elements of dW that a thread of ``add`` writes. ``shares``: of the partial
    sums, see ``cuda_grad_sums.shares``.
    """
    adding, transposes = (), p.layout == MLX_LAYOUT and add is not None
    if transposes:
        adding = (cuda_grad_sums.blocks(p, partials[-2:], shares) * add.threads,)
    elif add is not None:
        elements = prod(partials[-2:]) * p.volume
        adding = (cuda_splits.adding_threads(elements, each),)
    across, *down = blocks
    grid = across * kernel.threads, *down
    return Plan(
        p,
        CUDA,
        route,
        view,
        edges_to_weight_grad,
        partials=partials,
        read=read,
        scratch=4 * prod(partials),
        gpu=kept(kernel),
        add=add and kept(add),
        reads_stored=transposes,
        threadgroup=(kernel.threads,),
        dispatches=(Dispatch(0, partials[0], grid, adding),),
        **more,
    )


def _with_splits(
    p: Problem, plan: Plan, splits: int, slots: int, blocks: tuple[int, ...]
) -> Plan:
    """Return the plan of a problem from another one's of its layer.

    ``slots``: of partial sums, in as many blocks.
    """
    (one,), partials = plan.dispatches, (slots, *plan.partials[1:])
    across, *down = blocks
    one = one._replace(count=slots, grid=(across * plan.gpu.threads, *down))
    scratch = 4 * prod(partials)
    cut = {"splits": splits, "partials": partials, "scratch": scratch}
    return plan.changed(problem=p, dispatches=(one,), **cut)


def sorted_planner(layer: Problem, device: Device) -> Callable[[Problem], Plan]:
    """Return what plans tiles over mask-sorted rows."""
    sides = cuda_operands.whole_channels(layer)
    table, made, width = thresholds.SORTED_GRAD, {}, 32 if sides[1] <= 32 else 64
    tiles = cuda_grad_tiles.sorted_tiles(layer, width)
    side = max(1, device.cores // tiles)
    tried = cuda_operands.proof_channels(layer, width)

    def plan(p: Problem) -> Plan:
        blocks = -(-p.n_out // 64)
        # A split costs a partial dW; the multiprocessors have equally many, or one at
        # most.
        waves = max(1, min(table["splits"], blocks // (table["least"] * side)))
        splits = max(1, min(waves * side, blocks // table["fewest"]))
        splits = max(splits, -(-blocks // table["most"]))
        few = min(splits, PROOF_SPLITS)
        facts = few, cuda_grad_sums.shares(layer, device, sides, splits)
        of_layer = made.get(facts)
        if of_layer is None:
            again = partial(_sorted, device=device, width=width, splits=few)
            of_layer = replace(again(layer, splits=splits), proof=Proof(tried, again))
            made[facts] = of_layer
        return _with_splits(p, of_layer, splits, splits, (tiles, splits))

    return plan


def _sorted(p: Problem, device: Device, width: int, splits: int) -> Plan:
    """Plan tiles over mask-sorted rows, of so many columns, in so many splits."""
    route = "sorted_implicit_gemm"
    dtype, (c_in, c_out) = DTYPES[p.dtype], cuda_operands.whole_channels(p)
    offsets, table = cuda_grad_tiles.offsets_together(c_in), thresholds.SORTED_GRAD
    consumers, stages = table["consumers"], table["stages"]
    tiles = cuda_grad_tiles.sorted_tiles(p, width)
    shares = cuda_grad_sums.shares(p, device, (c_in, c_out), splits)
    files = (*cuda_tiles.HOPPER, f"{route}_weight_grad.cu")
    template = (
        ("T", dtype),
        ("CONSUMERS", consumers),
        ("WIDTH", width),
        ("STAGES", stages),
        ("OFFSETS", offsets),
        ("MIRRORED", p.mirrored),
    )
    kernel = GpuKernel(
        CUDA,
        f"{route}_weight_grad",
        files,
        OF_ROWS,
        template,
        threads=128 * consumers + 256,
        shared_bytes=stages * 128 * (64 * consumers + width) + 1024,
    )
    return _plan(
        p,
        route,
        "sorted",
        sorted_arrays,
        kernel,
        (splits, p.volume, c_in, c_out),
        (tiles, splits),
        cuda_grad_sums.add_splits(p, shares),
        each=cuda_splits.ADDED,
        shares=shares,
        variant="hopper",
        tile=(64 * consumers, width),
        splits=splits,
        multiple=cuda_operands.multiple(dtype),
        count=cuda_counts.rows_to_weight_grad,
    )


@LayerPlanner
def grouped_gemm(layer: Problem, device: Device) -> Callable[[Problem], Plan]:
    """Plan tiles over splits of the kernel-major edges, or over all of an offset."""
    whole, made = cuda_whole_grad.planner(layer, device), {}
    sides = cuda_operands.whole_channels(layer)
    stage, volume = cuda_grad_tiles.stage_edges(layer), layer.volume
    more = 2 * cuda_operands.multiple(DTYPES[layer.dtype]) - 3

    def plan(p: Problem) -> Plan:
        if cuda_whole_grad.pays(p, device):
            return whole(p)
        tile = cuda_grad_tiles.grouped_tile(p, device)
        tiles = cuda_grad_tiles.tiles_of_offset(sides, tile)
        splits = cuda_grad_tiles.grad_splits(p, device, tile, tiles, stage)
        few = min(splits, PROOF_SPLITS)
        shares = cuda_grad_sums.shares(layer, device, sides, splits / volume)
        of_layer = made.get((tile, few, shares))
        if of_layer is None:
            again = partial(_grouped, device=device, tile=tile, splits=few)
            tried = tile.rows + more, tile.width + more
            if tile.variant == "hopper" and tile.width == 32:  # never of more channels
                tried = 32 - 3, 32 - 11
            of_layer = replace(again(layer, splits=splits), proof=Proof(tried, again))
            made[tile, few, shares] = of_layer
        return _with_splits(p, of_layer, splits, splits + volume, (splits * tiles,))

    return plan


def _grouped(p: Problem, device: Device, tile: cuda_tiles.Tile, splits: int) -> Plan:
    """Plan tiles over so many splits of the kernel-major edges."""
    dtype, (c_in, c_out) = DTYPES[p.dtype], cuda_operands.whole_channels(p)
    stage = cuda_grad_tiles.stage_edges(p)
    tiles = cuda_grad_tiles.tiles_of_offset((c_in, c_out), tile)
    shares = cuda_grad_sums.shares(p, device, (c_in, c_out), splits / p.volume)
    kernel = GpuKernel(
        CUDA,
        "grouped_gemm",
        (*tile.files, "grouped_gemm.cu"),
        OF_STAGES,
        (("TILE", tile.code), ("T", dtype)),
        also=(cuda_grad_sums.ADD_PARTIALS["firsts"],),
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=tile.shared_bytes,
    )
    return _plan(
        p,
        "grouped_gemm",
        "edges",
        _READ_STAGES[stage],
        kernel,
        (splits + p.volume, c_in, c_out),
        (splits * tiles,),
        cuda_grad_sums.add_partials(p, "firsts", shares),
        shares=shares,
        variant=tile.variant,
        products=cuda_operands.products(p),
        tile=(tile.rows, tile.width),
        splits=splits,
        multiple=cuda_operands.multiple(dtype),
        count=cuda_counts.edges_to_weight_grad,
    )


def _edges(relation: Relation) -> tuple[mx.array, ...]:
    return offset_starts(relation), relation.edges


def _stages(size: int) -> Callable[[Relation], tuple[mx.array, ...]]:
    """Return what reads the pairs and where the stages of ``size`` of each start."""

    def read(relation: Relation) -> tuple[mx.array, ...]:
        def build() -> tuple[mx.array, ...]:
            return *pair_arrays(relation), first_stages(relation, size)

        return relation.view(name, build)

    name = f"cuda_stages_{size}"
    return read


_READ_STAGES = {size: _stages(size) for size in STAGE_PAIRS}


def relation_traversal(p: Problem, device: Device) -> Plan:
    """Plan 16 x 16 entries of dW a block, over splits of the kernel-major edges."""
    dtype, in_each = DTYPES[p.dtype], p.c_in // p.groups
    tiles = -(-in_each // SIDE) * -(-p.c_out // SIDE)
    table = thresholds.TRAVERSAL_GRAD
    splits = max(1, device.cores * table["splits"] // tiles)
    if p.edges is not None:
        splits = max(1, min(splits, -(-p.edges // table["least"])))
    kernel = GpuKernel(
        CUDA,
        "relation_traversal_weight_grad",
        TRAVERSAL_FILES,
        OF_EDGES,
        (("T", dtype),),
        also=(PER_ROW_OF_EDGES,),
        sizes=(
            ("groups", p.groups),
            ("c_in", f"x_shape[1] / {p.groups}"),
            ("c_out", f"dy_shape[1] / {p.groups}"),
        ),
    )
    sides = in_each, p.c_out
    shares = cuda_grad_sums.shares(p, device, sides, splits / p.volume)
    return _plan(
        p,
        "relation_traversal",
        "edges",
        _edges,
        kernel,
        (splits + p.volume, *sides),
        (splits * tiles,),
        cuda_grad_sums.add_partials(p, "starts", shares),
        shares=shares,
        splits=splits,
    )


def channels_each(p: Problem) -> int:
    """Return how many channels a thread of depthwise takes: 16 bytes, or one."""
    each = 16 // p.itemsize
    return 1 if p.c_out != p.groups or p.groups % each else each


def lanes_of(channels: int, each: int) -> int:
    """Return the lanes of a warp that a row of depthwise has: 4 to 32, a power of 2."""
    return min(32, max(4, 1 << (-(-channels // each) - 1).bit_length()))


def depthwise(p: Problem, device: Device) -> Plan:
    """Plan a group a channel: partial sums over splits of the kernel-major edges."""
    multiplier, each, stage = p.c_out // p.groups, channels_each(p), STAGE_PAIRS[-1]
    across, table = lanes_of(p.c_out, each), thresholds.DEPTHWISE_GRAD
    tiles = -(-p.c_out // (across * each))
    stages = -(-p.edges_at_most // stage)
    most = max(1, table["splits"] * device.cores // tiles)
    splits = max(1, min(most, stages // table["stages"]))
    sides = 1, p.c_out
    shares = cuda_grad_sums.shares(p, device, sides, splits / p.volume)
    kernel = GpuKernel(
        CUDA,
        "depthwise_weight_grad",
        DEPTHWISE_FILES,
        OF_STAGES,
        (
            ("T", DTYPES[p.dtype]),
            ("EACH", each),
            ("ACROSS", across),
            ("STAGE", stage),
        ),
        also=(cuda_grad_sums.ADD_PARTIALS["firsts"],),
        sizes=(
            ("groups", f"dy_shape[1] / {multiplier}"),
            ("c_in", 1),
            ("c_out", multiplier),
        ),
    )
    return _plan(
        p,
        "depthwise",
        "edges",
        _READ_STAGES[stage],
        kernel,
        (splits + p.volume, *sides),
        (splits, tiles),
        cuda_grad_sums.add_partials(p, "firsts", shares),
        shares=shares,
        splits=splits,
    )

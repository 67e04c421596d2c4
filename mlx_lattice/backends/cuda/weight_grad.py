"""Weight gradients on CUDA: dW[k] = sum over edges (i, o, k) of x[i]^T dy[o].

Kernels write float32 partial sums, which are added in a fixed order. If an offset has
few edges, one block adds all of them and writes dW itself (``grouped_gemm_whole``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import mlx.core as mx

from ...checks import DTYPES
from ...devices import CUDA, Device
from ...problem import MLX_LAYOUT, PROOF_SPLITS, Dispatch, Plan, Problem, Proof
from ...relation import Relation
from ..gpu.contraction import (
    ADD_SPLITS,
    PER_ROW_OF_EDGES,
    WEIGHT_GRAD,
    edges_to_weight_grad,
    interned,
    rounded_up,
)
from ..gpu.kernel import GpuKernel, Interface
from . import thresholds
from . import tiles as cuda_tiles
from .geometry import STAGE_PAIRS, offset_starts, pairs, sorted_arrays, stages_of
from .tiles import (
    HOPPER,
    ONE,
    SKIPPED_ROWS,
    STAGE_BYTES,
    Shape,
    Tile,
    WideTile,
    count_of,
    cut_blocks,
    few_offsets,
    has_wgmma,
    mma,
    products,
    proof_channels,
    shared_bytes,
    tile_width,
    used_blocks,
    whole_channels,
)

# EdgeTile of grouped_gemm, by the width of the wider side.
GRAD_TILES = {
    32: WideTile(1, 128, 32, 4, 4),
    64: WideTile(1, 128, 64, 4, 3),
    80: WideTile(2, 64, 80, 3, 2),
    96: WideTile(2, 64, 96, 3, 2),
    112: WideTile(2, 64, 112, 3, 2),
    128: WideTile(2, 64, 128, 3, 2),
    160: WideTile(3, 128, 160, 4, 1),
    192: WideTile(3, 128, 192, 4, 1),
    224: WideTile(2, 128, 224, 4, 1),
    256: WideTile(2, 128, 256, 4, 1),
}
# EdgeTile of few edges.
FEW_EDGES_GRAD_TILES = {
    96: WideTile(2, 128, 96, 4, 1),
    128: WideTile(1, 128, 128, 4, 2),
}
# dW in one launch: a block for each tile of an offset, by width. The least that has all
# output channels, or a wider one that fits twice into both sides.
WHOLE_TILES = {
    32: WideTile(1, 128, 32, 6, 3),
    48: WideTile(1, 128, 48, 4, 3),
    64: WideTile(1, 128, 64, 4, 3),
    128: WideTile(2, 128, 128, 6, 1),
    256: WideTile(2, 128, 256, 4, 1),
}


def grouped_tile(p: Problem, device: Device) -> Tile:
    """Return the tile of dW over kernel-major edges."""
    if not has_wgmma(p, device):
        side, per = _mma_grad_tile(p, device)
        return mma(p, "edge_walk.cuh", "grouped_gemm_mma.cuh", side=side, per=per)
    channels, edges, tiles = max(whole_channels(p)), p.edges_at_most, GRAD_TILES
    width = tile_width(channels, [w for w in tiles if w != 96 or channels <= 96])
    if edges <= thresholds.NARROW_GRAD_EDGES.get(width, -1):
        width //= 2
    low = FEW_EDGES_GRAD_TILES if edges <= thresholds.LOW_GRAD_EDGES else {}
    tile = low.get(width, tiles[width])
    shape = tile.consumers, tile.producer_threads, tile.width, tile.stages
    return Tile(
        "hopper",
        f"EdgeTile<{', '.join(map(str, shape))}>",
        tile.rows,
        tile.width,
        tile.threads,
        tile.per_multiprocessor,
        shared_bytes(tile),
        (*HOPPER, "edge_walk.cuh", "grouped_gemm_hopper.cuh"),
    )


def _mma_grad_tile(p: Problem, device: Device) -> tuple[int, int]:
    """Return the side of mma.sync's tile of dW, and its blocks of a multiprocessor."""
    # Larger tiles take the shared memory of a Hopper, and edges to fill them.
    if p.dtype != "float32" or device.family not in thresholds.HOPPER:
        return 64, 2
    channels, edges = whole_channels(p), p.edges_at_most
    if products(p) == ONE:
        taken = {
            side: prod(rounded_up(c, side) for c in channels)
            for side in thresholds.TF32_GRAD_SIDES
        }
        sides = [side for side in taken if taken[side] == min(taken.values())]
        side = sides[-1 if edges * min(channels) > thresholds.TF32_NARROW_GRAD else 0]
        more = side == 64 and edges > thresholds.TF32_MANY_EDGES
    else:
        fits = edges > thresholds.NARROW_GRAD_EDGES.get(128, -1)
        sides = thresholds.FLOAT_GRAD_SIDES if fits else (64,)
        side = max(s for s in sides if s == 64 or min(channels) > s // 2)
        more = False
    return side, 3 if more else 1 if side == 128 else 2


def tiles_of_offset(sides: tuple[int, int], tile: Tile | Shape) -> int:
    """Return the tiles that dW[k] of so many padded channels is cut into."""
    return -(-sides[0] // tile.rows) * -(-sides[1] // tile.width)


def sorted_tiles(p: Problem, width: int) -> int:
    """Return the tiles of dW over sorted rows: of all offsets."""
    c_in, c_out = whole_channels(p)
    together = thresholds.SORTED_GRAD["consumers"] * offsets_together(c_in)
    return -(-p.volume // together) * -(-c_out // width)


def grad_splits(p: Problem, device: Device, tile: Tile, tiles: int) -> int:
    """Return into how many splits the edges are cut, so that they fill the GPU."""
    splits = max(1, device.cores * tile.per_multiprocessor // tiles)
    edges = p.edges_at_most
    # The last stage of an offset is not full.
    stages = edges // stage_edges(p) + min(p.volume, edges)
    table = thresholds.GRAD_SPLIT
    worth = max(stages // table["stages"], min(stages, table["least"]))
    return max(1, min(splits, worth))


def stage_edges(p: Problem) -> int:
    """Return the edges of a stage of ``grouped_gemm``."""
    return STAGE_BYTES // p.itemsize


def offsets_together(c_in: int) -> int:
    """Return the offsets that have a warpgroup's 64 rows of dW together."""
    return 4 if c_in <= 16 else 2 if c_in <= 32 else 1


def edge_multiply_adds(plan: Plan, relation: Relation | None) -> int | None:
    """Count a weight gradient over edges: stages of one offset are filled up."""
    if relation is None:
        return None
    p, (height, width) = plan.problem, plan.tile
    c_in, c_out = whole_channels(p)
    stage = stage_edges(p)
    edges = sum(rounded_up(count, stage) for count in relation.edge_counts)
    return edges * rounded_up(c_in, height) * rounded_up(c_out, width)


def row_multiply_adds(plan: Plan, relation: Relation | None) -> int | None:
    """Count a weight gradient over sorted rows."""
    if relation is None:
        return None
    c_in, c_out = whole_channels(plan.problem)
    # Offsets whose channels have the 64 rows of a warpgroup together are skipped so.
    together = offsets_together(c_in)
    columns, used = rounded_up(c_out, plan.tile[1]), used_blocks(relation)
    blocks = count_of(cut_blocks(used.T, together).any(axis=1))
    return SKIPPED_ROWS**2 * columns * blocks


ADD_PARTIALS = {
    name: replace(
        ADD_SPLITS,
        inputs=("partial", name),
        sizes=(*ADD_SPLITS.sizes, ("volume", f"{name}_shape[0] - 1")),
    )
    for name in ("starts", "firsts")
}
# A block has 32 x 32 entries of them, or fewer whose sums its warps share.
SUM_FILES = *cuda_tiles.EPILOGUE_FILES[:2], "edge_walk.cuh"
TRANSPOSED_FILES, TRANSPOSED_SIDE = (*SUM_FILES, "transposed_sums.cu"), 32
WARPS = 8
# Splits of whole gradients, which are written in MLX's layout.
ADD_TRANSPOSED = replace(
    ADD_PARTIALS["firsts"],
    inputs=("partial",),
    sizes=tuple(
        {
            **dict(ADD_SPLITS.sizes),
            "lines": "partial_shape[2]",
            "channels": "partial_shape[3]",
            "volume": "partial_shape[1]",
        }.items()
    ),
)


def add_partials(p: Problem, by: str, shares: int) -> GpuKernel:
    """Return what adds partial sums of splits that are cut by offset: slot s + k."""
    sizes = (("splits", f"partial_shape[0] - {by}_shape[0] + 1"),)
    if p.layout == MLX_LAYOUT:
        face = ADD_PARTIALS[by]
        return _adding("add_partials_transposed", face, p, shares, sizes=sizes)
    given = "add_partials", SUM_FILES, ADD_PARTIALS[by], (("T", DTYPES[p.dtype]),)
    return GpuKernel(CUDA, *given, sizes=sizes)


def _adding(symbol: str, face: Interface, p: Problem, shares: int, **more) -> GpuKernel:
    """Return what adds partial sums and writes dW in MLX's layout."""
    template = ("T", DTYPES[p.dtype]), ("SHARES", shares)
    return GpuKernel(CUDA, symbol, TRANSPOSED_FILES, face, template, **more)


def sum_shares(p: Problem, device: Device, sides: Sequence[int], count: float) -> int:
    """Return into how many shares a block's warps cut so many partial sums."""
    table, found = thresholds.SHARED_SUMS, 1
    while found < WARPS and p.layout == MLX_LAYOUT:
        fills = adding_blocks(p, sides, found) >= table["blocks"] * device.cores
        if count <= found * table["most" if fills else "least"]:
            break
        found *= 2
    return found


def adding_blocks(p: Problem, sides: Sequence[int], shares: int) -> int:
    """Return how many blocks add up dW in MLX's layout, of dW[k] with such sides."""
    down, across = sides
    rows = TRANSPOSED_SIDE // shares
    return p.volume * -(-down // rows) * -(-across // TRANSPOSED_SIDE)


OF_EDGES = replace(
    WEIGHT_GRAD, sizes=(*WEIGHT_GRAD.sizes, ("n_edges", "edges_shape[0]"))
)


def _of(inputs: tuple[str, ...], **sizes: str) -> Interface:
    """Return the interface over another view, whose sizes are read in another way."""
    read = {**dict(WEIGHT_GRAD.sizes), **sizes}
    return replace(WEIGHT_GRAD, inputs=("x", "dy", *inputs), sizes=tuple(read.items()))


# Stages of edges: where those of each offset start.
OF_STAGES = _of(("pairs", "spans", "firsts"), volume="spans_shape[0]")
OF_OFFSETS = _of(("pairs", "spans"), volume="spans_shape[0]")
OF_ROWS = _of(
    ("table", "rows", "masks"),
    n_out="rows_shape[0]",
    volume="table_shape[0]",
    pitch="table_shape[1]",
)

TRAVERSAL_FILES = *cuda_tiles.EPILOGUE_FILES, "relation_traversal.cu"
DEPTHWISE_FILES = *SUM_FILES, "depthwise_weight_grad.cu"
SIDE = 16  # of a tile of relation_traversal


def _plan(
    p: Problem,
    device: Device,
    route: str,
    read: Callable[[Relation], tuple[mx.array, ...]],
    kernel: GpuKernel,
    sides: tuple[int, int],
    splits: int,
    blocks: tuple[int, ...],
    by: str = "",
    **more,
) -> Plan:
    """Plan one launch of partial sums, and another that adds them."""
    partials, dtype = (splits, p.volume, *sides), DTYPES[p.dtype]
    transposes, each = p.layout == MLX_LAYOUT, cuda_tiles.ADDED
    if by:
        partials, each = (splits + p.volume, *sides), 1
    shares = sum_shares(p, device, sides, splits / p.volume if by else splits)
    if by:
        add = add_partials(p, by, shares)
    elif transposes:
        add = _adding("add_splits_transposed", ADD_TRANSPOSED, p, shares)
    else:
        add = cuda_tiles.add_splits(dtype, axes=4)
    adding = cuda_tiles.adding_threads(prod(sides) * p.volume, each)
    if transposes:
        adding = adding_blocks(p, sides, shares) * add.threads
    across, *down = blocks
    grid = across * kernel.threads, *down
    return Plan(
        p,
        CUDA,
        route,
        "edges" if by else "sorted",
        edges_to_weight_grad,
        splits=splits,
        partials=partials,
        read=read,
        scratch=4 * prod(partials),
        gpu=interned(kernel),
        add=interned(add),
        reads_stored=transposes,
        threadgroup=(kernel.threads,),
        dispatches=(Dispatch(0, partials[0], grid, (adding,)),),
        **more,
    )


def sorted_implicit_gemm(p: Problem, device: Device) -> Plan:
    """Plan tiles over mask-sorted rows."""
    sides, table = whole_channels(p), thresholds.SORTED_GRAD
    width = 32 if sides[1] <= 32 else 64
    side = max(1, device.cores // sorted_tiles(p, width))
    blocks = -(-p.n_out // 64)
    # A split costs a partial dW. Multiprocessors get equally many blocks, or one at
    # most.
    waves = max(1, min(table["splits"], blocks // (table["least"] * side)))
    splits = max(1, min(waves * side, blocks // table["fewest"]))
    splits = max(splits, -(-blocks // table["most"]))
    few = min(splits, PROOF_SPLITS)
    again = partial(_sorted, device=device, width=width, splits=few)
    proof = Proof(proof_channels(p, width), again)
    return _sorted(p, device, width, splits, proof=proof)


def _sorted(
    p: Problem, device: Device, width: int, splits: int, proof: Proof | None = None
) -> Plan:
    """Plan tiles over mask-sorted rows, of so many columns, in so many splits."""
    route = "sorted_implicit_gemm"
    dtype, (c_in, c_out) = DTYPES[p.dtype], whole_channels(p)
    table = thresholds.SORTED_GRAD
    consumers, stages = table["consumers"], table["stages"]
    kernel = GpuKernel(
        CUDA,
        f"{route}_weight_grad",
        (*HOPPER, f"{route}_weight_grad.cu"),
        OF_ROWS,
        (
            ("T", dtype),
            ("CONSUMERS", consumers),
            ("WIDTH", width),
            ("STAGES", stages),
            ("OFFSETS", offsets_together(c_in)),
            ("MIRRORED", p.mirrored),
        ),
        threads=128 * consumers + 256,
        shared_bytes=stages * 128 * (64 * consumers + width) + 1024,
    )
    return _plan(
        p,
        device,
        route,
        sorted_arrays,
        kernel,
        (c_in, c_out),
        splits,
        (sorted_tiles(p, width), splits),
        variant="hopper",
        tile=(64 * consumers, width),
        multiple=cuda_tiles.multiple(dtype),
        count=row_multiply_adds,
        proof=proof,
    )


def grouped_gemm(p: Problem, device: Device) -> Plan:
    """Plan tiles over splits of the kernel-major edges, or over all of an offset."""
    more = 2 * cuda_tiles.multiple(DTYPES[p.dtype]) - 3
    if writes_whole(p, device):
        tile = _whole_tile(p, device)
        again = partial(_planned_whole, tile=tile)
        proof = Proof((tile.rows + more, tile.width + more), again)
        return replace(again(p), proof=proof)
    tile = grouped_tile(p, device)
    tiles = tiles_of_offset(whole_channels(p), tile)
    splits = grad_splits(p, device, tile, tiles)
    tried = tile.rows + more, tile.width + more
    if tile.variant == "hopper" and tile.width == 32:  # never of more channels
        tried = 32 - 3, 32 - 11
    few = min(splits, PROOF_SPLITS)
    again = partial(_grouped, device=device, tile=tile, splits=few)
    return _grouped(p, device, tile, splits, proof=Proof(tried, again))


def _grouped(
    p: Problem, device: Device, tile: Tile, splits: int, proof: Proof | None = None
) -> Plan:
    """Plan tiles over so many splits of the kernel-major edges."""
    dtype, sides = DTYPES[p.dtype], whole_channels(p)
    kernel = GpuKernel(
        CUDA,
        "grouped_gemm",
        (*tile.files, "grouped_gemm.cu"),
        OF_STAGES,
        (("TILE", tile.code), ("T", dtype)),
        also=(ADD_PARTIALS["firsts"],),
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=tile.shared_bytes,
    )
    return _plan(
        p,
        device,
        "grouped_gemm",
        stages_of(stage_edges(p)),
        kernel,
        sides,
        splits,
        (splits * tiles_of_offset(sides, tile),),
        "firsts",
        variant=tile.variant,
        products=products(p),
        tile=(tile.rows, tile.width),
        multiple=cuda_tiles.multiple(dtype),
        count=edge_multiply_adds,
        proof=proof,
    )


def _edges(relation: Relation) -> tuple[mx.array, ...]:
    return offset_starts(relation), relation.edges


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
    facts = (in_each, p.c_out), splits, (splits * tiles,), "starts"
    return _plan(p, device, "relation_traversal", _edges, kernel, *facts)


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
    kernel = GpuKernel(
        CUDA,
        "depthwise_weight_grad",
        DEPTHWISE_FILES,
        OF_STAGES,
        (("T", DTYPES[p.dtype]), ("EACH", each), ("ACROSS", across), ("STAGE", stage)),
        also=(ADD_PARTIALS["firsts"],),
        sizes=(
            ("groups", f"dy_shape[1] / {multiplier}"),
            ("c_in", 1),
            ("c_out", multiplier),
        ),
    )
    facts = (1, p.c_out), splits, (splits, tiles), "firsts"
    return _plan(p, device, "depthwise", stages_of(stage), kernel, *facts)


def writes_whole(p: Problem, device: Device) -> bool:
    """Whether offsets have so few edges that one block passes all of those of one."""
    if not has_wgmma(p, device):
        return False
    elements = p.volume * prod(whole_channels(p))
    even = "even" if few_offsets(p) else "uneven"
    *_, most = (
        stages
        for least, stages in thresholds.WHOLE_GRAD[even]
        if elements >= least * device.cores
    )
    longest = min(p.n_in, p.n_out, p.edges_at_most)
    if few_offsets(p):  # which are even
        longest = min(longest, p.edges_at_most / p.volume)
    return longest / stage_edges(p) <= most


def _whole_tile(p: Problem, device: Device) -> WideTile:
    """Return the tile of dW: a wide one if it fills the GPU."""
    c_in, c_out = whole_channels(p)
    least = thresholds.WHOLE_GRAD_BLOCKS * device.cores
    for width in (256, 128):
        tile = WHOLE_TILES[width]
        if width <= min(c_in, c_out) // 2 and _whole_blocks(p, tile) >= least:
            return tile
    return WHOLE_TILES[next((w for w in (32, 48) if c_out <= w), 64)]


def _whole_blocks(p: Problem, tile: WideTile) -> int:
    """Return how many blocks write dW."""
    sides = whole_channels(p)
    return p.volume * tiles_of_offset(sides, tile)


def _planned_whole(p: Problem, tile: WideTile) -> Plan:
    """Plan tiles of a shape."""
    blocks = _whole_blocks(p, tile)
    dtype, transposes = DTYPES[p.dtype], p.layout == MLX_LAYOUT
    template = (
        ("T", dtype),
        ("CONSUMERS", tile.consumers),
        ("WIDTH", tile.width),
        ("STAGES", tile.stages),
        ("TRANSPOSED", transposes),
    )
    kernel = GpuKernel(
        CUDA,
        "grouped_gemm_whole",
        (*HOPPER, "grouped_gemm_whole.cu"),
        OF_OFFSETS,
        template,
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=shared_bytes(tile),
    )
    return Plan(
        p,
        CUDA,
        "grouped_gemm",
        "edges",
        edges_to_weight_grad,
        read=pairs,
        gpu=interned(kernel),
        reads_stored=transposes,
        variant="whole",
        tile=(tile.rows, tile.width),
        multiple=cuda_tiles.multiple(dtype),
        threadgroup=(kernel.threads,),
        dispatches=(Dispatch(0, p.volume * p.c_in, (blocks * kernel.threads,)),),
        count=edge_multiply_adds,
    )

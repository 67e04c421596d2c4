"""Weight gradients of few edges on Hopper: one launch writes dW, no partial sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..problem import MLX_LAYOUT, Problem
from ..routes import cuda_shapes, cuda_tile_kinds, thresholds
from ..routes.plan import Dispatch, Plan, Proof
from . import cuda_counts, cuda_grad_tiles, cuda_operands, cuda_tiles
from .cuda_tables import pair_arrays
from .gpu_kernel import GpuKernel
from .runners import edges_to_weight_grad
from .signatures import WEIGHT_GRAD, kept

OF_OFFSETS = replace(
    WEIGHT_GRAD,
    inputs=("x", "dy", "pairs", "spans"),
    sizes=tuple({**dict(WEIGHT_GRAD.sizes), "volume": "spans_shape[0]"}.items()),
)


def pays(p: Problem, device: Device) -> bool:
    """Whether offsets have so few edges that one block passes all of those of one.

    The larger dW is, the more its partial sums would cost.
    """
    if not cuda_operands.has_wgmma(p, device):
        return False
    elements = p.volume * prod(cuda_operands.whole_channels(p))
    even = "even" if cuda_tiles.few_offsets(p) else "uneven"
    *_, most = (
        stages
        for least, stages in thresholds.WHOLE_GRAD[even]
        if elements >= least * device.cores
    )
    return _stages(p) <= most


def _stages(p: Problem) -> float:
    """Return the stages of the longest offset; of few, which are even, of one."""
    longest = min(p.n_in, p.n_out, p.edges_at_most)
    if cuda_tiles.few_offsets(p):
        longest = min(longest, p.edges_at_most / p.volume)
    return longest / cuda_grad_tiles.stage_edges(p)


def planner(layer: Problem, device: Device) -> Callable[[Problem], Plan]:
    """Return what plans tiles of dW over all edges of an offset each."""
    made: dict[cuda_tile_kinds.Tile, Plan] = {}
    more = 2 * cuda_operands.multiple(DTYPES[layer.dtype]) - 3

    def plan(p: Problem) -> Plan:
        tile = _tile(p, device)
        of_layer = made.get(tile)
        if of_layer is None:
            again = partial(_planned, tile=tile)
            proof = Proof((tile.rows + more, tile.width + more), again)
            of_layer = made[tile] = replace(again(layer), proof=proof)
        return of_layer.changed(problem=p)  # its numbers are those of any rows

    return plan


def _tile(p: Problem, device: Device) -> cuda_tile_kinds.Tile:
    """Return the tile of dW: wide ones where they fill the GPU."""
    c_in, c_out = cuda_operands.whole_channels(p)
    tiles, table = cuda_shapes.WHOLE_TILES, thresholds.WHOLE_GRAD_TILES
    least = table["blocks"] * device.cores

    def fills(tile: cuda_tile_kinds.Tile) -> bool:
        return tile.width <= min(c_in, c_out) // 2 and _blocks(p, tile) >= least

    wide = [tile for width, tile in tiles.items() if width >= 128 and fills(tile)]
    if wide:
        return wide[-1]
    if cuda_tiles.few_offsets(p) and fills(cuda_shapes.EVEN_WHOLE_TILE):
        return cuda_shapes.EVEN_WHOLE_TILE
    if _stages(p) > table["stages"]:  # few blocks take splits of their edges
        for tile in cuda_shapes.SPLIT_WHOLE_TILES:
            if _blocks(p, tile) <= device.cores:
                return tile
    return next((tiles[w] for w in tiles if c_out <= w < 128), tiles[64])


def _blocks(p: Problem, tile: cuda_tile_kinds.Tile) -> int:
    """Return how many blocks write dW."""
    sides = cuda_operands.whole_channels(p)
    return p.volume * cuda_grad_tiles.tiles_of_offset(sides, tile)


def _planned(p: Problem, tile: cuda_tile_kinds.Tile) -> Plan:
    """Plan tiles of a shape."""
    blocks = _blocks(p, tile)
    dtype, transposes = DTYPES[p.dtype], p.layout == MLX_LAYOUT
    template = (
        ("T", dtype),
        ("CONSUMERS", tile.consumers),
        ("WIDTH", tile.width),
        ("STAGES", tile.stages),
        ("SPLITS", tile.splits),
        ("TRANSPOSED", transposes),
    )
    kernel = GpuKernel(
        CUDA,
        "grouped_gemm_whole",
        (*cuda_tiles.HOPPER, "grouped_gemm_whole.cu"),
        OF_OFFSETS,
        template,
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=cuda_tile_kinds.shared_bytes(tile),
    )
    return Plan(
        p,
        CUDA,
        "grouped_gemm",
        "edges",
        edges_to_weight_grad,
        read=pair_arrays,
        gpu=kept(kernel),
        reads_stored=transposes,
        variant="whole",
        tile=(tile.rows, tile.width),
        block_splits=tile.splits,
        multiple=cuda_operands.multiple(dtype),
        threadgroup=(kernel.threads,),
        dispatches=(Dispatch(0, p.volume * p.c_in, (blocks * kernel.threads,)),),
        count=cuda_counts.edges_to_weight_grad,
    )

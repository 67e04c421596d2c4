"""Which matrix tile a weight gradient gets on CUDA, and its splits: by tables."""

from __future__ import annotations

from math import prod

from ..devices import Device
from ..problem import Problem
from ..routes import thresholds
from ..routes.cuda_shapes import FEW_EDGES_GRAD_TILES, GRAD_TILES
from ..routes.cuda_tile_kinds import Shape, shared_bytes
from .cuda_operands import ONE, STAGE_BYTES, has_wgmma, products, whole_channels
from .cuda_tile_choice import tile_width
from .cuda_tiles import HOPPER, Tile, mma
from .signatures import rounded_up


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


def grad_splits(p: Problem, device: Device, tile: Tile, tiles: int, stage: int) -> int:
    """Return into how many splits the edges are cut, so that they fill the GPU.

    Args:
        p: the facts.
        device: whose processors.
        tile: of dW.
        tiles: of dW[k].
        stage: edges of a stage.
    """
    splits = max(1, device.cores * tile.per_multiprocessor // tiles)
    edges = p.edges_at_most
    stages = edges // stage + min(p.volume, edges)  # the last of an offset is not full
    table = thresholds.GRAD_SPLIT
    worth = max(stages // table["stages"], min(stages, table["least"]))
    return max(1, min(splits, worth))


def stage_edges(p: Problem) -> int:
    """Return the edges of a stage of ``grouped_gemm``."""
    return STAGE_BYTES // p.itemsize


def offsets_together(c_in: int) -> int:
    """Return the offsets that have a warpgroup's 64 rows of dW together."""
    return 4 if c_in <= 16 else 2 if c_in <= 32 else 1

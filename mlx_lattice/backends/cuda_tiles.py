"""The matrix tiles of CUDA's kernels, in the shapes that fit a problem."""

from __future__ import annotations

from typing import NamedTuple

from ..devices import CUDA
from ..problem import WEIGHT_GRAD, Problem
from ..routes import cuda_tile_kinds, thresholds
from . import cuda_epilogue
from .cuda_operands import (
    STAGE_SLICES,
    product_count,
    slices_of,
    tail_slices,
    weight_parts,
    whole_channels,
)

HOPPER = (
    *cuda_epilogue.FILES,
    "tiles.cuh",
    "hopper.cuh",
    "tile_moments.cuh",
    "wgmma.cuh",
)
MMA = (*cuda_epilogue.FILES, "tiles.cuh", "tensor_core.cuh")
MMA_STAGES = 4
# Shared memory of a multiprocessor, and what each of its blocks takes besides.
SHARED, RESERVED = 233472, 1024


class Tile(NamedTuple):
    """A matrix tile of a kernel.

    Attributes:
        variant: of the kernel: "mma", "hopper" or "wide".
        code: the C++ type that names it.
        rows, width: of the result: output rows or input channels, and output channels.
        threads: of a block.
        per_multiprocessor: blocks that lie side by side.
        shared_bytes: dynamic shared memory of a block.
        files: sources of the tile.
        persistent: whether a block takes tile after tile.
        itself: whether each row's only neighbour is itself.
    """

    variant: str
    code: str
    rows: int
    width: int
    threads: int
    per_multiprocessor: int
    shared_bytes: int
    files: tuple[str, ...]
    persistent: bool = False
    itself: bool = False


def few_edges(p: Problem) -> bool:
    """Whether the relation was made with few edges a row that the pass writes."""
    rows = p.n_out if p.pass_ == WEIGHT_GRAD else p.rows_written
    few = few_offsets(p)
    least = thresholds.FEW_EDGES_OF_FEW_OFFSETS if few else thresholds.FEW_EDGES
    return p.edges is not None and p.edges < least * rows


def few_offsets(p: Problem) -> bool:
    """Whether the kernel has few offsets."""
    return p.volume <= thresholds.FEW_OFFSETS


def list_length(volume: int) -> int:
    """Return how many offsets a kernel's list has room for; few kernels serve all K."""
    return 64 if volume <= 64 else max(512, 1 << (volume - 1).bit_length())


def mma(p: Problem, *files: str, side: int = 64, per: int = 2) -> Tile:
    """Return the square tile of mma.sync, ``per`` blocks of which lie side by side."""
    shared, code = MMA_STAGES * 2 * side * 128, f"MmaTile<{product_count(p)}, {side}>"
    return Tile("mma", code, side, side, 2 * side, per, shared, (*MMA, *files))


def wide(p: Problem, tile: cuda_tile_kinds.Tile, itself: bool = False) -> Tile:
    """Return WideTile in a shape, for the problem's channels and offsets.

    itself: whether to read no table, since each row's only neighbour is itself.
    """
    early = thresholds.FEW_OFFSETS if few_offsets(p) and not itself else 0
    shape = tile.consumers, tile.width, tile.stages, tail_slices(p), early
    if itself:
        shape = *shape, "true"
    return Tile(
        "wide",
        f"WideTile<{', '.join(map(str, shape))}>",
        tile.rows,
        tile.width,
        tile.threads,
        tile.per_multiprocessor,
        cuda_tile_kinds.shared_bytes(tile),
        (*HOPPER, "weight_stages.cuh", "sorted_implicit_gemm_wide.cuh"),
        itself=itself,
    )


def persistent(p: Problem, tile: cuda_tile_kinds.SortedTile) -> Tile:
    """Return PersistentTile in the shape that fits the problem."""
    slices, weights = slices_of(whole_channels(p)[0], p.read_size), weight_parts(p)
    kept = 8 if p.epilogue or p.integer else 4 if p.moments else 0
    tile = _fitting(tile, slices, list_length(p.volume), weights, kept * tile.width)
    code = ", ".join(map(str, (*tile, slices, product_count(p))))
    return Tile(
        "hopper",
        f"PersistentTile<{code}>",
        tile.rows,
        tile.width,
        tile.threads,
        tile.per_multiprocessor,
        cuda_tile_kinds.shared_bytes(tile, weights),
        (
            *HOPPER,
            "hopper_tf32.cuh",
            "stage_sources.cuh",
            "sorted_implicit_gemm_hopper.cuh",
        ),
        persistent=True,
    )


def _fitting(
    tile: cuda_tile_kinds.SortedTile, slices: int, length: int, weights: int, kept: int
) -> cuda_tile_kinds.SortedTile:
    """Return the tile with as many stages as shared memory has room for.

    Args:
        tile: with most stages.
        slices: of an offset in a stage.
        length: of the list of offsets.
        weights: parts of a weight in a stage.
        kept: bytes of what an epilogue, or statistics, keep of the tile's channels.
    """
    per = tile.per_multiprocessor
    # What is prefetched, the list of offsets, and barriers.
    ahead, offsets = (8, 1) if slices == STAGE_SLICES else (4, 2 if slices == 2 else 4)
    fixed = ahead * (offsets * tile.rows * 4 + 64) + 4 * length + 512 + kept
    while tile.stages > 2 and not side_by_side(
        cuda_tile_kinds.shared_bytes(tile, weights) + fixed, per
    ):
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def side_by_side(shared_bytes: int, blocks: int) -> bool:
    """Whether a multiprocessor has shared memory for so many blocks."""
    return (shared_bytes + RESERVED) * blocks <= SHARED


def sums_moments(p: Problem, tile: Tile, is_split: bool) -> bool:
    """Whether what writes the rows, tiles or what adds their splits, sums statistics.

    Where it is asked to, and rows are so many that a norm reads them twice.
    """
    if not p.sums_moments:
        return False
    is_whole = whole_channels(p)[1] == p.channels[1]
    few = thresholds.is_one_launch(p.rows_written, p.itemsize, CUDA)
    return is_whole and not few and (is_split or tile.variant != "mma")

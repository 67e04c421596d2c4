"""How CUDA's sums over offsets are split, so that few rows fill a GPU, and added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import ceil

import mlx.core as mx

from ..epilogue import EpilogueFacts
from ..problem import Problem
from ..routes import thresholds
from . import cuda_epilogue
from .cuda_operands import STAGE_BYTES, whole_channels
from .cuda_tiles import Tile
from .gpu_kernel import GpuKernel
from .kernel_launches import THREADS
from .signatures import ADD_SPLITS, rounded_up

ADDED = 4  # channels of a thread that adds splits
# Rounds of blocks, one a multiprocessor, where offsets are split; and what two of them
# that run side by side take of their time.
MOST_ROUNDS, OVERLAP = 4, 0.85
# Of a block that sums statistics of what it adds up: channels, and least rows; and
# blocks that fill any GPU several times.
MOMENTS_CHANNELS, MOMENTS_ROWS, MOMENTS_BLOCKS = 64, 32, 1024
SUMS = replace(ADD_SPLITS, inputs=("partial", "bias"))


def splitter(layer: Problem, tile: Tile) -> Callable[[Problem, int, int], int]:
    """Return ``splits(p, tiles, places)`` for the problems of a layer.

    That is into how many splits the offsets are cut, so that few rows fill a GPU: as
    many as make the multiprocessors' time, and that of adding up, the least. Over
    splits of 1 000 to 10 000 rows of 64 to 512 channels, timed on an H200, within 4% of
    the fastest. Blocks that run side by side gain little from each other there, but of
    int8; elsewhere they are taken not to slow each other.

    Args:
        layer: the facts but the rows.
        tile: of the output; ``tiles`` of it there are in all.

    ``places`` are those for blocks on the GPU.
    """
    us, (c_x, c_y) = _adding(layer), whole_channels(layer)
    size = max(1, tile.rows * tile.width / 8192)
    each_stage = thresholds.INT8_STAGE_US if layer.integer else thresholds.STAGE_US
    stages = c_x * layer.read_size / STAGE_BYTES
    offset = us["offset"] + each_stage[tile.variant] * size**0.5 * stages
    per = tile.per_multiprocessor
    if tile.variant == "mma" or layer.integer:
        of_a_round, most_rounds = per, 1  # blocks of a multiprocessor
    else:
        of_a_round, most_rounds = 1, per if per > 1 else MOST_ROUNDS

    def splits(p: Problem, tiles: int, places: int) -> int:
        slots, tiles = places // per * of_a_round, tiles or 1
        most = most_rounds * slots // tiles
        if most < 2:
            return 1
        used, rows = used_offsets(p, tile.rows), p.rows_written
        most = int(min(used, thresholds.MOST_SPLITS, most))
        whole, each = used * offset, _split_us(us, rows * c_y)
        best, least = 1, whole * _rounds(tiles / slots, per)
        # Those that fill whole rounds, or the best that leave some of one free.
        count = min(slots // tiles, int((whole / each) ** 0.5))
        for following in range(2, most_rounds + 2):
            count = min(count, most)
            if count > best:
                share = whole * _rounds(count * tiles / slots, per) / count
                cost = share + us["adding"] + count * each
                if cost < least:
                    best, least = count, cost
            count = following * slots // tiles
        return best

    return splits


def _rounds(blocks: float, per: int) -> float:
    """Return how many blocks one after another take as long, of so many on average.

    Where ``per`` lie side by side, some have fewer, and what they do overlaps.
    """
    rounds = ceil(blocks)
    return OVERLAP * (rounds + blocks) / 2 if per > 1 and rounds > 1 else rounds


def adding_us(p: Problem, splits: int) -> float:
    """Return about how long adding so many splits takes."""
    if splits == 1:
        return 0
    us, elements = _adding(p), p.rows_written * whole_channels(p)[1]
    return us["adding"] + splits * _split_us(us, elements)


def _adding(p: Problem) -> dict[str, float]:
    return thresholds.INT8_SPLIT_US if p.integer else thresholds.SPLIT_US


def _split_us(us: dict[str, float], elements: int) -> float:
    """Return what a split costs: its partial sums are written, and read."""
    return us["split"] + 8 * elements / us["bytes"]


def used_offsets(p: Problem, height: int) -> float:
    """Return about how many offsets a tile of sorted rows uses.

    Where rows have one edge each, one, and another where a tile has rows of two; with
    more edges, masks are many. Counted at K = 27 and 10 000 rows, of which a tile has
    64: 18.5 offsets at 10 edges a row, 15.4 at 4.4.
    """
    volume, rows = p.volume, p.rows_written
    if not rows or not p.edges:
        return volume
    masks = thresholds.USED_OFFSETS * volume * max(0, 1 - rows / p.edges)
    return min(volume, p.edges, 1 + masks + volume * height / rows)


@lru_cache(maxsize=256)
def add_splits(
    dtype: mx.Dtype,
    axes: int = 3,
    after: EpilogueFacts | None = None,
    moments: bool = False,
) -> GpuKernel:
    """Return what adds splits in order.

    Args:
        dtype: of the sum.
        axes: of the partial sums.
        after: the epilogue that it computes; None where it adds a bias alone.
        moments: whether it writes statistics of the rows of the sum, too.
    """
    sizes = ()
    if axes == 4:
        lines = "partial_shape[1] * partial_shape[2]"
        sizes = ("lines", lines), ("channels", "partial_shape[3]")
    symbol = "add_splits_moments" if moments else "add_splits"
    files, template = (*cuda_epilogue.FILES, f"{symbol}.cu"), (("T", dtype),)
    given = SUMS, template, after, moments
    return cuda_epilogue.finishing_kernel(symbol, files, *given, sizes=sizes)


def moments_lines(rows: int, channels: int) -> int:
    """Return the lines of statistics of so many rows: one a block of them."""
    columns = -(-channels // MOMENTS_CHANNELS)
    share = -(-rows * columns // MOMENTS_BLOCKS)
    return -(-rows // rounded_up(max(share, MOMENTS_ROWS), MOMENTS_ROWS))


def moments_threads(rows: int, channels: int) -> int:
    """Return the threads that add splits and sum statistics."""
    columns = -(-channels // MOMENTS_CHANNELS)
    return moments_lines(rows, channels) * columns * THREADS


def adding_threads(elements: int, each: int = ADDED) -> int:
    """Return the threads that add splits, ``each`` elements each, in whole blocks."""
    return rounded_up(-(-elements // each), THREADS)

"""How CUDA's sums over offsets are split, so that few rows fill a GPU, and added."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import mlx.core as mx

from ..epilogue import EpilogueFacts
from ..problem import Problem
from ..routes import thresholds
from . import cuda_epilogue
from .cuda_tiles import STAGE_BYTES, Tile, whole_channels
from .gpu_kernel import THREADS, GpuKernel
from .signatures import ADD_SPLITS, rounded_up

ADDED = 4  # channels of a thread that adds splits
SUMS = replace(ADD_SPLITS, inputs=("partial", "bias"))


def splits_of(p: Problem, tile: Tile, tiles: int, places: int) -> int:
    """Return into how many splits the offsets are cut, so that few rows fill a GPU.

    As many as make the sum of a tile's share and of what adding up costs the least.

    Args:
        p: the facts.
        tile: of the output.
        tiles: of it in all.
        places: for blocks on the GPU.
    """
    used, c_x = used_offsets(p, tile.rows), whole_channels(p)[0]
    us, size = _adding(p), max(1, tile.rows * tile.width / 8192)
    stage = thresholds.STAGE_US[tile.variant] * size**0.5
    whole = used * (us["offset"] + stage * c_x * p.read_size / STAGE_BYTES)
    each = _split_us(p)
    most = min(places // max(1, tiles), used, thresholds.MOST_SPLITS)
    splits = int(min(most, (whole / each) ** 0.5))
    pays = splits > 1 and whole - whole / splits > adding_us(p, splits)
    return splits if pays else 1


def adding_us(p: Problem, splits: int) -> float:
    """Return about how long adding so many splits takes."""
    if splits == 1:
        return 0
    return _adding(p)["adding"] + splits * _split_us(p)


def _adding(p: Problem) -> dict[str, float]:
    return thresholds.INT8_SPLIT_US if p.integer else thresholds.SPLIT_US


def _split_us(p: Problem) -> float:
    """Return what a split costs: its partial sums are written, and read."""
    us, elements = _adding(p), p.rows_written * whole_channels(p)[1]
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
    dtype: mx.Dtype, axes: int = 3, after: EpilogueFacts | None = None
) -> GpuKernel:
    """Return what adds splits in order.

    Args:
        dtype: of the sum.
        axes: of the partial sums.
        after: the epilogue that it computes; None where it adds a bias alone.
    """
    sizes = ()
    if axes == 4:
        lines = "partial_shape[1] * partial_shape[2]"
        sizes = ("lines", lines), ("channels", "partial_shape[3]")
    files, template = (*cuda_epilogue.FILES, "add_splits.cu"), (("T", dtype),)
    return cuda_epilogue.finishing_kernel(
        "add_splits", files, SUMS, template, after, sizes=sizes
    )


def adding_threads(elements: int, each: int = ADDED) -> int:
    """Return the threads that add splits, ``each`` elements each, in whole blocks."""
    return rounded_up(-(-elements // each), THREADS)

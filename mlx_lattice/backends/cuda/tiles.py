"""Matrix tiles on CUDA: their shapes, which tile a problem gets, and its splits.

The tables hold the shapes of Hopper's tiles. Other GPUs run ``mma``, one square tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import mlx.core as mx

from ...backends.gpu import norms as gpu_norms
from ...devices import CUDA, Device
from ...epilogue import EpilogueFacts
from ...geometry.lattice import used_by_blocks
from ...problem import WEIGHT_GRAD, Plan, Problem
from ...relation import Relation
from ...settings import TF32
from ..gpu.contraction import (
    ADD_SPLITS,
    AFTER,
    LINES,
    finishing,
    interned,
    rounded_up,
    with_moments,
)
from ..gpu.kernel import THREADS, GpuKernel, Interface, Value
from ..gpu.nvrtc import TYPES
from . import thresholds

# A stage has 128 bytes of each row's summed channels: four slices, each as deep as one
# product of tensor cores.
SLICE_BYTES, STAGE_SLICES = 32, 4
STAGE_BYTES = SLICE_BYTES * STAGE_SLICES
THREE, ONE = "three TF32", "TF32"  # three products keep float32's accuracy
POWERS = (32, 64, 128, 256)  # widths of tiles that unpack their weights
SKIPPED_ROWS = 64  # rows that a wgmma, or a tile of mma, skips together
# What `cuda/epilogue.cuh` needs before it.
EPILOGUE_FILES = "alignment.cuh", "channels.cuh", "activations.cuh", "epilogue.cuh"
HOPPER = (*EPILOGUE_FILES, "tiles.cuh", "hopper.cuh", "tile_moments.cuh", "wgmma.cuh")
MMA = (*EPILOGUE_FILES, "tiles.cuh", "tensor_core.cuh")
MMA_STAGES = 4
# Shared memory of a multiprocessor, and what the hardware takes of it for each block.
SHARED, RESERVED = 233472, 1024
SUMS = replace(ADD_SPLITS, inputs=("partial", "bias"))
ADDED = 4  # channels of a thread that adds splits
# Splits fill at most so many rounds of blocks. Two blocks that run side by side take
# this share of the time that they take one after the other.
MOST_ROUNDS, OVERLAP = 4, 0.85
# A block that adds splits and sums statistics: its channels and its least rows. So many
# blocks fill any GPU several times.
MOMENTS_CHANNELS, MOMENTS_ROWS, MOMENTS_BLOCKS = 64, 32, 1024


# Shapes


class PersistentTile(NamedTuple):
    """Shape of PersistentTile of sorted_implicit_gemm."""

    consumers: int  # warpgroups that multiply
    blocks: int  # blocks of 64 rows of each
    producers: int  # warpgroups that copy
    width: int  # output channels
    stages: int  # buffers of 64 summed channels, in shared memory
    per_multiprocessor: int  # thread blocks that a multiprocessor holds at once

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.consumers * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + self.producers)


class WideTile(NamedTuple):
    """Shape of WideTile and EdgeTile: a consumer warpgroup has 64 rows of the tile."""

    consumers: int
    producer_threads: int
    width: int
    stages: int
    per_multiprocessor: int

    @property
    def rows(self) -> int:
        """Rows (of the output, or of dW) of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.consumers + self.producer_threads


Shape = PersistentTile | WideTile


def shared_bytes(tile: Shape, weights: int = 1) -> int:
    """Return the dynamic shared memory of a block."""
    lines = tile.width if tile.width <= 32 else rounded_up(tile.width, 64)
    return tile.stages * 128 * (tile.rows + weights * lines) + 1024


# Tiles for many rows, by output channels. PersistentTile sums few input channels of
# several offsets together, WideTile sums whole stages of one offset. Timed on an H200
# (benchmarks/tiles.py). tests/routes/test_cuda_timings.py compares the choices with the
# fastest tiles.
SORTED_TILES = {
    32: PersistentTile(2, 2, 2, 32, 6, 1),
    48: PersistentTile(2, 2, 2, 48, 5, 1),
    64: PersistentTile(2, 2, 2, 64, 5, 1),
    96: PersistentTile(2, 2, 2, 96, 4, 1),
    128: PersistentTile(2, 2, 1, 128, 4, 1),
    192: PersistentTile(2, 1, 1, 192, 4, 1),
    256: PersistentTile(2, 1, 1, 256, 4, 1),
}
# Tiles for many rows and at least a stage of input channels, by output channels.
WIDE_TILES = {
    32: WideTile(1, 128, 32, 6, 3),
    48: WideTile(3, 128, 48, 6, 1),
    64: WideTile(2, 128, 64, 4, 2),
    80: WideTile(3, 128, 80, 5, 1),
    96: WideTile(3, 128, 96, 5, 1),
    112: WideTile(3, 128, 112, 5, 1),
    128: WideTile(3, 128, 128, 5, 1),
    160: WideTile(3, 128, 160, 4, 1),
    192: WideTile(2, 128, 192, 4, 1),
    224: WideTile(2, 128, 224, 4, 1),
    256: WideTile(2, 128, 256, 4, 1),
}
# Tiles for rows with few edges: these tiles are lower.
FEW_EDGES_TILES = {
    32: PersistentTile(1, 1, 1, 32, 4, 4),
    48: PersistentTile(1, 1, 1, 48, 3, 4),
    64: PersistentTile(1, 1, 1, 64, 3, 4),
    96: PersistentTile(1, 1, 1, 96, 4, 2),
    128: PersistentTile(1, 1, 1, 128, 4, 2),
    192: PersistentTile(2, 1, 1, 192, 4, 1),
    256: PersistentTile(2, 1, 1, 256, 4, 1),
}
# Tiles of few rows are lower and narrower, so that more of them fill the GPU: by the
# kind of rows (``_kind``) and the output channels, (most elements of the output, tile).
ANY = 1 << 62
_LOW_32, _LOW_48 = WIDE_TILES[32], WideTile(1, 128, 48, 4, 3)
_LOW_64, _LOW_96, _LOW_128 = (
    WideTile(1, 128, width, stages, 2) for width, stages in ((64, 6), (96, 4), (128, 4))
)
_QUICK_64, _MANY_64 = WideTile(1, 128, 64, 4, 3), WideTile(1, 128, 64, 3, 4)
_SLICED_32 = PersistentTile(1, 2, 1, 32, 5, 2)
SMALL_TILES: dict[str, dict[int, tuple[tuple[int, Any], ...]]] = {
    "sliced sums": {
        32: ((1 << 18, FEW_EDGES_TILES[32]), (3 << 21, _SLICED_32)),
        48: ((1 << 19, FEW_EDGES_TILES[48]),),
        **dict.fromkeys((64, 96, 128, 192, 256), ((1 << 19, FEW_EDGES_TILES[64]),)),
    },
    "narrow sums": {
        32: ((1 << 16, _LOW_32), (3 << 21, _SLICED_32)),
        48: ((3 << 17, _LOW_48),),
        64: ((1 << 20, _QUICK_64),),
        96: ((3 << 19, _LOW_96),),
        128: ((1 << 21, _LOW_128), (1 << 24, WIDE_TILES[128])),
        192: ((1 << 24, WIDE_TILES[192]),),
        256: ((1 << 24, WIDE_TILES[256]),),
    },
    "many edges": {
        64: ((3 << 17, _QUICK_64),),
        96: ((3 << 17, _LOW_96),),
        128: ((3 << 18, _LOW_128),),
        192: ((5 << 16, _LOW_96),),
        256: ((3 << 18, _LOW_128), (3 << 19, WIDE_TILES[128])),
    },
    "few edges": {
        64: ((3 << 21, _LOW_64),),
        96: ((1 << 21, _LOW_64), (3 << 22, _LOW_96)),
        128: ((1 << 21, _LOW_64), (1 << 24, _LOW_128)),
        192: ((1 << 21, _LOW_64), (ANY, WIDE_TILES[192])),
        256: ((1 << 22, _LOW_64), (ANY, WIDE_TILES[256])),
    },
    "few offsets": {
        32: ((3 << 17, _LOW_32), (1 << 22, _SLICED_32)),
        48: ((5 << 17, _LOW_48), (1 << 22, _QUICK_64)),
        64: ((3 << 17, _LOW_32), (3 << 21, _MANY_64)),
        96: ((5 << 17, _LOW_32), (5 << 18, _LOW_96)),
        128: ((1 << 21, _LOW_64),),
        192: ((5 << 17, _LOW_64), (3 << 20, _LOW_96)),
        256: ((3 << 19, _LOW_64), (1 << 22, _LOW_128)),
    },
    "one edge": {
        32: ((1 << 19, _LOW_32), (3 << 22, _SLICED_32)),
        48: ((1 << 22, _LOW_48),),
        64: ((3 << 16, _LOW_32), (1 << 21, _MANY_64), (3 << 23, FEW_EDGES_TILES[64])),
        96: ((3 << 19, _LOW_96), (1 << 21, WIDE_TILES[96])),
        128: ((5 << 16, _LOW_64), (9 << 18, _LOW_128), (ANY, FEW_EDGES_TILES[128])),
        192: ((5 << 18, _LOW_64), (1 << 23, WIDE_TILES[192])),
        256: (
            (3 << 18, _LOW_64),
            (3 << 19, _LOW_128),
            (5 << 20, WIDE_TILES[128]),
            (ANY, WIDE_TILES[256]),
        ),
    },
    "identity": {
        32: ((3 << 17, _LOW_32), (3 << 20, _MANY_64)),
        48: ((1 << 21, _LOW_48),),
        64: ((3 << 16, _QUICK_64), (3 << 19, WIDE_TILES[64]), (3 << 22, _MANY_64)),
        96: ((3 << 17, _MANY_64), (3 << 21, WideTile(2, 128, 96, 3, 2))),
        128: ((3 << 19, _MANY_64), (1 << 23, WIDE_TILES[128])),
        192: ((3 << 22, _MANY_64),),
        256: (
            (3 << 18, _LOW_64),
            (1 << 21, _LOW_128),
            (3 << 21, WIDE_TILES[128]),
            (1 << 24, WIDE_TILES[256]),
        ),
    },
}
SMALL_TILES["one stage"] = SMALL_TILES["many edges"] | {
    64: ((1 << 20, _QUICK_64), (5 << 20, _MANY_64))
}
CLASSES = (32, 48, 64, 96, 128, 192, 256)  # output channels of SMALL_TILES
# Tiles for float32 with prepared weights. A stage has each weight twice, for three
# products of TF32.
FLOAT_TILES = {
    32: PersistentTile(2, 2, 2, 32, 5, 1),
    64: PersistentTile(2, 2, 2, 64, 4, 1),
    96: PersistentTile(2, 1, 2, 96, 5, 1),
    128: PersistentTile(2, 1, 1, 128, 4, 1),
}
# FLOAT_TILES for rows with few edges.
FLOAT_FEW_EDGES_TILES = {
    32: PersistentTile(1, 1, 1, 32, 4, 2),
    64: PersistentTile(1, 1, 1, 64, 4, 2),
    96: PersistentTile(2, 1, 1, 96, 4, 1),
    128: PersistentTile(2, 1, 1, 128, 4, 1),
}
# Tiles for one product of TF32, if an offset has whole stages. Within 9% of the
# fastest.
TF32_TILES = {
    32: WideTile(1, 128, 32, 3, 4),
    96: WideTile(1, 128, 96, 4, 2),
    128: WideTile(2, 128, 128, 6, 1),
    160: WideTile(2, 128, 160, 4, 1),
    **{width: WIDE_TILES[width] for width in (64, 192, 224, 256)},
}
TF32_SMALL_TILES: dict[int, tuple[tuple[int, Any], ...]] = {
    64: ((1 << 18, _LOW_32),),
    128: ((3 << 17, _LOW_64), (3 << 20, _LOW_128)),
    192: ((3 << 17, _LOW_64),),
    256: ((1 << 20, _LOW_64), (1 << 21, TF32_TILES[128])),
}
# Tiles for int8 features.
INT8_TILES: dict[int, Any] = SORTED_TILES | {
    32: PersistentTile(2, 3, 2, 32, 4, 1),
    64: PersistentTile(2, 3, 2, 64, 4, 1),
    **{width: WIDE_TILES[width] for width in (112, 160, 192, 224, 256)},
    128: PersistentTile(2, 2, 2, 128, 4, 1),
}
# Tiles for int8 features and rows with few edges.
INT8_FEW_EDGES_TILES: dict[int, Any] = FEW_EDGES_TILES | {
    112: WideTile(1, 128, 112, 4, 2),
    160: WideTile(1, 128, 160, 3, 2),
    224: FEW_EDGES_TILES[256],
}
# Tiles for int8 features, if rows fill the GPU about once.
INT8_LOW_TILES: dict[int, Any] = {64: SORTED_TILES[64], 96: _LOW_96, 128: _LOW_128}


# Operands


def multiple(dtype: mx.Dtype) -> int:
    """Return what tiles' channels are padded to a multiple of: 16 bytes."""
    return 16 // dtype.size


def whole_channels(p: Problem) -> tuple[int, int]:
    """Return the channels that the pass sums over and writes, padded."""
    each, (c_x, c_y) = 16 // p.read_size, p.channels
    return -(-c_x // each) * each, -(-c_y // each) * each


def slices_of(c_in: int, itemsize: int = 2) -> int:
    """Return how many slices of an offset a stage has; 0 if that varies."""
    size = SLICE_BYTES // itemsize
    if c_in % (STAGE_SLICES * size) == 0:
        return STAGE_SLICES
    if c_in <= size:
        return 1
    return 2 if c_in <= 2 * size or c_in % (2 * size) == 0 else 0


def tail_slices(p: Problem) -> int:
    """Return the slices of an offset's last stage; 0 if that stage is full."""
    return -(-(whole_channels(p)[0] * p.read_size % STAGE_BYTES) // SLICE_BYTES)


def proof_channels(p: Problem, width: int) -> tuple[int, int]:
    """Return (C_in, C_out) for the proof of a kernel with tiles of so many columns."""
    each, stage = 16 // p.read_size, STAGE_BYTES // p.read_size
    c_x = whole_channels(p)[0]
    if c_x > 2 * stage:
        c_x = 2 * stage if c_x % stage == 0 else stage + c_x % stage
    tried = c_x - 3, width + 2 * each - 3
    return tried[::-1] if p.transposed else tried


def products(p: Problem) -> str:
    """Return how tensor cores multiply float32; "" for other dtypes."""
    if p.dtype != "float32":
        return ""
    return ONE if p.precision == TF32 else THREE


def product_count(p: Problem) -> int:
    """Return how many products of tensor cores one product of features takes."""
    return 3 if products(p) == THREE and not p.integer else 1


def has_wgmma(p: Problem, device: Device) -> bool:
    """Whether wgmma takes the features in either layout."""
    return p.dtype != "float32" and device.family in thresholds.HOPPER


def multiplies_one(p: Problem, device: Device) -> bool:
    """Whether wgmma takes float32 as it takes half: one TF32 product, full stages."""
    one = products(p) == ONE and not p.bits and device.family in thresholds.HOPPER
    return one and slices_of(whole_channels(p)[0], p.read_size) == STAGE_SLICES


def prepares(p: Problem, device: Device) -> bool:
    """Whether float32 weights are prepared for wgmma before the call."""
    if p.dtype != "float32" or p.pass_ == WEIGHT_GRAD or p.bits:
        return False
    if multiplies_one(p, device):
        elements = p.rows_written * whole_channels(p)[1]
        return not p.rows_are_summed and elements > thresholds.TURNED_ELEMENTS
    many = p.rows_written * p.channels[1] > thresholds.FLOAT_ELEMENTS
    return many and device.family in thresholds.HOPPER


def weight_parts(p: Problem) -> int:
    """Return the parts of a prepared weight: one, or a high and a low one."""
    return 2 if product_count(p) == 3 else 1


def unpacked_bytes(p: Problem) -> int:
    """Return the bytes of unpacked weights."""
    c_x, c_y = whole_channels(p)
    return p.volume * c_x * c_y * p.itemsize


def few_edges(p: Problem) -> bool:
    """Whether the rows that the pass writes have few edges on average."""
    rows = p.n_out if p.pass_ == WEIGHT_GRAD else p.rows_written
    few = few_offsets(p)
    least = thresholds.FEW_EDGES_OF_FEW_OFFSETS if few else thresholds.FEW_EDGES
    return p.edges is not None and p.edges < least * rows


def few_offsets(p: Problem) -> bool:
    """Whether the kernel has few offsets."""
    return p.volume <= thresholds.FEW_OFFSETS


def list_length(volume: int) -> int:
    """Return the length of a kernel's list of offsets; few lengths serve all K."""
    return 64 if volume <= 64 else max(512, 1 << (volume - 1).bit_length())


# Tiles


class Tile(NamedTuple):
    """A matrix tile of a kernel."""

    variant: str  # of the kernel: "mma", "hopper" or "wide"
    code: str  # the C++ type that names it
    rows: int
    width: int
    threads: int  # of a block
    per_multiprocessor: int  # blocks of a multiprocessor
    shared_bytes: int  # dynamic shared memory of a block
    files: tuple[str, ...]  # sources of the tile
    persistent: bool = False  # whether a block takes tile after tile
    itself: bool = False  # whether each row's only neighbour is itself


def mma(p: Problem, *files: str, side: int = 64, per: int = 2) -> Tile:
    """Return the square tile of mma.sync, with ``per`` blocks a multiprocessor."""
    shared, code = MMA_STAGES * 2 * side * 128, f"MmaTile<{product_count(p)}, {side}>"
    return Tile("mma", code, side, side, 2 * side, per, shared, (*MMA, *files))


def wide(p: Problem, shape: WideTile, itself: bool = False) -> Tile:
    """Return WideTile in a shape, for the problem's channels and offsets."""
    early = thresholds.FEW_OFFSETS if few_offsets(p) and not itself else 0
    code = shape.consumers, shape.width, shape.stages, tail_slices(p), early
    code = *code, *["true"] * itself
    return shaped(
        "wide",
        f"WideTile<{', '.join(map(str, code))}>",
        shape,
        ("weight_stages.cuh", "sorted_implicit_gemm_wide.cuh"),
        itself=itself,
    )


def persistent(p: Problem, shape: PersistentTile) -> Tile:
    """Return PersistentTile in a shape, with the stages that shared memory holds."""
    slices, weights = slices_of(whole_channels(p)[0], p.read_size), weight_parts(p)
    # Bytes of a channel that an epilogue, or statistics, keep.
    channel = 8 if p.epilogue or p.integer else 4 if p.moments else 0
    # Prefetched indices, the list of offsets, and barriers.
    ahead, offsets = (8, 1) if slices == STAGE_SLICES else (4, 2 if slices == 2 else 4)
    fixed = ahead * (offsets * shape.rows * 4 + 64) + 512
    fixed += 4 * list_length(p.volume) + channel * shape.width
    per = shape.per_multiprocessor
    while shape.stages > 2:
        block = shared_bytes(shape, weights) + fixed + RESERVED
        if block * per <= SHARED:
            break
        shape = shape._replace(stages=shape.stages - 1)
    return shaped(
        "hopper",
        f"PersistentTile<{', '.join(map(str, (*shape, slices, product_count(p))))}>",
        shape,
        ("hopper_tf32.cuh", "stage_sources.cuh", "sorted_implicit_gemm_hopper.cuh"),
        weights,
        persistent=True,
    )


def shaped(
    variant: str,
    code: str,
    shape: Shape,
    files: tuple[str, ...],
    weights: int = 1,
    **more: bool,
) -> Tile:
    """Return a tile of Hopper; ``weights`` are the parts of a weight in a stage."""
    return Tile(
        variant,
        code,
        shape.rows,
        shape.width,
        shape.threads,
        shape.per_multiprocessor,
        shared_bytes(shape, weights),
        (*HOPPER, *files),
        **more,
    )


def sums_moments(p: Problem, tile: Tile, is_split: bool) -> bool:
    """Whether the launch that writes the rows sums their statistics."""
    if not p.sums_moments:
        return False
    is_whole = whole_channels(p)[1] == p.channels[1]
    few = gpu_norms.is_one_launch(p.rows_written, p.itemsize)
    return is_whole and not few and (is_split or tile.variant != "mma")


# Choice


def sorted_tile(p: Problem, device: Device, packed: bool = False) -> Tile:
    """Return the tile over sorted rows; ``packed``: whether it unpacks its weights."""
    if packed and has_wgmma(p, device):
        return _packed_tile(p)
    if multiplies_one(p, device) and (prepares(p, device) or p.rows_are_summed):
        c_y = whole_channels(p)[1]
        return wide(p, _small(p, TF32_SMALL_TILES) or fitting(TF32_TILES, c_y))
    if prepares(p, device):
        tiles = FLOAT_FEW_EDGES_TILES if few_edges(p) else FLOAT_TILES
        return persistent(p, fitting(tiles, whole_channels(p)[1]))
    if not has_wgmma(p, device):
        return mma(p, "sorted_implicit_gemm_mma.cuh")
    return of_shape(p, small_shape(p) or _shape_of_many_rows(p))


def of_shape(p: Problem, shape: Shape) -> Tile:
    """Return the tile of a shape for the problem's channels and offsets."""
    if isinstance(shape, WideTile):
        return wide(p, shape, itself=p.pointwise and not p.integer)
    return persistent(p, shape)


def small_shape(p: Problem) -> Shape | None:
    """Return the shape of few rows, or None if the rows are many."""
    return _small(p, SMALL_TILES[_kind(p)])


def _small(p: Problem, by_width: dict[int, tuple]) -> Shape | None:
    c_y = whole_channels(p)[1]
    sizes, elements = by_width.get(tile_width(c_y, CLASSES), ()), p.rows_written * c_y
    return next((shape for most, shape in sizes if elements <= most), None)


def _kind(p: Problem) -> str:
    """Return the kind of rows, a key of SMALL_TILES."""
    if p.pointwise:
        return "identity"
    summed = whole_channels(p)[0] * p.read_size
    if 2 * summed < STAGE_BYTES:
        return "sliced sums"  # several offsets share a stage: not WideTile's
    if few_offsets(p):
        return "one edge" if few_edges(p) else "few offsets"
    if few_edges(p):
        return "few edges"
    if summed == STAGE_BYTES:
        return "one stage"
    return "many edges" if summed > STAGE_BYTES else "narrow sums"


def _shape_of_many_rows(p: Problem) -> Shape:
    """Return the shape of half precision: WideTile for whole stages of many edges."""
    (c_x, c_y), few = whole_channels(p), few_edges(p)
    if not p.pointwise and not few and c_x * p.read_size >= STAGE_BYTES:
        return fitting(WIDE_TILES, c_y)
    low = few and not few_offsets(p) and not p.pointwise
    return fitting(FEW_EDGES_TILES if low else SORTED_TILES, c_y)


def _packed_tile(p: Problem) -> Tile:
    """Return the tile that unpacks its weights: a low one would do it more often."""
    (c_x, c_y), few = whole_channels(p), few_edges(p)
    width = tile_width(c_y, POWERS)
    if not few and width >= 128 and slices_of(c_x) == STAGE_SLICES:
        return wide(p, WIDE_TILES[width])
    # Unpacking takes the registers of the widest tile. If offsets are few, the rows of
    # a tile share one, however few edges they have.
    low = few and not few_offsets(p)
    return persistent(p, (FEW_EDGES_TILES if low else SORTED_TILES)[min(width, 128)])


def fitting(tiles: dict[int, Shape], channels: int) -> Shape:
    """Return the tile of the width that fits so many channels."""
    return tiles[tile_width(channels, tiles)]


def tile_width(channels: int, widths: Iterable[int]) -> int:
    """Return the tile width that wastes the least, the wider at a tie or nearly so."""
    widths = sorted(widths)
    for width in widths:
        if channels <= min(width, 128):
            return width
    wide = [width for width in widths if width >= 96] or widths
    least = min(rounded_up(channels, width) for width in wide)
    return max(w for w in wide if rounded_up(channels, w) <= 1.1 * least)


def unpacks_once(p: Problem, device: Device, tile: Tile) -> bool:
    """Whether a call unpacks its weights to floats first, instead of ``tile``."""
    few = few_edges(p) and has_wgmma(p, device)
    least = thresholds.UNPACK_ROWS["few edges" if few else tile.variant].get(tile.width)
    room = max(thresholds.UNPACK_BYTES, p.n_out * whole_channels(p)[1] * p.itemsize)
    return unpacked_bytes(p) <= room and least is not None and p.n_out >= least


# Splits


def splits_of(p: Problem, tile: Tile, tiles: int, places: int) -> int:
    """Return into how many splits offsets are cut, to take the least time."""
    per = tile.per_multiprocessor
    if tile.variant == "mma" or p.integer:
        of_a_round, most_rounds = per, 1  # blocks of a multiprocessor
    else:
        of_a_round, most_rounds = 1, per if per > 1 else MOST_ROUNDS
    slots, tiles = places // per * of_a_round, tiles or 1
    most = most_rounds * slots // tiles
    if most < 2:
        return 1
    us, (c_x, c_y) = _adding(p), whole_channels(p)
    each_stage = thresholds.INT8_STAGE_US if p.integer else thresholds.STAGE_US
    stages = c_x * p.read_size / STAGE_BYTES
    size = max(1, tile.rows * tile.width / 8192)
    offset = us["offset"] + each_stage[tile.variant] * size**0.5 * stages
    used = used_offsets(p, tile.rows)
    most = int(min(used, thresholds.MOST_SPLITS, most))
    whole, each = used * offset, _split_us(us, p.rows_written * c_y)
    best, least = 1, whole * _rounds(tiles / slots, per)
    # Splits that fill whole rounds, or the best that leave some of one free.
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


def _rounds(blocks: float, per: int) -> float:
    """Return the time of a multiprocessor's blocks, ``per`` of them side by side."""
    rounds = ceil(blocks)
    return OVERLAP * (rounds + blocks) / 2 if per > 1 and rounds > 1 else rounds


def adding_us(p: Problem, splits: int) -> float:
    """Return about how many microseconds adding so many splits takes."""
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

    One, if rows have one edge each, and another in a tile with rows of two masks; more
    edges make many masks. Measured at K = 27, 10 000 rows and tiles of 64 rows: 18.5
    offsets at 10 edges a row, 15.4 at 4.4.
    """
    volume, rows = p.volume, p.rows_written
    if not rows or not p.edges:
        return volume
    masks = thresholds.USED_OFFSETS * volume * max(0, 1 - rows / p.edges)
    return min(volume, p.edges, 1 + masks + volume * height / rows)


def finishing_kernel(
    symbol: str,
    files: Sequence[str],
    interface: Interface,
    template: Sequence[tuple[str, Value]],
    after: EpilogueFacts | None,
    moments: bool = False,
    **more: object,
) -> GpuKernel:
    """Return a kernel whose last template argument is what follows its sums."""
    kind, together = "Bias<T>", AFTER[:1]
    if after is not None:
        values = [TYPES.get(value, value) for _, value in after.template]
        kind = f"Epilogue<T, {', '.join(map(str, values))}>"
        interface, together = finishing(interface), AFTER
    elif moments:
        kind, together = "Moments<T>", (*together, LINES)
        interface = with_moments(interface)
    template = *template, ("AFTER", kind)
    fields = {"together": together, **more}
    return interned(
        GpuKernel(CUDA, symbol, tuple(files), interface, template, **fields)
    )


@lru_cache(maxsize=256)
def add_splits(
    dtype: mx.Dtype,
    axes: int = 3,
    after: EpilogueFacts | None = None,
    moments: bool = False,
) -> GpuKernel:
    """Return the kernel that adds partial sums of so many axes, in order."""
    sizes = ()
    if axes == 4:
        lines = "partial_shape[1] * partial_shape[2]"
        sizes = ("lines", lines), ("channels", "partial_shape[3]")
    symbol = "add_splits_moments" if moments else "add_splits"
    files, template = (*EPILOGUE_FILES, f"{symbol}.cu"), (("T", dtype),)
    return finishing_kernel(symbol, files, SUMS, template, after, moments, sizes=sizes)


def moments_lines(rows: int, channels: int) -> int:
    """Return the lines of statistics of so many rows: one a block of rows."""
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


# What tiles multiply, absent edges and padding included: `Plan.count`, for `cost`


def sorted_multiply_adds(plan: Plan, relation: Relation | None) -> int | None:
    """Return the multiply-adds of tiles over sorted rows."""
    if relation is None:
        return None
    p, (height, width) = plan.problem, plan.tile
    c_x, c_y = whole_channels(p)
    used = used_blocks(relation.T if p.transposed else relation)
    columns, tiles = rounded_up(c_y, width), cut_blocks(used, height // SKIPPED_ROWS)
    if plan.variant != "hopper":  # an offset's last stage, or as much as it fills
        filled = STAGE_BYTES if plan.variant == "mma" else SLICE_BYTES
        depth = rounded_up(c_x, filled // p.read_size)
        return height * depth * columns * count_of(tiles.any(axis=1))
    # Whole stages, halves or slices of an offset. What else a stage has that several
    # offsets share is not counted.
    slices = max(1, slices_of(c_x, p.read_size))
    depth = rounded_up(c_x, slices * SLICE_BYTES // p.read_size)
    return SKIPPED_ROWS * depth * columns * count_of(used)


def used_blocks(relation: Relation) -> mx.array:
    """Return (blocks, K): the offsets that each block of sorted rows uses."""
    # A mirrored relation and its transpose share the tiles of the former.
    by_tiles = relation.mirrored and relation.is_transposed
    rows = (relation.T if by_tiles else relation).sorted
    return used_by_blocks(rows.table >= 0, SKIPPED_ROWS)


def cut_blocks(used: mx.array, size: int) -> mx.array:
    """Return (N, K) as (ceil(N / size), size, K), filled up with False."""
    padded = mx.pad(used, [(0, -used.shape[0] % size), (0, 0)])
    return padded.reshape(-1, size, used.shape[1])


def count_of(flags: mx.array) -> int:
    """Return how many flags are set."""
    return mx.sum(flags.astype(mx.int32)).item()

"""Contractions of int8 features on CUDA, planned from facts alone.

Compute capability 8.0 and later; wgmma on Hopper. Channels are padded to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import NamedTuple

import mlx.core as mx

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..integer_facts import FOLLOWING, IntegerFacts, finished
from ..problem import Problem
from ..quantized import IntegerWeight
from ..relation import Relation
from ..routes import thresholds
from ..routes.plan import (
    IN_KERNEL,
    IN_SUM,
    PROOF_SPLITS,
    Dispatch,
    Plan,
    Proof,
    integers_unpacked,
)
from . import cuda_tile_tables as tables
from . import cuda_tiles
from .cuda_compile import TYPES
from .cuda_tables import sorted_arrays
from .cuda_tiles import Tile, whole_channels
from .gpu_joins import padded
from .gpu_kernel import THREADS, GpuKernel, Interface
from .signatures import ADD_SPLITS, SORTED_TILES, W_OFFSET, W_ROW, kept, rounded_up

_SIZES = {
    **dict(SORTED_TILES.sizes),
    "c_y": "w_shape[1]",
    W_OFFSET: "w_shape[1] * w_shape[2]",
    W_ROW: "w_shape[2]",
    "pitch": "table_shape[1]",
}
# Of partial sums, and of whole ones with what follows them.
PARTS = replace(SORTED_TILES, sizes=tuple(_SIZES.items()))
TILES = replace(PARTS, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
SPLITS = replace(ADD_SPLITS, inputs=("partial", *FOLLOWING))
UNPACK = Interface(
    "UnpackInt4",
    ("words", "multipliers"),
    ("w",),
    (("lines", "words_shape[0] * words_shape[1]"), ("padded", "words_shape[2] * 8")),
)
EPILOGUE = "integer_epilogue.cuh"
# Sources of a tile, by variant.
FILES = {
    "mma": (*cuda_tiles.MMA, EPILOGUE, "sorted_implicit_gemm_mma.cuh"),
    "wide": (
        *cuda_tiles.HOPPER,
        EPILOGUE,
        "hopper_int8.cuh",
        "weight_stages.cuh",
        "sorted_implicit_gemm_wide.cuh",
    ),
    "hopper": (
        *cuda_tiles.HOPPER,
        "hopper_tf32.cuh",
        EPILOGUE,
        "hopper_int8.cuh",
        "stage_sources.cuh",
        "sorted_implicit_gemm_hopper.cuh",
    ),
}


class Cut(NamedTuple):
    """How the work over sorted rows is cut.

    Attributes:
        tile: of the result.
        splits: of the sums.
        us: about how many microseconds it takes.
    """

    tile: Tile
    splits: int
    us: float


def cut_of(p: Problem, device: Device) -> Cut:
    """Return how the work of a problem is cut.

    A lower tile serves few rows. If its splits or its last blocks would take longer, by
    ``thresholds.INT8_US``, the tile of many rows serves them too.
    """
    if device.family not in thresholds.HOPPER:
        return _cut_by(p, device, of_int8(cuda_tiles.mma(p)))
    c_x, c_y = whole_channels(p)
    stages, left = divmod(c_x, cuda_tiles.STAGE_BYTES)
    by_width, lower = tables.INT8_TILES, tables.INT8_SMALL_TILES
    # All rows of a tile share a lone offset.
    if cuda_tiles.few_edges(p) and p.volume > 1:
        by_width = tables.INT8_FEW_EDGES_TILES
        lower = tables.INT8_FEW_EDGES_SMALL_TILES
    elif stages > 0 and left > 0:
        by_width = by_width | tables.WIDE_TILES
        lower = tables.INT8_DEEP_SMALL_TILES
    width = cuda_tiles.tile_width(c_y, by_width)
    lower = lower.get(width, ())
    if cuda_tiles.few_offsets(p) and width >= 64:
        lower = *tables.INT8_FEW_OFFSETS_TILES, *lower
    small = cuda_tiles.small_tile(lower, p.rows_written * c_y)
    shapes = [shape for shape in (small, by_width[width]) if shape]
    cuts = [_cut_by(p, device, hopper_tile(p, shape)) for shape in shapes]
    return min(cuts, key=lambda cut: cut.us)


def _cut_by(p: Problem, device: Device, tile: Tile) -> Cut:
    """Return the cut by a tile; several blocks a multiprocessor fill whole ones."""
    c_x, c_y = whole_channels(p)
    columns, each, cores = -(-c_y // tile.width), tile.per_multiprocessor, device.cores
    stages = c_x / cuda_tiles.STAGE_BYTES
    if not tile.persistent:  # an offset has slices of its own
        stages = ceil(cuda_tiles.STAGE_SLICES * stages) / cuda_tiles.STAGE_SLICES
    stage_us = thresholds.INT8_US[tile.variant] * tile.rows * tile.width * stages
    tiles = -(-p.rows_written // tile.rows) * columns
    splits = cuda_tiles.splits_of(p, tile, tiles, cores * each)
    if splits > 1 and splits * tiles > cores:
        full = [max(1, i * cores // tiles) for i in range(1, each + 1)]
        nearest = min(full, key=lambda n: max(n / splits, splits / n))
        splits = min(nearest, p.volume)
    # Of the multiprocessor with most blocks, and adding.
    most = ceil(tiles * splits / cores) * ceil(p.volume / splits)
    us = most * stage_us + cuda_tiles.adding_us(p, splits)
    return Cut(tile, splits, us)


def of_int8(tile: Tile) -> Tile:
    """Return a tile with its sources for int8."""
    return tile._replace(files=FILES[tile.variant])


def hopper_tile(p: Problem, shape: tables.Shape) -> Tile:
    """Return the tile of Hopper in a shape."""
    if isinstance(shape, tables.PersistentTile):
        return of_int8(cuda_tiles.persistent(p, shape))
    return of_int8(cuda_tiles.wide(p, shape))


def int8_sorted(p: Problem, device: Device) -> Plan:
    """Plan matrix tiles of int8 over mask-sorted rows; int4 weights become int8."""
    tile, splits, _ = cut_of(p, device)
    most = max(1, device.cores * tile.per_multiprocessor // splits)
    return _as_cut(p, tile, splits, most)


def _again(
    p: Problem, tile: Tile, is_split: bool, defines: tuple[tuple[str, int], ...]
) -> Plan:
    """Return the plan of a small problem for another cut's kernel, in few blocks."""
    plan = _as_cut(p, tile, PROOF_SPLITS if is_split else 1, 2)
    return replace(plan, gpu=kept(replace(plan.gpu, defines=defines)))


def _as_cut(p: Problem, tile: Tile, splits: int, most: int) -> Plan:
    """Return the plan of work that is cut already, in ``most`` persistent blocks."""
    rows, (c_x, c_y) = p.rows_written, whole_channels(p)
    is_split, high = splits > 1, -(-rows // tile.rows)
    blocks = high * -(-c_y // tile.width)
    if tile.persistent:
        blocks = min(blocks, most)
    scratch, added, add = 0, (), None
    if is_split:
        scratch = 4 * splits * rows * c_y
        added = (cuda_tiles.adding_threads(rows * c_y),)
        add = adding_kernel(p.integer, DTYPES[p.dtype])
    weights = integers_unpacked(p)
    if weights:
        scratch += p.volume * c_x * c_y
    gpu = tiles_kernel(p, tile, is_split)
    again = partial(_again, tile=tile, is_split=is_split, defines=gpu.defines)
    return Plan(
        p,
        CUDA,
        "int8_sorted",
        "sorted",
        _bind,
        variant=tile.variant,
        tile=(tile.rows, tile.width),
        splits=splits,
        multiple=cuda_tiles.multiple(mx.int8),
        read=sorted_arrays,
        weights=weights,
        epilogue=IN_SUM if is_split else IN_KERNEL,
        scratch=scratch,
        gpu=gpu,
        add=add,
        threadgroup=(tile.threads,),
        dispatches=(Dispatch(0, high, (blocks * tile.threads, splits), added),),
        count=cuda_tiles.sorted_multiply_adds,
        proof=Proof(cuda_tiles.proof_channels(p, tile.width), again),
    )


def after(facts: IntegerFacts, dtype: mx.Dtype) -> str:
    """Return the C++ type of what follows the sums.

    ``dtype`` is that of a residual of floats.
    """
    there = [str(name in facts.there).lower() for name in ("shift", "residual")]
    residual = TYPES[mx.int8 if facts.residual_int8 else dtype]
    return f"IntegerEpilogue<{facts.act.code}, {', '.join(there)}, {residual}>"


def tiles_kernel(p: Problem, tile: Tile, is_split: bool) -> GpuKernel:
    """Return the kernel of the tiles; if sums are split it writes parts of them."""
    dtype, whole = DTYPES[p.dtype], not is_split
    return kept(
        GpuKernel(
            CUDA,
            "int8_sorted",
            (*tile.files, "int8_sorted.cu"),
            TILES if whole else PARTS,
            (
                ("TILE", tile.code),
                ("OUT", p.integer.out_dtype(dtype) if whole else mx.int32),
                ("MIRRORED", p.mirrored),
                ("AFTER", after(p.integer, dtype) if whole else "PartialSums"),
            ),
            threads=tile.threads,
            blocks_per_multiprocessor=tile.per_multiprocessor,
            shared_bytes=tile.shared_bytes,
            defines=(("LATTICE_MAX_OFFSETS", cuda_tiles.list_length(p.volume)),),
            together=FOLLOWING if whole else ("bias",),
        )
    )


def adding_kernel(facts: IntegerFacts, dtype: mx.Dtype) -> GpuKernel:
    """Return the kernel that adds int32 partial sums, and computes what follows.

    ``dtype`` is that of floats, of the result and the residual.
    """
    return kept(
        GpuKernel(
            CUDA,
            "add_integer_splits",
            (*cuda_tiles.EPILOGUE_FILES, "tiles.cuh", EPILOGUE, "integer_splits.cu"),
            SPLITS,
            (("OUT", facts.out_dtype(dtype)), ("AFTER", after(facts, dtype))),
            together=FOLLOWING,
        )
    )


@lru_cache(maxsize=1024)
def unpacker(shape: tuple[int, ...], group_size: int):
    """Return the launch that makes int4 words of a shape int8: (K, C_out, channels)."""
    template = (("GROUP_SIZE", group_size),)
    kernel = kept(GpuKernel(CUDA, "unpack_int4", ("unpack_int4.cu",), UNPACK, template))
    volume, c_out, words = shape
    threads = rounded_up(volume * c_out * words // 2, THREADS)
    out = (volume, c_out, 8 * words), mx.int8
    return kernel.launcher((True, True), [out], (threads,))


def _bind(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over sorted rows; splits are added in order."""
    p, view, (dispatch,) = plan.problem, plan.read(relation), plan.dispatches
    n, c_y = relation.n_out, p.channels[1]
    facts, out = p.integer, p.integer.out_dtype(DTYPES[p.dtype])
    if p.edges == 0 or 0 in [array.size for array in view]:
        none, dtype = mx.zeros((n, c_y), dtype=mx.int32), DTYPES[p.dtype]
        return lambda x, w, *added: finished(none, facts, dtype, *added[:-1])
    multiple, wide = plan.multiple, whole_channels(p)[1]
    there = tuple([name in facts.there for name in FOLLOWING])
    whole, add, given = ((n, wide), out), None, (True,) * 5
    if plan.add is None:
        made, given = whole, given + there
    else:
        made, given = ((plan.splits, n, wide), mx.int32), (*given, False)
        add = plan.add.launcher((True, *there), [whole], dispatch.add)
    tiles = plan.gpu.launcher(given, [made], dispatch.grid, plan.threadgroup)

    def call(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        values = w.values
        if w.bits == 4:
            unpack = unpacker(values.shape, w.group_size)
            values = unpack(list(w.arrays))[0]
        after, x = added[:-1], padded(x, 1, multiple)
        if wide != c_y:
            values = padded(values, 1, multiple)
            lines = [a if a is None else padded(a, -1, multiple) for a in after[:3]]
            after = *lines, *after[3:]
        given = [a for a in after if a is not None]
        arrays = [x, values, *view]
        if add is None:
            y = tiles([*arrays, *given])[0]
        else:
            y = add([tiles(arrays)[0], *given])[0]
        return y if wide == c_y else y[:, :c_y]

    return call

"""Contractions on CUDA: a planner for each route, from facts alone.

Compute capability 8.0 and later. By matrix tiles over sorted rows, which pad channels
to 16 bytes and on Hopper multiply half and bfloat16 through wgmma; or by threads, one
an output row and its channels. Packed weights are read as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import NamedTuple

import mlx.core as mx

from ...checks import DTYPES
from ...devices import CUDA, Device
from ...plan import (
    IN_KERNEL,
    IN_SUM,
    IN_TILES,
    PREPARED_ONCE,
    PROOF_SPLITS,
    UNPACKED_ONCE,
    Dispatch,
    Plan,
    Proof,
    integers_unpacked,
)
from ...problem import (
    FOLLOWING,
    KERNEL_MAJOR,
    MLX_LAYOUT,
    WEIGHT_GRAD,
    IntegerFacts,
    Problem,
    finished,
)
from ...quantized import IntegerWeight, QuantizedWeight
from ...relation import Relation
from ..gpu.contraction import (
    ADD_SPLITS,
    PER_ROW,
    PER_ROW_OF_EDGES,
    SORTED_TILES,
    W_GROUP,
    W_OFFSET,
    W_ROW,
    copied,
    kept,
    packed,
    per_row,
    rounded_up,
    sorted_tiles,
)
from ..gpu.joins import padded
from ..gpu.kernel import THREADS, GpuKernel, Interface, blocks_for
from ..gpu.nvrtc import TYPES
from . import thresholds
from . import tile_tables as tables
from . import tiles as cuda_tiles
from . import weight_grad as cuda_weight_grad
from .geometry import sorted_arrays
from .tiles import EPILOGUE_FILES, Tile, finishing_kernel, whole_channels

SCALES = ("scale_groups", "scales_shape[2]")
PACKED_ROWS = replace(packed(PER_ROW), name="PackedRow", sizes=(*PER_ROW.sizes, SCALES))
PACKED_ROWS_OF_EDGES = replace(
    PACKED_ROWS,
    inputs=packed(PER_ROW_OF_EDGES).inputs,
    sizes=tuple(
        {
            **dict(PACKED_ROWS.sizes),
            "rows": "starts_shape[0] - 1",
            "volume": "words_shape[0]",
        }.items()
    ),
)
UNPACK = Interface(
    "Unpack",
    ("words", "scales", "biases"),
    ("w",),
    (("c_out", "words_shape[1]"), SCALES, ("padding", "0")),
)
PITCH = ("pitch", "table_shape[1]")  # rows of the sorted table, with padding
TILES = replace(SORTED_TILES, sizes=(*SORTED_TILES.sizes, PITCH))
PACKED_TILES = replace(
    packed(TILES),
    name="PackedTiles",
    sizes=(*TILES.sizes, ("c_packed", "words_shape[1]"), SCALES),
)
TF32_WEIGHTS = Interface(
    "Tf32Weights",
    ("w",),
    ("out",),
    (
        ("lines", "w_shape[2]"),
        ("channels", "w_shape[1]"),
        (W_OFFSET, "w_shape[1] * w_shape[2]"),
        ("w_channel_stride", "w_shape[2]"),
        ("w_line_stride", "1"),
    ),
)
# Which axis of the weight's array is which.
WEIGHT_AXES = {
    KERNEL_MAJOR: {"volume": "w_shape[0]", "c_in": "w_shape[1]", "c_out": "w_shape[2]"},
    MLX_LAYOUT: {"c_out": "w_shape[0]", "volume": "w_shape[1]", "c_in": "w_shape[2]"},
}
# Where a float weight stands, in elements, as C++ over its shape.
STRIDES = {
    KERNEL_MAJOR: {W_OFFSET: "w_shape[1] * w_shape[2]", W_ROW: "w_shape[2]"},
    MLX_LAYOUT: {W_OFFSET: "w_shape[2]", W_ROW: "w_shape[1] * w_shape[2]"},
}


# By rows


def _csr(relation: Relation) -> tuple[mx.array, ...]:
    return relation.output_csr.indptr, relation.output_csr.edges


def _table(relation: Relation) -> tuple[mx.array, ...]:
    return (relation.held_table(),)


def _by_rows(
    p: Problem,
    route: str,
    kernel: GpuKernel,
    of_table: bool,
    threads: int | None = None,
    **more,
) -> Plan:
    """Plan so many threads an output row, by default one a channel."""
    blocks = blocks_for(p.rows_written * (threads or p.channels[1]))
    return Plan(
        p,
        CUDA,
        route,
        "out_in" if of_table else "output_csr",
        per_row,
        read=_table if of_table else _csr,
        epilogue=IN_KERNEL if p.epilogue else "",
        gpu=kernel,
        threadgroup=(THREADS,),
        dispatches=(Dispatch(0, p.rows_written, (blocks * THREADS,)),),
        **more,
    )


def relation_traversal(p: Problem, device: Device) -> Plan:
    """Plan a thread an output row and channel, which walks the row's edges."""
    if p.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.relation_traversal(p, device)
    axes = WEIGHT_AXES[p.layout]
    each = axes["c_in"], f"{axes['c_out']} / {p.groups}"
    c_x, c_y = reversed(each) if p.transposed else each
    group = f"({axes['c_out']} / {p.groups})"
    if p.layout == MLX_LAYOUT:
        group += f" * {axes['volume']} * {axes['c_in']}"
    sizes = {"groups": p.groups, "c_x": c_x, "c_y": c_y}
    sizes |= {**STRIDES[p.layout], W_GROUP: group}
    kernel = finishing_kernel(
        "relation_traversal",
        cuda_weight_grad.TRAVERSAL_FILES,
        PER_ROW_OF_EDGES,
        (("T", DTYPES[p.dtype]), ("TRANSPOSED", p.rows_are_summed)),
        p.epilogue,
        also=(cuda_weight_grad.OF_EDGES,),
        sizes=tuple(sizes.items()),
    )
    return _by_rows(p, "relation_traversal", kernel, False, reads_stored=True)


def quantized_traversal(p: Problem, device: Device) -> Plan:
    """Plan a thread an output row and channel, with packed weights."""
    kernel = finishing_kernel(
        "quantized_traversal" if p.table else "quantized_traversal_of_edges",
        (*EPILOGUE_FILES, "quantized_traversal.cu"),
        PACKED_ROWS if p.table else PACKED_ROWS_OF_EDGES,
        (("T", DTYPES[p.dtype]), ("BITS", p.bits), ("GROUP_SIZE", p.group_size)),
        p.epilogue,
        sizes=(
            ("groups", p.groups),
            ("c_x", f"x_shape[1] / {p.groups}"),
            ("c_y", f"words_shape[1] / {p.groups}"),
        ),
    )
    return _by_rows(p, "quantized_traversal", kernel, p.table, weights=IN_TILES)


def depthwise(p: Problem, device: Device) -> Plan:
    """Plan a group a channel: a warp some output rows, a lane 16 bytes of channels."""
    if p.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.depthwise(p, device)
    multiplier, channels = p.c_out // p.groups, p.channels[1]
    each = cuda_weight_grad.channels_each(p)
    lanes = cuda_weight_grad.lanes_of(channels, each)
    kernel = finishing_kernel(
        "depthwise_transposed" if p.transposed else "depthwise",
        (*EPILOGUE_FILES, "depthwise.cu"),
        PER_ROW,
        (("T", DTYPES[p.dtype]), ("EACH", each), ("GROUP", lanes)),
        p.epilogue,
        sizes=(
            ("groups", f"w_shape[2] / {multiplier}"),
            ("c_x", multiplier if p.transposed else 1),
            ("c_y", 1 if p.transposed else multiplier),
        ),
    )
    threads = lanes * -(-channels // (lanes * each))
    return _by_rows(p, "depthwise", kernel, True, threads, weights=copied(p))


# By matrix tiles over sorted rows


def sorted_implicit_gemm(p: Problem, device: Device) -> Plan:
    """Plan matrix tiles over mask-sorted rows."""
    if p.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.sorted_implicit_gemm(p, device)
    weights = PREPARED_ONCE if cuda_tiles.prepares(p, device) else ""
    tile = cuda_tiles.sorted_tile(p, device)
    return _by_tiles(p, device, "sorted_implicit_gemm", weights, tile)


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan the same tiles; packed weights are unpacked in them, or once before."""
    tile, weights = cuda_tiles.sorted_tile(p, device, packed=True), IN_TILES
    if cuda_tiles.unpacks_once(p, device, tile):
        tile, weights = cuda_tiles.sorted_tile(p, device), UNPACKED_ONCE
    return _by_tiles(p, device, "quantized_sorted", weights, tile)


class _Cut(NamedTuple):
    """How the work of tiles over sorted rows is cut.

    Attributes:
        route: its name.
        weights: ``Plan.weights``.
        tile: a matrix tile.
        splits: of the sums.
        blocks: at most, of a persistent grid.
        moments: whether the launch that writes the rows sums their statistics.
    """

    route: str
    weights: str
    tile: cuda_tiles.Tile
    splits: int
    blocks: int
    moments: bool = False


def _by_tiles(
    p: Problem, device: Device, route: str, weights: str, tile: cuda_tiles.Tile
) -> Plan:
    """Plan tiles over sorted rows, in splits that fill the GPU."""
    columns = -(-whole_channels(p)[1] // tile.width)
    tiles = -(-p.rows_written // tile.rows) * columns
    places = device.cores * tile.per_multiprocessor
    splits = cuda_tiles.splits_of(p, tile, tiles, places)
    blocks = max(1, places // splits)
    moments = cuda_tiles.sums_moments(p, tile, splits > 1)
    if moments:  # a block keeps to a column of tiles
        blocks = max(1, blocks // columns) * columns
    return _as_cut(p, _Cut(route, weights, tile, splits, blocks, moments))


def _again(p: Problem, cut: _Cut, defines: tuple[tuple[str, int], ...]) -> Plan:
    """Return the plan of a small problem for the kernel of another cut.

    In few blocks, so that each takes tile after tile. The kernel's list of offsets may
    be longer than the problem needs.
    """
    splits = min(cut.splits, PROOF_SPLITS)
    plan = _as_cut(p, cut._replace(splits=splits, blocks=2))
    return replace(plan, gpu=kept(replace(plan.gpu, defines=defines)))


def _as_cut(p: Problem, cut: _Cut) -> Plan:
    """Return the plan of work that is cut already."""
    tile, splits, rows = cut.tile, cut.splits, p.rows_written
    width, is_split = whole_channels(p)[1], splits > 1
    high, columns = -(-rows // tile.rows), -(-width // tile.width)
    blocks = high * columns
    if tile.persistent:  # blocks take tile after tile; else each has one
        blocks = min(blocks, cut.blocks)
    moments = blocks // columns if cut.moments else 0
    scratch, added, add = 0, (), None
    if is_split:
        after, dtype = p.epilogue, DTYPES[p.dtype]
        add = cuda_tiles.add_splits(dtype, after=after, moments=cut.moments)
        scratch = 4 * splits * rows * width
        added = (cuda_tiles.adding_threads(rows * width),)
        if cut.moments:
            moments = cuda_tiles.moments_lines(rows, width)
            added = (cuda_tiles.moments_threads(rows, width),)
    scratch += 12 * moments * width
    run = sorted_tiles
    if cut.weights == PREPARED_ONCE:
        run, scratch = _prepared, scratch + cuda_tiles.prepared_bytes(p)
    elif cut.weights == UNPACKED_ONCE:
        run, scratch = _unpacked_once, scratch + cuda_tiles.unpacked_bytes(p)
    kernel = _tiles_kernel(p, cut)
    # All problems of the kernel have the same proof, whichever is planned first.
    proof = cut._replace(splits=PROOF_SPLITS if is_split else 1)
    again = partial(_again, cut=proof, defines=kernel.defines)
    return Plan(
        p,
        CUDA,
        cut.route,
        "sorted",
        run,
        variant=tile.variant,
        tile=(tile.rows, tile.width),
        splits=splits,
        moments=moments,
        multiple=cuda_tiles.multiple(DTYPES[p.dtype]),
        read=sorted_arrays,
        weights=cut.weights,
        products=cuda_tiles.products(p),
        epilogue=(IN_SUM if is_split else IN_KERNEL) if p.epilogue else "",
        scratch=scratch,
        gpu=kernel,
        reads_stored=cut.weights != IN_TILES,
        add=add,
        threadgroup=(tile.threads,),
        dispatches=(Dispatch(0, high, (blocks * tile.threads, splits), added),),
        count=cuda_tiles.sorted_multiply_adds,
        proof=Proof(cuda_tiles.proof_channels(p, tile.width), again, tile.itself),
    )


def _tiles_kernel(p: Problem, cut: _Cut) -> GpuKernel:
    """Return the kernel of tiles over sorted rows: no number of rows is in its text."""
    dtype, tile, is_split = DTYPES[p.dtype], cut.tile, cut.splits > 1
    is_packed, prepared = cut.weights == IN_TILES, cut.weights == PREPARED_ONCE
    out = mx.float32 if is_split else dtype  # of partial sums, or of y
    template = ("TILE", tile.code), ("T", dtype), ("OUT", out)
    mirrored = ("MIRRORED", p.mirrored)
    if is_packed:
        packing = ("BITS", p.bits), ("GROUP_SIZE", p.group_size)
        face, template = PACKED_TILES, (*template, mirrored, *packing)
        c_y, files = "words_shape[1]", ("packed_weights.cuh", "quantized_sorted.cu")
        strides = {}
    else:
        transposed = ("TRANSPOSED", prepared or p.rows_are_summed)
        face, template = TILES, (*template, transposed, mirrored)
        files, strides = ("sorted_implicit_gemm.cu",), STRIDES[p.layout]
        c_y = WEIGHT_AXES[p.layout]["c_in" if p.transposed else "c_out"]
        if prepared:
            c_y, strides = "w_shape[1]", STRIDES[KERNEL_MAJOR]
    multiple = cuda_tiles.multiple(dtype)
    # Packed weights are not padded. Of others it tells the compiler that they are.
    c_y = f"({c_y} + {multiple - 1}) / {multiple} * {multiple}"
    return finishing_kernel(
        "quantized_sorted" if is_packed else "sorted_implicit_gemm",
        (*tile.files, *files),
        face,
        template,
        None if is_split else p.epilogue,  # the launch that adds splits computes it
        cut.moments and not is_split,
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=tile.shared_bytes,
        defines=(("LATTICE_MAX_OFFSETS", cuda_tiles.list_length(p.volume)),),
        sizes=(("c_y", c_y), *strides.items()),
    )


def _unpacked_once(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over floats."""
    call = sorted_tiles(plan, relation)
    return lambda x, w, *added: call(x, unpacked_weights(w), *added)


def _prepared(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over prepared weights."""
    read = replace(plan, reads_stored=False)  # what is prepared is kernel-major
    call, prepare = sorted_tiles(read, relation), _preparing(plan.problem)
    return lambda x, w, *added: call(x, prepare([w])[0], *added)


def _preparing(p: Problem) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what makes padded float32 weights what wgmma takes.

    (K, C_y, C_x), rounded to TF32; or (2 K, C_y, C_x), each offset in two parts.
    """
    parts = cuda_tiles.weight_parts(p)
    axes, strides = WEIGHT_AXES[p.layout], STRIDES[p.layout]
    channels, lines = axes["c_in"], axes["c_out"]
    if p.transposed:
        channels, lines = lines, channels
    channel, line = strides[W_ROW], 1
    if p.rows_are_summed:
        channel, line = line, channel
    kernel = kept(
        GpuKernel(
            CUDA,
            "tf32_weights",
            ("tf32_weights.cu",),
            TF32_WEIGHTS,
            (("PARTS", parts),),
            sizes=(
                ("lines", lines),
                ("channels", channels),
                (W_OFFSET, strides[W_OFFSET]),
                ("w_channel_stride", channel),
                ("w_line_stride", line),
            ),
        )
    )
    c_x, c_y = whole_channels(p)
    blocks = p.volume * -(-c_x // 32) * -(-c_y // 32)
    shape = parts * p.volume, c_y, c_x
    return kernel.launcher((True,), [(shape, mx.float32)], (blocks * THREADS,))


def unpacked_weights(w: QuantizedWeight) -> mx.array:
    """Return packed weights as floats, each rounded once: (K, C_in, C_out).

    Channels are padded to 16 bytes, outputs with zeros.
    """
    launch = _unpacker(w.shape, w.padded_channels, w.dtype, w.bits, w.group_size)
    return launch(list(w.arrays))[0]


@lru_cache(maxsize=1024)
def _unpacker(shape, padded_channels, dtype, bits, group_size) -> Callable:
    """Return the launch that unpacks weights of a shape and packing."""
    multiple, volume = cuda_tiles.multiple(dtype), shape[0]
    c_in, c_out = (rounded_up(c, multiple) for c in shape[1:])
    kernel = kept(
        GpuKernel(
            CUDA,
            "unpack_weights",
            ("alignment.cuh", "tiles.cuh", "packed_weights.cuh", "unpack_weights.cu"),
            UNPACK,
            (("T", dtype), ("BITS", bits), ("GROUP_SIZE", group_size)),
            sizes=(("padding", padded_channels - c_in),),
        )
    )
    blocks = blocks_for(c_in * c_out // multiple**2)
    out = (volume, c_in, c_out), dtype
    return kernel.launcher((True,) * 3, [out], (blocks * THREADS, volume))


_INT8_SIZES = {
    **dict(SORTED_TILES.sizes),
    "c_y": "w_shape[1]",
    W_OFFSET: "w_shape[1] * w_shape[2]",
    W_ROW: "w_shape[2]",
    "pitch": "table_shape[1]",
}
# Of partial sums, and of whole ones with what follows them.
INT8_PARTS = replace(SORTED_TILES, sizes=tuple(_INT8_SIZES.items()))
INT8_FACE = replace(INT8_PARTS, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
INT8_SPLITS = replace(ADD_SPLITS, inputs=("partial", *FOLLOWING))
UNPACK_INT4 = Interface(
    "UnpackInt4",
    ("words", "multipliers"),
    ("w",),
    (("lines", "words_shape[0] * words_shape[1]"), ("padded", "words_shape[2] * 8")),
)
INT8_EPILOGUE = "integer_epilogue.cuh"
# Sources of a tile, by variant.
INT8_FILES = {
    "mma": (*cuda_tiles.MMA, INT8_EPILOGUE, "sorted_implicit_gemm_mma.cuh"),
    "wide": (
        *cuda_tiles.HOPPER,
        INT8_EPILOGUE,
        "hopper_int8.cuh",
        "weight_stages.cuh",
        "sorted_implicit_gemm_wide.cuh",
    ),
    "hopper": (
        *cuda_tiles.HOPPER,
        "hopper_tf32.cuh",
        INT8_EPILOGUE,
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
    return tile._replace(files=INT8_FILES[tile.variant])


def hopper_tile(p: Problem, shape: tables.Shape) -> Tile:
    """Return the tile of Hopper in a shape."""
    if isinstance(shape, tables.PersistentTile):
        return of_int8(cuda_tiles.persistent(p, shape))
    return of_int8(cuda_tiles.wide(p, shape))


def int8_sorted(p: Problem, device: Device) -> Plan:
    """Plan matrix tiles of int8 over mask-sorted rows; int4 weights become int8."""
    tile, splits, _ = cut_of(p, device)
    most = max(1, device.cores * tile.per_multiprocessor // splits)
    return _int8_as_cut(p, tile, splits, most)


def _int8_again(
    p: Problem, tile: Tile, is_split: bool, defines: tuple[tuple[str, int], ...]
) -> Plan:
    """Return the plan of a small problem for another cut's kernel, in few blocks."""
    plan = _int8_as_cut(p, tile, PROOF_SPLITS if is_split else 1, 2)
    return replace(plan, gpu=kept(replace(plan.gpu, defines=defines)))


def _int8_as_cut(p: Problem, tile: Tile, splits: int, most: int) -> Plan:
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
    again = partial(_int8_again, tile=tile, is_split=is_split, defines=gpu.defines)
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
            INT8_FACE if whole else INT8_PARTS,
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
            (
                *cuda_tiles.EPILOGUE_FILES,
                "tiles.cuh",
                INT8_EPILOGUE,
                "integer_splits.cu",
            ),
            INT8_SPLITS,
            (("OUT", facts.out_dtype(dtype)), ("AFTER", after(facts, dtype))),
            together=FOLLOWING,
        )
    )


@lru_cache(maxsize=1024)
def unpacker(shape: tuple[int, ...], group_size: int):
    """Return the launch that makes int4 words of a shape int8: (K, C_out, channels)."""
    template = (("GROUP_SIZE", group_size),)
    kernel = kept(
        GpuKernel(CUDA, "unpack_int4", ("unpack_int4.cu",), UNPACK_INT4, template)
    )
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

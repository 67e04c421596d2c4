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
from ...problem import (
    FOLLOWING,
    IN_KERNEL,
    IN_SUM,
    IN_TILES,
    KERNEL_MAJOR,
    MLX_LAYOUT,
    PREPARED_ONCE,
    PROOF_SPLITS,
    UNPACKED_ONCE,
    WEIGHT_GRAD,
    Dispatch,
    IntegerFacts,
    Plan,
    Problem,
    Proof,
    integers_unpacked,
)
from ...quantized import QuantizedWeight
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
    integer_tiles,
    interned,
    packed,
    per_row,
    rounded_up,
    sorted_tiles,
)
from ..gpu.kernel import THREADS, GpuKernel, Interface, blocks_for
from ..gpu.nvrtc import TYPES
from . import thresholds
from . import tiles as cuda_tiles
from . import weight_grad as cuda_weight_grad
from .geometry import sorted_arrays
from .tiles import (
    EPILOGUE_FILES,
    STAGE_BYTES,
    Tile,
    finishing_kernel,
    whole_channels,
)

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
    return (relation.out_in,)


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
    """How the work of tiles over sorted rows is cut."""

    route: str  # its name
    weights: str  # ``Plan.weights``
    tile: Tile  # a matrix tile
    splits: int  # of the sums
    blocks: int  # at most, of a persistent grid
    moments: bool = False


def _by_tiles(p: Problem, device: Device, route: str, weights: str, tile: Tile) -> Plan:
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


def _proof_plan(p: Problem, cut: _Cut, defines: tuple[tuple[str, int], ...]) -> Plan:
    """Return the plan of a small problem for the kernel of another cut."""
    splits = min(cut.splits, PROOF_SPLITS)
    plan = _as_cut(p, cut._replace(splits=splits, blocks=2))
    return replace(plan, gpu=interned(replace(plan.gpu, defines=defines)))


def _as_cut(p: Problem, cut: _Cut) -> Plan:
    """Return the plan of work that is cut already."""
    tile, splits, rows, dtype = cut.tile, cut.splits, p.rows_written, DTYPES[p.dtype]
    (c_x, c_y), is_split = whole_channels(p), splits > 1
    high, columns = -(-rows // tile.rows), -(-c_y // tile.width)
    blocks = high * columns
    if tile.persistent:  # blocks take tile after tile; else each has one
        blocks = min(blocks, cut.blocks)
    moments = blocks // columns if cut.moments else 0
    scratch, added, add = 0, (), None
    if is_split:
        scratch = 4 * splits * rows * c_y
        added = (cuda_tiles.adding_threads(rows * c_y),)
        if p.integer:
            add = _add_integer_splits(p.integer, dtype)
        else:
            add = cuda_tiles.add_splits(dtype, after=p.epilogue, moments=cut.moments)
        if cut.moments:
            moments = cuda_tiles.moments_lines(rows, c_y)
            added = (cuda_tiles.moments_threads(rows, c_y),)
    scratch += 12 * moments * c_y
    bind = _integers if p.integer else sorted_tiles
    if cut.weights == PREPARED_ONCE:
        bind, scratch = (
            _prepared,
            scratch + cuda_tiles.weight_parts(p) * cuda_tiles.unpacked_bytes(p),
        )
    elif cut.weights == UNPACKED_ONCE:
        bind = _integers if p.integer else _unpacked_once
        scratch += p.volume * c_x * c_y * (1 if p.integer else p.itemsize)
    kernel = _int8_kernel(p, tile, is_split) if p.integer else _tiles_kernel(p, cut)
    # All problems of the kernel have the same proof, whichever is planned first.
    proof = cut._replace(splits=PROOF_SPLITS if is_split else 1)
    again = partial(_proof_plan, cut=proof, defines=kernel.defines)
    after = (IN_SUM if is_split else IN_KERNEL) if p.epilogue or p.integer else ""
    return Plan(
        p,
        CUDA,
        cut.route,
        "sorted",
        bind,
        variant=tile.variant,
        tile=(tile.rows, tile.width),
        splits=splits,
        moments=moments,
        multiple=16 // p.read_size,
        read=sorted_arrays,
        weights=cut.weights,
        products="" if p.integer else cuda_tiles.products(p),
        epilogue=after,
        scratch=scratch,
        gpu=kernel,
        reads_stored=not p.integer and cut.weights != IN_TILES,
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
    """Return what makes padded float32 weights what wgmma takes."""
    parts = cuda_tiles.weight_parts(p)
    axes, strides = WEIGHT_AXES[p.layout], STRIDES[p.layout]
    channels, lines = axes["c_in"], axes["c_out"]
    if p.transposed:
        channels, lines = lines, channels
    channel, line = strides[W_ROW], 1
    if p.rows_are_summed:
        channel, line = line, channel
    kernel = interned(
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
    """Return packed weights as floats, each rounded once: (K, C_in, C_out)."""
    launch = _unpacker(w.shape, w.padded_channels, w.dtype, w.bits, w.group_size)
    return launch(list(w.arrays))[0]


@lru_cache(maxsize=1024)
def _unpacker(shape, padded_channels, dtype, bits, group_size) -> Callable:
    """Return the launch that unpacks weights of a shape and packing."""
    multiple, volume = cuda_tiles.multiple(dtype), shape[0]
    c_in, c_out = (rounded_up(c, multiple) for c in shape[1:])
    kernel = interned(
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


# int8 features: integer sums, and what follows them

_INT8_SIZES = {
    **dict(SORTED_TILES.sizes),
    "c_y": "w_shape[1]",
    W_OFFSET: "w_shape[1] * w_shape[2]",
    W_ROW: "w_shape[2]",
    "pitch": "table_shape[1]",
}
INT8_PARTS = replace(SORTED_TILES, sizes=tuple(_INT8_SIZES.items()))  # partial sums
INT8_SUMS = replace(INT8_PARTS, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
INT8_SPLITS = replace(ADD_SPLITS, inputs=("partial", *FOLLOWING))
UNPACK_INT4 = Interface(
    "UnpackInt4",
    ("words", "multipliers"),
    ("w",),
    (("lines", "words_shape[0] * words_shape[1]"), ("padded", "words_shape[2] * 8")),
)
INT8_EPILOGUE = "integer_epilogue.cuh"
_INT8 = INT8_EPILOGUE, "hopper_int8.cuh"
_WIDE = "weight_stages.cuh", "sorted_implicit_gemm_wide.cuh"
_HOPPER = "stage_sources.cuh", "sorted_implicit_gemm_hopper.cuh"
INT8_FILES: dict[str, tuple[str, ...]] = {  # sources of a tile, by variant
    "mma": (*cuda_tiles.MMA, INT8_EPILOGUE, "sorted_implicit_gemm_mma.cuh"),
    "wide": (*cuda_tiles.HOPPER, *_INT8, *_WIDE),
    "hopper": (*cuda_tiles.HOPPER, "hopper_tf32.cuh", *_INT8, *_HOPPER),
}


def int8_sorted(p: Problem, device: Device) -> Plan:
    """Plan matrix tiles of int8 over mask-sorted rows; int4 weights become int8."""
    tile, splits = int8_cut(p, device)
    blocks = max(1, device.cores * tile.per_multiprocessor // splits)
    return _as_cut(p, _Cut("int8_sorted", integers_unpacked(p), tile, splits, blocks))


def int8_cut(p: Problem, device: Device) -> tuple[Tile, int]:
    """Return the tile and the splits of the sums that take the least time."""
    tiles = [cuda_tiles.mma(p)]
    if device.family in thresholds.HOPPER:
        many, c_y = _int8_shape_of_many_rows(p), whole_channels(p)[1]
        small = cuda_tiles.fitting(cuda_tiles.FEW_EDGES_TILES, c_y)
        if c_y > 48:
            small = cuda_tiles.small_shape(p)
        filled = device.cores * many.rows * many.width  # elements that fill the GPU
        is_once = p.rows_written * c_y <= filled
        if small is None and is_once and isinstance(many, cuda_tiles.PersistentTile):
            small = cuda_tiles.INT8_LOW_TILES.get(many.width)
        shapes = [shape for shape in (small, many) if shape]
        tiles = [cuda_tiles.of_shape(p, shape) for shape in shapes]
    tiles = [tile._replace(files=INT8_FILES[tile.variant]) for tile in tiles]
    cuts = [_timed_cut(p, device, tile) for tile in tiles]
    return min(cuts)[1:]


def _int8_shape_of_many_rows(p: Problem) -> cuda_tiles.Shape:
    c_x, c_y = whole_channels(p)
    if cuda_tiles.few_edges(p) and p.volume > 1:  # all rows share a lone offset
        return cuda_tiles.fitting(cuda_tiles.INT8_FEW_EDGES_TILES, c_y)
    has_tail = c_x > STAGE_BYTES and c_x % STAGE_BYTES
    tiles = cuda_tiles.WIDE_TILES if has_tail and c_y > 64 else cuda_tiles.INT8_TILES
    return cuda_tiles.fitting(tiles, c_y)


def _timed_cut(p: Problem, device: Device, tile: Tile) -> tuple[float, Tile, int]:
    """Return about how many us a tile takes, the tile, and its splits."""
    c_x, c_y = whole_channels(p)
    each, cores = tile.per_multiprocessor, device.cores
    stages = c_x / STAGE_BYTES
    if not tile.persistent:  # an offset has slices of its own
        stages = ceil(cuda_tiles.STAGE_SLICES * stages) / cuda_tiles.STAGE_SLICES
    stage_us = thresholds.INT8_US[tile.variant] * tile.rows * tile.width * stages
    tiles = -(-p.rows_written // tile.rows) * -(-c_y // tile.width)
    splits = cuda_tiles.splits_of(p, tile, tiles, cores * each)
    if splits > 1 and splits * tiles > cores:
        # Several blocks a multiprocessor: splits that fill whole multiprocessors.
        full = [max(1, i * cores // tiles) for i in range(1, each + 1)]
        nearest = min(full, key=lambda n: max(n / splits, splits / n))
        splits = min(nearest, p.volume)
    # Of the multiprocessor with most blocks, and adding.
    most = ceil(tiles * splits / cores) * ceil(p.volume / splits)
    return most * stage_us + cuda_tiles.adding_us(p, splits), tile, splits


def _integer_epilogue(facts: IntegerFacts, dtype: mx.Dtype) -> str:
    """Return the C++ type of an epilogue; ``dtype`` is that of a float residual."""
    there = [str(name in facts.there).lower() for name in ("shift", "residual")]
    residual = TYPES[mx.int8 if facts.residual_int8 else dtype]
    return f"IntegerEpilogue<{facts.act.code}, {', '.join(there)}, {residual}>"


def _int8_kernel(p: Problem, tile: Tile, is_split: bool) -> GpuKernel:
    """Return the kernel of the tiles; if sums are split it writes parts of them."""
    dtype = DTYPES[p.dtype]
    out, after = p.integer.out_dtype(dtype), _integer_epilogue(p.integer, dtype)
    if is_split:
        out, after = mx.int32, "PartialSums"
    return interned(
        GpuKernel(
            CUDA,
            "int8_sorted",
            (*tile.files, "int8_sorted.cu"),
            INT8_PARTS if is_split else INT8_SUMS,
            (
                ("TILE", tile.code),
                ("OUT", out),
                ("MIRRORED", p.mirrored),
                ("AFTER", after),
            ),
            threads=tile.threads,
            blocks_per_multiprocessor=tile.per_multiprocessor,
            shared_bytes=tile.shared_bytes,
            defines=(("LATTICE_MAX_OFFSETS", cuda_tiles.list_length(p.volume)),),
            together=("bias",) if is_split else FOLLOWING,
        )
    )


def _add_integer_splits(facts: IntegerFacts, dtype: mx.Dtype) -> GpuKernel:
    """Return the kernel that adds int32 partial sums, and computes what follows."""
    template = (
        ("OUT", facts.out_dtype(dtype)),
        ("AFTER", _integer_epilogue(facts, dtype)),
    )
    files = *EPILOGUE_FILES, "tiles.cuh", INT8_EPILOGUE, "integer_splits.cu"
    return interned(
        GpuKernel(
            CUDA,
            "add_integer_splits",
            files,
            INT8_SPLITS,
            template,
            together=FOLLOWING,
        )
    )


@lru_cache(maxsize=1024)
def _int4_unpacker(shape: tuple[int, ...], group_size: int) -> Callable:
    """Return the launch that makes int4 words of a shape int8: (K, C_out, channels)."""
    template = (("GROUP_SIZE", group_size),)
    kernel = interned(
        GpuKernel(CUDA, "unpack_int4", ("unpack_int4.cu",), UNPACK_INT4, template)
    )
    volume, c_out, words = shape
    threads = rounded_up(volume * c_out * words // 2, THREADS)
    return kernel.launcher(
        (True, True), [((volume, c_out, 8 * words), mx.int8)], (threads,)
    )


_integers = partial(integer_tiles, unpacker=_int4_unpacker)

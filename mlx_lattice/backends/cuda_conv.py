"""Contractions by matrix tiles on CUDA: a planner for each route, from facts alone.

Compute capability 8.0 and later. On Hopper, half and bfloat16 go through wgmma. Every
tile pads channels to 16 bytes, and packed weights are read where they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..problem import WEIGHT_GRAD, Problem
from ..relation import Relation
from ..routes.plan import (
    IN_KERNEL,
    IN_SUM,
    IN_TILES,
    PREPARED_ONCE,
    PROOF_SPLITS,
    UNPACKED_ONCE,
    Dispatch,
    LayerPlanner,
    Plan,
    Proof,
)
from . import (
    cuda_counts,
    cuda_operands,
    cuda_splits,
    cuda_tile_choice,
    cuda_tiles,
    cuda_weight_grad,
)
from .cuda_epilogue import finishing_kernel
from .cuda_rows import (
    SCALES,
    WEIGHT_AXES,
    strides_of,
)
from .cuda_tables import sorted_arrays
from .cuda_unpack import unpacked_weights
from .gpu_kernel import GpuKernel, Interface
from .kernel_launches import THREADS
from .runners import Runner, sorted_tiles
from .signatures import (
    SORTED_TILES,
    W_GROUP,
    W_OFFSET,
    W_ROW,
    kept,
    packed,
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

# Where prepared weights stand: (K, C_y, C_x), or (2 K, C_y, C_x).
PREPARED = {W_OFFSET: "w_shape[1] * w_shape[2]", W_ROW: "w_shape[2]"}


@LayerPlanner
def sorted_implicit_gemm(layer: Problem, device: Device) -> Callable[[Problem], Plan]:
    """Plan matrix tiles over mask-sorted rows."""
    if layer.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.sorted_planner(layer, device)

    def weights(p: Problem, _) -> str:
        return PREPARED_ONCE if cuda_operands.prepares(p, device) else ""

    return _tiles(layer, device, "sorted_implicit_gemm", weights)


@LayerPlanner
def quantized_sorted(layer: Problem, device: Device) -> Callable[[Problem], Plan]:
    """Plan the same tiles, packed weights unpacked into them, or once before."""

    def weights(p: Problem, tile_of: Callable[[Problem], tuple]) -> str:
        once = cuda_tile_choice.unpacks_once(p, device, tile_of(p)[0])
        return UNPACKED_ONCE if once else IN_TILES

    return _tiles(layer, device, "quantized_sorted", weights)


def _tiles(
    layer: Problem, device: Device, route: str, weights_of: Callable[..., str]
) -> Callable[[Problem], Plan]:
    """Return what plans tiles over sorted rows.

    ``weights_of(problem, tile_of)`` says how weights are read; ``tile_of`` returns the
    tile that would unpack them, and more.
    """

    def of_tile(tile: cuda_tiles.Tile) -> tuple:
        return tile, cuda_splits.splitter(layer, tile), {}

    chosen = {
        packed: cuda_tile_choice.tile_chooser(layer, device, packed, of_tile)
        for packed in (False, True)
    }
    width = cuda_operands.whole_channels(layer)[1]

    def plan(p: Problem) -> Plan:
        weights = weights_of(p, chosen[True])
        tile, splits_of, made = chosen[weights == IN_TILES](p)
        columns = -(-width // tile.width)
        tiles = -(-p.rows_written // tile.rows) * columns
        places = device.cores * tile.per_multiprocessor
        splits = splits_of(p, tiles, places)
        blocks = max(1, places // splits)
        moments = cuda_tiles.sums_moments(p, tile, splits > 1)
        if moments:  # a block keeps to a column of tiles
            blocks = max(1, blocks // columns) * columns
        cut = _Cut(route, weights, tile, splits, blocks, moments)
        key = weights, splits > 1, moments
        of_layer = made.get(key)
        if of_layer is None:
            of_layer = made[key] = _cut_tiles(layer, cut)
        return _with_rows(p, of_layer, cut, width)

    return plan


class _Cut(NamedTuple):
    """How the work of tiles over sorted rows is cut.

    Attributes:
        route: its name.
        weights: what the plan says of them.
        tile: a matrix tile.
        splits: of the sums.
        blocks: at most, of a persistent grid.
        moments: whether what writes the rows sums their statistics: tiles, or what adds
            splits.
    """

    route: str
    weights: str
    tile: cuda_tiles.Tile
    splits: int
    blocks: int
    moments: bool = False


def _again(p: Problem, cut: _Cut, defines: tuple[tuple[str, int], ...]) -> Plan:
    """Return the plan of a small problem for the kernel of another cut.

    In few blocks, so that each takes tile after tile. The kernel's list of offsets may
    be longer than the problem needs.
    """
    splits = min(cut.splits, PROOF_SPLITS)
    plan = _as_cut(p, cut._replace(splits=splits, blocks=2))
    return replace(plan, gpu=kept(replace(plan.gpu, defines=defines)))


def _tiles_kernel(layer: Problem, cut: _Cut) -> GpuKernel:
    """Return the kernel of tiles over sorted rows: no number of rows is in its text."""
    p, dtype = layer, DTYPES[layer.dtype]
    weights, tile, is_split = cut.weights, cut.tile, cut.splits > 1
    is_packed, prepared = weights == IN_TILES, weights == PREPARED_ONCE
    template = ("TILE", tile.code), ("T", dtype), ("OUT", out_of(dtype, is_split))
    mirrored = ("MIRRORED", p.mirrored)
    if is_packed:
        packing = ("BITS", p.bits), ("GROUP_SIZE", p.group_size)
        face, template = PACKED_TILES, (*template, mirrored, *packing)
        c_y, files = "words_shape[1]", ("packed_weights.cuh", "quantized_sorted.cu")
        strides = {}
    else:
        transposed = ("TRANSPOSED", prepared or p.rows_are_summed)
        face, template = TILES, (*template, transposed, mirrored)
        files, strides = ("sorted_implicit_gemm.cu",), strides_of(p)
        c_y = WEIGHT_AXES[p.layout]["c_in" if p.transposed else "c_out"]
        if prepared:
            c_y, strides = "w_shape[1]", PREPARED
        strides = {name: read for name, read in strides.items() if name != W_GROUP}
    multiple = cuda_operands.multiple(dtype)
    # Packed weights are not padded; of others it tells the compiler that they are.
    c_y = f"({c_y} + {multiple - 1}) / {multiple} * {multiple}"
    return finishing_kernel(
        "quantized_sorted" if is_packed else "sorted_implicit_gemm",
        (*tile.files, *files),
        face,
        template,
        None if is_split else p.epilogue,  # it is done where sums are whole
        cut.moments and not is_split,
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=tile.shared_bytes,
        defines=(("LATTICE_MAX_OFFSETS", cuda_tiles.list_length(p.volume)),),
        sizes=(("c_y", c_y), *strides.items()),
    )


def out_of(dtype: mx.Dtype, is_split: bool) -> mx.Dtype:
    """Return the dtype of what tiles write: partial sums are float32."""
    return mx.float32 if is_split else dtype


def _as_cut(p: Problem, cut: _Cut) -> Plan:
    """Plan work that is cut already; packed weights are transposed ones."""
    width = cuda_operands.whole_channels(p)[1]
    return _with_rows(p, _cut_tiles(p.layer, cut), cut, width)


def _cut_tiles(layer: Problem, cut: _Cut) -> Plan:
    """Plan what rows do not change of tiles over sorted rows."""
    p, dtype, runs = layer, DTYPES[layer.dtype], {PREPARED_ONCE: _prepared}
    runs[UNPACKED_ONCE] = _unpacked_once
    is_split, tile = cut.splits > 1, cut.tile
    kernel, add = _tiles_kernel(layer, cut), None
    if is_split:
        add = cuda_splits.add_splits(dtype, after=p.epilogue, moments=cut.moments)
    # The same proof for all problems of the kernel, whichever is planned first.
    cut = cut._replace(splits=PROOF_SPLITS if is_split else 1)
    tried = cuda_operands.proof_channels(p, tile.width)
    return Plan(
        p,
        CUDA,
        cut.route,
        "sorted",
        runs.get(cut.weights, sorted_tiles),
        variant=tile.variant,
        tile=(tile.rows, tile.width),
        multiple=cuda_operands.multiple(dtype),
        read=sorted_arrays,
        weights=cut.weights,
        products=cuda_operands.products(p),
        epilogue=(IN_SUM if is_split else IN_KERNEL) if p.epilogue else "",
        gpu=kernel,
        reads_stored=cut.weights != IN_TILES,
        add=add,
        threadgroup=(tile.threads,),
        count=cuda_counts.sorted_tiles,
        proof=Proof(
            tried, partial(_again, cut=cut, defines=kernel.defines), tile.itself
        ),
    )


def _with_rows(p: Problem, plan: Plan, cut: _Cut, width: int) -> Plan:
    """Return the plan of a problem, from that of its layer; ``width``: of y, padded."""
    tile, splits, rows = cut.tile, cut.splits, p.rows_written
    high, columns = -(-rows // tile.rows), -(-width // tile.width)
    blocks = tiles = high * columns
    if tile.persistent:  # blocks take tile after tile; elsewhere each has its own
        blocks = min(tiles, cut.blocks)
    moments = blocks // columns if cut.moments else 0
    scratch, added = 0, ()
    if splits > 1:
        scratch = 4 * splits * rows * width
        added = (cuda_splits.adding_threads(rows * width),)
        if cut.moments:
            moments = cuda_splits.moments_lines(rows, width)
            added = (cuda_splits.moments_threads(rows, width),)
    scratch += 12 * moments * width
    if cut.weights == PREPARED_ONCE:
        scratch += cuda_operands.prepared_bytes(p)
    elif cut.weights == UNPACKED_ONCE:
        scratch += cuda_operands.unpacked_bytes(p)
    grid = blocks * tile.threads, splits
    dispatches = (Dispatch(0, high, grid, added),)
    return plan.changed(
        problem=p,
        splits=splits,
        moments=moments,
        scratch=scratch,
        dispatches=dispatches,
    )


@Runner
def _unpacked_once(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over floats."""
    call = sorted_tiles.settle(plan, relation)
    return lambda x, w, *added: call(x, unpacked_weights(w), *added)


@Runner
def _prepared(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over prepared weights."""
    read = replace(plan, reads_stored=False)  # what is prepared is kernel-major
    call, prepare = sorted_tiles.settle(read, relation), _preparing(plan.problem)
    return lambda x, w, *added: call(x, prepare([w])[0], *added)


def _preparing(p: Problem) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what makes float32 weights what Hopper's matrix product takes, padded.

    (K, C_y, C_x), rounded to TF32; or (2 K, C_y, C_x), each offset in two parts.
    """
    parts = cuda_operands.weight_parts(p)
    axes, strides = WEIGHT_AXES[p.layout], strides_of(p)
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
    c_x, c_y = cuda_operands.whole_channels(p)
    blocks = p.volume * -(-c_x // 32) * -(-c_y // 32)
    shape = parts * p.volume, c_y, c_x
    return kernel.launcher((True,), [(shape, mx.float32)], (blocks * THREADS,))

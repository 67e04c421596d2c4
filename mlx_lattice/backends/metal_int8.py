"""Contractions of int8 features on Metal, planned from facts alone.

TensorOps of M5 and later have int32 sums: no order or split changes a bit. Older chips,
which multiply no matrices of integers, multiply int8 as half in simdgroup matrices and
add up in float32: exactly while a sum stays below 2**24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import mlx.core as mx

from ..devices import METAL, Device
from ..dtypes import DTYPES
from ..integer_facts import ALIGNMENT, FOLLOWING
from ..problem import Problem
from ..quantized import IntegerWeight
from ..relation import Relation
from ..routes.plan import IN_KERNEL, IN_SUM, Plan, Proof, integers_unpacked
from . import metal_matrix
from .gpu_kernel import Interface, Value
from .metal_counts import EIGHTS, TENSOR, sorted_multiply_adds
from .metal_matrix import SIMDGROUP_FILES, Cut, cut_of, dispatches_of, small_cut
from .metal_plans import TILE_PLACE, kernel
from .metal_tiles import (
    PROOF_TAIL,
    TILE_ROWS,
    Matrices,
    SortedTile,
    sorted_tile,
    tensor_tile,
    tiles_of,
)
from .runners import Runner, sorted_tiles
from .signatures import ADD_SPLITS, SORTED_TILES, W_OFFSET, W_ROW

EPILOGUE = "matrix_tiles", "epilogue", "tile_moments", "integer_epilogue"
HALF = mx.float16  # holds every int8; its products are added up in float32
SAID = "int8 as half, exact while sums stay below 2^24"
TILES = replace(SORTED_TILES, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
SPLITS = replace(ADD_SPLITS, inputs=("partial", "rows", *FOLLOWING))
MEMORY = "GemmSums<M, M, COLUMNS, true, SIDE, GROUPS, BYTES, KEPT>::Tile::FLOATS"
UNPACK = Interface("UnpackInt4", ("words", "multipliers"), ("w",), (("words", "0"),))


def int8_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan int8_tensor_ops: sorted rows and weights, both int8, to TensorOps."""
    shared = p.edges_at_most // p.volume
    sizes = p.rows_written, shared, p.channels, p.volume
    return _cut(p, device, tensor_tile(*sizes, device, item=1))


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan quantized_sorted: packed weights; or int8 rows and weights, as half."""
    if not p.integer:
        return metal_matrix.quantized_sorted(p, device)
    facts = p.rows_written, p.edges_at_most, p.channels, p.volume, HALF.size, 16, device
    return _cut(p, device, sorted_tile(*facts, Matrices(across=True, in_float=False)))


def _cut(p: Problem, device: Device, tile: SortedTile) -> Plan:
    """Return the plan of a tile, its work cut."""
    return _as_cut(p, cut_of(p, device, tile, p.volume * p.c_out * p.packed_channels))


def _again(p: Problem, cut: Cut) -> Plan:
    return _as_cut(p, small_cut(p, cut))


def _as_cut(p: Problem, cut: Cut) -> Plan:
    """Return the plan of work that is cut already."""
    tile, placed, facts = cut.tile, cut.placed, p.integer
    (c_x, c_y), n = p.channels, p.rows_written
    sliced, splits = tile.partial_sums
    dispatches = dispatches_of(p, cut, splits)
    held = max((d.add[1] for d in dispatches if d.add), default=0)
    scratch, is_split = 4 * splits * held * c_y, splits > 1
    if p.bits == 4:
        scratch += p.volume * c_y * p.packed_channels
    sizes = {"volume": p.volume, "c_x": c_x, "c_y": c_y, "splits": splits}
    stored = p.packed_channels
    sizes |= {"together": cut.together, W_OFFSET: c_y * stored, W_ROW: stored}
    dtype = DTYPES[p.dtype]
    out, residual = facts.out_dtype(dtype), mx.int8 if facts.residual_int8 else dtype
    after = {"R": residual, "ACTIVATION": facts.act.code}
    symbol, files, own = _kernel(tile)
    gpu = kernel(
        symbol,
        files,
        TILES,
        "" if tile.height else MEMORY,
        TILE_PLACE,
        OUT=mx.int32 if is_split else out,
        COLUMNS=tile.columns,
        **own,
        PLACED=placed and not is_split,
        SLICED=sliced,
        FAR=cut.is_far,
        **(dict(R=dtype, ACTIVATION=0) if is_split else after),
    )
    product = TENSOR if tile.height else EIGHTS
    # Rows of whole words, and a tail.
    step = tile.step or tile.shape.step // HALF.size
    deep = max(p.group_size or ALIGNMENT, step) + PROOF_TAIL // 4 * 4
    name, variant = "quantized_sorted", SAID
    if tile.height:
        name, variant = "int8_tensor_ops", tile.said
    add = None
    if is_split:
        files = *EPILOGUE, "add_integer_splits"
        add = kernel("add_integer_splits", files, SPLITS, T=out, PLACED=placed, **after)
    return Plan(
        p,
        METAL,
        name,
        "sorted",
        _run,
        variant=variant,
        tile=(TILE_ROWS, tile.columns),
        region=tile.region,
        splits=splits,
        sliced=sliced,
        partials=(splits, n, c_y) if is_split else (),
        placed=placed,
        read=tiles_of(tile.region),
        epilogue=IN_SUM if is_split else IN_KERNEL,
        weights=integers_unpacked(p),
        scratch=scratch,
        sizes=tuple(sizes.items()),
        gpu=gpu,
        add=add,
        threadgroup=(tile.threads, 1, 1),
        dispatches=dispatches,
        count=partial(sorted_multiply_adds, product=product, region=tile.region),
        proof=Proof(
            (deep, tile.columns + PROOF_TAIL),
            partial(_again, cut=cut),
        ),
    )


def _kernel(tile: SortedTile) -> tuple[str, tuple[str, ...], dict[str, Value]]:
    """Return symbol, files and own template arguments of a tile's kernel."""
    if tile.height:
        own = {"HEIGHT": tile.height, "DEEP": tile.step // TENSOR[1]}
        return "int8_tensor_ops", (*EPILOGUE, "tensor_ops", "int8_tensor_ops"), own
    groups, side, step, buffers = tile.shape
    own = {"M": HALF, "SIDE": side, "GROUPS": groups, "BYTES": step, "KEPT": buffers}
    name = "quantized_sorted_int8"
    return name, (*EPILOGUE, SIMDGROUP_FILES[-1], name), own


@Runner
def _run(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over sorted rows; int4 weights become int8 before."""
    call = sorted_tiles.settle(plan, relation)

    def called(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        values = w.values
        if w.bits == 4:
            values = _unpacker(values.shape, w.group_size)(list(w.arrays))[0]
        return call(x, values, *added)

    return called


@lru_cache(maxsize=1024)
def _unpacker(shape: tuple[int, ...], group_size: int) -> Callable:
    """Return the launch that makes int4 words of a shape int8: (K, C_out, channels)."""
    volume, c_out, words = shape
    count = volume * c_out * words
    files = "matrix_tiles", "unpack_int4"
    gpu = kernel("unpack_int4", files, UNPACK, GROUP=group_size)
    made = (volume, c_out, 8 * words), mx.int8
    return gpu.launcher((True, True), [made], (count,), words=count)

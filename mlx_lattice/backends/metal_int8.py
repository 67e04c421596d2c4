"""Contractions of int8 features on Metal: TensorOps of M5 and later, from facts alone.

Sums are int32: no order or split changes a bit. Older chips, which multiply no matrices
of integers, add float32 products of int8 in the tiles of packed weights: exactly while
a sum stays below 2**24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import mlx.core as mx

from ..devices import METAL, Device
from ..epilogue import activation_code
from ..integer_facts import FOLLOWING, finished
from ..integer_weight import ALIGNMENT, IntegerWeight
from ..problem import DTYPES, Problem
from ..quantized import QuantizedWeight, padded
from ..relation import Relation
from ..routes.plan import IN_KERNEL, IN_SUM, OPERATIONS, Plan, Proof
from . import metal_matrix
from .gpu_kernel import Interface
from .metal_counts import TENSOR, sorted_multiply_adds
from .metal_matrix import Cut, cut_of, dispatches_of, small_cut
from .metal_plans import TILE_PLACE, edges_of, kernel
from .metal_tiles import PROOF_TAIL, TILE_ROWS, tensor_tile, tiles_of
from .runners import Runner, sorted_tiles
from .signatures import ADD_SPLITS, SORTED_TILES, W_OFFSET, W_ROW

EPILOGUE = "matrix_tiles", "epilogue", "integer_epilogue"
TILES = replace(SORTED_TILES, inputs=(*SORTED_TILES.inputs[:-1], *FOLLOWING))
SPLITS = replace(ADD_SPLITS, inputs=("partial", "rows", *FOLLOWING))
UNPACK = Interface("UnpackInt4", ("words", "multipliers"), ("w",), (("words", "0"),))


def int8_tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan int8_tensor_ops: sorted rows and weights, both int8, to TensorOps."""
    shared = edges_of(p) // p.volume
    sizes = p.rows_written, shared, p.channels, p.volume
    tile = tensor_tile(*sizes, device, item=1)
    weight_bytes = p.volume * p.c_out * _stored(p)
    return _as_cut(p, cut_of(p, device, tile, weight_bytes))


def _stored(p: Problem) -> int:
    """Return the bytes of an output channel of an offset."""
    return padded(p.c_in, p.group_size or ALIGNMENT)


def _again(p: Problem, cut: Cut) -> Plan:
    return _as_cut(p, small_cut(p, cut))


def _as_cut(p: Problem, cut: Cut) -> Plan:
    """Return the plan of work that is cut already."""
    tile, placed, facts = cut.tile, cut.placed, p.integer
    (c_x, c_y), n = p.channels, p.rows_written
    sliced, splits = tile.parts
    dispatches = dispatches_of(p, cut, splits)
    held = max((d.add[1] for d in dispatches if d.add), default=0)
    scratch, is_split = 4 * splits * held * c_y, splits > 1
    if p.bits == 4:
        scratch += p.volume * c_y * _stored(p)
    sizes = {"volume": p.volume, "c_x": c_x, "c_y": c_y, "splits": splits}
    sizes |= {"together": cut.together, W_OFFSET: c_y * _stored(p), W_ROW: _stored(p)}
    dtype = DTYPES[p.dtype]
    out, residual = facts.out_dtype(dtype), mx.int8 if facts.residual_int8 else dtype
    after = {"R": residual, "ACTIVATION": activation_code(facts.activation)}
    gpu = kernel(
        "int8_tensor_ops",
        (*EPILOGUE, "tensor_ops", "int8_tensor_ops"),
        TILES,
        "",
        TILE_PLACE,
        OUT=mx.int32 if is_split else out,
        COLUMNS=tile.columns,
        HEIGHT=tile.height,
        DEEP=tile.step // TENSOR[1],
        PLACED=placed and not is_split,
        SLICED=sliced,
        FAR=cut.is_far,
        **(dict(R=dtype, ACTIVATION=0) if is_split else after),
    )
    # Rows of whole words, and a tail.
    deep = max(p.group_size or ALIGNMENT, tile.step) + PROOF_TAIL // 4 * 4
    add = None
    if is_split:
        files = *EPILOGUE, "add_integer_splits"
        add = kernel("add_integer_splits", files, SPLITS, T=out, PLACED=placed, **after)
    return Plan(
        p,
        METAL,
        "int8_tensor_ops",
        "sorted",
        _run,
        variant=tile.said,
        tile=(TILE_ROWS, tile.columns),
        splits=splits,
        sliced=sliced,
        partials=(splits, n, c_y) if is_split else (),
        placed=placed,
        read=tiles_of(tile.region),
        epilogue=IN_SUM if is_split else IN_KERNEL,
        weights="unpacked once" if p.bits == 4 else "",
        scratch=scratch,
        sizes=tuple(sizes.items()),
        gpu=gpu,
        add=add,
        threadgroup=(tile.threads, 1, 1),
        dispatches=dispatches,
        count=partial(sorted_multiply_adds, product=TENSOR, region=tile.region),
        proof=Proof(
            (deep, tile.columns + PROOF_TAIL),
            partial(_again, cut=cut),
        ),
    )


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


def quantized_sorted(p: Problem, device: Device) -> Plan:
    """Plan quantized_sorted: packed weights, or those of int8 features as float32."""
    if not p.integer:
        return metal_matrix.quantized_sorted(p, device)
    return _of_integers(p, metal_matrix.quantized_sorted(_as_packed(p), device))


def _as_packed(p: Problem) -> Problem:
    """Return the facts of int8 features and weights as float32 and packed weights."""
    group = p.group_size or ALIGNMENT
    return replace(p, integer=None, bits=8, group_size=group, dtype="float32")


def _of_integers(p: Problem, packed: Plan) -> Plan:
    """Return a plan of packed weights as one of integers."""
    said = "int8 as float32, exact while sums stay below 2^24"
    again = packed.proof.again
    proof = packed.proof._replace(again=lambda p: _of_integers(p, again(_as_packed(p))))
    return replace(
        packed,
        problem=p,
        run=_run_packed,
        variant=f"{packed.variant}, {said}" if packed.variant else said,
        epilogue=OPERATIONS,
        proof=proof,
    )


@Runner
def _run_packed(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles of packed weights; MLX operations finish its sums."""
    p = plan.problem
    inner = replace(plan, problem=_as_packed(p), epilogue="")
    call, group = sorted_tiles.settle(inner, relation), inner.problem.group_size

    def called(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        levels = w.integers().view(mx.uint8) ^ 128
        shape = *levels.shape[:2], levels.shape[2] // group
        scales, biases = mx.ones(shape), mx.full(shape, -128.0)
        words = levels.view(mx.uint32)
        weight = QuantizedWeight(words, scales, biases, p.c_in, 8, group)
        sums = call(x.astype(mx.float32), weight, None)
        return finished(sums, p.integer, DTYPES[p.dtype], *added[:-1])

    return called

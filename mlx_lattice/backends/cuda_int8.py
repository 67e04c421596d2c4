"""Contractions of int8 features on CUDA: a planner, from facts alone.

Compute capability 8.0 and later; wgmma on Hopper. Channels are padded to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import NamedTuple

import mlx.core as mx

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..integer_facts import FOLLOWING, finished
from ..problem import Problem
from ..quantized import IntegerWeight
from ..relation import Relation
from ..routes import cuda_shapes, cuda_small_tiles, cuda_tile_kinds, thresholds
from ..routes.plan import (
    IN_KERNEL,
    IN_SUM,
    PROOF_SPLITS,
    Dispatch,
    LayerPlanner,
    Plan,
    Proof,
    integers_unpacked,
)
from . import (
    cuda_counts,
    cuda_integers,
    cuda_operands,
    cuda_splits,
    cuda_tile_choice,
    cuda_tiles,
)
from .cuda_padding import padded
from .cuda_tables import sorted_arrays
from .cuda_tiles import Tile
from .runners import Runner
from .signatures import kept


class Cut(NamedTuple):
    """How the work over sorted rows is cut.

    Attributes:
        tile: of the result.
        splits: of the sums.
        us: about how long it takes.
    """

    tile: Tile
    splits: int
    us: float


def cutter(layer: Problem, device: Device) -> Callable[[Problem], Cut]:
    """Return what cuts the work of the problems of a layer.

    A lower tile serves few rows; where its splits or its last blocks would take longer,
    by ``thresholds.INT8_US``, the tile of many rows serves them too.
    """
    if device.family not in thresholds.HOPPER:
        return _cutting(layer, device, of_int8(cuda_tiles.mma(layer)))
    (c_x, c_y), made = cuda_operands.whole_channels(layer), {}
    stages, left = divmod(c_x, cuda_operands.STAGE_BYTES)
    is_deep = stages > 0 and left > 0  # as cuda_small_tiles says it

    def sides(few: bool) -> tuple:
        """Return the lower tiles and the one of many rows; ``few``: edges a row are."""
        tiles, lower = cuda_shapes.INT8_TILES, cuda_small_tiles.INT8_SMALL_TILES
        if few:
            tiles = cuda_shapes.INT8_FEW_EDGES_TILES
            lower = cuda_small_tiles.INT8_FEW_EDGES_SMALL_TILES
        elif is_deep:
            tiles = tiles | cuda_shapes.WIDE_TILES
            lower = cuda_small_tiles.INT8_DEEP_SMALL_TILES
        width = cuda_tile_choice.tile_width(c_y, tiles)
        lower = lower.get(width, ())
        if cuda_tiles.few_offsets(layer) and width >= 64:
            lower = *cuda_small_tiles.INT8_FEW_OFFSETS_TILES, *lower
        return lower, tiles[width]

    # All rows of a tile share a lone offset.
    known = [sides(False), sides(layer.volume > 1)]

    def cut(p: Problem) -> Cut:
        lower, last = known[cuda_tiles.few_edges(p)]
        cuts = []
        for shape in (cuda_tile_choice.small_tile(lower, p.rows_written * c_y), last):
            if shape and shape not in made:
                made[shape] = _cutting(layer, device, hopper_tile(layer, shape))
            cuts += [made[shape](p)] if shape else []
        return min(cuts, key=lambda cut: cut.us)

    return cut


def _cutting(layer: Problem, device: Device, tile: Tile) -> Callable[[Problem], Cut]:
    """Return what cuts by a tile; several blocks a multiprocessor fill whole ones."""
    c_x, c_y = cuda_operands.whole_channels(layer)
    columns, each, cores = -(-c_y // tile.width), tile.per_multiprocessor, device.cores
    splits_of, volume = cuda_splits.splitter(layer, tile), layer.volume
    stages = c_x / cuda_operands.STAGE_BYTES
    if not tile.persistent:  # an offset has slices of its own
        stages = ceil(cuda_operands.STAGE_SLICES * stages) / cuda_operands.STAGE_SLICES
    stage_us = thresholds.INT8_US[tile.variant] * tile.rows * tile.width * stages

    def cut(p: Problem) -> Cut:
        tiles = -(-p.rows_written // tile.rows) * columns
        splits = splits_of(p, tiles, cores * each)
        if splits > 1 and splits * tiles > cores:
            full = [max(1, i * cores // tiles) for i in range(1, each + 1)]
            nearest = min(full, key=lambda n: max(n / splits, splits / n))
            splits = min(nearest, volume)
        # Of the multiprocessor with most blocks, and adding.
        most = ceil(tiles * splits / cores) * ceil(volume / splits)
        us = most * stage_us + cuda_splits.adding_us(p, splits)
        return Cut(tile, splits, us)

    return cut


def of_int8(tile: Tile) -> Tile:
    """Return a tile with the sources that it has for int8."""
    return tile._replace(files=cuda_integers.FILES[tile.variant])


def hopper_tile(
    p: Problem, tile: cuda_tile_kinds.SortedTile | cuda_tile_kinds.Tile
) -> Tile:
    """Return the tile of Hopper in a shape."""
    if isinstance(tile, cuda_tile_kinds.SortedTile):
        return of_int8(cuda_tiles.persistent(p, tile))
    return of_int8(cuda_tiles.wide(p, tile))


@LayerPlanner
def int8_sorted(layer: Problem, device: Device) -> Callable[[Problem], Plan]:
    """Plan matrix tiles of int8 over mask-sorted rows; int4 weights become int8."""
    cut_of, made = cutter(layer, device), {}

    def plan(p: Problem) -> Plan:
        tile, splits, _ = cut_of(p)
        key = tile, splits > 1
        of_layer = made.get(key)
        if of_layer is None:
            of_layer = made[key] = _of_layer(layer, *key)
        most = device.cores * tile.per_multiprocessor // splits
        return _with_rows(p, of_layer, tile, splits, max(1, most))

    return plan


def _again(
    p: Problem, tile: Tile, is_split: bool, defines: tuple[tuple[str, int], ...]
) -> Plan:
    """Return the plan of a small problem for another cut's kernel, in few blocks."""
    splits = PROOF_SPLITS if is_split else 1
    plan = _with_rows(p, _of_layer(p.layer, tile, is_split), tile, splits, 2)
    return replace(plan, gpu=kept(replace(plan.gpu, defines=defines)))


def _of_layer(p: Problem, tile: Tile, is_split: bool) -> Plan:
    """Plan what rows do not change of the problems of a layer, ``p``."""
    add = None
    if is_split:
        add = cuda_integers.adding_kernel(p.integer, DTYPES[p.dtype])
    gpu = cuda_integers.tiles_kernel(p, tile, is_split)
    tried = cuda_operands.proof_channels(p, tile.width)
    again = partial(_again, tile=tile, is_split=is_split, defines=gpu.defines)
    return Plan(
        p,
        CUDA,
        "int8_sorted",
        "sorted",
        _run,
        variant=tile.variant,
        tile=(tile.rows, tile.width),
        multiple=cuda_operands.multiple(mx.int8),
        read=sorted_arrays,
        weights=integers_unpacked(p),
        epilogue=IN_SUM if is_split else IN_KERNEL,
        gpu=gpu,
        add=add,
        threadgroup=(tile.threads,),
        count=cuda_counts.sorted_tiles,
        proof=Proof(tried, again),
    )


def _with_rows(p: Problem, plan: Plan, tile: Tile, splits: int, most: int) -> Plan:
    """Return the plan of a problem, from that of its layer.

    Args:
        p: the facts.
        plan: of the layer.
        tile: of the result.
        splits: of the sums.
        most: blocks of a persistent grid, at most.
    """
    rows, (c_x, c_y) = p.rows_written, cuda_operands.whole_channels(p)
    high = -(-rows // tile.rows)
    blocks = high * -(-c_y // tile.width)
    if tile.persistent:
        blocks = min(blocks, most)
    scratch = 4 * splits * rows * c_y if splits > 1 else 0
    if plan.weights:
        scratch += p.volume * c_x * c_y
    added = (cuda_splits.adding_threads(rows * c_y),) if splits > 1 else ()
    grid = blocks * tile.threads, splits
    dispatches = (Dispatch(0, high, grid, added),)
    facts = {"splits": splits, "scratch": scratch, "dispatches": dispatches}
    return plan.changed(problem=p, **facts)


@Runner
def _run(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over sorted rows; splits are added in order."""
    p, view, (dispatch,) = plan.problem, plan.read(relation), plan.dispatches
    n, c_y = relation.n_out, p.channels[1]
    facts, out = p.integer, p.integer.out_dtype(DTYPES[p.dtype])
    if p.edges == 0 or 0 in [array.size for array in view]:
        none, dtype = mx.zeros((n, c_y), dtype=mx.int32), DTYPES[p.dtype]
        return lambda x, w, *added: finished(none, facts, dtype, *added[:-1])
    multiple, wide = plan.multiple, cuda_operands.whole_channels(p)[1]
    there = tuple([name in facts.there for name in FOLLOWING])
    whole, add = ((n, wide), out), None
    if plan.add is None:
        tiles = plan.gpu.launcher(
            (True,) * 5 + there, [whole], dispatch.grid, plan.threadgroup
        )
    else:
        partials = (plan.splits, n, wide), mx.int32
        given = (True,) * 5 + (False,)
        tiles = plan.gpu.launcher(given, [partials], dispatch.grid, plan.threadgroup)
        add = plan.add.launcher((True, *there), [whole], dispatch.add)

    def call(x: mx.array, w: IntegerWeight, *added: mx.array | None) -> mx.array:
        values = w.values
        if w.bits == 4:
            unpack = cuda_integers.unpacker(values.shape, w.group_size)
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

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
from ..integer_facts import FOLLOWING, finished
from ..integer_weight import IntegerWeight
from ..problem import DTYPES, Problem
from ..relation import Relation
from ..routes import cuda_shapes, thresholds
from ..routes.plan import IN_KERNEL, IN_SUM, Dispatch, Plan, Proof, integers_unpacked
from . import cuda_counts, cuda_integers, cuda_splits, cuda_tiles
from .cuda_padding import padded
from .cuda_tiles import Tile
from .cuda_views import sorted_arrays
from .runners import Runner
from .signatures import kept


class Cut(NamedTuple):
    """A tile of the result, how many there are, and into how many splits sums go."""

    tile: Tile
    tiles: int
    splits: int


def cut_of(p: Problem, device: Device) -> Cut:
    """Return how the work over sorted rows of int8 is cut.

    A lower tile serves few rows; where its splits or its last blocks would take longer,
    by ``thresholds.INT8_US``, the tile of many rows serves them too.
    """
    if device.family not in thresholds.HOPPER:
        return _cut(p, device, of_int8(cuda_tiles.mma(p)))
    c_y, few = cuda_tiles.whole_channels(p)[1], cuda_tiles.few_edges(p)
    few = few and p.volume > 1  # all rows of a tile share a lone offset
    tiles = cuda_shapes.INT8_FEW_EDGES_TILES if few else cuda_shapes.INT8_TILES
    width = cuda_tiles.tile_width(c_y, tiles)
    lower = cuda_shapes.INT8_SMALL_TILES.get(width, ())
    if cuda_tiles.few_offsets(p) and width >= 64:
        lower = *cuda_shapes.INT8_FEW_OFFSETS_TILES, *lower
    shapes = cuda_tiles.small_tile(lower, p.rows_written * c_y), tiles[width]
    cuts = [_cut(p, device, hopper_tile(p, shape)) for shape in shapes if shape]
    return min(cuts, key=lambda cut: _us(p, device, cut))


def _cut(p: Problem, device: Device, tile: Tile) -> Cut:
    """Return the cut for a tile; several blocks a multiprocessor fill whole ones."""
    columns = -(-cuda_tiles.whole_channels(p)[1] // tile.width)
    tiles = -(-p.rows_written // tile.rows) * columns
    each, cores = tile.per_multiprocessor, device.cores
    splits = cuda_splits.splits_of(p, tile, tiles, cores * each)
    if splits > 1 and splits * tiles > cores:
        full = [max(1, i * cores // tiles) for i in range(1, each + 1)]
        nearest = min(full, key=lambda n: max(n / splits, splits / n))
        splits = min(nearest, p.volume)
    return Cut(tile, tiles, splits)


def _us(p: Problem, device: Device, cut: Cut) -> float:
    """Return about how long the multiprocessor with most blocks takes, and adding."""
    tile, tiles, splits = cut
    stages = cuda_tiles.whole_channels(p)[0] / cuda_tiles.STAGE_BYTES
    if not tile.persistent:  # stages hold one offset
        stages = ceil(stages)
    most = ceil(tiles * splits / device.cores) * ceil(p.volume / splits)
    us = thresholds.INT8_US[tile.variant] * tile.rows * tile.width
    return most * stages * us + cuda_splits.adding_us(p, splits)


def of_int8(tile: Tile) -> Tile:
    """Return a tile with the sources that it has for int8."""
    return tile._replace(files=cuda_integers.FILES[tile.variant])


def hopper_tile(p: Problem, tile: cuda_shapes.SortedTile | cuda_shapes.Tile) -> Tile:
    """Return the tile of Hopper in a shape."""
    if isinstance(tile, cuda_shapes.SortedTile):
        return of_int8(cuda_tiles.persistent(p, tile))
    return of_int8(cuda_tiles.wide(p, tile))


def int8_sorted(p: Problem, device: Device) -> Plan:
    """Plan matrix tiles of int8 over mask-sorted rows; int4 weights become int8."""
    tile, _, splits = cut_of(p, device)
    places = device.cores * tile.per_multiprocessor
    plan = as_cut(p, tile, splits, max(1, places // splits))
    tried = cuda_tiles.proof_channels(p, tile.width)
    again = partial(_again, tile=tile, splits=splits, defines=plan.gpu.defines)
    return replace(plan, proof=Proof(tried, again))


def _again(
    p: Problem, tile: Tile, splits: int, defines: tuple[tuple[str, int], ...]
) -> Plan:
    """Return the plan of a small problem for another cut's kernel, in few blocks."""
    plan = as_cut(p, tile, min(splits, cuda_tiles.PROOF_SPLITS), 2)
    return replace(plan, gpu=kept(replace(plan.gpu, defines=defines)))


def as_cut(p: Problem, tile: Tile, splits: int, most: int) -> Plan:
    """Plan work that is cut already.

    Args:
        p: the facts.
        tile: of the result.
        splits: of the sums.
        most: blocks of a persistent grid, at most.
    """
    rows, (c_x, c_y) = p.rows_written, cuda_tiles.whole_channels(p)
    tiles = -(-rows // tile.rows) * -(-c_y // tile.width)
    blocks = min(tiles, most) if tile.persistent else tiles
    scratch = 4 * splits * rows * c_y if splits > 1 else 0
    weights = integers_unpacked(p)
    if weights:
        scratch += p.volume * c_x * c_y
    after = p.integer, DTYPES[p.dtype]
    add = cuda_integers.adding_kernel(*after) if splits > 1 else None
    added = (cuda_splits.adding_threads(rows * c_y),) if add else ()
    grid = blocks * tile.threads, splits
    return Plan(
        p,
        CUDA,
        "int8_sorted",
        "sorted",
        _run,
        variant=tile.variant,
        tile=(tile.rows, tile.width),
        splits=splits,
        multiple=cuda_tiles.multiple(mx.int8),
        read=sorted_arrays,
        weights=weights,
        epilogue=IN_SUM if add else IN_KERNEL,
        scratch=scratch,
        gpu=cuda_integers.tiles_kernel(p, tile, splits),
        add=add,
        threadgroup=(tile.threads,),
        dispatches=(Dispatch(0, -(-rows // tile.rows), grid, added),),
        count=cuda_counts.sorted_tiles,
    )


@Runner
def _run(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y by tiles over sorted rows; splits are added in order."""
    p, view, (dispatch,) = plan.problem, plan.read(relation), plan.dispatches
    n, c_y = relation.n_out, p.channels[1]
    facts, out = p.integer, p.integer.out_dtype(DTYPES[p.dtype])
    if p.edges == 0 or 0 in [array.size for array in view]:
        none, dtype = mx.zeros((n, c_y), dtype=mx.int32), DTYPES[p.dtype]
        return lambda x, w, *added: finished(none, facts, dtype, *added[:-1])
    multiple, wide = plan.multiple, cuda_tiles.whole_channels(p)[1]
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

"""What CUDA's matrix tiles multiply: absent edges and padding too, for ``cost``.

Each function is the ``count`` of a Plan. How a kernel skips stands in the kernels:
``cuda/sorted_implicit_gemm*`` and ``cuda/grouped_gemm*``.
"""

from __future__ import annotations

import mlx.core as mx

from ..geometry.curves import used_by_blocks
from ..relation import Relation
from ..routes.plan import Plan
from . import cuda_grad_tiles
from .cuda_operands import (
    SLICE_BYTES,
    STAGE_BYTES,
    STAGE_SLICES,
    slices_of,
    whole_channels,
)
from .signatures import rounded_up

BLOCK = 64  # rows that are skipped together: those of a wgmma, or of a tile of mma


def edges_to_weight_grad(plan: Plan, relation: Relation | None) -> int | None:
    """Count a weight gradient over edges: stages of one offset are filled up."""
    if relation is None:
        return None
    p, (height, width) = plan.problem, plan.tile
    c_in, c_out = whole_channels(p)
    stage = cuda_grad_tiles.stage_edges(p)
    edges = sum(rounded_up(count, stage) for count in relation.edge_counts)
    return edges * rounded_up(c_in, height) * rounded_up(c_out, width)


def rows_to_weight_grad(plan: Plan, relation: Relation | None) -> int | None:
    """Count a weight gradient over sorted rows."""
    if relation is None:
        return None
    c_in, c_out = whole_channels(plan.problem)
    # Offsets whose channels have the 64 rows of a warpgroup together are skipped so.
    together = cuda_grad_tiles.offsets_together(c_in)
    columns, used = rounded_up(c_out, plan.tile[1]), _used(relation)
    return BLOCK * BLOCK * columns * _count(_cut(used.T, together).any(axis=1))


def sorted_tiles(plan: Plan, relation: Relation | None) -> int | None:
    """Count tiles over sorted rows."""
    if relation is None:
        return None
    p, (height, width) = plan.problem, plan.tile
    c_x, c_y = whole_channels(p)
    used = _used(relation.T if p.transposed else relation)
    columns, tiles = rounded_up(c_y, width), _cut(used, height // BLOCK)
    if plan.variant != "hopper":  # an offset's last stage, or as much as it fills
        filled = STAGE_BYTES if plan.variant == "mma" else SLICE_BYTES
        depth = rounded_up(c_x, filled // p.read_size)
        return height * depth * columns * _count(tiles.any(axis=1))
    slices, width = slices_of(c_x, p.read_size), SLICE_BYTES // p.read_size
    if slices in (2, 4):  # whole stages, or their halves, are one offset's
        depth = rounded_up(c_x, width * slices)
        return BLOCK * depth * columns * _count(used)
    stages = _stages(tiles, -(-c_x // width), plan.splits)
    return BLOCK * width * STAGE_SLICES * columns * stages


def _used(relation: Relation) -> mx.array:
    """Return (blocks, K): the offsets that each block of sorted rows uses."""
    # A mirrored relation and its transpose share the tiles of the former.
    by_tiles = relation.mirrored and relation.is_transposed
    rows = (relation.T if by_tiles else relation).sorted
    return used_by_blocks(rows.table >= 0, BLOCK)


def _stages(tiles: mx.array, slices: int, splits: int) -> int:
    """Return how many (block, stage) pairs a tile's blocks multiply.

    A split of a tile goes through its part of the tile's offsets in order, ``slices``
    slices each, four in a stage, which a block multiplies where it uses one of them.

    Args:
        tiles: (tiles, blocks, K), the offsets that each block of a tile uses.
        slices: of 16 channels, of an offset.
        splits: of a tile's offsets.
    """
    live = tiles.any(axis=1)
    place = mx.cumsum(live.astype(mx.int32), axis=1) - 1
    count = place[:, -1:] + 1
    own, begin = mx.zeros_like(place), mx.zeros_like(place)
    for split in range(1, splits):
        start = count * split // splits
        own = mx.where(place >= start, split, own)
        begin = mx.where(place >= start, start, begin)
    first = (place - begin) * slices
    last = (first + slices - 1) // STAGE_SLICES
    first = first // STAGE_SLICES
    most = tiles.shape[2] * slices // STAGE_SLICES + 1
    shape = (*tiles.shape[:2], splits * most)
    flags = mx.zeros((shape[0] * shape[1] * shape[2] + 1,), dtype=mx.int32)
    blocks = mx.arange(shape[0] * shape[1]).reshape(*shape[:2], 1).astype(mx.int64)
    for step in range((slices + STAGE_SLICES - 2) // STAGE_SLICES + 1):
        stage = own * most + first + step
        inside = tiles & (first + step <= last)[:, None]
        at = blocks * shape[2] + stage[:, None]
        flags[mx.where(inside, at, flags.size - 1).flatten()] = 1
    return _count(flags[:-1])


def _cut(used: mx.array, size: int) -> mx.array:
    """Return (N, K) as (ceil(N / size), size, K), the rest unused."""
    padded = mx.pad(used, [(0, -used.shape[0] % size), (0, 0)])
    return padded.reshape(-1, size, used.shape[1])


def _count(flags: mx.array) -> int:
    return mx.sum(flags.astype(mx.int32)).item()

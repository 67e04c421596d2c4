"""What CUDA's matrix tiles multiply: absent edges and padding too, for ``cost``.

The kernel, its tile and its splits are read from a Choice's parameters; how each skips,
from the kernels: ``cuda/sorted_implicit_gemm*.cu``, ``cuda/*grouped_gemm*.cu`` and
``cuda/sorted_weight_grad_hopper.cu``.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ..geometry.curves import used_by_blocks
from ..problem import INPUT_GRAD, Problem
from ..relation import Relation
from .cuda_sorted import runs_of

BLOCK = 64  # rows that are skipped together: those of a wgmma, or of a tile of mma
RUN, STAGE_RUNS = 16, 4  # summed channels of a run, and the runs of a stage


def multiply_adds(p: Problem, parameters: Mapping, relation: Relation) -> int | None:
    """Return the multiply-adds of a launch, or None where the kernel is not known.

    Args:
        p: the facts.
        parameters: what the Choice's kernel is launched with.
        relation: the layer's (untransposed) relation.
    """
    if "tile" not in parameters:
        return None
    kernel = parameters["kernel"]
    height, width = map(int, parameters["tile"].split(" x "))
    stage = 128 // p.itemsize  # summed channels, or edges, of a stage of mma
    c_in, c_out = (_up(c, 16 // p.itemsize) for c in (p.c_in, p.c_out))
    if kernel.startswith("grouped_gemm"):
        stage = 64 if kernel == "grouped_gemm_hopper" else stage
        edges = sum(_up(count, stage) for count in relation.edge_counts)
        return edges * _up(c_in, height) * _up(c_out, width)
    if p.pass_ == INPUT_GRAD:
        relation, c_in, c_out = relation.T, c_out, c_in
    columns, used = _up(c_out, width), _used(relation)
    if kernel == "sorted_weight_grad":
        # Offsets whose channels share the 64 rows of a warpgroup go together.
        together = parameters["offsets"] * BLOCK // height
        return BLOCK * BLOCK * columns * _count(_cut(used.T, together).any(axis=1))
    tiles = _cut(used, height // BLOCK)
    if kernel != "sorted_implicit_gemm_hopper":
        depth = c_in if kernel.endswith("wide") else _up(c_in, stage)
        return height * depth * columns * _count(tiles.any(axis=1))
    runs = runs_of(c_in)
    if runs in (2, 4):  # whole stages, or their halves, are one offset's
        depth = _up(c_in, RUN * runs)
        return BLOCK * depth * columns * _count(used)
    stages = _stages(tiles, -(-c_in // RUN), parameters.get("split-K", 1))
    return BLOCK * RUN * STAGE_RUNS * columns * stages


def _used(relation: Relation) -> mx.array:
    """Return (blocks, K): the offsets that each block of sorted rows uses."""
    # A mirrored relation and its transpose share the tiles of the former.
    shared = relation.mirrored and relation.is_transposed
    rows = (relation.T if shared else relation).sorted
    return used_by_blocks(rows.table >= 0, BLOCK)


def _stages(tiles: mx.array, runs: int, splits: int) -> int:
    """Return how many (block, stage) pairs a tile's blocks multiply.

    A split of a tile goes through its share of the tile's offsets in order, ``runs``
    runs each, four in a stage, which a block multiplies where it uses one of them.

    Args:
        tiles: (tiles, blocks, K), the offsets that each block of a tile uses.
        runs: of 16 channels, of an offset.
        splits: shares of a tile's offsets.
    """
    live = tiles.any(axis=1)
    place = mx.cumsum(live.astype(mx.int32), axis=1) - 1
    count = place[:, -1:] + 1
    share, begin = mx.zeros_like(place), mx.zeros_like(place)
    for split in range(1, splits):
        start = count * split // splits
        share = mx.where(place >= start, split, share)
        begin = mx.where(place >= start, start, begin)
    first = (place - begin) * runs
    last = (first + runs - 1) // STAGE_RUNS
    first = first // STAGE_RUNS
    most = tiles.shape[2] * runs // STAGE_RUNS + 1
    shape = (*tiles.shape[:2], splits * most)
    flags = mx.zeros((shape[0] * shape[1] * shape[2] + 1,), dtype=mx.int32)
    blocks = mx.arange(shape[0] * shape[1]).reshape(*shape[:2], 1).astype(mx.int64)
    for step in range((runs + STAGE_RUNS - 2) // STAGE_RUNS + 1):
        stage = share * most + first + step
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


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

"""What Metal's matrix tiles multiply: absent edges and padding too, for ``cost``.

They skip blocks of eight rows, TensorOps of 16, be they sorted or in their own order; a
weight gradient fills up the edges of an offset in each of its splits.
"""

from __future__ import annotations

import mlx.core as mx

from ..geometry.curves import used_by_blocks
from ..relation import Relation
from ..routes.plan import Plan
from .dispatch_bounds import ceil_div
from .metal_tiles import BLOCK_ROWS, tile_table

# A product of simdgroup matrices, and one of TensorOps: rows, depth, columns.
EIGHTS, TENSOR = (BLOCK_ROWS, 8, 8), (16, 16, 32)


def sorted_multiply_adds(
    plan: Plan,
    relation: Relation | None,
    *,
    product: tuple[int, int, int],
    region: int,
) -> int | None:
    """Return the multiply-adds of tiles over sorted rows.

    Args:
        plan: says the problem.
        relation: the layer's (untransposed) one.
        product: rows, depth and columns of a product of matrices.
        region: rows that are sorted together.
    """
    if relation is None:
        return None
    over = relation.T if plan.problem.transposed else relation
    return _blocks(plan, tile_table(over, region), product)


def table_multiply_adds(plan: Plan, relation: Relation | None) -> int | None:
    """Return the multiply-adds of tiles over rows in their own order."""
    if relation is None:
        return None
    over = relation.T if plan.problem.transposed else relation
    return _blocks(plan, over.out_in, EIGHTS)


def _blocks(plan: Plan, table: mx.array, product: tuple[int, int, int]) -> int:
    """Return the multiply-adds of blocks of rows with an edge of an offset."""
    c_x, c_y = plan.problem.channels
    blocks = mx.sum(used_by_blocks(table >= 0, product[0])).item()
    return blocks * product[0] * _up(c_x, product[1]) * _up(c_y, product[2])


def edge_multiply_adds(
    plan: Plan, relation: Relation | None, *, product: tuple[int, int, int]
) -> int | None:
    """Return the multiply-adds of a weight gradient by tiles.

    Args:
        plan: says the problem, and the splits.
        relation: the layer's (untransposed) one.
        product: rows, depth and columns of a product of matrices.
    """
    if relation is None:
        return None
    p, depth, edges = plan.problem, product[1], relation.edges
    ends = [p.n_out * split // plan.splits for split in range(1, plan.splits + 1)]
    split = mx.searchsorted(mx.array(ends), edges[:, 1], "right").astype(mx.int32)
    counts = mx.zeros((plan.splits * p.volume,), dtype=mx.int32)
    counts = counts.at[split * p.volume + edges[:, 2]].add(1)
    padded = depth * mx.sum((counts + (depth - 1)) // depth).item()
    return padded * _up(p.c_in, product[0]) * _up(p.c_out, product[2])


def _up(count: int, multiple: int) -> int:
    return ceil_div(count, multiple) * multiple

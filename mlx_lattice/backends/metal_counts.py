"""What Metal's matrix tiles multiply: absent edges and padding too, for ``cost``.

They skip blocks of eight rows, TensorOps of 16, be they sorted or in their own order; a
weight gradient fills up the edges of an offset in each of its ranges of rows.
"""

from __future__ import annotations

import mlx.core as mx

from ..devices import Device
from ..geometry.curves import used_by_blocks
from ..problem import INPUT_GRAD, WEIGHT_GRAD, Problem
from ..relation import Relation
from .metal_kernels import ceil_div
from .metal_tiles import (
    BLOCK_ROWS,
    GRAD_ROUTES,
    SORTED_ROUTES,
    grad_parts,
    grad_tile,
    sorted_plan,
    tile_rows,
)

# A product of simdgroup matrices, and one of TensorOps: rows, depth, columns.
EIGHTS, TENSOR = (BLOCK_ROWS, 8, 8), (16, 16, 32)


def multiply_adds(route: str, p: Problem, device: Device, relation: Relation) -> int:
    """Return the multiply-adds of a route's tiles.

    Args:
        route: one of matrix tiles.
        p: the facts.
        device: whose tiles.
        relation: the layer's (untransposed) relation.
    """
    product = TENSOR if route.endswith("tensor_ops") else EIGHTS
    if p.pass_ == WEIGHT_GRAD:
        edges = _padded_edges(route, p, device, relation, product[1])
        return edges * _up(p.c_in, product[0]) * _up(p.c_out, product[2])
    c_x, c_y, n = p.c_in, p.c_out, p.n_out
    if p.pass_ == INPUT_GRAD:
        relation, c_x, c_y, n = relation.T, c_y, c_x, p.n_in
    if route in SORTED_ROUTES:
        narrowest = SORTED_ROUTES[route]
        plan = sorted_plan(n, (c_x, c_y), p.volume, p.itemsize, narrowest, device)
        table = tile_rows(relation, plan.row_bytes, device)[1]
    else:
        table = relation.out_in
    blocks = mx.sum(used_by_blocks(table >= 0, product[0])).item()
    return blocks * product[0] * _up(c_x, product[1]) * _up(c_y, product[2])


def _padded_edges(
    route: str, p: Problem, device: Device, relation: Relation, depth: int
) -> int:
    """Return the edges, and those that fill up an offset's products in a range."""
    high, wide = grad_tile(p.c_in, p.c_out, *GRAD_ROUTES[route])
    across = ceil_div(p.c_in, high) * ceil_div(p.c_out, wide)
    features = (p.n_in * p.c_in + p.n_out * p.c_out) * p.itemsize
    shape = p.volume, p.c_in, p.c_out
    edges = relation.edges
    parts = grad_parts(len(edges), features, shape, across, p.itemsize, device)
    ends = mx.array([p.n_out * part // parts for part in range(1, parts + 1)])
    unit = mx.searchsorted(ends, edges[:, 1], "right").astype(mx.int32) * p.volume
    counts = mx.zeros((parts * p.volume,), dtype=mx.int32)
    counts = counts.at[unit + edges[:, 2]].add(1)
    return depth * mx.sum((counts + (depth - 1)) // depth).item()


def _up(count: int, multiple: int) -> int:
    return ceil_div(count, multiple) * multiple

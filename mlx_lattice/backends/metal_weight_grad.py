"""Weight gradients on Metal without matrix units: ``WEIGHT_GRAD[route]``.

``WEIGHT_GRAD[route](x, dy, relation, groups)``, as in ``portable``. Each offset's edges
are cut into parts, one thread each; parts and their order depend on sizes only, so the
bits are the same on every run.
"""

from __future__ import annotations

import mlx.core as mx

from ..relation import Relation
from .dispatch_bounds import METAL_CUTS, dispatch_limit
from .metal_kernels import Kernel, by_rows, ceil_div, cuts, no_elements

_GRAD_PARTS = Kernel(
    "weight_grad_parts",
    ("weight_grad",),
    ("x", "dy", "starts", "edges", "sizes"),
    ("partial",),
    "weight_grad_parts<T>(x, dy, starts, edges, sizes, partial, "
    "thread_position_in_grid.xy);",
)
_ADD_PARTS = Kernel(
    "add_parts",
    ("weight_grad",),
    ("partial", "sizes"),
    ("dw",),
    "add_parts<T>(partial, sizes, dw, thread_position_in_grid.xy);",
)
_DEPTHWISE_PARTS = Kernel(
    "depthwise_grad_parts",
    ("weight_grad", "depthwise"),
    ("x", "dy", "starts", "edges", "sizes"),
    ("partial",),
    "depthwise_grad_parts<T>(x, dy, starts, edges, sizes, partial, "
    "thread_position_in_grid.xy);",
)


def _part_edges(relation: Relation, parts: int) -> int:
    """Return the most edges that one part of one offset may have."""
    edges = relation.n_edges
    if relation.has_table:  # an offset has at most one edge to each output row
        edges = min(edges, relation.n_out)
    return ceil_div(edges, parts)


def _parts(relation: Relation, elements: int) -> int:
    """Return into how many parts each offset's edges are cut.

    As many as are worth their partial sums, but no thread is to add for long.
    """
    worth = max(1, relation.volume) * METAL_CUTS["part_edges"]
    wanted = ceil_div(relation.n_edges, worth)
    fitting = METAL_CUTS["partial_elements"] // elements
    needed = ceil_div(_part_edges(relation, 1), METAL_CUTS["thread_edges"])
    return max(1, needed, min(wanted, METAL_CUTS["parts"], fitting))


def add_parts(partial, parts, volume, c_in, padded, c_out, dtype) -> mx.array:
    """Add partials (parts, K, padded C_in, C_out) in order: dW (K, C_in, C_out)."""
    rows = volume * c_in

    def launch(first: int, count: int) -> list[mx.array]:
        return _ADD_PARTS(
            [partial],
            [parts, volume, c_in, padded, c_out, first],
            [((count, c_out), dtype)],
            (c_out, count),
            T=dtype,
        )

    work = parts * rows * c_out
    dw = by_rows(rows, work, dispatch_limit("elements"), launch)[0]
    return dw.reshape(volume, c_in, c_out)


def _by_parts(
    kernel, inputs, sizes, relation, shape, blocks, high, groups, bound
) -> mx.array:
    """Return dW by parts of each offset's edges, added in order.

    Partial sums that would take too much memory together are added a few at a time.

    Args:
        kernel: adds up units, (part, k, block of inputs), the last fastest.
        inputs: its arrays.
        sizes: called with (first unit, parts).
        relation: what is contracted over.
        shape: (K, inputs a group, C_out).
        blocks: blocks of inputs a group.
        high: inputs of a block.
        groups: of channels.
        bound: what an edge's multiply-adds are counted as: a kind of dispatch limit.
    """
    (volume, c_in, c_out), dtype = shape, inputs[0].dtype
    elements, units = volume * blocks * high * c_out, volume * blocks
    parts = _parts(relation, elements)
    most = _part_edges(relation, parts) * high * c_out
    work, limit = relation.n_edges * c_in * c_out, dispatch_limit(bound)
    rounds = list(cuts(parts, parts * elements, METAL_CUTS["partial_elements"]))

    def launch(first: int, count: int) -> list[mx.array]:
        return kernel(
            inputs,
            sizes(first, parts),
            [((count * high, c_out), mx.float32)],
            (groups * ceil_div(c_out // groups, 4), count),
            T=dtype,
        )

    def add(first: int, count: int) -> mx.array:
        start = first * units
        partial = by_rows(
            count * units, work, limit, lambda a, n: launch(start + a, n), most=most
        )[0]
        result = dtype if len(rounds) == 1 else mx.float32
        return add_parts(partial, count, volume, c_in, blocks * high, c_out, result)

    total, *others = (add(*part) for part in rounds)
    for one in others:
        total = total + one
    return total.astype(dtype)


def relation_traversal_weight_grad(x, dy, relation, groups):
    """Return dW (K, C_in / groups, C_out): a thread has 4 x 4 of it for a part."""
    c_in, c_out, volume = x.shape[1] // groups, dy.shape[1], relation.volume
    shape = volume, c_in, c_out
    if no_elements(shape) or relation.n_edges == 0:
        return mx.zeros(shape, dtype=x.dtype)
    return _by_parts(
        _GRAD_PARTS,
        [x, dy, *relation.kernel_csr],
        lambda first, parts: [first, parts, volume, groups, c_in, c_out // groups],
        relation,
        shape,
        ceil_div(c_in, 4),
        4,
        groups,
        "multiply_adds",
    )


def depthwise_weight_grad(x, dy, relation, groups):
    """Return dW (K, 1, C_out) where each input channel is a group of its own."""
    c_out, volume = dy.shape[1], relation.volume
    if x.shape[1] != groups:
        raise ValueError(
            "depthwise runs as many groups as input channels; got "
            f"{x.shape[1]} channels, groups = {groups}"
        )
    shape = volume, 1, c_out
    if no_elements(shape) or relation.n_edges == 0:
        return mx.zeros(shape, dtype=x.dtype)
    # A thread has four outputs, whatever their groups.
    return _by_parts(
        _DEPTHWISE_PARTS,
        [x, dy, *relation.kernel_csr],
        lambda first, parts: [first, parts, volume, c_out, c_out // groups],
        relation,
        shape,
        1,
        1,
        1,
        "elements",
    )


WEIGHT_GRAD = {
    "relation_traversal": relation_traversal_weight_grad,
    "depthwise": depthwise_weight_grad,
}

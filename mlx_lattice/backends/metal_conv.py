"""The contractions on Metal: a function for each route and pass, by route name.

``CONV[route](x, w, relation, groups, transposed)`` and
``WEIGHT_GRAD[route](x, dy, relation, groups)``, as in ``portable``. Nothing is launched
for empty outputs, and a relation without edges gives zeros.
"""

from __future__ import annotations

import mlx.core as mx

from ..relation import Relation
from ..tuning import METAL_CUTS, dispatch_limit
from .metal_kernels import Kernel, by_rows, ceil_div, cuts, no_elements
from .metal_reductions import long_segments, sum_segments

VEC4_ROWS, HALF_ROWS = 4, 2

_TRAVERSE_TABLE = Kernel(
    "relation_traversal_table",
    ("relation_traversal",),
    ("x", "w", "table", "sizes"),
    ("y",),
    "traverse_table<T, TRANSPOSED>(x, w, table, sizes, y, thread_position_in_grid.xy);",
)
_TRAVERSE_CSR = Kernel(
    "relation_traversal_csr",
    ("relation_traversal",),
    ("x", "w", "starts", "edges", "sizes"),
    ("y",),
    "traverse_csr<T, OUT, TRANSPOSED>(x, w, starts, edges, sizes, y, "
    "thread_position_in_grid.xy);",
)
_VEC4 = Kernel(
    "vec4",
    ("vec4",),
    ("x", "w", "table", "sizes"),
    ("y",),
    "vec4_conv<WIDE>(x, w, table, sizes, y, thread_position_in_grid.xy);",
)
_FP16 = Kernel(
    "fp16_gather",
    ("fp16_gather",),
    ("x", "w", "table", "sizes"),
    ("y",),
    "gather_conv<TRANSPOSED>(x, w, table, sizes, y, thread_position_in_grid.xy);",
)
_ATOMIC = Kernel(
    "fp32_atomic",
    ("relation_traversal", "fp32_atomic"),
    ("x", "w", "edges", "sizes"),
    ("y",),
    "scatter_edges<TRANSPOSED>(x, w, edges, sizes, y, thread_position_in_grid.xy);",
    atomic=True,
)
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
_DEPTHWISE = Kernel(
    "depthwise",
    ("weight_grad", "depthwise"),
    ("x", "w", "table", "sizes"),
    ("y",),
    "depthwise_forward<T>(x, w, table, sizes, y, thread_position_in_grid.xy);",
)
_DEPTHWISE_T = Kernel(
    "depthwise_transposed",
    ("weight_grad", "depthwise"),
    ("x", "w", "table", "sizes"),
    ("y",),
    "depthwise_transposed<T>(x, w, table, sizes, y, thread_position_in_grid.xy);",
)
_DEPTHWISE_PARTS = Kernel(
    "depthwise_grad_parts",
    ("weight_grad", "depthwise"),
    ("x", "dy", "starts", "edges", "sizes"),
    ("partial",),
    "depthwise_grad_parts<T>(x, dy, starts, edges, sizes, partial, "
    "thread_position_in_grid.xy);",
)


def _written(w: mx.array, groups: int, transposed: bool) -> int:
    """Return the channels that a contraction writes."""
    return w.shape[1] * groups if transposed else w.shape[2]


def _empty(x: mx.array, relation: Relation, width: int) -> mx.array | None:
    shape = relation.n_out, width
    if no_elements(shape) or x.size == 0:
        return mx.zeros(shape, dtype=x.dtype)
    return None


def _over_rows(
    kernel, inputs, sizes, relation, w, width, grid, dtype, bound, **template
):
    """Launch over slices of output rows.

    Args:
        kernel: what to launch.
        inputs: its arrays.
        sizes: called with (first row, rows).
        relation: whose output rows are written.
        w: the weight.
        width: channels written.
        grid: called with the rows of a slice.
        dtype: of the output.
        bound: what an edge's multiply-adds are counted as: a kind of dispatch limit.
        template: arguments of the kernel.
    """

    def launch(first: int, rows: int) -> list[mx.array]:
        out = [((rows, width), dtype)]
        return kernel(inputs, sizes(first, rows), out, grid(rows), **template)

    # All edges that there could be, or are where counted; a row may have all offsets.
    edge, row = w.shape[1] * w.shape[2], relation.volume
    edges = relation.known_edges
    edges = relation.n_out * row if edges is None else edges
    limit = dispatch_limit(bound)
    return by_rows(relation.n_out, edges * edge, limit, launch, most=row * edge)[0]


def relation_traversal(x, w, relation, groups, transposed):
    """Return y: one thread a (row, four channels) walks the row's edges in order."""
    width = _written(w, groups, transposed)
    zeros = _empty(x, relation, width)
    if zeros is not None:
        return zeros
    if not relation.has_table:
        return _traverse_edges(x, w, relation, groups, width, transposed)
    c_x, c_y = x.shape[1] // groups, width // groups
    return _over_rows(
        _TRAVERSE_TABLE,
        [x, w, relation.out_in],
        lambda first, rows: [first, relation.volume, groups, c_x, c_y],
        relation,
        w,
        width,
        lambda rows: (groups * ceil_div(c_y, 4), rows),
        x.dtype,
        "multiply_adds",
        T=x.dtype,
        TRANSPOSED=transposed,
    )


def _traverse_edges(x, w, relation, groups, width, transposed):
    """Return y over edges, of which a row may have any number.

    The edges of long rows are cut into pieces, whose float32 sums are added in order.
    """
    starts, edges = relation.output_csr
    c_x, c_y = x.shape[1] // groups, width // groups
    n_edges, longest = relation.n_edges, METAL_CUTS["longest"]
    if n_edges == 0:
        return mx.zeros((relation.n_out, width), dtype=x.dtype)
    owners, dtype = None, x.dtype
    if n_edges > longest:
        starts, owners = long_segments(starts, n_edges)
        dtype, longest = mx.float32, METAL_CUTS["piece"]

    def launch(first: int, rows: int) -> list[mx.array]:
        return _TRAVERSE_CSR(
            [x, w, starts, edges],
            [first, groups, c_x, c_y],
            [((rows, width), dtype)],
            (groups * ceil_div(c_y, 4), rows),
            T=x.dtype,
            OUT=dtype,
            TRANSPOSED=transposed,
        )

    edge, limit = w.shape[1] * w.shape[2], dispatch_limit("multiply_adds")
    most = min(n_edges, longest) * edge
    y = by_rows(starts.size - 1, n_edges * edge, limit, launch, most=most)[0]
    return y if owners is None else sum_segments(y, owners).astype(x.dtype)


def vec4(x, w, relation, groups, transposed):
    """Return y, float32: one thread has four rows of four channels."""
    c_in, c_out = w.shape[1:]
    if transposed or groups > 1 or c_out % 4 or x.dtype != mx.float32:
        raise ValueError(
            "vec4 runs the forward pass of float32, one group and C_out a multiple of "
            f"4; got {x.dtype}, groups = {groups}, C_out = {c_out}, "
            f"transposed = {transposed}"
        )
    zeros = _empty(x, relation, c_out)
    if zeros is not None:
        return zeros
    return _over_rows(
        _VEC4,
        [x, w, relation.out_in],
        lambda first, rows: [first, rows, relation.volume, c_in, c_out],
        relation,
        w,
        c_out,
        lambda rows: (c_out // 4, ceil_div(rows, VEC4_ROWS)),
        x.dtype,
        "multiply_adds",
        WIDE=c_in % 4 == 0,
    )


def fp16_gather(x, w, relation, groups, transposed):
    """Return y, float16: one thread has two rows of four channels."""
    if groups > 1 or x.dtype != mx.float16:
        raise ValueError(
            f"fp16_gather runs float16 in one group; got {x.dtype}, groups = {groups}"
        )
    width = _written(w, groups, transposed)
    zeros = _empty(x, relation, width)
    if zeros is not None:
        return zeros
    return _over_rows(
        _FP16,
        [x, w, relation.out_in],
        lambda first, rows: [first, rows, relation.volume, x.shape[1], width],
        relation,
        w,
        width,
        lambda rows: (ceil_div(width, 4), ceil_div(rows, HALF_ROWS)),
        x.dtype,
        "multiply_adds",
        TRANSPOSED=transposed,
    )


def fp32_atomic(x, w, relation, groups, transposed):
    """Return y, float32, by atomic addition: the order of sums is not fixed."""
    if groups > 1 or x.dtype != mx.float32:
        raise ValueError(
            f"fp32_atomic runs float32 in one group; got {x.dtype}, groups = {groups}"
        )
    width, n_edges = _written(w, groups, transposed), relation.n_edges
    zeros = _empty(x, relation, width)
    if zeros is not None or n_edges == 0:
        return mx.zeros((relation.n_out, width), dtype=x.dtype)
    work = n_edges * w.shape[1] * w.shape[2]
    parts = [
        _ATOMIC(
            [x, w, relation.edges],
            [first, x.shape[1], width],
            [((relation.n_out, width), mx.float32)],
            (ceil_div(width, 4), count),
            init=0,
            TRANSPOSED=transposed,
        )[0]
        for first, count in cuts(n_edges, work, dispatch_limit("multiply_adds"))
    ]
    return sum(parts[1:], parts[0])


def depthwise(x, w, relation, groups, transposed):
    """Return y where each input channel is a group of its own."""
    if w.shape[1] != 1:
        raise ValueError(
            "depthwise runs as many groups as input channels, weights (K, 1, C_out); "
            f"got {tuple(w.shape)} with groups = {groups}"
        )
    width, c_out = _written(w, groups, transposed), w.shape[2]
    zeros = _empty(x, relation, width)
    if zeros is not None:
        return zeros
    return _over_rows(
        _DEPTHWISE_T if transposed else _DEPTHWISE,
        [x, w, relation.out_in],
        lambda first, rows: [first, relation.volume, c_out, c_out // groups],
        relation,
        w,
        width,
        lambda rows: (ceil_div(width, 4), rows),
        x.dtype,
        "elements",
        T=x.dtype,
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


CONV = {
    "relation_traversal": relation_traversal,
    "vec4": vec4,
    "fp16_gather": fp16_gather,
    "fp32_atomic": fp32_atomic,
    "depthwise": depthwise,
}
WEIGHT_GRAD = {
    "relation_traversal": relation_traversal_weight_grad,
    "depthwise": depthwise_weight_grad,
}

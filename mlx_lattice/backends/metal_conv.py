"""The contractions on Metal: a function for each route and pass, by route name.

``CONV[route](x, w, relation, groups, transposed)``, as in ``portable``; the weight
gradients stand in ``metal_weight_grad``. Nothing is launched for empty outputs, and a
relation without edges gives zeros.
"""

from __future__ import annotations

import mlx.core as mx

from ..relation import Relation
from .dispatch_bounds import SEGMENT_CUTS, dispatch_limit
from .gpu_segments import pieces
from .metal_kernels import Kernel, by_rows, ceil_div, cuts, no_elements
from .metal_reductions import sum_segments
from .metal_weight_grad import WEIGHT_GRAD, add_parts

__all__ = ["CONV", "WEIGHT_GRAD", "add_parts"]

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
    n_edges, longest = relation.n_edges, SEGMENT_CUTS["longest"]
    if n_edges == 0:
        return mx.zeros((relation.n_out, width), dtype=x.dtype)
    owners, dtype = None, x.dtype
    if n_edges > longest:
        starts, owners = pieces(starts, n_edges)
        dtype, longest = mx.float32, SEGMENT_CUTS["piece"]

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


CONV = {
    "relation_traversal": relation_traversal,
    "vec4": vec4,
    "fp16_gather": fp16_gather,
    "fp32_atomic": fp32_atomic,
    "depthwise": depthwise,
}

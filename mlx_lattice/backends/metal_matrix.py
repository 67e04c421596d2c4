"""The contractions on Metal's matrix units: a function for each route and pass.

``CONV[route](x, w, relation, groups, transposed)`` and
``WEIGHT_GRAD[route](x, dy, relation, groups)``, as in ``portable``. Nothing is launched
for empty outputs. Sums are float32 and their order depends on sizes only.
"""

from __future__ import annotations

import mlx.core as mx

from ..devices import current
from ..relation import Relation
from ..routes import thresholds
from .metal_kernels import Kernel, by_rows, ceil_div, cuts, no_elements
from .metal_tiles import (
    GRAD_HEIGHTS,
    GRAD_WIDTHS,
    TENSOR_COLUMNS,
    TENSOR_GRAD,
    THREADS,
    TILE_ROWS,
    dispatches,
    grad_parts,
    grad_tile,
    sorted_plan,
    tiles,
    tiles_together,
    work_limit,
)

# Flags of a launch.
PLACED, SLICED = 1, 2
DENSE = (16, 32, 64)

# Where a thread is: the last arguments of every kernel of matrix tiles.
GEMM_PLACE = (
    "threadgroup_position_in_grid, int(simdgroup_index_in_threadgroup), "
    "int(thread_index_in_simdgroup)"
)

_SORTED = Kernel(
    "sorted_implicit_gemm",
    ("matrix_tiles", "sorted_implicit_gemm"),
    ("x", "w", "table", "rows", "masks", "bias", "sizes"),
    ("y",),
    "threadgroup float memory[GemmSums<T, COLUMNS, TRANSPOSED>::Tile::FLOATS];\n"
    "  const FloatWeights<T> weights = {w};\n"
    "  sorted_gemm<T, OUT, COLUMNS, TRANSPOSED, BIAS>(x, weights, table, rows, masks, "
    f"bias, sizes, y, memory, {GEMM_PLACE});",
)
_ADD_SPLITS = Kernel(
    "add_splits",
    ("matrix_tiles", "sorted_implicit_gemm"),
    ("partial", "rows", "bias", "sizes"),
    ("y",),
    "add_splits<T, BIAS>(partial, rows, bias, sizes, y, thread_position_in_grid.xy);",
)
_DENSE = Kernel(
    "dense_channel",
    ("matrix_tiles", "dense_channel"),
    ("x", "w", "table", "bias", "sizes"),
    ("y",),
    "threadgroup float memory[TableTile<T, C_Y, 2, C_X, TRANSPOSED>::FLOATS];\n"
    "  table_gemm<T, C_Y, 2, C_X, TRANSPOSED, BIAS>(x, w, table, bias, sizes, y, "
    f"memory, {GEMM_PLACE});",
)
_COUT16 = Kernel(
    "cout16",
    ("matrix_tiles", "dense_channel", "cout16"),
    ("x", "w", "table", "bias", "sizes"),
    ("y",),
    "threadgroup float memory[TableTile<T, 16, 4, 0, false>::FLOATS];\n"
    "  sixteen_columns<T, BIAS>(x, w, table, bias, sizes, y, memory, "
    f"{GEMM_PLACE});",
)
_WEIGHT_GRAD = Kernel(
    "grouped_weight_grad",
    ("weight_grad", "matrix_tiles", "grouped_gemm"),
    ("x", "dy", "starts", "edges", "sizes"),
    ("dw",),
    "threadgroup float memory[GradTile<T, IN, OUT>::FLOATS];\n"
    "  grouped_weight_grad<T, RESULT, IN, OUT>(x, dy, starts, edges, sizes, dw, "
    f"memory, {GEMM_PLACE});",
)

_ADD_RANGES = Kernel(
    "add_ranges",
    ("weight_grad", "matrix_tiles", "grouped_gemm"),
    ("before", "partial", "sizes"),
    ("dw",),
    "add_ranges<RESULT, ONTO>(before, partial, sizes, dw, thread_position_in_grid.xy);",
)

TENSOR_FAMILY = (
    "weight_grad",
    "matrix_tiles",
    "sorted_implicit_gemm",
    "grouped_gemm",
    "tensor_ops",
)
_TENSOR = Kernel(
    "tensor_ops",
    TENSOR_FAMILY,
    ("x", "w", "table", "rows", "masks", "bias", "sizes"),
    ("y",),
    "threadgroup float memory[TensorSums<T, COLUMNS, TRANSPOSED>::Tile::FLOATS];\n"
    "  const FloatWeights<T> weights = {w};\n"
    "  sorted_gemm<T, OUT, COLUMNS, TRANSPOSED, BIAS, FloatWeights<T>, "
    "TensorSums<T, COLUMNS, TRANSPOSED>>(x, weights, table, rows, masks, "
    f"bias, sizes, y, memory, {GEMM_PLACE});",
)
_TENSOR_GRAD = Kernel(
    "tensor_ops_weight_grad",
    TENSOR_FAMILY,
    ("x", "dy", "starts", "edges", "sizes"),
    ("dw",),
    "threadgroup float memory[GradTile<T, IN, OUT>::FLOATS];\n"
    "  grouped_weight_grad<T, RESULT, IN, OUT, TensorGradSums<T, IN, OUT>>(x, dy, "
    f"starts, edges, sizes, dw, memory, {GEMM_PLACE});",
)


def one_group(route: str, groups: int) -> None:
    """Raise unless a convolution has one group."""
    if groups > 1:
        raise ValueError(f"{route} runs one group; got groups = {groups}")


def half_types(route: str, x: mx.array) -> None:
    """Raise for float32, which the accelerators would round."""
    if x.dtype == mx.float32:
        raise ValueError(f"{route} multiplies float16 and bfloat16; got float32")


def _empty(x: mx.array, n: int, width: int, bias: mx.array | None) -> mx.array | None:
    """Return the result where there is nothing to multiply, else None."""
    if not no_elements((n, width)) and x.size > 0:
        return None
    y = mx.zeros((n, width), dtype=x.dtype)
    return y if bias is None else y + bias


def _edges(relation: Relation) -> int:
    """Return all edges there could be, or are where counted."""
    edges = relation.known_edges
    return relation.n_out * relation.volume if edges is None else edges


def sorted_implicit_gemm(x, w, relation, groups, transposed, bias=None):
    """Return y by matrix tiles over mask-sorted rows.

    Args:
        x: (N_in, C_x).
        w: (K, C_x, C_y), or (K, C_y, C_x) where transposed.
        relation: has a neighbour table.
        groups: 1.
        transposed: whether the weights are read across, as input gradients do.
        bias: (C_y,), added before rounding, or None.
    """
    one_group("sorted_implicit_gemm", groups)
    c_y = w.shape[1] if transposed else w.shape[2]
    return sorted_tiles(_SORTED, x, [w], c_y, relation, bias, TRANSPOSED=transposed)


def sorted_tiles(
    kernel, x, weights, c_y, relation, bias=None, narrowest=16, **template
):
    """Return y by a kernel over mask-sorted tiles, whatever its weights are stored as.

    Args:
        kernel: reads x, the weights, table, rows, masks and bias.
        x: (N_in, C_x).
        weights: the arrays it takes as weights.
        c_y: channels written.
        relation: has a neighbour table.
        bias: (C_y,), added before rounding, or None.
        narrowest: fewest columns of a tile that the kernel has.
        template: arguments of the kernel, besides T, OUT, COLUMNS and BIAS.
    """
    volume, (n, c_x) = relation.volume, (relation.n_out, x.shape[1])
    empty = _empty(x, n, c_y, bias)
    if empty is not None:
        return empty
    plan = sorted_plan(n, (c_x, c_y), volume, x.itemsize, narrowest, current())
    slices, row_bytes, columns, splits = plan
    view = tiles(relation, row_bytes)
    across, count = ceil_div(c_y, columns), ceil_div(n, TILE_ROWS)
    work = _edges(relation) * c_x * c_y
    pieces, apart = dispatches(count, row_bytes, work)
    flags = PLACED * (not apart)
    flags += 4 * tiles_together(sum(w.nbytes for w in weights) // slices, row_bytes)
    if splits == 1 and slices > 1:
        splits, flags = slices, flags + SLICED
    # Splits are sums apart: add_splits puts their rows in place.
    tile_flags = flags & ~PLACED if splits > 1 else flags
    added = mx.zeros((1,), dtype=x.dtype) if bias is None else bias
    shared = {"T": x.dtype, "BIAS": bias is not None}
    template |= shared if splits == 1 else {"T": x.dtype, "BIAS": False}

    def launch(first: int, length: int) -> mx.array:
        top, kept = first * TILE_ROWS, min(n - first * TILE_ROWS, length * TILE_ROWS)
        y = kernel(
            [x, *weights, view.table, view.rows, view.masks, added],
            [first, top + kept, volume, c_x, c_y, splits, tile_flags],
            [((splits * kept, c_y), mx.float32 if splits > 1 else x.dtype)],
            (across * length * THREADS, 1, splits),
            threadgroup=(THREADS, 1, 1),
            OUT=mx.float32 if splits > 1 else x.dtype,
            COLUMNS=columns,
            **template,
        )[0]
        if splits == 1:
            return y
        sizes, grid = [kept, c_y, splits, top, flags], (ceil_div(c_y, 4), kept)
        shape = (kept, c_y), x.dtype
        return _ADD_SPLITS([y, view.rows, added], sizes, [shape], grid, **shared)[0]

    parts = [launch(first, length) for first, length in pieces]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y[mx.argsort(view.rows)] if apart else y


def tensor_ops(x, w, relation, groups, transposed, bias=None):
    """Return what ``sorted_implicit_gemm`` does, through TensorOps: half types only."""
    one_group("tensor_ops", groups)
    half_types("tensor_ops", x)
    c_y = w.shape[1] if transposed else w.shape[2]
    return sorted_tiles(
        _TENSOR, x, [w], c_y, relation, bias, TENSOR_COLUMNS, TRANSPOSED=transposed
    )


def _by_table(kernel, tile_rows, x, w, relation, c_y, bias, **template) -> mx.array:
    """Launch over slices of rows in their own order."""
    n, volume, c_x = relation.n_out, relation.volume, x.shape[1]
    empty = _empty(x, n, c_y, bias)
    if empty is not None:
        return empty
    added = mx.zeros((1,), dtype=x.dtype) if bias is None else bias

    def launch(first: int, rows: int) -> list[mx.array]:
        return kernel(
            [x, w, relation.out_in, added],
            [first, rows, volume, c_x],
            [((rows, c_y), x.dtype)],
            (THREADS, ceil_div(rows, tile_rows)),
            threadgroup=(THREADS, 1, 1),
            T=x.dtype,
            BIAS=bias is not None,
            **template,
        )

    limit = work_limit()
    return by_rows(n, _edges(relation) * c_x * c_y, limit, launch)[0]


def _check_channels(route: str, expected: str, channels: tuple[int, int], fits: bool):
    if not fits:
        raise ValueError(
            f"{route} runs {expected}; got C_in = {channels[0]}, C_out = {channels[1]}"
        )


def _check_dense(c_in: int, c_out: int) -> None:
    fits = c_in in DENSE and c_out in DENSE
    wanted = f"C_in and C_out in {DENSE}"
    _check_channels("dense_channel", wanted, (c_in, c_out), fits)


def dense_channel(x, w, relation, groups, transposed, bias=None):
    """Return y for 16, 32 or 64 channels, rows in their own order."""
    one_group("dense_channel", groups)
    _check_dense(*w.shape[1:])
    c_y = w.shape[1] if transposed else w.shape[2]
    template = {"C_X": x.shape[1], "C_Y": c_y, "TRANSPOSED": transposed}
    return _by_table(_DENSE, 64, x, w, relation, c_y, bias, **template)


def cout16(x, w, relation, groups, transposed, bias=None):
    """Return y (N_out, 16), forward only, rows in their own order."""
    one_group("cout16", groups)
    fits = w.shape[2] == 16 and not transposed
    _check_channels("cout16", "forward with C_out = 16", w.shape[1:], fits)
    return _by_table(_COUT16, 128, x, w, relation, 16, bias)


def dense_channel_weight_grad(x, dy, relation, groups):
    """Return dW for 16, 32 or 64 channels, tiles of just those."""
    _check_dense(x.shape[1], dy.shape[1])
    return grouped_gemm_weight_grad(x, dy, relation, groups)


def cout16_weight_grad(x, dy, relation, groups):
    """Return dW (K, C_in, 16), tiles of 16 columns."""
    channels = x.shape[1], dy.shape[1]
    _check_channels("cout16", "C_out = 16", channels, channels[1] == 16)
    return grouped_gemm_weight_grad(x, dy, relation, groups)


def grouped_gemm_weight_grad(x, dy, relation, groups):
    """Return dW (K, C_in, C_out) by matrix tiles over ranges of each offset's edges."""
    return _weight_grad(
        _WEIGHT_GRAD, x, dy, relation, groups, GRAD_HEIGHTS, GRAD_WIDTHS
    )


def tensor_ops_weight_grad(x, dy, relation, groups):
    """Return what ``grouped_gemm_weight_grad`` does, through TensorOps."""
    half_types("tensor_ops", x)
    return _weight_grad(_TENSOR_GRAD, x, dy, relation, groups, *TENSOR_GRAD)


def _weight_grad(kernel, x, dy, relation, groups, heights, widths) -> mx.array:
    """Launch over ranges of output rows, tiles as small as channels allow."""
    one_group("a weight gradient by matrix tiles", groups)
    c_in, c_out, volume = x.shape[1], dy.shape[1], relation.volume
    shape = volume, c_in, c_out
    if no_elements(shape) or relation.n_edges == 0:
        return mx.zeros(shape, dtype=x.dtype)
    high, wide = grad_tile(c_in, c_out, heights, widths)
    across = ceil_div(c_in, high) * ceil_div(c_out, wide)
    features = x.nbytes + dy.nbytes
    parts = grad_parts(relation.n_edges, features, shape, across, x.itemsize)
    result = x.dtype if parts == 1 else mx.float32
    starts, edges = relation.kernel_csr

    def launch(first: int, units: int) -> list[mx.array]:
        return kernel(
            [x, dy, starts, edges],
            [first, parts, volume, c_in, c_out, relation.n_out],
            [((units, c_in, c_out), result)],
            (across * THREADS, units),
            threadgroup=(THREADS, 1, 1),
            T=x.dtype,
            RESULT=result,
            IN=high,
            OUT=wide,
        )

    work, limit = relation.n_edges * c_in * c_out, work_limit()
    if parts == 1:
        return by_rows(volume, work, limit, launch)[0]
    # Partials are added to the sum of those before: few are held at a time.
    held = ceil_div(parts * volume * c_in * c_out * 4, thresholds.PARTIAL_BYTES["*"])
    dw = None
    for first, count in cuts(parts, max(held, ceil_div(work, limit)), 1):
        share = work * count // parts
        partial = by_rows(
            count * volume,
            share,
            limit,
            lambda unit, units, first=first: launch(first * volume + unit, units),
        )[0]
        last = first + count == parts
        dw = _ADD_RANGES(
            [partial if dw is None else dw, partial],
            [count, volume * c_in, c_out],
            [(shape, x.dtype if last else mx.float32)],
            (c_out, volume * c_in),
            RESULT=x.dtype if last else mx.float32,
            ONTO=dw is not None,
        )[0]
    return dw


CONV = {
    "sorted_implicit_gemm": sorted_implicit_gemm,
    "dense_channel": dense_channel,
    "cout16": cout16,
    "tensor_ops": tensor_ops,
}
FUSED_BIAS = frozenset(CONV)
WEIGHT_GRAD = {
    "dense_channel": dense_channel_weight_grad,
    "cout16": cout16_weight_grad,
    "tensor_ops": tensor_ops_weight_grad,
    "sorted_implicit_gemm": grouped_gemm_weight_grad,
    "grouped_gemm": grouped_gemm_weight_grad,
}

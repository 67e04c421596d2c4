"""Contractions with packed weights on Metal: a function for each route.

``QUANTIZED[route](x, packed, relation, groups)``. Weights and features are read where
they stand: nothing is padded, and no float weight is ever in device memory.
"""

from __future__ import annotations

import mlx.core as mx

from .dispatch_bounds import dispatch_limit
from .metal_kernels import Kernel, by_rows, ceil_div, no_elements
from .metal_matrix import (
    GEMM_PLACE,
    TENSOR_COLUMNS,
    TENSOR_FAMILY,
    half_types,
    one_group,
    sorted_tiles,
)

_PACKED = ("words", "scales", "biases")
_TRAVERSE_TABLE = Kernel(
    "quantized_traversal_table",
    ("relation_traversal", "quantized_traversal"),
    ("x", *_PACKED, "table", "sizes"),
    ("y",),
    "traverse_table_packed<T, BITS, GROUP>(x, words, scales, biases, table, sizes, y, "
    "thread_position_in_grid.xy);",
)
_TRAVERSE_CSR = Kernel(
    "quantized_traversal_csr",
    ("relation_traversal", "quantized_traversal"),
    ("x", *_PACKED, "starts", "edges", "sizes"),
    ("y",),
    "traverse_csr_packed<T, BITS, GROUP>(x, words, scales, biases, starts, edges, "
    "sizes, y, thread_position_in_grid.xy);",
)
_SORTED = Kernel(
    "quantized_sorted",
    ("matrix_tiles", "sorted_implicit_gemm", "quantized_sorted"),
    ("x", *_PACKED, "table", "rows", "masks", "bias", "sizes"),
    ("y",),
    "threadgroup float memory[GemmSums<T, COLUMNS, true>::Tile::FLOATS];\n"
    "  const PackedWeights<T, BITS, GROUP> weights = {words, scales, biases};\n"
    "  sorted_gemm<T, OUT, COLUMNS, true, BIAS>(x, weights, table, rows, masks, bias, "
    f"sizes, y, memory, {GEMM_PLACE});",
)
_TENSOR = Kernel(
    "quantized_tensor_ops",
    (*TENSOR_FAMILY, "quantized_sorted"),
    ("x", *_PACKED, "table", "rows", "masks", "bias", "sizes"),
    ("y",),
    "threadgroup float memory[TensorSums<T, COLUMNS, true>::Tile::FLOATS];\n"
    "  const PackedWeights<T, BITS, GROUP> weights = {words, scales, biases};\n"
    "  sorted_gemm<T, OUT, COLUMNS, true, BIAS, PackedWeights<T, BITS, GROUP>, "
    "TensorSums<T, COLUMNS, true>>(x, weights, table, rows, masks, bias, "
    f"sizes, y, memory, {GEMM_PLACE});",
)


def quantized_tensor_ops(x, w, relation, groups, bias=None):
    """Return what ``quantized_sorted`` does, through TensorOps: half types only."""
    one_group("quantized_tensor_ops", groups)
    half_types("quantized_tensor_ops", x)
    return _sorted(_TENSOR, x, w, relation, bias, TENSOR_COLUMNS)


def quantized_sorted(x, w, relation, groups, bias=None):
    """Return y by matrix tiles over mask-sorted rows, weights unpacked into them."""
    one_group("quantized_sorted", groups)
    return _sorted(_SORTED, x, w, relation, bias)


def _sorted(kernel, x, w, relation, bias, narrowest=16) -> mx.array:
    packing = {"BITS": w.bits, "GROUP": w.group_size}
    channels = w.shape[2]
    return sorted_tiles(
        kernel, x, w.arrays, channels, relation, bias, narrowest, **packing
    )


def quantized_traversal(x, w, relation, groups):
    """Return y: one thread a (row, four channels) walks the row's edges in order."""
    volume, c_in, c_out = w.shape
    n, c_y = relation.n_out, c_out // groups
    if no_elements((n, c_out)) or x.size == 0:
        return mx.zeros((n, c_out), dtype=x.dtype)
    if relation.has_table:
        kernel, view = _TRAVERSE_TABLE, [relation.out_in]
    else:
        kernel, view = _TRAVERSE_CSR, list(relation.output_csr)

    def launch(first: int, rows: int) -> list[mx.array]:
        return kernel(
            [x, *w.arrays, *view],
            [first, volume, groups, c_in, c_y],
            [((rows, c_out), x.dtype)],
            (groups * ceil_div(c_y, 4), rows),
            T=x.dtype,
            BITS=w.bits,
            GROUP=w.group_size,
        )

    edges = relation.known_edges
    edges = n * volume if edges is None else edges
    limit = dispatch_limit("multiply_adds")
    return by_rows(n, edges * c_in * c_out, limit, launch)[0]


QUANTIZED = {
    "quantized_tensor_ops": quantized_tensor_ops,
    "quantized_sorted": quantized_sorted,
    "quantized_traversal": quantized_traversal,
}
FUSED_BIAS = frozenset({"quantized_tensor_ops", "quantized_sorted"})

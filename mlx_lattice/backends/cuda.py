"""Contractions on CUDA, by the kernels in ``cuda/``.

Compute capability 8.0 and later. On Hopper, half and bfloat16 go through wgmma.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from .cuda_compile import TYPES
from .cuda_depthwise import depthwise, depthwise_weight_grad
from .cuda_kernels import SHORT, added, kernel, run, without_edges
from .cuda_quantized import quantized_traversal
from .cuda_sorted import quantized_sorted, sorted_implicit_gemm
from .cuda_weight_grad import (
    grouped_gemm_weight_grad,
    relation_traversal_weight_grad,
    sorted_weight_grad,
)


def relation_traversal(x, w, relation, groups, transposed, bias=None):
    """Return y: one thread an output row and channel walks the row's edges."""
    n_out = relation.n_out
    shape = n_out, w.shape[1] * groups if transposed else w.shape[2]
    if n_out == 0 or relation.n_in == 0 or x.shape[1] == 0 or relation.n_edges == 0:
        return without_edges(shape, x.dtype, bias)
    csr, last = relation.output_csr, added(bias)
    function = _traversal_kernel(x.dtype, transposed, groups, last[1:])
    blocks = max(1, min(1 << 20, -(-shape[0] * shape[1] // 256)))
    inputs = [x, w, csr.indptr, csr.edges, *last.arrays]
    return run(function, inputs, blocks, 256, [(shape, x.dtype)])[0]


@cache
def _traversal_kernel(dtype: mx.Dtype, transposed: bool, groups: int, bias: tuple):
    names, value, suffix = bias
    flag = "true" if transposed else "false"
    each = "w_shape[1]", f"w_shape[2] / {groups}"
    in_each, out_each = reversed(each) if transposed else each
    return kernel(
        f"relation_traversal_{SHORT[dtype]}_{flag}_{groups}{suffix}",
        ("relation_traversal.cu",),
        ("x", "w", "indptr", "edges", *names),
        ("y",),
        f"lattice::relation_traversal<{TYPES[dtype]}, {flag}>(x, w, "
        f"indptr, edges, {value}, y, indptr_shape[0] - 1, "
        f"{in_each}, {out_each}, {groups});",
    )


CONV = {
    "depthwise": depthwise,
    "sorted_implicit_gemm": sorted_implicit_gemm,
    "relation_traversal": relation_traversal,
}
QUANTIZED = {
    "quantized_sorted": quantized_sorted,
    "quantized_traversal": quantized_traversal,
}
# Routes whose functions take ``bias``, (C_out,), and add it to their sums: all.
FUSED_BIAS = frozenset(CONV) | frozenset(QUANTIZED)
WEIGHT_GRAD = {
    "depthwise": depthwise_weight_grad,
    "sorted_implicit_gemm": sorted_weight_grad,
    "grouped_gemm": grouped_gemm_weight_grad,
    "relation_traversal": relation_traversal_weight_grad,
}

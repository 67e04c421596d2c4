"""Contractions with packed weights on CUDA.

Weights are read where they stand: nothing is padded, and no float weight is ever in
device memory.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..quantized import QuantizedWeight
from .cuda_kernels import SHORT, THREADS, TYPES, blocks_for, kernel, run


class Weights(NamedTuple):
    """What the tiles of ``sorted_implicit_gemm`` multiply with.

    Attributes:
        arrays: by the names under which the kernel gets them.
        value: the C++ value that it reads them through.
        c_out: the C++ integer of the output channels, before padding.
        name: part of the kernel's name.
        files: sources beyond the tiles'.
    """

    arrays: dict[str, mx.array]
    value: str
    c_out: str
    name: str = ""
    files: tuple[str, ...] = ()


def packed_weights(w: QuantizedWeight) -> Weights:
    """Return packed weights as the tiles take them: (K, C_out, channels)."""
    value = (
        f"lattice::PackedWeights<{TYPES[w.dtype]}, {w.bits}>{{words, scales, biases, "
        f"words_shape[1], scales_shape[2], {w.group_size}}}"
    )
    arrays = {"words": w.weight, "scales": w.scales, "biases": w.biases}
    name = f"_int{w.bits}_{w.group_size}"
    return Weights(arrays, value, "words_shape[1]", name, ("quantized_sorted.cu",))


def quantized_traversal(x, w, relation, groups):
    """Return y: one thread an output row and channel walks the row's edges in order."""
    shape = relation.n_out, w.shape[2]
    if 0 in (*shape, x.size):
        return mx.zeros(shape, dtype=x.dtype)
    if relation.has_table:
        kind, view = "table", {"table": relation.out_in}
        sizes = "table_shape[0], table_shape[1]"
    elif relation.n_edges == 0:
        return mx.zeros(shape, dtype=x.dtype)
    else:
        csr = relation.output_csr
        kind, view = "csr", {"starts": csr.indptr, "edges": csr.edges}
        sizes = "starts_shape[0] - 1"
    weights = f"{TYPES[x.dtype]}, {w.bits}"
    function = kernel(
        f"quantized_traversal_{kind}_{SHORT[x.dtype]}_{w.bits}_{w.group_size}_{groups}",
        ("pooling.cu", "quantized_traversal.cu"),
        ("x", "words", "scales", "biases", *view),
        ("y",),
        f"const lattice::PackedLines<{weights}> w = {{words, scales, biases, "
        f"x_shape[1] / {groups}, words_shape[1], scales_shape[2], {w.group_size}}};\n"
        f"lattice::quantized_traversal_{kind}<{weights}>(x, w, {', '.join(view)}, y, "
        f"{sizes}, {groups});",
    )
    inputs = [x, *w.arrays, *view.values()]
    blocks = blocks_for(shape[0] * shape[1])
    return run(function, inputs, blocks, THREADS, [(shape, x.dtype)])[0]

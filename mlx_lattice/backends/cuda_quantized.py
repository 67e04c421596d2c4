"""Contractions with packed weights on CUDA.

Weights are read where they stand: nothing is padded. Either no float weight is ever in
device memory, or they are there for the length of one call.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..quantized import QuantizedWeight
from .cuda_compile import TYPES
from .cuda_kernels import (
    SHORT,
    THREADS,
    added,
    blocks_for,
    kernel,
    run,
    whole,
    without_edges,
)


class WeightsCode(NamedTuple):
    """How the tiles of ``sorted_implicit_gemm`` read their weights.

    Attributes:
        names: under which the kernel gets the arrays.
        value: the C++ value that it reads them through.
        c_out: the C++ integer of the output channels, before padding.
        name: part of the kernel's name.
        files: sources beyond the tiles'.
    """

    names: tuple[str, ...]
    value: str
    c_out: str
    name: str = ""
    files: tuple[str, ...] = ()


class Weights(NamedTuple):
    """What the tiles of ``sorted_implicit_gemm`` multiply with."""

    arrays: tuple[mx.array, ...]
    code: WeightsCode


def packed_weights(w: QuantizedWeight) -> Weights:
    """Return packed weights as the tiles take them: (K, C_out, channels)."""
    return Weights((w.weight, w.scales, w.biases), _code(w.dtype, w.bits, w.group_size))


def unpacked_weights(w: QuantizedWeight) -> mx.array:
    """Return packed weights as floats, each rounded once: (K, C_in, C_out).

    Channels are padded to 16 bytes, outputs with zeros.
    """
    size = w.dtype.size
    volume, c_in, c_out = w.shape[0], whole(w.shape[1], size), whole(w.shape[2], size)
    function = _unpack_kernel(w.dtype, w.bits, w.group_size, w.padded_channels - c_in)
    blocks = blocks_for(c_in * c_out * size**2 // 256), volume
    slots = [((volume, c_in, c_out), w.dtype)]
    return run(function, w.arrays, blocks, THREADS, slots)[0]


@cache
def _unpack_kernel(dtype: mx.Dtype, bits: int, group_size: int, spare: int):
    """Return the kernel for weights whose storage has ``spare`` channels too many."""
    code = _code(dtype, bits, group_size)
    return kernel(
        f"unpack_weights_{SHORT[dtype]}{code.name}_{spare}",
        ("alignment.cuh", "tiles.cuh", *code.files),
        code.names,
        ("w",),
        f"lattice::unpack_weights({code.value}, w, {spare});",
    )


@cache
def _code(dtype: mx.Dtype, bits: int, group_size: int) -> WeightsCode:
    value = (
        f"lattice::PackedWeights<{TYPES[dtype]}, {bits}>{{words, scales, biases, "
        f"words_shape[1], scales_shape[2], {group_size}}}"
    )
    names = ("words", "scales", "biases")
    name = f"_int{bits}_{group_size}"
    return WeightsCode(names, value, "words_shape[1]", name, ("quantized_sorted.cu",))


def quantized_traversal(x, w, relation, groups, bias=None):
    """Return y: one thread an output row and channel walks the row's edges in order."""
    shape = relation.n_out, w.shape[2]
    if 0 in (*shape, x.size):
        return without_edges(shape, x.dtype, bias)
    if relation.has_table:
        kind, view = "table", {"table": relation.out_in}
        sizes = "table_shape[0], table_shape[1]"
    elif relation.n_edges == 0:
        return without_edges(shape, x.dtype, bias)
    else:
        csr = relation.output_csr
        kind, view = "csr", {"starts": csr.indptr, "edges": csr.edges}
        sizes = "starts_shape[0] - 1"
    weights = f"{TYPES[x.dtype]}, {w.bits}"
    last = added(bias)
    function = kernel(
        f"quantized_traversal_{kind}_{SHORT[x.dtype]}_{w.bits}_{w.group_size}_{groups}"
        f"{last.suffix}",
        ("alignment.cuh", "channels.cuh", "quantized_traversal.cu"),
        ("x", "words", "scales", "biases", *view, *last.names),
        ("y",),
        f"const lattice::PackedLines<{weights}> w = {{words, scales, biases, "
        f"x_shape[1] / {groups}, words_shape[1], scales_shape[2], {w.group_size}}};\n"
        f"lattice::quantized_traversal_{kind}<{weights}>(x, w, {', '.join(view)}, "
        f"{last.value}, y, {sizes}, {groups});",
    )
    inputs = [x, *w.arrays, *view.values(), *last.arrays]
    blocks = blocks_for(shape[0] * shape[1])
    return run(function, inputs, blocks, THREADS, [(shape, x.dtype)])[0]

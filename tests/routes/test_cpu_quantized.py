"""The native contractions with packed weights."""

import mlx.core as mx
import native
import numpy as np
import pytest
from native import (
    THREADS,
    agrees,
    cpu,
    each_dtype,
    each_isa,
    edges_of,
    numpy64,
    oracle,
    random_table,
    same_bits,
)

cpu_device = native.cpu_device


@each_isa
@each_dtype
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("group_size", (32, 64, 128))
@pytest.mark.parametrize("c_in,c_out,groups", [(128, 24, 1), (256, 32, 2), (384, 9, 1)])
def test_quantized(c_in, c_out, groups, group_size, bits, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(bits)
    n_in, n_out, volume = 90, 100, 4
    dense = mx.array(rng.standard_normal((volume, c_out, c_in // groups)), mx.float32)
    words, scales, biases = mx.quantize(dense.astype(dtype), group_size, bits)
    back = mx.dequantize(
        words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits
    )
    w64 = numpy64(back).transpose(0, 2, 1)
    x = mx.array(rng.standard_normal((n_in, c_in))).astype(dtype)
    bias = mx.array(rng.standard_normal(c_out)).astype(dtype)
    table = random_table(rng, n_out, n_in, volume)
    edges = edges_of(table)
    expected = oracle(numpy64(x), w64, edges, n_out, groups, bias=numpy64(bias))
    arguments = {"groups": groups, "bits": bits, "group_size": group_size}
    packed = (words, scales, biases)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        a = cpu.quantized_sorted(x, *packed, mx.array(table), bias, **arguments)
        agrees(a, expected, dtype)
        b = cpu.quantized_traversal(
            x, *packed, mx.array(edges), n_out, bias, **arguments
        )
        same_bits([a, b])
        runs.append(a)
    same_bits(runs)
    if groups == 1:
        one = [v[1] for v in packed]
        got = cpu.quantized_pointwise(x, *one, bits=bits, group_size=group_size)
        agrees(got, numpy64(x) @ w64[1], dtype)


def test_quantized_weights_too_large_to_unpack_at_once():
    rng = np.random.default_rng(0)
    w = mx.array(rng.standard_normal((9, 1024, 1024)), mx.float32)
    words, scales, biases = mx.quantize(w, 64, 8)
    x = mx.array(rng.standard_normal((60, 1024)), mx.float32)
    table = mx.array(random_table(rng, 50, 60, 9))
    got = cpu.quantized_sorted(x, words, scales, biases, table, bits=8)
    back = mx.dequantize(words, scales, biases, 64, 8).transpose(0, 2, 1)
    agrees(got, numpy64(cpu.blocked_gather_gemm(x, back, table)), mx.float32)


@each_isa
@each_dtype
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("c_in,groups", [(3, 1), (33, 1), (40, 1), (70, 2)])
def test_features_narrower_than_the_stored_groups(c_in, groups, bits, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(c_in)
    own, group_size = c_in // groups, 32
    stored = -(-own // group_size) * group_size
    dense = mx.array(rng.standard_normal((4, 18, stored)), mx.float32).astype(dtype)
    words, scales, biases = mx.quantize(dense, group_size, bits)
    exact = (a.astype(mx.float32) for a in (scales, biases))
    back = numpy64(mx.dequantize(words, *exact, group_size, bits))
    w64 = back[:, :, :own].transpose(0, 2, 1)
    x = mx.array(rng.standard_normal((50, c_in))).astype(dtype)
    table = random_table(rng, 60, 50, 4)
    edges = edges_of(table)
    arguments = {"groups": groups, "bits": bits, "group_size": group_size}
    packed = (words, scales, biases)
    y = cpu.quantized_sorted(x, *packed, mx.array(table), **arguments)
    agrees(y, oracle(numpy64(x), w64, edges, 60, groups), dtype)
    same_bits(
        [y, cpu.quantized_traversal(x, *packed, mx.array(edges), 60, **arguments)]
    )
    if groups == 1:
        one = [a[2] for a in packed]
        got = cpu.quantized_pointwise(x, *one, bits=bits, group_size=group_size)
        agrees(got, numpy64(x) @ w64[2], dtype)


def test_features_of_other_widths_are_refused():
    words, scales, biases = mx.quantize(mx.ones((2, 8, 64)), 32, 8)
    for channels in (32, 31, 65):
        x = mx.ones((4, channels))
        with pytest.raises(ValueError, match=f"x has {channels} channels"):
            cpu.quantized_sorted(
                x,
                words,
                scales,
                biases,
                mx.zeros((4, 2), mx.int32),
                bits=8,
                group_size=32,
            )

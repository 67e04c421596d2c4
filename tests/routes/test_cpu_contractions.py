"""The native contractions against float64 oracles written from the scalar rule."""

import itertools

import mlx.core as mx
import native
import numpy as np
import pytest
from native import (
    THREADS,
    agrees,
    cpu,
    csr_of,
    each_dtype,
    each_isa,
    edges_of,
    numpy64,
    oracle,
    oracle_weight_grad,
    random_table,
    same_bits,
)

cpu_device = native.cpu_device

# What the edges of a relation are enough for; each route has a function of its own.
EDGE_GRADIENTS = (
    cpu.blocked_gather_gemm_weight_grad,
    cpu.grouped_gemm_weight_grad,
    cpu.relation_traversal_weight_grad,
)


# (C_in, C_out, groups)
CHANNELS = [
    (1, 1, 1),
    (3, 5, 1),
    (7, 130, 1),
    (16, 16, 1),
    (32, 48, 1),
    (64, 64, 1),
    (129, 17, 1),
    (300, 8, 1),
    (4, 6, 2),
    (12, 12, 12),
    (33, 33, 33),
    (8, 16, 8),
]


ROWS_IN, ROWS_OUT, VOLUME = 150, 170, 5


def drawn(c_in, c_out, groups, dtype):
    """A table and its edges; features, a gradient, a weight and a bias."""
    rng = np.random.default_rng(c_in + c_out)
    table = random_table(rng, ROWS_OUT, ROWS_IN, VOLUME)
    shapes = (ROWS_IN, c_in), (ROWS_OUT, c_out), (VOLUME, c_in // groups, c_out), c_out
    arrays = (mx.array(rng.standard_normal(s)).astype(dtype) for s in shapes)
    return table, edges_of(table), *arrays


@each_isa
@each_dtype
@pytest.mark.parametrize("c_in,c_out,groups", CHANNELS)
def test_forward(c_in, c_out, groups, dtype, isa):
    cpu.set_isa(isa)
    table, edges, x, _, w, bias = drawn(c_in, c_out, groups, dtype)
    x64, w64 = numpy64(x), numpy64(w)
    plain = oracle(x64, w64, edges, ROWS_OUT, groups)
    biased = plain + numpy64(bias)
    t, e = mx.array(table), mx.array(edges)
    csr = [mx.array(v) for v in csr_of(edges, ROWS_OUT)]
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        a = cpu.blocked_gather_gemm(x, w, t, groups=groups)
        b = cpu.blocked_gather_gemm(x, w, t, bias, groups=groups)
        agrees(a, plain, dtype)
        agrees(b, biased, dtype)
        runs.append([a, b])
        # Every form of the relation adds in one order.
        same_bits([a, cpu.grouped_gemm(x, w, e, ROWS_OUT, groups=groups)])
        same_bits([b, cpu.relation_traversal(x, w, *csr, bias, groups=groups)])
    for results in zip(*runs, strict=True):
        same_bits(results)


@each_isa
@each_dtype
@pytest.mark.parametrize("c_in,c_out,groups", CHANNELS)
def test_gradients(c_in, c_out, groups, dtype, isa):
    cpu.set_isa(isa)
    _, edges, x, dy, w, _ = drawn(c_in, c_out, groups, dtype)
    back = edges[:, [1, 0, 2]]
    back = back[np.lexsort((back[:, 1], back[:, 2]))]
    dx = oracle(numpy64(dy), numpy64(w), back, ROWS_IN, groups, transposed=True)
    dw = oracle_weight_grad(numpy64(x), numpy64(dy), edges, VOLUME, groups)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        got = cpu.grouped_gemm(
            dy, w, mx.array(back), ROWS_IN, groups=groups, transpose_weight=True
        )
        agrees(got, dx, dtype)
        dws = [
            gradient(x, dy, mx.array(edges), VOLUME, groups=groups)
            for gradient in EDGE_GRADIENTS
        ]
        agrees(dws[0], dw, dtype)
        same_bits(dws)
        runs.append([got, dws[0]])
    for results in zip(*runs, strict=True):
        same_bits(results)


@each_isa
@each_dtype
@pytest.mark.parametrize(
    "n,c_in,c_out",
    [
        (0, 4, 4),
        (1, 3, 2),
        (5, 1, 70),
        (1000, 64, 64),
        (700, 131, 129),
        (3, 0, 4),
        (3, 4, 0),
    ],
)
def test_pointwise(n, c_in, c_out, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(n)
    x = mx.array(rng.standard_normal((n, c_in))).astype(dtype)
    w = mx.array(rng.standard_normal((c_in, c_out))).astype(dtype)
    bias = mx.array(rng.standard_normal(c_out)).astype(dtype)
    expected = numpy64(x) @ numpy64(w)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        a = cpu.native_pointwise(x, w)
        agrees(a, expected, dtype)
        agrees(cpu.native_pointwise(x, w, bias), expected + numpy64(bias), dtype)
        same_bits([a, cpu.native_pointwise(x, w.T, transpose=True)])
        runs.append(a)
    same_bits(runs)


@pytest.mark.parametrize("n_in,n_out", [(0, 0), (0, 3), (4, 0), (1, 1), (2, 3)])
@each_dtype
def test_few_rows(n_in, n_out, dtype):
    rng = np.random.default_rng(0)
    table = random_table(rng, n_out, n_in, 27)
    edges = edges_of(table)
    x = mx.array(rng.standard_normal((n_in, 5))).astype(dtype)
    w = mx.array(rng.standard_normal((27, 5, 6))).astype(dtype)
    dy = mx.array(rng.standard_normal((n_out, 6))).astype(dtype)
    bias = mx.array(np.arange(6.0)).astype(dtype)
    expected = oracle(numpy64(x), numpy64(w), edges, n_out, bias=np.arange(6.0))
    agrees(cpu.blocked_gather_gemm(x, w, mx.array(table), bias), expected, dtype)
    dw = oracle_weight_grad(numpy64(x), numpy64(dy), edges, 27)
    agrees(cpu.grouped_gemm_weight_grad(x, dy, mx.array(edges), 27), dw, dtype)


def test_repeated_edges_are_all_added():
    rng = np.random.default_rng(4)
    n, volume = 40, 3
    edges = np.stack(
        [
            rng.integers(0, n, 900),
            rng.integers(0, n, 900),
            rng.integers(0, volume, 900),
        ],
        1,
    ).astype(np.int32)
    edges = edges[np.lexsort((edges[:, 0], edges[:, 1], edges[:, 2]))]
    x = mx.array(rng.standard_normal((n, 20)), mx.float32)
    w = mx.array(rng.standard_normal((volume, 20, 70)), mx.float32)
    dy = mx.array(rng.standard_normal((n, 70)), mx.float32)
    expected = oracle(numpy64(x), numpy64(w), edges, n)
    csr = [mx.array(v) for v in csr_of(edges, n)]
    for threads in THREADS:
        cpu.set_num_threads(threads)
        agrees(cpu.grouped_gemm(x, w, mx.array(edges), n), expected, mx.float32)
        agrees(cpu.relation_traversal(x, w, *csr), expected, mx.float32)
        dw = oracle_weight_grad(numpy64(x), numpy64(dy), edges, volume)
        got = cpu.grouped_gemm_weight_grad(x, dy, mx.array(edges), volume)
        agrees(got, dw, mx.float32)


def test_many_rows_give_equal_bits():
    rng = np.random.default_rng(5)
    n, volume = 20_000, 27
    table = mx.array(random_table(rng, n, n, volume))
    edges = cpu.edges(table)[0]
    x = mx.array(rng.standard_normal((n, 40)), mx.float32)
    w = mx.array(rng.standard_normal((volume, 40, 24)), mx.float32)
    dy = mx.array(rng.standard_normal((n, 24)), mx.float32)
    y, dw = [], []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        y.append(cpu.blocked_gather_gemm(x, w, table))
        dw.append(cpu.grouped_gemm_weight_grad(x, dy, edges, volume))
        mx.eval(y, dw)
    same_bits(y)
    same_bits(dw)
    t, x64, w64 = np.array(table), numpy64(x), numpy64(w)
    expected = np.zeros((n, 24))
    for k in range(volume):
        o = np.nonzero(t[:, k] >= 0)[0]
        expected[o] += x64[t[o, k]] @ w64[k]
    agrees(y[0], expected, mx.float32)


@each_isa
@each_dtype
@pytest.mark.parametrize("groups", (1, 2, 12))
def test_weights_of_any_strides_give_the_same_bits(groups, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(groups)
    x = mx.array(rng.standard_normal((40, 12))).astype(dtype)
    table = mx.array(rng.integers(-1, 40, (40, 5)).astype(np.int32))
    stored = mx.array(rng.standard_normal((5, 12 // groups, 18))).astype(dtype)
    stored = stored[:, :, : 12 if groups == 12 else 18]
    for order in itertools.permutations(range(3)):
        back = np.argsort(order).tolist()
        w = mx.contiguous(stored.transpose(order)).transpose(back)
        for transpose in (False, True):
            a = x if not transpose else mx.tile(x, (1, 2))[:, : w.shape[2]]
            options = dict(groups=groups, transpose_weight=transpose)
            y = cpu.blocked_gather_gemm(a, w, table, **options)
            expected = cpu.blocked_gather_gemm(
                a, mx.contiguous(stored), table, **options
            )
            assert mx.array_equal(y, expected), order


@each_isa
@each_dtype
@pytest.mark.parametrize("channels", [(5, 7), (32, 64), (130, 16)], ids=str)
def test_weight_gradient_of_each_row_with_itself(channels, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(1)
    x, dy = (mx.array(rng.standard_normal((400, c))).astype(dtype) for c in channels)
    same = np.stack([np.arange(400), np.arange(400), np.zeros(400, int)], 1)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        runs.append(cpu.native_pointwise_weight_grad(x, dy))
        agrees(runs[-1], oracle_weight_grad(numpy64(x), numpy64(dy), same, 1), dtype)
        edges = mx.array(same.astype(np.int32))
        same_bits([runs[-1], cpu.grouped_gemm_weight_grad(x, dy, edges, 1)])
    same_bits(runs)
    assert not mx.any(cpu.native_pointwise_weight_grad(x[:0], dy[:0])).item()


@each_dtype
def test_weight_gradient_of_many_ranges(dtype):
    """More output rows than a range, so that a thread widens several."""
    rng = np.random.default_rng(2)
    n, volume = 10_000, 3
    table = random_table(rng, n, n, volume)
    x = mx.array(rng.standard_normal((n, 9))).astype(dtype)
    dy = mx.array(rng.standard_normal((n, 20))).astype(dtype)
    expected = [
        numpy64(x)[column[column >= 0]].T @ numpy64(dy)[column >= 0]
        for column in table.T
    ]
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        edges = mx.array(edges_of(table))
        runs.append(cpu.grouped_gemm_weight_grad(x, dy, edges, volume))
        agrees(runs[-1], np.stack(expected), dtype)
    same_bits(runs)


@each_dtype
@pytest.mark.parametrize("groups", (1, 3, 12))
def test_the_bias_begins_each_sum(groups, dtype):
    """It is rounded once, with the sum; rows without edges are the bias itself."""
    rng = np.random.default_rng(3)
    table = random_table(rng, 60, 40, 5)
    table[7:19] = -1
    x = mx.array(rng.standard_normal((40, 12))).astype(dtype)
    w = mx.array(rng.standard_normal((5, 12 // groups, 12))).astype(dtype)
    bias = mx.array(rng.standard_normal(12)).astype(dtype)
    y = cpu.blocked_gather_gemm(x, w, mx.array(table), bias, groups=groups)
    plain = oracle(numpy64(x), numpy64(w), edges_of(table), 60, groups)
    agrees(y, plain + numpy64(bias), dtype)
    same_bits([y[7:19], mx.tile(bias, (12, 1))])
    none = mx.zeros((0, 3), mx.int32)
    same_bits(
        [cpu.grouped_gemm(x, w, none, 60, bias, groups=groups), mx.tile(bias, (60, 1))]
    )

"""What only the extension promises: every form of a relation, and any number of threads
or rows, add in one order; packed weights of any size."""

from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import native
import numpy as np
import pytest
import reference as ref
from native import THREADS, cpu, each_dtype, each_isa, random_table, same_bits

cpu_device = native.cpu_device

WEIGHT_GRADS = (
    cpu.blocked_gather_gemm_weight_grad,
    cpu.grouped_gemm_weight_grad,
    cpu.relation_traversal_weight_grad,
)
# (C_in, C_out, groups)
CHANNELS = (
    (3, 5, 1),
    (7, 130, 1),
    (64, 64, 1),
    (50, 90, 1),  # whose weight gradients pack their rows, the last block a part,
    (256, 260, 1),  # on tiles of 64 channels too
    (300, 8, 1),
    (8, 16, 8),
    (33, 33, 33),
)
ROWS_IN, ROWS_OUT, VOLUME = 150, 170, 5


def edges_of(table):
    """Kernel-major (E, 3): (i, o, k) sorted by (k, o)."""
    o, k = np.nonzero(table >= 0)
    order = np.lexsort((o, k))
    return np.stack([table[o, k], o, k], 1)[order].astype(np.int32)


def csr_of(edges, n_out):
    order = np.argsort(edges[:, 1], kind="stable")
    starts = np.searchsorted(edges[order, 1], np.arange(n_out + 1)).astype(np.int32)
    return starts, edges[order, 0].copy(), edges[order, 2].copy()


def normal(rng, shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape)).astype(dtype)


def exact(array):
    return ref.to_numpy(array).astype(np.float64)


@each_isa
@each_dtype
@pytest.mark.parametrize("c_in, c_out, groups", CHANNELS)
def test_every_form_of_a_relation_adds_in_one_order(c_in, c_out, groups, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(c_in + c_out)
    table = random_table(rng, ROWS_OUT, ROWS_IN, VOLUME)
    table[:, 3] = -1
    x, dy = normal(rng, (ROWS_IN, c_in), dtype), normal(rng, (ROWS_OUT, c_out), dtype)
    w, bias = normal(rng, (VOLUME, c_in // groups, c_out), dtype), normal(rng, c_out)
    stored = mx.contiguous(w.transpose(2, 0, 1)).transpose(1, 2, 0)  # as MLX has it
    edges, bias = edges_of(table), bias.astype(dtype)
    t, e = mx.array(table), mx.array(edges)
    csr = [mx.array(v) for v in csr_of(edges, ROWS_OUT)]
    ys, dws = [], []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        ys += [
            cpu.blocked_gather_gemm(x, w, t, bias, groups=groups),
            cpu.blocked_gather_gemm(x, stored, t, bias, groups=groups),
            cpu.grouped_gemm(x, w, e, ROWS_OUT, bias, groups=groups),
            cpu.relation_traversal(x, w, *csr, bias, groups=groups),
        ]
        for gradient in WEIGHT_GRADS:
            of = partial(gradient, x, dy, e, VOLUME, groups=groups)
            dws += [of(), mx.contiguous(of(output_major=True).transpose(1, 2, 0))]
        mx.eval(ys, dws)
    same_bits(ys)
    same_bits(dws)
    assert not dws[0][3].any().item() and dws[0][4].any().item()
    relation = SimpleNamespace(edges=edges, offsets=range(VOLUME))
    wanted = ref.weight_grad(exact(x), exact(dy), relation, groups=groups)
    ref.assert_close(dws[0], wanted, dtype)


@each_isa
@each_dtype
def test_a_pointwise_product_is_the_sum_over_a_table(dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(1)
    x, dy, w = (normal(rng, s, dtype) for s in ((400, 33), (400, 70), (33, 70)))
    table = mx.arange(400, dtype=mx.int32)[:, None]
    edges = cpu.edges(table)[0]
    for threads in THREADS:
        cpu.set_num_threads(threads)
        y = cpu.blocked_gather_gemm(x, w[None], table)
        same_bits(
            [
                y,
                cpu.native_pointwise(x, w),
                cpu.native_pointwise(x, w.T, transpose=True),
            ]
        )
        dw = cpu.grouped_gemm_weight_grad(x, dy, edges, 1)
        same_bits([dw, cpu.native_pointwise_weight_grad(x, dy)])
    assert not mx.any(cpu.native_pointwise_weight_grad(x[:0], dy[:0])).item()


@pytest.mark.parametrize("n, c_in, c_out", ((0, 4, 4), (3, 0, 4), (3, 4, 0)))
def test_products_of_nothing(n, c_in, c_out):
    y = cpu.native_pointwise(mx.ones((n, c_in)), mx.ones((c_in, c_out)))
    assert y.shape == (n, c_out) and not y.any().item()


@pytest.mark.parametrize("bits", (4, 8))
@each_isa
@each_dtype
def test_packed_weights_add_in_one_order(dtype, isa, bits):
    cpu.set_isa(isa)
    rng = np.random.default_rng(bits)
    words = mx.quantize(normal(rng, (4, 24, 128), dtype), 64, bits)
    x, bias = normal(rng, (90, 128), dtype), normal(rng, 24, dtype)
    table = random_table(rng, 100, 90, 4)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        options = {"bits": bits, "group_size": 64}
        edges = mx.array(edges_of(table))
        runs += [
            cpu.quantized_sorted(x, *words, mx.array(table), bias, **options),
            cpu.quantized_traversal(x, *words, edges, 100, bias, **options),
        ]
    same_bits(runs)


def test_a_kernel_of_no_offsets_gives_the_bias():
    x, w, bias = mx.ones((4, 3)), mx.zeros((0, 3, 5)), mx.arange(5.0)
    table, edges = mx.zeros((6, 0), mx.int32), mx.zeros((0, 3), mx.int32)
    expected = mx.tile(bias, (6, 1))
    same_bits([cpu.blocked_gather_gemm(x, w, table, bias), expected])
    same_bits([cpu.grouped_gemm(x, w, edges, 6, bias), expected])


@pytest.mark.parametrize("rows", (70, 530))
@each_dtype
def test_weights_that_fit_no_cache_are_packed_in_parts(dtype, rows):
    """Sums go on from part to part; rows without edges, a bias, what follows, once.

    The parts are channels of few rows, and offsets of more.
    """
    rng = np.random.default_rng(3)
    table, (c_in, c_out) = random_table(rng, rows, 60, 6), (1024, 1000)
    table[7] = -1
    x, w = normal(rng, (60, c_in), dtype), normal(rng, (6, c_in, c_out), dtype)
    bias, added = normal(rng, c_out, dtype), normal(rng, (rows, c_out), dtype)
    after = None, None, None, added, 1, 0.0
    plain, finished = [], []
    for threads in (*THREADS, 9):  # and more than there are offsets
        cpu.set_num_threads(threads)
        plain.append(cpu.blocked_gather_gemm(x, w, mx.array(table), bias))
        given = mx.array(table), bias
        finished.append(cpu.blocked_gather_gemm(x, w, *given, epilogue=after))
        mx.eval(plain, finished)
    same_bits(plain)
    same_bits(finished)
    sums = np.tile(exact(bias), (rows, 1))
    for k, column in enumerate(table.T):
        o = np.flatnonzero(column >= 0)
        sums[o] += exact(x)[column[o]] @ exact(w)[k]
    ref.assert_close(plain[0], sums, dtype)
    ref.assert_close(finished[0], np.maximum(sums + exact(added), 0), dtype)

"""Native pooling and scattered reductions against scalar loops."""

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
    numpy64,
)

cpu_device = native.cpu_device


@each_isa
@each_dtype
@pytest.mark.parametrize("c", (1, 16, 37))
def test_pooling(c, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(c)
    n_in, n_out, volume = 80, 60, 8
    table = np.full((n_out, volume), -1, np.int32)
    for k in range(volume):
        o = rng.permutation(n_out)[:30]
        table[o, k] = rng.permutation(n_in)[:30]
    x = mx.array(rng.standard_normal((n_in, c)) - 5).astype(dtype)
    dy = mx.array(rng.standard_normal((n_out, c))).astype(dtype)
    weights = mx.array(rng.standard_normal((n_out, volume)), mx.float32)
    x64, dy64, weights64 = numpy64(x), numpy64(dy), numpy64(weights)
    best, index = np.zeros((n_out, c)), np.full((n_out, c), -1)
    total, weighted = np.zeros((n_out, c)), np.zeros((n_out, c))
    for o in range(n_out):
        for k in range(volume):
            i = table[o, k]
            if i < 0:
                continue
            total[o] += x64[i]
            weighted[o] += weights64[o, k] * x64[i]
            take = (index[o] < 0) | (x64[i] > best[o])
            best[o], index[o] = (
                np.where(take, x64[i], best[o]),
                np.where(take, i, index[o]),
            )
    dx = np.zeros((n_in, c))
    for o in range(n_out):
        for j in range(c):
            if index[o, j] >= 0:
                dx[index[o, j], j] += dy64[o, j]
    t = mx.array(table)
    back = cpu.transpose_table(t, n_in)
    for threads in THREADS:
        cpu.set_num_threads(threads)
        y, got_index = cpu.pool_max(x, t)
        np.testing.assert_array_equal(numpy64(y), best)
        np.testing.assert_array_equal(np.array(got_index), index)
        agrees(cpu.pool_max_grad(dy, got_index, back), dx, dtype)
        agrees(cpu.pool_sum(x, t), total, dtype)
        agrees(cpu.pool_sum(x, t, weights), weighted, dtype)


def test_pool_max_keeps_nan_and_infinities():
    x = mx.array([[-np.inf], [np.nan], [1.0], [-np.inf]], mx.float32)
    table = mx.array([[0, 3], [2, 1], [1, 2], [-1, -1]], mx.int32)
    y, index = cpu.pool_max(x, table)
    np.testing.assert_array_equal(np.array(y)[:, 0], [-np.inf, np.nan, np.nan, 0])
    assert np.array(index)[:, 0].tolist() == [0, 1, 1, -1]


@each_isa
@each_dtype
@pytest.mark.parametrize("c", (1, 19, 64))
def test_scatter(c, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(2)
    n, rows, volume = 700, 90, 3
    x = mx.array(rng.standard_normal((n, c)) - 3).astype(dtype)
    table = rng.integers(-1, rows - 5, (n, volume)).astype(np.int32)
    weights = rng.standard_normal((n, volume)).astype(np.float32)
    x64 = numpy64(x)
    total, weighted = np.zeros((rows, c)), np.zeros((rows, c))
    best, index = np.zeros((rows, c)), np.full((rows, c), -1)
    for q, k in np.argwhere(table >= 0):
        r = table[q, k]
        total[r] += x64[q]
        weighted[r] += weights[q, k] * x64[q]
        take = (index[r] < 0) | (x64[q] > best[r])
        best[r] = np.where(take, x64[q], best[r])
        index[r] = np.where(take, q, index[r])
    t, found = mx.array(table), []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        agrees(cpu.scatter_sum(x, t, rows), total, dtype)
        agrees(cpu.scatter_sum(x, t, rows, mx.array(weights)), weighted, dtype)
        y, rows_won = cpu.scatter_max(x, t, rows)
        np.testing.assert_array_equal(numpy64(y), best)
        np.testing.assert_array_equal(np.array(rows_won), index)
        found.append(cpu.scatter_sum(x, t, rows))
    assert all(mx.array_equal(f, found[0]) for f in found)


def test_scatter_of_nothing_and_errors():
    x, table = mx.zeros((0, 3)), mx.zeros((0, 1), mx.int32)
    assert mx.array_equal(cpu.scatter_sum(x, table, 4), mx.zeros((4, 3)))
    assert cpu.scatter_max(x, table, 0)[0].shape == (0, 3)
    one = mx.zeros((1, 3))
    with pytest.raises(ValueError, match="one row each"):
        cpu.scatter_sum(one, table, 4)
    with pytest.raises(RuntimeError, match="names row 7"):
        mx.eval(cpu.scatter_sum(one, mx.array([[7]], mx.int32), 4))

"""What the tests of the native kernels share: the extension, instruction sets, oracles.

The oracles are float64 loops written from the scalar rule.
"""

import mlx.core as mx
import numpy as np
import pytest

cpu = pytest.importorskip("mlx_lattice._cpu")

THREADS = (1, 2, 5)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def runnable():
    """The instruction sets that this processor has."""
    names = []
    before = cpu.isa()
    for name in ("baseline", "avx2", "avx512"):
        try:
            cpu.set_isa(name)
            names.append(name)
        except ValueError:
            pass
    cpu.set_isa(before)
    return names


# For parametrised tests: on every instruction set, in every dtype.
each_isa = pytest.mark.parametrize("isa", runnable())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def cpu_device():
    """MLX on the CPU; instruction set and threads as they were afterwards."""
    before, isa = mx.default_device(), cpu.isa()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)
    cpu.set_isa(isa)
    cpu.set_num_threads(0)


def numpy64(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


def random_table(rng, n_out, n_in, volume, density=0.4):
    table = rng.integers(0, max(n_in, 1), (n_out, volume))
    absent = (
        rng.random((n_out, volume)) > density if n_in else np.ones_like(table, bool)
    )
    return np.where(absent, -1, table).astype(np.int32)


def edges_of(table):
    """Kernel-major (E, 3): (i, o, k) sorted by (k, o)."""
    o, k = np.nonzero(table >= 0)
    order = np.lexsort((o, k))
    return np.stack([table[o, k], o, k], 1)[order].astype(np.int32)


def csr_of(edges, n_out):
    order = np.argsort(edges[:, 1], kind="stable")
    starts = np.searchsorted(edges[order, 1], np.arange(n_out + 1)).astype(np.int32)
    return starts, edges[order, 0].copy(), edges[order, 2].copy()


def oracle(x, w, edges, n_out, groups=1, transposed=False, bias=None):
    """Sum over edges of x[i] @ W[k], group by group, in float64."""
    volume, a, b = w.shape
    if transposed:  # (K, C_in, groups * C_out), read as its transpose
        parts = [
            w[:, :, g * (b // groups) : (g + 1) * (b // groups)].transpose(0, 2, 1)
            for g in range(groups)
        ]
    else:
        n = b // groups
        parts = [w[:, :, g * n : (g + 1) * n] for g in range(groups)]
    c_in, c_out = parts[0].shape[1:]
    y = np.zeros((n_out, groups * c_out))
    for g, part in enumerate(parts):
        xs = x[:, g * c_in : (g + 1) * c_in]
        for i, o, k in edges:
            y[o, g * c_out : (g + 1) * c_out] += xs[i] @ part[k]
    return y if bias is None else y + bias


def oracle_weight_grad(x, dy, edges, volume, groups=1):
    c_in, c_out = x.shape[1] // groups, dy.shape[1] // groups
    w = np.zeros((volume, c_in, groups * c_out))
    for g in range(groups):
        for i, o, k in edges:
            w[k, :, g * c_out : (g + 1) * c_out] += np.outer(
                x[i, g * c_in : (g + 1) * c_in], dy[o, g * c_out : (g + 1) * c_out]
            )
    return w


def agrees(got, expected, dtype):
    assert got.dtype == dtype and got.shape == expected.shape
    error = np.linalg.norm(numpy64(got) - expected)
    assert error <= TOLERANCE[dtype] * max(np.linalg.norm(expected), 1e-30)


def same_bits(arrays):
    first = np.array(arrays[0].view(mx.uint8))
    for other in arrays[1:]:
        np.testing.assert_array_equal(np.array(other.view(mx.uint8)), first)

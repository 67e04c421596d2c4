"""The native contractions against float64 oracles written from the scalar rule."""

import itertools
import threading

import mlx.core as mx
import numpy as np
import pytest

cpu = pytest.importorskip("mlx_lattice._cpu")

THREADS = (1, 2, 5)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def runnable():
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


@pytest.fixture(autouse=True)
def _cpu_device():
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


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("c_in,c_out,groups", CHANNELS)
def test_conv(c_in, c_out, groups, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(c_in + c_out)
    n_in, n_out, volume = 150, 170, 5
    table = random_table(rng, n_out, n_in, volume)
    edges = edges_of(table)
    x = mx.array(rng.standard_normal((n_in, c_in))).astype(dtype)
    w = mx.array(rng.standard_normal((volume, c_in // groups, c_out))).astype(dtype)
    bias = mx.array(rng.standard_normal(c_out)).astype(dtype)
    x64, w64 = numpy64(x), numpy64(w)
    plain = oracle(x64, w64, edges, n_out, groups)
    biased = plain + numpy64(bias)
    t, e = mx.array(table), mx.array(edges)
    csr = [mx.array(v) for v in csr_of(edges, n_out)]
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        a = cpu.conv(x, w, t, groups=groups)
        b = cpu.conv(x, w, t, bias, groups=groups)
        agrees(a, plain, dtype)
        agrees(b, biased, dtype)
        runs.append([a, b])
        # Every form of the relation adds in one order.
        same_bits([a, cpu.conv_edges(x, w, e, n_out, groups=groups)])
        same_bits([b, cpu.conv_csr(x, w, *csr, bias, groups=groups)])
    for results in zip(*runs, strict=True):
        same_bits(results)


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("c_in,c_out,groups", CHANNELS)
def test_gradients(c_in, c_out, groups, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(c_in + c_out)
    n_in, n_out, volume = 150, 170, 5
    table = random_table(rng, n_out, n_in, volume)
    edges = edges_of(table)
    x = mx.array(rng.standard_normal((n_in, c_in))).astype(dtype)
    dy = mx.array(rng.standard_normal((n_out, c_out))).astype(dtype)
    w = mx.array(rng.standard_normal((volume, c_in // groups, c_out))).astype(dtype)
    back = edges[:, [1, 0, 2]]
    back = back[np.lexsort((back[:, 1], back[:, 2]))]
    dx = oracle(numpy64(dy), numpy64(w), back, n_in, groups, transposed=True)
    dw = oracle_weight_grad(numpy64(x), numpy64(dy), edges, volume, groups)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        got = cpu.conv_edges(
            dy, w, mx.array(back), n_in, groups=groups, transpose_weight=True
        )
        agrees(got, dx, dtype)
        a = cpu.weight_grad(x, dy, mx.array(table), groups=groups)
        b = cpu.weight_grad_edges(x, dy, mx.array(edges), volume, groups=groups)
        agrees(a, dw, dtype)
        same_bits([a, b])
        runs.append([got, a])
    for results in zip(*runs, strict=True):
        same_bits(results)


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
def test_matmul(n, c_in, c_out, dtype, isa):
    cpu.set_isa(isa)
    rng = np.random.default_rng(n)
    x = mx.array(rng.standard_normal((n, c_in))).astype(dtype)
    w = mx.array(rng.standard_normal((c_in, c_out))).astype(dtype)
    bias = mx.array(rng.standard_normal(c_out)).astype(dtype)
    expected = numpy64(x) @ numpy64(w)
    runs = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        a = cpu.matmul(x, w)
        agrees(a, expected, dtype)
        agrees(cpu.matmul(x, w, bias), expected + numpy64(bias), dtype)
        same_bits([a, cpu.matmul(x, w.T, transpose=True)])
        runs.append(a)
    same_bits(runs)


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
        a = cpu.conv_quantized(x, *packed, mx.array(table), bias, **arguments)
        agrees(a, expected, dtype)
        b = cpu.conv_edges_quantized(
            x, *packed, mx.array(edges), n_out, bias, **arguments
        )
        same_bits([a, b])
        runs.append(a)
    same_bits(runs)
    if groups == 1:
        one = [v[1] for v in packed]
        got = cpu.matmul_quantized(x, *one, bits=bits, group_size=group_size)
        agrees(got, numpy64(x) @ w64[1], dtype)


def test_quantized_weights_too_large_to_unpack_at_once():
    rng = np.random.default_rng(0)
    w = mx.array(rng.standard_normal((9, 1024, 1024)), mx.float32)
    words, scales, biases = mx.quantize(w, 64, 8)
    x = mx.array(rng.standard_normal((60, 1024)), mx.float32)
    table = mx.array(random_table(rng, 50, 60, 9))
    got = cpu.conv_quantized(x, words, scales, biases, table, bits=8)
    back = mx.dequantize(words, scales, biases, 64, 8).transpose(0, 2, 1)
    agrees(got, numpy64(cpu.conv(x, back, table)), mx.float32)


@pytest.mark.parametrize("n_in,n_out", [(0, 0), (0, 3), (4, 0), (1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows(n_in, n_out, dtype):
    rng = np.random.default_rng(0)
    table = random_table(rng, n_out, n_in, 27)
    edges = edges_of(table)
    x = mx.array(rng.standard_normal((n_in, 5))).astype(dtype)
    w = mx.array(rng.standard_normal((27, 5, 6))).astype(dtype)
    dy = mx.array(rng.standard_normal((n_out, 6))).astype(dtype)
    bias = mx.array(np.arange(6.0)).astype(dtype)
    expected = oracle(numpy64(x), numpy64(w), edges, n_out, bias=np.arange(6.0))
    agrees(cpu.conv(x, w, mx.array(table), bias), expected, dtype)
    dw = oracle_weight_grad(numpy64(x), numpy64(dy), edges, 27)
    agrees(cpu.weight_grad(x, dy, mx.array(table)), dw, dtype)
    agrees(cpu.weight_grad_edges(x, dy, mx.array(edges), 27), dw, dtype)


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
        agrees(cpu.conv_edges(x, w, mx.array(edges), n), expected, mx.float32)
        agrees(cpu.conv_csr(x, w, *csr), expected, mx.float32)
        dw = oracle_weight_grad(numpy64(x), numpy64(dy), edges, volume)
        got = cpu.weight_grad_edges(x, dy, mx.array(edges), volume)
        agrees(got, dw, mx.float32)


def test_many_rows_give_equal_bits():
    rng = np.random.default_rng(5)
    n, volume = 20_000, 27
    table = mx.array(random_table(rng, n, n, volume))
    x = mx.array(rng.standard_normal((n, 40)), mx.float32)
    w = mx.array(rng.standard_normal((volume, 40, 24)), mx.float32)
    dy = mx.array(rng.standard_normal((n, 24)), mx.float32)
    y, dw = [], []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        y.append(cpu.conv(x, w, table))
        dw.append(cpu.weight_grad(x, dy, table))
        mx.eval(y, dw)
    same_bits(y)
    same_bits(dw)
    t, x64, w64 = np.array(table), numpy64(x), numpy64(w)
    expected = np.zeros((n, 24))
    for k in range(volume):
        o = np.nonzero(t[:, k] >= 0)[0]
        expected[o] += x64[t[o, k]] @ w64[k]
    agrees(y[0], expected, mx.float32)


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
            y = cpu.conv(a, w, table, **options)
            expected = cpu.conv(a, mx.contiguous(stored), table, **options)
            assert mx.array_equal(y, expected), order


@pytest.mark.parametrize("isa", runnable())
def test_half_conversions_are_exact(isa):
    cpu.set_isa(isa)
    one = mx.array([[1.0]])
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    values = mx.array(bits).view(mx.float16)
    same = cpu.matmul(values, one.astype(mx.float16))  # x * 1: loads and stores
    expected = np.array(values)
    np.testing.assert_array_equal(np.array(same), np.where(expected == 0, 0, expected))
    rng = np.random.default_rng(0)
    odd = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    odd = np.concatenate([odd, np.float32([65519.9, 65520, 2**-25, 3 * 2**-26, 1e-8])])
    odd = odd[np.isfinite(odd)].reshape(-1, 1)
    # A float32 sum stored as half: conv of halves cannot make these, so add a bias.
    for dtype in (mx.float16, mx.bfloat16):
        bias = mx.array(odd[:, 0])
        got = cpu.matmul(mx.zeros((1, 1), dtype), mx.zeros((1, len(odd)), dtype), bias)
        np.testing.assert_array_equal(
            np.array(got.view(mx.uint16)),
            np.array(bias[None].astype(dtype).view(mx.uint16)),
        )


def test_compile_streams_threads_and_layouts():
    rng = np.random.default_rng(0)
    table = mx.array(random_table(rng, 64, 64, 27))
    x = mx.array(rng.standard_normal((64, 8)), mx.float32)
    w = mx.array(rng.standard_normal((27, 8, 8)), mx.float32)
    expected = cpu.conv(x, w, table)
    compiled = mx.compile(
        lambda x, w, t: cpu.conv(mx.exp(mx.log(x)), w, t) + cpu.conv(x, w, t),
    )
    positive = mx.abs(x)
    twice = 2 * cpu.conv(positive, w, table)
    assert mx.allclose(compiled(positive, w, table), twice, rtol=1e-4, atol=1e-4)
    shapeless = mx.compile(lambda x, w, t: cpu.conv(x, w, t) + 1, shapeless=True)
    for n in (64, 10):
        assert mx.allclose(shapeless(x, w, table[:n]), expected[:n] + 1)
    strided = mx.array(np.array(x).T.copy()).T
    same_bits([expected, cpu.conv(strided, w, table)])
    stream = mx.new_stream(mx.cpu)
    same_bits([expected, cpu.conv(x, w, table, stream=stream)])
    found = []
    mx.eval(x, w, table)

    def work():
        found.append(np.array(cpu.conv(x, w, table, stream=mx.cpu)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4
    for f in found:
        np.testing.assert_array_equal(f, np.array(expected))


def test_refusals_and_errors_are_sentences():
    x, w = mx.zeros((4, 8)), mx.zeros((27, 8, 8))
    table = mx.zeros((4, 27), mx.int32)
    with pytest.raises(Exception, match="no rule for vjp"):
        mx.grad(lambda x: cpu.conv(x, w, table).sum())(x)
    with pytest.raises(Exception, match="no rule for jvp"):
        mx.jvp(lambda x: cpu.conv(x, w, table), [x], [x])
    mapped = mx.vmap(lambda x: cpu.conv(x, w, table))(mx.ones((2, 4, 8)))
    assert mx.array_equal(mapped[1], cpu.conv(mx.ones((4, 8)), w, table))
    with pytest.raises(ValueError, match="x is float32 but the weight is float16"):
        cpu.conv(x, w.astype(mx.float16), table)
    with pytest.raises(ValueError, match="x has 7 channels"):
        cpu.conv(x[:, :7], w, table)
    with pytest.raises(ValueError, match="do not divide into 3 groups"):
        cpu.conv(mx.zeros((4, 24)), w, table, groups=3)
    with pytest.raises(ValueError, match="table has 26 offsets"):
        cpu.conv(x, w, table[:, 1:])
    with pytest.raises(ValueError, match="table must be int32"):
        cpu.conv(x, w, table.astype(mx.int64))
    with pytest.raises(ValueError, match="bias must have shape"):
        cpu.conv(x, w, table, mx.zeros(3))
    with pytest.raises(RuntimeError, match="names input row 99"):
        mx.eval(cpu.conv(x, w, table + 99))
    with pytest.raises(RuntimeError, match="names input row 99"):
        mx.eval(cpu.weight_grad(x, x, table + 99))
    with pytest.raises(RuntimeError, match="not sorted"):
        edges = mx.array([[0, 0, 1], [0, 0, 0]], dtype=mx.int32)
        mx.eval(cpu.weight_grad_edges(x, x, edges, 27))
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        words = mx.zeros((27, 8, 1), mx.uint32)
        cpu.conv_quantized(x, words, x, x, table, bits=3)
    with pytest.raises(ValueError, match="no mmx kernels"):
        cpu.set_isa("mmx")


def test_build_facts():
    assert cpu.built_for() == mx.__version__
    cpu.set_num_threads(3)
    assert cpu.num_threads() == 3
    cpu.set_num_threads(0)
    assert cpu.num_threads() >= 1

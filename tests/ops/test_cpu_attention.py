"""The CPU's kernel of attention on every instruction set, against float64."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from native import (  # noqa: F401 (a fixture)
    THREADS,
    cpu,
    cpu_device,
    each_dtype,
    each_isa,
    same_bits,
)

# Group sizes, how many of each are queries, heads, heads of keys, channels, values.
CASES = {
    "odd": ([1, 17, 42, 0], None, 4, 2, 6, 5),
    "several blocks of keys": ([700, 300], None, 2, 2, 16, 16),
    "wide heads": ([290], None, 3, 1, 65, 130),
    "one row": ([1], None, 1, 1, 1, 1),
    "keys of two groups": ([40, 40], [40, 9], 2, 2, 8, 8),
}


def given(name, dtype=np.float32):
    """q, k, v, dy, and rows, starts and queries of the groups."""
    sizes, queries, *widths = CASES[name]
    rng = np.random.default_rng(len(name))
    queries = queries or sizes
    n = sum(queries)
    rows = rng.permutation(n)
    if sum(sizes) > n:  # the second group sees the end of the first one
        rows = np.concatenate([rows, rows[queries[1] : sizes[0]]])
    count, kv, dim, value = widths
    shapes = (n, count, dim), (n, kv, dim), (n, kv, value), (n, count, value)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    starts = np.cumsum([0, *sizes])
    return arrays, [a.astype(np.int32) for a in (rows, starts, np.array(queries))]


def expected(arrays, lists, scale):
    """y, dq, and dk and dv by place, in float64."""
    q, k, v, dy = (a.astype(np.float64) for a in arrays)
    rows, starts, queries = lists
    y, dq = np.zeros(dy.shape), np.zeros(q.shape)
    dk, dv = (np.zeros((len(rows), *a.shape[1:])) for a in (k, v))
    shared = q.shape[1] // k.shape[1]
    for g, count in enumerate(queries):
        keys = rows[starts[g] : starts[g + 1]]
        at, own = slice(starts[g], starts[g + 1]), keys[:count]
        for h in range(q.shape[1] if count else 0):
            s = q[own, h] @ k[keys, h // shared].T * scale
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            y[own, h] = p @ v[keys, h // shared]
            dp = dy[own, h] @ v[keys, h // shared].T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * scale
            dq[own, h] = ds @ k[keys, h // shared]
            dk[at, h // shared] += ds.T @ q[own, h]
            dv[at, h // shared] += p.T @ dy[own, h]
    return y, dq, dk, dv


@each_dtype
@pytest.mark.parametrize("name", CASES)
@each_isa
def test_is_attention(name, dtype, isa):
    arrays, lists = given(name)
    arrays = [mx.array(a).astype(dtype) for a in arrays]
    wanted = expected([ref.to_numpy(a) for a in arrays], lists, 0.3)
    q, k, v, dy = arrays
    lists = [mx.array(a) for a in lists]
    cpu.set_isa(isa)
    y, sums = cpu.attention(q, k, v, *lists, scale=0.3)
    back = cpu.attention_gradient(dy, q, k, v, y, sums, *lists, scale=0.3)
    assert {a.dtype for a in (y, *back)} == {dtype}
    for actual, exact in zip((y, *back), wanted, strict=True):
        ref.assert_close(actual, exact, str(dtype).removeprefix("mlx.core."))


@each_isa
def test_strides_and_threads_change_no_bit(isa):
    """Queries, keys and values are views of one array, read where they are."""
    (q, k, v, dy), lists = given("several blocks of keys")
    lists = [mx.array(a) for a in lists]
    packed = mx.array(np.concatenate([q, k, v], axis=1))
    views = [packed[:, 2 * i : 2 * i + 2] for i in range(3)]
    turned = [mx.array(a.transpose(2, 0, 1).copy()).transpose(1, 2, 0) for a in (q, k)]
    cpu.set_isa(isa)
    results = []
    for threads in THREADS:
        cpu.set_num_threads(threads)
        for some in ((q, k, v), views, (*turned, v)):
            some = [mx.array(a) for a in some]
            y, sums = cpu.attention(*some, *lists, scale=0.3)
            more = y, sums, *lists
            back = cpu.attention_gradient(mx.array(dy), *some, *more, scale=0.3)
            results.append((y, sums, *back))
    for parts in zip(*results, strict=True):
        same_bits(parts)


@each_isa
def test_large_scores_and_what_is_not_a_number(isa):
    """A row whose scores are far apart; one that sees NaN, and none that does not."""
    q, k, v = (mx.array(cases.features(90, 8, i).reshape(90, 1, 8)) for i in range(3))
    lists = mx.arange(90), mx.array([0, 60, 90]), mx.array([60, 30])
    lists = [a.astype(mx.int32) for a in lists]
    cpu.set_isa(isa)
    y = cpu.attention(q * 1e4, k, v, *lists, scale=1.0)[0]
    best = mx.argmax((q[:60, 0] @ k[:60, 0].T), axis=1)
    np.testing.assert_allclose(np.array(y[:60, 0]), np.array(v[best, 0]), rtol=1e-5)
    bad = mx.where(mx.arange(90)[:, None, None] == 70, mx.nan, k)
    y = np.array(cpu.attention(q, bad, v, *lists, scale=1.0)[0])
    assert np.isfinite(y[:60]).all() and np.isnan(y[60:]).all()

"""Attention to sequences, and modulation, against float64 NumPy."""

from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
import reference as ref

import mlx_lattice as ml
from mlx_lattice import ops
from mlx_lattice.backends import portable_only

# Rows of each batch element: alike, of one element, very different, none at all.
SIZES = ((4, 4), (7,), (3, 40, 0, 17, 90), (0, 5), (1,), (0, 0))


def rows_of(sizes, shuffled=False, channels=3):
    """A tensor with so many rows in each batch element."""
    rng = np.random.default_rng(len(sizes) + sum(sizes))
    batch = np.repeat(np.arange(len(sizes)), sizes)
    coords = np.stack([batch, np.arange(len(batch)), 0 * batch, 0 * batch], axis=1)
    coords = coords[rng.permutation(len(coords))] if shuffled else coords
    feats = mx.array(rng.standard_normal((len(coords), channels)).astype(np.float32))
    where = mx.array(coords.astype(np.int32).reshape(-1, 4))
    return ml.SparseTensor(where, feats, batch_size=len(sizes))


def numbers(*shape, dtype="float32"):
    return mx.array(np.random.standard_normal(shape)).astype(getattr(mx, dtype))


def attended(q, k, v, batch, lengths, scale, dy=None):
    """(N, heads, D_v) in float64, and the gradients of q, k and v."""
    q, k, v = (ref.to_numpy(a).astype(np.float64) for a in (q, k, v))
    share = q.shape[1] // k.shape[2]
    y = np.zeros((*q.shape[:2], v.shape[-1]))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for i, h in np.ndindex(*q.shape[:2]):
        b, n, g = batch[i], lengths[batch[i]], h // share
        if n:
            scores = k[b, :n, g] @ q[i, h] * scale
            weight = np.exp(scores - scores.max())
            weight /= weight.sum()
            y[i, h] = weight @ v[b, :n, g]
        if n and dy is not None:
            dv[b, :n, g] += np.outer(weight, dy[i, h])
            ds = weight * ((v[b, :n, g] - y[i, h]) @ dy[i, h]) * scale
            dq[i, h] = ds @ k[b, :n, g]
            dk[b, :n, g] += np.outer(ds, q[i, h])
    return y if dy is None else (y, dq, dk, dv)


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_attend_to_their_sequence(sizes, shuffled, dtype):
    x, count = rows_of(sizes, shuffled), len(sizes)
    q = numbers(len(x), 4, 6, dtype=dtype)
    k, v = (numbers(count, 9, 2, width, dtype=dtype) for width in (6, 5))
    lengths = np.random.default_rng(1).integers(0, 10, count)
    lengths[-1] = 0
    batch = np.array(x.coords[:, 0])
    for given, taken in ((None, np.full(count, 9)), (mx.array(lengths), lengths)):
        y = ops.cross_attention(q, k, v, x, lengths=given, scale=0.3)
        assert y.shape == (len(x), 4, 5)
        if len(x):
            ref.assert_close(y, attended(q, k, v, batch, taken, 0.3), dtype)


@pytest.mark.parametrize("portable", (False, True))
@pytest.mark.parametrize("lengths", ([11, -2, 3], [-1, 12, 9], [99, -99, 99]), ids=str)
def test_lengths_of_an_array_are_clipped(lengths, portable):
    """More than M = 9 are M, less than 0 are none, and other sequences are right."""
    x, taken = rows_of((3, 4, 5), True), np.clip(lengths, 0, 9)
    arrays = numbers(12, 4, 6), numbers(3, 9, 2, 6), numbers(3, 9, 2, 5)
    batch, dy = np.array(x.coords[:, 0]), numbers(12, 4, 5)

    def run(*arrays):
        return ops.cross_attention(*arrays, x, lengths=mx.array(lengths), scale=0.3)

    with portable_only() if portable else nullcontext():
        (y,), found = mx.vjp(run, arrays, [dy])
        mx.eval(y, found)
    wanted = attended(*arrays, batch, taken, 0.3, np.array(dy, np.float64))
    for got, each in zip((y, *found), wanted, strict=True):
        ref.assert_close(got, each)


@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("sizes", SIZES[:5])
def test_gradients_of_rows(sizes, shuffled):
    """Also where a tensor has fewer elements than there are sequences."""
    x, count = rows_of(sizes, shuffled), len(sizes) + 1
    arrays = numbers(len(x), 4, 6), numbers(count, 9, 2, 6), numbers(count, 9, 2, 5)
    lengths = np.random.default_rng(2).integers(0, 10, count)
    batch, dy = np.array(x.coords[:, 0]), numbers(len(x), 4, 5)

    def run(*arrays):
        return ops.cross_attention(*arrays, x, lengths=mx.array(lengths), scale=0.3)

    _, found = mx.vjp(run, arrays, [dy])
    expected = attended(*arrays, batch, lengths, 0.3, np.array(dy, np.float64))
    for grad, each in zip(found, expected[1:], strict=True):
        if np.any(each):
            ref.assert_close(grad, each)
        else:
            assert not mx.any(grad).item()


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_sequences_attend_to_sequences(dtype):
    q, k, v = (numbers(2, n, 2, 8, dtype=dtype) for n in (5, 7, 7))
    y = ops.cross_attention(q, k, v, lengths=mx.array([7, 3]))
    flat = q.reshape(10, 2, 8)
    expected = attended(flat, k, v, [0] * 5 + [1] * 5, [7, 3], 8**-0.5)
    assert y.dtype == q.dtype
    ref.assert_close(y.reshape(10, 2, 8), expected, dtype)


def test_long_queries_are_cut(monkeypatch):
    x = rows_of((30, 5))
    arrays = numbers(35, 2, 4), numbers(2, 6, 2, 4), numbers(2, 6, 2, 4)
    whole = ops.cross_attention(*arrays, x)
    monkeypatch.setattr("mlx_lattice.ops.attention_calls.SCORES", 60)
    cut = ops.cross_attention(*arrays, x)
    assert mx.allclose(cut, whole, atol=1e-6).item()


def test_gradients_of_gradients():
    x, at = (
        rows_of((3, 5)),
        (numbers(8, 1, 4), numbers(2, 5, 1, 4), numbers(2, 5, 1, 4)),
    )

    def slope(k):
        run = lambda k: ops.cross_attention(at[0], k, at[2], x).square().sum()  # noqa: E731
        return mx.grad(run)(k).square().sum()

    by = numbers(*at[1].shape)
    found = (mx.grad(slope)(at[1]) * by).sum().item()
    ends = [slope(at[1] + h * by).item() for h in (3e-3, -3e-3)]
    assert found == pytest.approx((ends[0] - ends[1]) / 6e-3, rel=2e-2, abs=1e-3)


@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("sizes", SIZES)
def test_elements_as_sequences(sizes, shuffled):
    x = rows_of(sizes, shuffled)
    y, lengths = ops.to_sequences(x)
    assert lengths.tolist() == list(sizes)
    assert y.shape == (len(sizes), max(sizes), 3)
    batch, feats = np.array(x.coords)[:, 0], np.array(x.feats)
    for b, size in enumerate(sizes):
        assert np.array_equal(np.array(y[b, :size]), feats[batch == b])
        assert not np.any(np.array(y[b, size:]))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("sizes", SIZES)
def test_modulation_is_that_of_the_element(sizes, dtype):
    x = rows_of(sizes, True).astype(getattr(mx, dtype))
    shift, scale = (numbers(len(sizes), 3) for _ in range(2))
    y, gated = ops.modulate(x, shift, scale), ops.gate(x, scale)
    batch = np.array(x.coords)[:, 0]
    feats, a, b = (ref.to_numpy(v).astype(float) for v in (x.feats, scale, shift))
    assert y.dtype == x.dtype and y.key == x.key
    if len(x):
        ref.assert_close(y.feats, feats * (1 + a[batch]) + b[batch], dtype)
        ref.assert_close(gated.feats, feats * a[batch], dtype)
    one = ops.modulate(x, shift[:1], scale[:1]).feats
    expected = (x.feats * (1 + scale[:1]) + shift[:1]).astype(x.dtype)
    assert mx.allclose(one, expected, rtol=2e-2, atol=2e-2).item()


def test_gradients_of_modulation():
    x = rows_of((3, 20, 0, 9), True)
    shift, scale = numbers(4, 3), numbers(4, 3)
    loss = lambda *at: (ops.modulate(x, *at).feats * x.feats).sum()  # noqa: E731
    by_shift, by_scale = mx.grad(loss, argnums=(0, 1))(shift, scale)
    batch, feats = np.array(x.coords)[:, 0], np.array(x.feats, np.float64)
    for found, each in ((by_shift, feats), (by_scale, feats**2)):
        expected = np.stack([each[batch == b].sum(axis=0) for b in range(4)])
        ref.assert_close(found, expected)


def test_packed_rows_as_sequences():
    lengths = [3, 0, 5, 1]
    x = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    expected = np.zeros((4, 5, 2), np.float32)
    for b, begin in enumerate(np.cumsum([0, *lengths[:-1]])):
        expected[b, : lengths[b]] = x[begin : begin + lengths[b]]
    for given in (lengths, mx.array(lengths), np.array(lengths)):
        found, sizes = ops.to_sequences(mx.array(x), given)
        assert np.array_equal(np.array(found), expected) and sizes.tolist() == lengths
    weight = mx.random.normal(expected.shape)
    grad = mx.grad(lambda x: (ops.to_sequences(x, lengths)[0] * weight).sum())
    inside = np.arange(5) < np.array(lengths)[:, None]
    assert np.array_equal(np.array(grad(mx.array(x))), np.array(weight)[inside])
    assert ops.to_sequences(mx.zeros((0, 2)), [0, 0])[0].shape == (2, 0, 2)
    for wrong in ([3, 5], [[9]], [9.0], [10, -1]):
        with pytest.raises(ValueError, match="lengths"):
            ops.to_sequences(mx.array(x), wrong)

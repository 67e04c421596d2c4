"""Means of channels, and channels again, against NumPy: by MLX's sum, and in halves."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref

import mlx_lattice as ml
from mlx_lattice import devices, ops


@pytest.fixture(params=("cpu", "h200"))
def chip(request, monkeypatch):
    """The device whose way is taken; there is nothing but MLX's operations in it."""
    profile = devices.PROFILES[request.param]
    monkeypatch.setattr(devices, "current", lambda: profile)
    return request.param


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("share", (1, 2, 3, 4, 6, 7, 8))
@pytest.mark.parametrize("rows", (0, 1, 37))
def test_means_and_their_gradients(chip, rows, share, dtype):
    feats = mx.array(cases.features(max(rows, 1), 5 * share)[:rows])
    feats = feats.astype(getattr(mx, dtype))
    exact = ref.to_numpy(feats).astype(np.float64)
    y = ops.channel_avg_pool(feats, 5)
    assert y.dtype == feats.dtype and y.shape == (rows, 5)
    ref.assert_close(y, exact.reshape(rows, 5, share).mean(axis=2), dtype)
    dy = mx.array(cases.features(max(rows, 1), 5, 1)[:rows]).astype(feats.dtype)
    dx = mx.grad(lambda f: (ops.channel_avg_pool(f, 5) * dy).sum())(feats)
    expected = np.repeat(ref.to_numpy(dy).astype(np.float64) / share, share, axis=1)
    ref.assert_close(dx, expected, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("times", (1, 2, 5, 8))
def test_repeats_and_their_gradients(chip, times, dtype):
    feats = mx.array(cases.features(37, 3)).astype(getattr(mx, dtype))
    y = ops.channel_repeat(feats, times)
    assert mx.array_equal(y, mx.repeat(feats, times, axis=1)) and y.dtype == feats.dtype
    dy = mx.array(cases.features(37, 3 * times, 1)).astype(feats.dtype)
    dx = mx.grad(lambda f: (ops.channel_repeat(f, times) * dy).sum())(feats)
    exact = ref.to_numpy(dy).astype(np.float64).reshape(37, 3, times).sum(axis=2)
    ref.assert_close(dx, exact, dtype)


@pytest.mark.parametrize(
    "name, number", (("channel_avg_pool", 3), ("channel_repeat", 4))
)
def test_second_derivatives_and_tangents(chip, name, number):
    feats, run = mx.array(cases.features(9, 12)), getattr(ops, name)

    def loss(f):
        return (run(f, number) ** 3).sum()

    def bend(f):
        return (mx.grad(loss)(f) ** 2).sum()

    def plainly(f):
        if name == "channel_repeat":
            return (mx.repeat(f, number, axis=1) ** 3).sum()
        return (f.reshape(9, number, -1).mean(axis=2) ** 3).sum()

    def plain_bend(f):
        return (mx.grad(plainly)(f) ** 2).sum()

    ref.assert_close(mx.grad(bend)(feats), np.array(mx.grad(plain_bend)(feats)))
    along = mx.array(cases.features(9, 12, 1))
    (_, (found,)) = mx.jvp(lambda f: run(f, number), [feats], [along])
    ref.assert_close(found, np.array(run(along, number)))
    step = mx.compile(mx.grad(loss))
    ref.assert_close(step(feats), np.array(mx.grad(plainly)(feats)))


def test_a_tensor_keeps_its_rows(chip):
    rows = mx.array(cases.geometry("surface", 3, 40))
    x = ml.SparseTensor(rows, mx.array(cases.features(len(rows), 12)))
    y = ops.channel_avg_pool(x, 3)
    assert y.key == x.key
    expected = np.array(x.feats).reshape(len(rows), 3, 4).mean(axis=2)
    np.testing.assert_allclose(np.array(y.feats), expected, rtol=1e-5, atol=1e-6)
    again = ops.channel_repeat(y, 4)
    assert again.key == x.key and again.shape == x.shape

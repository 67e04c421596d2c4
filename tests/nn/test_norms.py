"""Normalisation over active rows: against the float64 oracle."""

from contextlib import nullcontext

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.backends import portable_only

CHANNELS = 6


def tensor(name="batches", dtype="float32", n=60, batch_size=None, shift=3.0):
    coords = cases.geometry(name, 3, n)
    feats = cases.features(len(coords), CHANNELS) * 2 + shift
    x = ml.SparseTensor(
        mx.array(coords.astype(np.int32)),
        mx.array(feats, dtype=getattr(mx, dtype)),
        batch_size=batch_size,
    )
    return x, ref.to_numpy(x.feats).astype(np.float64), coords[:, 0]


def affine(layer, seed=0):
    """Give a layer a scale and a shift that are not 1 and 0; return them."""
    rng = np.random.default_rng(seed)
    pair = rng.normal(size=(2, CHANNELS)).astype(np.float32)
    layer.weight = mx.array(pair[0])
    if not isinstance(layer, nn.RMSNorm):
        layer.bias = mx.array(pair[1])
        return pair
    return pair[0], 0


def rms_norm(x, eps=1e-5):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)


LAYERS = {
    "batch": (lambda: nn.BatchNorm(CHANNELS), lambda x, b: ref_rows.batch_norm(x)),
    "layer": (lambda: nn.LayerNorm(CHANNELS), lambda x, b: ref_rows.layer_norm(x)),
    "rms": (lambda: nn.RMSNorm(CHANNELS), lambda x, b: rms_norm(x)),
    "group": (
        lambda: nn.GroupNorm(2, CHANNELS),
        lambda x, b: ref_rows.group_norm(x, b, 2),
    ),
    "instance": (
        lambda: nn.InstanceNorm(CHANNELS, affine=True),
        lambda x, b: ref_rows.instance_norm(x, b),
    ),
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", ("empty", "one", "negative", "batches"))
@pytest.mark.parametrize("kind", LAYERS)
def test_values(kind, name, dtype):
    make, oracle = LAYERS[kind]
    x, exact, batch = tensor(name, dtype, batch_size=20)
    layer = make()
    weight, bias = affine(layer)
    y = layer(x)
    assert y.key == x.key and y.dtype == x.dtype
    ref.assert_close(y.feats, oracle(exact, batch) * weight + bias, dtype)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients(kind):
    make, oracle = LAYERS[kind]
    x, exact, batch = tensor(n=12)
    layer = make()
    weight, bias = affine(layer)
    dy = cases.features(len(exact), CHANNELS, 5)

    def loss(feats):
        return (layer(x.replace(feats)).feats * mx.array(dy)).sum()

    dx = np.array(mx.grad(loss)(x.feats))
    step, expected = 1e-5, np.zeros_like(exact)
    for at in np.ndindex(*exact.shape):
        move = np.zeros_like(exact)
        move[at] = step
        change = oracle(exact + move, batch) - oracle(exact - move, batch)
        expected[at] = (change * weight * dy).sum() / (2 * step)
    np.testing.assert_allclose(dx, expected, atol=2e-4, rtol=2e-3)
    twice = mx.grad(lambda f: (mx.grad(loss)(f) ** 2).sum())(x.feats)
    assert mx.isfinite(twice).all().item()


# BatchNorm's statistics


def test_running_statistics_are_those_of_mlx():
    ours, theirs = nn.BatchNorm(CHANNELS), mlx.nn.BatchNorm(CHANNELS)
    for seed in range(3):
        x, _, _ = tensor(n=30 + seed)
        y = theirs(x.feats)
        np.testing.assert_allclose(np.array(ours(x).feats), np.array(y), atol=1e-5)
    for name in ("running_mean", "running_var"):
        a, b = np.array(ours[name]), np.array(theirs[name])
        np.testing.assert_allclose(a, b, rtol=1e-5)
    ours.eval(), theirs.eval()
    y = theirs(x.feats)
    np.testing.assert_allclose(np.array(ours(x).feats), np.array(y), atol=1e-5)


@pytest.mark.parametrize("portable", (False, True))
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rows", (2, 3, 40))
def test_the_running_variance_is_unbiased(rows, dtype, portable):
    """It moves by the sum of squares over n - 1, as PyTorch's."""
    layer, wanted = nn.BatchNorm(CHANNELS, momentum=0.3), np.ones(CHANNELS)
    for seed in range(2):
        feats = np.random.default_rng(seed).normal(1, 2, (rows, CHANNELS))
        feats = mx.array(feats).astype(getattr(mx, dtype))
        coords = mx.array([[0, i, 0, 0] for i in range(rows)])
        with portable_only() if portable else nullcontext():
            layer(ml.SparseTensor(coords, feats)).eval()
            mx.eval(layer.running_var)
        values = ref.to_numpy(feats).astype(np.float64)
        wanted = 0.7 * wanted + 0.3 * values.var(axis=0, ddof=1)
    np.testing.assert_allclose(np.array(layer.running_var), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_running_statistics_are_float32_in_nets_of_any_dtype(dtype, tmp_path):
    kind = getattr(mx, dtype)
    net, names = mlx.nn.Sequential(nn.BatchNorm(CHANNELS)), {"mean", "var"}
    x, exact, _ = tensor(dtype=dtype)
    net.set_dtype(kind)
    net(x)
    net.save_weights(str(tmp_path / "net.safetensors"))
    halves = [(k, a.astype(kind)) for k, a in tree_flatten(net.parameters())]
    mx.save_safetensors(str(tmp_path / "half.safetensors"), dict(halves))
    for name in ("net.safetensors", "half.safetensors"):
        other = mlx.nn.Sequential(nn.BatchNorm(CHANNELS))
        other.set_dtype(kind)
        other.load_weights(str(tmp_path / name))
        for key, array in tree_flatten(other.parameters()):
            wanted = mx.float32 if key.split("_")[-1] in names else kind
            assert array.dtype == wanted, (name, key)
            ours = dict(tree_flatten(net.parameters()))[key]
            assert mx.allclose(ours, array, rtol=1e-2, atol=1e-4)
        other.eval()
        layer = other.layers[0]
        mean, var = np.array(layer.running_mean), np.array(layer.running_var)
        y = (exact - mean) / np.sqrt(var + layer.eps)
        ref.assert_close(other(x).feats, y, dtype)
    layer.running_mean = np.ones(CHANNELS, np.float16)
    assert layer.running_mean.dtype == mx.float32


def test_half_statistics_are_float32():
    """A mean of 2 000 and a deviation of 1 survive where float16 sums overflow."""
    rng = np.random.default_rng(0)
    feats = (rng.normal(size=(4000, 1)) * 4 + 2000).astype(np.float16)
    mean, var = ops.batch_stats(mx.array(feats))
    exact = feats.astype(np.float64)
    np.testing.assert_allclose(np.array(mean), exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(np.array(var), exact.var(axis=0), rtol=1e-4)
    assert nn.BatchNorm(1)(mx.array(feats)).dtype == mx.float16


def test_without_running_statistics():
    layer = nn.BatchNorm(CHANNELS, track_running_stats=False, affine=False)
    x, exact, _ = tensor()
    for mode in (True, False):
        layer.train(mode)
        ref.assert_close(layer(x).feats, ref_rows.batch_norm(exact))


def test_errors():
    x, _, _ = tensor()
    with pytest.raises(ValueError, match="divisible by the number of groups"):
        nn.GroupNorm(4, 6)
    with pytest.raises(ValueError, match="'eps' must be positive but got 0"):
        nn.GroupNorm(2, 6, eps=0.0)
    with pytest.raises(ValueError, match="groups must divide the 6 channels"):
        ops.group_norm(x, 4)
    with pytest.raises(ValueError, match=r"\(N, 5\)"):
        nn.BatchNorm(5)(x)
    with pytest.raises(ValueError, match="go together"):
        ops.batch_norm(x, mean=mx.zeros((6,)))

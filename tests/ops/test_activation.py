"""Activations of no rows, gradients included; GELU and its derivatives."""

import math

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.epilogue import ARRAYS, EpilogueFacts, finished
from mlx_lattice.nn import activations

EMPTY = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 6)))


@pytest.mark.parametrize("name", activations.__all__)
def test_a_layer_of_no_rows(name):
    layer = getattr(nn, name)()
    some = layer(mx.ones((2, 6)))
    assert layer(EMPTY).feats.tolist() == [] == layer(EMPTY.feats).tolist()
    assert layer(EMPTY).feats.shape == (0, some.shape[1])
    dx = mx.grad(lambda feats: layer(feats).sum())(EMPTY.feats)
    mx.eval(dx)
    assert dx.shape == EMPTY.feats.shape


@pytest.mark.parametrize("name", ("relu", "gelu", "silu", "glu", "softmax"))
def test_a_function_of_no_rows(name):
    y = getattr(ops, name)(EMPTY)
    assert y.key == EMPTY.key and y.feats.tolist() == []


@pytest.mark.parametrize("activation", ("", "relu", "gelu", "silu"))
def test_norms_and_epilogues_of_no_rows(activation):
    feats, one = EMPTY.feats, mx.ones((6,))
    facts = EpilogueFacts(ARRAYS, activation, eps=1e-5)
    assert finished(feats, facts, one, one, one, one, feats).tolist() == []
    layers = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
    net = nn.Sequential(
        nn.BatchNorm(6), *([layers[activation]()] if activation else [])
    )
    for training in (True, False):
        assert net.train(training)(EMPTY).feats.tolist() == []


def exact_gelu(x):
    """Value, first and second derivative in float64."""
    x = ref.to_numpy(x).astype(np.float64)
    below = (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x * below, below + x * density, density * (2 - x**2)


def exact_silu(x):
    """Value, first and second derivative in float64."""
    x = ref.to_numpy(x).astype(np.float64)
    s = 1 / (1 + np.exp(-x))
    slope = s * (1 - s)
    return x * s, s + x * slope, slope * (2 + x * (1 - 2 * s))


SMOOTH = {"gelu": (exact_gelu, nn.GELU), "silu": (exact_silu, nn.SiLU)}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("count", (1, 17, 1030))
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_activations_and_their_derivatives(name, count, dtype):
    x = (mx.array(cases.features(count, 3)) * 4).astype(getattr(mx, dtype))
    (exact, layer), function = SMOOTH[name], getattr(ops, name)
    value, slope, curve = exact(x)
    y = function(x)
    assert y.dtype == x.dtype and mx.array_equal(layer()(x), y).item()
    ref.assert_close(y, value, dtype)
    first = mx.grad(lambda x: function(x).sum())
    ref.assert_close(first(x), slope, dtype)
    ref.assert_close(mx.jvp(function, [x], [mx.ones_like(x)])[1][0], slope, dtype)
    if dtype == "float32":
        ref.assert_close(mx.grad(lambda x: first(x).sum())(x), curve, "float16")
    ref.assert_close(mx.vmap(function)(x), value, dtype)


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_activations_on_every_instruction_set(name):
    cpu = pytest.importorskip("mlx_lattice._cpu")
    x, before = mx.array(cases.features(777, 1).ravel() * 5), cpu.isa()
    (value, slope, _), kernel = SMOOTH[name][0](x), getattr(cpu, name)
    with mx.stream(mx.cpu):
        for isa in ("baseline", "avx2", "avx512"):
            try:
                cpu.set_isa(isa)
            except ValueError:
                continue
            try:
                ref.assert_close(kernel(x), value)
                ref.assert_close(kernel(x, mx.ones_like(x)), slope)
                far = kernel(mx.array([mx.nan, 1e4, -1e4, mx.inf]))
                limits = [np.nan, 1e4, 0, np.inf]
                np.testing.assert_allclose(np.array(far), limits, atol=1e-30)
            finally:
                cpu.set_isa(before)

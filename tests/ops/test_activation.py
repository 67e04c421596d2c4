"""Activations, their derivatives, and those of biases: sums of columns."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
import reference_norms
from conftest import mappable

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.channel_kernels import activated_sum, column_sums
from mlx_lattice.epilogue import named

# Names of ``ops``, with their oracles and layers.
BY_KERNELS = {
    "gelu": ("gelu", nn.GELU),
    "silu": ("silu", nn.SiLU),
    "gelu_approx": ("gelu_tanh", lambda: nn.GELU("tanh")),
    "relu": ("relu", nn.ReLU),
    "leaky_relu": ("leaky_relu", nn.LeakyReLU),
    "elu": ("elu", nn.ELU),
}


def derivatives(name, x):
    """Value, first and second derivative in float64."""
    value, slope = reference_norms.ACTIVATIONS[name]
    x, step = ref.to_numpy(x).astype(np.float64), 1e-5
    curve = (slope(x + step) - slope(x - step)) / (2 * step)
    return value(x), slope(x), curve


def exact_elu(x, alpha):
    """Value and derivative in float64."""
    x = ref.to_numpy(x).astype(np.float64)
    below = alpha * np.exp(np.minimum(x, 0))
    return np.where(x > 0, x, below - alpha), np.where(x > 0, 1, below)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("count", (1, 17, 1030))
@pytest.mark.parametrize("name", BY_KERNELS)
def test_activations_by_kernels_and_their_derivatives(name, count, dtype):
    x = (mx.array(cases.features(count, 3)) * 4).astype(getattr(mx, dtype))
    (oracle, layer), function = BY_KERNELS[name], getattr(ops, name)
    value, slope, curve = derivatives(oracle, x)
    y = function(x)
    assert y.dtype == x.dtype and mx.array_equal(layer()(x), y).item()
    ref.assert_close(y, value, dtype)
    first = mx.grad(lambda x: function(x).sum())
    ref.assert_close(first(x), slope, dtype)
    ref.assert_close(mx.jvp(function, [x], [mx.ones_like(x)])[1][0], slope, dtype)
    if dtype == "float32":
        ref.assert_close(mx.grad(lambda x: first(x).sum())(x), curve, "float16")
    ref.assert_close(mx.vmap(function)(x), value, dtype)


@pytest.mark.parametrize("name", BY_KERNELS)
def test_an_activation_of_any_axes_is_that_of_its_rows(name):
    x, function = mx.array(cases.features(24, 5)), getattr(ops, name)
    rows, dy = function(x), mx.array(cases.features(24, 5)) + 1
    back = mx.vjp(function, [x], [dy])[1][0]
    for shape in ((2, 12, 5), (120,), (1, 1, 24, 5)):
        y, dx = mx.vjp(function, [x.reshape(shape)], [dy.reshape(shape)])
        assert y[0].shape == shape and dx[0].shape == shape
        ref.assert_close(y[0].reshape(24, 5), np.array(rows))
        ref.assert_close(dx[0].reshape(24, 5), np.array(back))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_selu_has_a_slope_where_its_exponential_overflows(dtype):
    x = mx.array([[-300, -2, -1e-3, 0.5, 12, 100, 300]]).astype(getattr(mx, dtype))
    value, slope = exact_elu(x, 1.67326)
    for selu in (ops.selu, nn.SELU()):
        ref.assert_close(selu(x), 1.0507 * value, dtype)
        first = mx.grad(lambda x, selu=selu: selu(x).astype(mx.float32).sum())(x)
        ref.assert_close(first, 1.0507 * slope, dtype)
    rows = ml.SparseTensor(mx.zeros((1, 4), mx.int32), x)
    assert mx.array_equal(nn.SELU()(rows).feats, nn.SELU()(x))


@pytest.mark.parametrize("name", ("relu", "leaky_relu"))
def test_a_relu_keeps_what_is_no_number(name):
    slope = {"relu": 0.0, "leaky_relu": 0.01}[name]
    x = mx.array([[mx.nan, mx.inf, -mx.inf, 0.0, -0.0, -2.0]])
    y = np.array(getattr(ops, name)(x))
    below = -np.inf if slope else 0.0
    np.testing.assert_array_equal(
        y, np.float32([[np.nan, np.inf, below, 0, 0, -2 * slope]])
    )


@pytest.mark.parametrize("kind", ("LeakyReLU", "ELU"))
@pytest.mark.parametrize("slope", (-0.5, 0.0, 0.2, 1.5))
def test_a_layer_of_any_slope_is_mlxs(kind, slope):
    x = mx.array(cases.features(40, 3)) * 2
    layer, wanted = getattr(nn, kind)(slope), getattr(mlx.nn, kind)(slope)
    ref.assert_close(layer(x), np.array(wanted(x)))
    grads = [mx.grad(lambda x, f=f: f(x).sum())(x) for f in (layer, wanted)]
    ref.assert_close(grads[0], np.array(grads[1]))


def test_an_elu_far_from_zero():
    """By kernels and composed: MLX's own has no slope from 89 on."""
    x = mx.array([[1e30, 90.0, 0.0, -90.0, -1e30, mx.nan]])
    for shape in (x.shape, (6,)):
        y, back = mx.vjp(ops.elu, [x.reshape(shape)], [mx.ones(shape)])
        wanted = [1e30, 90, 0, -1, -1, np.nan]
        np.testing.assert_allclose(np.array(y[0]).ravel(), wanted, 1e-6)
        slopes = [1, 1, 1, 0, 0, np.nan]
        np.testing.assert_allclose(np.array(back[0]).ravel(), slopes, atol=1e-30)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rows", (1, 255, 256, 9001))
def test_sums_of_columns(rows, dtype):
    """And what they are for: gradients of biases."""
    x = (mx.array(cases.features(rows, 7)) + 0.25).astype(getattr(mx, dtype))
    bias = mx.zeros((7,), dtype=x.dtype)
    wanted = ref.to_numpy(x).astype(np.float64).sum(axis=0)
    y = column_sums(x, bias)
    assert y.dtype == bias.dtype
    ref.assert_close(y, wanted, dtype)
    by = mx.arange(7).astype(x.dtype)
    (dx,) = mx.vjp(lambda x: column_sums(x, bias), [x], [by])[1]
    assert mx.array_equal(dx, mx.broadcast_to(by, x.shape)).item()
    (moved,) = mx.jvp(lambda x: column_sums(x, bias), [x], [x])[1]
    ref.assert_close(moved, wanted, dtype)


@pytest.mark.parametrize("there", ("b", "r", "br"))
@pytest.mark.parametrize("name", ("", "relu", "silu"))
def test_sums_that_are_activated(name, there):
    """As MLX computes them, with derivatives by all arrays, to the second."""
    act = {"": lambda v: v, "relu": mlx.nn.relu, "silu": mlx.nn.silu}[name]
    rows = [mx.array(cases.features(300, 8, seed)) for seed in range(3)]
    x, residual, by = rows
    beside = {"b": mx.array(cases.features(1, 8, 3)[0]), "r": residual}
    given = [x, *[beside[each] for each in there]]
    which = list(range(len(given)))

    def ours(x, *rest):
        bias = rest[0] if "b" in there else None
        added = rest[-1] if "r" in there else None
        return activated_sum(x, named(name), bias, added)

    def of_mlx(x, *rest):
        return act(sum(rest, x))

    def found(function):
        first = mx.grad(lambda *a: (mx.sin(function(*a)) * by).sum(), which)
        second = mx.grad(lambda *a: sum(mx.square(d).sum() for d in first(*a)), which)
        ones = [mx.ones_like(a) for a in given]
        along = mx.jvp(function, given, ones)[1][0]
        several = [mx.stack([a, 2 * a]) for a in given]
        with mappable():
            mapped = mx.vmap(function)(*several)
        each = mapped, mx.compile(function)(*given)
        return function(*given), *first(*given), *second(*given), along, *each

    for got, wanted in zip(found(ours), found(of_mlx), strict=True):
        ref.assert_close(got, ref.to_numpy(wanted).astype(np.float64))
    none = activated_sum(x[:0], named(name), beside["b"], residual[:0])
    assert none.shape == (0, 8)

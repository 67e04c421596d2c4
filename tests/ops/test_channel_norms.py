"""Norms by channel, with what is fused into them, of every backend that is here.

Kernels against float64, then what the library makes of them: derivatives of every
order, empty sets, compiled graphs.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import mappable
from contractions import exact, moved
from emulated_cuda import EMULATED, place_of
from norm_checks import (
    GROUPS,
    Given,
    array,
    check_derivatives_of_groups,
    check_groups,
    kernels_of,
    segmented,
)
from places import HERE, agreed
from reference_norms import ACTIVATIONS, Norm

from mlx_lattice import backends, ops
from mlx_lattice.epilogue import named
from mlx_lattice.registry import NORMS, Fit

PLACES = [*(place for place in HERE if place.name in NORMS), EMULATED]


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request):
    """Where kernels run; CUDA's are emulated without a GPU."""
    return place_of(request)


dtypes = pytest.mark.parametrize("dtype", cases.DTYPES)
# Rows and channels: one of each, several blocks, more channels than a block has.
SHAPES = ((1, 1), (2, 3), (5, 96), (700, 17), (650, 8), (40, 264))
shapes = pytest.mark.parametrize(
    "shape, dtype", [(s, cases.DTYPES[i % 3]) for i, s in enumerate(SHAPES)], ids=str
)
activations = pytest.mark.parametrize("act", ACTIVATIONS, ids=str)


def test_slopes_far_from_zero(place):
    """Where squares are not finite; a NaN stays."""
    x = mx.array([[1e30, -1e30, 90.0, -90.0, mx.nan, 0.0]])
    line, dy = mx.ones((1, 6)), mx.ones((1, 6))
    for name, below in (("gelu_tanh", 0.0), ("silu", 0.0), ("elu(0.5)", -0.5)):
        fit = Fit(0 * line, line, None, None, 0.0, named(name))
        dx, _ = agreed(place, kernels_of(place).gradient, dy, x, fit)
        np.testing.assert_allclose(exact(dx)[0], [1, 0, 1, 0, np.nan, 0.5], atol=1e-6)
        y = agreed(place, kernels_of(place).normalize, x, fit)
        wanted = [1e30, below, 90, below, np.nan, 0]
        np.testing.assert_allclose(exact(y)[0], wanted, 1e-6, 1e-6)


@shapes
def test_moments(place, shape, dtype):
    for scale, shift in ((1.0, 0.0), (1.0, 1000.0), (0.0, -7.0)):
        x, values = array(shape, dtype, 0, scale, shift)
        mean, var, *_ = agreed(place, kernels_of(place).moments, x)
        np.testing.assert_allclose(exact(mean)[0], values.mean(axis=0), 1e-6, 1e-6)
        np.testing.assert_allclose(exact(var)[0], values.var(axis=0), 1e-5, 1e-9)


def test_running_statistics_move(place):
    kernels = kernels_of(place)
    for rows in (1, 2, 300):
        x, values = array((rows, 5))
        running = mx.array([0.5] * 5), mx.array([2.0] * 5)
        found = [agreed(place, kernels.moments, x, None, running, 0.1)]
        given = Fit(None, None), None, running, 0.1
        found.append(agreed(place, kernels.batch_norm, x, *given))
        moved_var = 1.8 + 0.1 * values.var(axis=0, ddof=1) if rows > 1 else [2.0] * 5
        for *_, mean, var in found:
            ref.assert_close(mean[0], 0.45 + 0.1 * values.mean(axis=0))
            ref.assert_close(var[0], moved_var)


@shapes
def test_shapes(place, shape, dtype):
    Given(shape, dtype, "relu", parameters=dtype).check(place, dtype)


@activations
@pytest.mark.parametrize("affine, added", ((False, True), (True, False)))
def test_activations_and_residuals(place, act, affine, added):
    for shape, dtype in (((60, 17), "float32"), ((60, 16), "float16")):
        Given(shape, dtype, act, affine, added).check(place, dtype)


@activations
def test_fixed_statistics(place, act):
    mean, mean_wanted = array((1, 9), "float32", 8)
    var, var_wanted = array((1, 9), "float32", 9, 0.1, 2.0)
    given = Given((40, 9), "float16", act, statistics=(mean_wanted, var_wanted))
    given.check(place, "float16", None, (mean, var))


@pytest.mark.parametrize("groups, apart, channels, dtype", GROUPS)
def test_groups(place, monkeypatch, groups, apart, channels, dtype):
    check_groups(place, monkeypatch, groups, apart, channels, dtype)


@dtypes
@pytest.mark.parametrize("ordered", (True, False))
def test_segments(place, ordered, dtype):
    of, segments = segmented(ordered)
    for channels in (3, 16):
        given = Given((len(of), channels), dtype, "silu", of=of)
        given.check(place, dtype, segments)


@pytest.mark.parametrize("groups, apart", ((12, False), (6, True), (3, False)))
def test_derivatives_of_groups(place, monkeypatch, groups, apart):
    with place.inside():
        check_derivatives_of_groups(monkeypatch, place, groups, apart)


@dtypes
@pytest.mark.parametrize("channels", (3, 16))
def test_features_may_begin_anywhere(place, channels, dtype):
    given = Given((30, channels), dtype, "relu")
    for name in ("x", "dy", "residual", "weight", "bias"):
        setattr(given, name, moved(getattr(given, name)))
    given.arrays = given.weight, given.bias
    given.check(place, dtype)


def test_strided_features(place):
    """A slice of channels, as the gradient of a concatenation is."""
    wide, values = array((50, 24), "float16", 1)
    kernels, x = kernels_of(place), wide[:, 8:]

    def run():
        mean, var, *_ = kernels.moments(x)
        fit = Fit(mean, var, None, None, 1e-5)
        terms = kernels.gradient_sums(x, x, fit)[1]
        return kernels.normalize(x, fit), kernels.gradient(x, x, fit, None, terms)[0]

    y, dx = agreed(place, run)
    wanted = Norm(values[:, 8:])
    ref.assert_close(y, wanted.y, "float16")
    assert np.abs(exact(dx) - wanted.back(values[:, 8:])[0]).max() < 1e-3


# What the library makes of them


def inputs(rows=9, channels=3):
    """x, weight, bias, residual."""
    at = (rows, channels), (1, channels), (1, channels), (rows, channels)
    x, w, b, r = (array(shape, seed=seed)[0] for seed, shape in enumerate(at))
    return [x, w[0] + 1, b[0], r]


def normed(act, fixed):
    """A norm as a function of its arrays, and the oracle's."""
    mean, var = mx.array([0.1, -0.2, 0.3]), mx.array([1.0, 2.0, 0.5])
    statistics = (exact(mean), exact(var)) if fixed else None

    def ours(x, w, b, r, *moved):
        given = (None, None)
        if fixed:
            given = mean + sum(moved), var + sum(moved)
        return ops.batch_norm(x, *given, w, b, residual=r, activation=act)

    return ours, lambda x, w, b, r: Norm(x, w, b, r, act, statistics=statistics)


BOTH = pytest.mark.parametrize("fixed", (False, True), ids=("batch", "fixed"))
SMOOTH = pytest.mark.parametrize(
    "act", (None, "gelu", "gelu_tanh", "silu", "relu", "elu"), ids=str
)


@BOTH
@SMOOTH
def test_second_derivatives(fixed, act):
    """The gradient of a gradient, by every array, against the oracle's differences."""
    ours, oracle = normed(act, fixed)
    arrays = inputs()
    dy, exact_dy = array((9, 3), seed=7)
    along = [array(a.shape if a.ndim == 2 else (1, 3), seed=9)[0] for a in arrays]
    along = [a.reshape(b.shape) for a, b in zip(along, arrays, strict=True)]

    def first(*arrays):
        _, grads = mx.vjp(ours, arrays, [dy])
        return sum((g * a).sum() for g, a in zip(grads, along, strict=True))

    found = mx.grad(first, argnums=(0, 1, 2, 3))(*arrays)
    values, step = [exact(a) for a in arrays], 1e-6

    def slope(*values):
        found = oracle(*values).back(exact_dy)
        parts = zip(found, along, strict=True)
        return sum((g * exact(a)).sum() for g, a in parts)

    for at, got in enumerate(found):
        wanted = np.zeros(got.shape)
        for place in np.ndindex(*got.shape):
            pair = []
            for sign in (step, -step):
                there = [v.copy() for v in values]
                there[at][place] += sign
                pair.append(slope(*there))
            wanted[place] = (pair[0] - pair[1]) / (2 * step)
        np.testing.assert_allclose(exact(got), wanted, atol=2e-3, rtol=2e-3)
    third = mx.grad(lambda *a: mx.grad(first)(*a).sum())(*arrays)
    assert mx.isfinite(third).all().item()


@BOTH
@SMOOTH
def test_derivatives_are_those_of_the_composed_form(fixed, act):
    """By given statistics too, which the last array moves; and mapped."""
    ours, _ = normed(act, fixed)
    arrays, dy = [*inputs(), mx.zeros((3,))], array((9, 3), seed=7)[0]
    moved_by = [mx.ones_like(a) * (k + 1) for k, a in enumerate(arrays)]
    several = [mx.stack([a, 2 * a, a + 1]) for a in arrays[:1]]

    def everything():
        (y,), back = mx.vjp(ours, arrays, [dy])
        (along,) = mx.jvp(ours, arrays, moved_by)[1]
        with mappable():
            mapped = mx.vmap(lambda x: ours(x, *arrays[1:]))(*several)
        return [y, *back, along, mapped]

    with backends.portable_only():
        wanted = everything()
    for got, expected in zip(everything(), wanted, strict=True):
        np.testing.assert_allclose(exact(got), exact(expected), atol=2e-5, rtol=2e-4)


@BOTH
def test_compiled(fixed):
    ours, _ = normed("relu", fixed)
    arrays = inputs()

    def step(*arrays):
        loss = mx.value_and_grad(lambda *a: mx.square(ours(*a)).sum(), (0, 1, 2, 3))
        return loss(*arrays)

    value, grads = mx.compile(step)(*arrays)
    wanted, expected = step(*arrays)
    assert abs(value - wanted).item() < 1e-4
    for got, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(exact(got), exact(other), atol=1e-5)


@pytest.mark.parametrize("shape", ((0, 3), (4, 0), (1, 3)), ids=str)
@dtypes
def test_few_rows_and_no_channels(shape, dtype):
    x = array(shape, dtype)[0]
    one, none = mx.ones(shape[1:]), mx.zeros(shape[1:])
    for statistics in ((None, None), (none, one)):

        def loss(x, w, statistics=statistics):
            y = ops.batch_norm(x, *statistics, w, residual=x, activation="relu")
            assert y.shape == shape and y.dtype == x.dtype
            return y.astype(mx.float32).sum()

        for grad in mx.grad(loss, argnums=(0, 1))(x, one):
            assert mx.isfinite(grad).all().item()


def test_other_dtypes_of_parameters_and_residuals():
    x, values = array((20, 4), "float16")
    w, b = mx.ones((4,), mx.bfloat16), mx.ones((4,))
    y = ops.batch_norm(x, weight=w, bias=b, residual=mx.ones((20, 4)))
    ref.assert_close(y, Norm(values, bias=2.0).y, "float16")
    grads = mx.grad(
        lambda w, b, r: ops.batch_norm(x, weight=w, bias=b, residual=r).sum(),
        argnums=(0, 1, 2),
    )(w, b, mx.ones((20, 4)))
    assert [g.dtype for g in grads] == [mx.bfloat16, mx.float32, mx.float32]


@pytest.mark.parametrize("shape", ((30, 3), (1, 3), (0, 3)), ids=str)
def test_statistics_alone(shape):
    """What SyncBatchNorm is made of: their gradients, of any order."""
    x, values = array(shape)

    def loss(x):
        mean, var = ops.batch_stats(x)
        return (mx.square(mean) * mx.array([1.0, 2.0, 3.0]) + mx.sin(var)).sum()

    def everything():
        twice = mx.grad(lambda x: mx.square(mx.grad(loss)(x)).sum())(x)
        return loss(x), mx.grad(loss)(x), twice, mx.jvp(loss, [x], [x])[1][0]

    with backends.portable_only():
        wanted = everything()
    for got, other in zip(everything(), wanted, strict=True):
        np.testing.assert_allclose(exact(got), exact(other), atol=1e-5)
    mean, _ = ops.batch_stats(x)
    np.testing.assert_allclose(exact(mean), values.sum(0) / max(1, len(x)), atol=1e-6)

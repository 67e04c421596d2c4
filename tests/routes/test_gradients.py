"""Derivatives of the two contractions, to any order, against closed forms.

With y = F(x, w) bilinear, L = |y|^2 / 2 and a direction (u, v): y' = F(u, w) + F(x, v),
L' = <y, y'>, and the Hessian's product with (u, v) is written out in `hessian`.
"""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, multi_edges, pair

import mlx_lattice as ml
from mlx_lattice import devices, routes

CASES = (*KINDS, cases.Case("submanifold", 3, 1), cases.Case("forward", 2, 3, 2))
ROUTES = ("gather_gemm_scatter", "explicit_gemm", "grouped_gemm")


class Setup:
    """A point (x, w), a direction (u, v) and a cotangent, here and in float64."""

    def __init__(self, relation, expected, c_in=4, c_out=6, groups=1, dtype="float32"):
        self.relation, self.expected, self.groups = relation, expected, groups
        point = Numbers(relation, c_in, c_out, groups, dtype)
        along = Numbers(relation, c_in, c_out, groups, dtype, seed=7)
        self.at, self.direction = [point.x, point.w], [along.x, along.w]
        self.dy = point.dy
        (self.x, self.w, self.c), (self.u, self.v, _) = point.exact, along.exact

    def conv(self, x, w):
        return ml.conv(x, w, self.relation, groups=self.groups)

    def loss(self, x, w):
        return 0.5 * (self.conv(x, w) ** 2).sum()

    # The same in float64

    def forward(self, x, w):
        return ref.conv(x, w, self.expected, groups=self.groups)

    def to_x(self, dy, w):
        return ref.input_grad(dy, w, self.expected, groups=self.groups)

    def to_w(self, x, dy):
        return ref.weight_grad(x, dy, self.expected, groups=self.groups)

    def slope(self):
        return self.forward(self.u, self.w) + self.forward(self.x, self.v)

    def hessian(self):
        """The Hessian of the loss times (u, v)."""
        y, slope = self.forward(self.x, self.w), self.slope()
        return (
            self.to_x(slope, self.w) + self.to_x(y, self.v),
            self.to_w(self.x, slope) + self.to_w(self.u, y),
        )


@pytest.fixture(params=CASES, ids=str)
def setup(request):
    return Setup(*pair(request.param, n=25))


def directional(setup):
    """<grad of the loss, (u, v)> as a function of (x, w)."""

    def along(x, w):
        dx, dw = mx.grad(setup.loss, argnums=(0, 1))(x, w)
        u, v = setup.direction
        return (dx * u).sum() + (dw * v).sum()

    return along


def test_vjp(setup):
    (y,), (dx, dw) = mx.vjp(setup.conv, setup.at, [setup.dy])
    ref.assert_close(y, setup.forward(setup.x, setup.w))
    ref.assert_close(dx, setup.to_x(setup.c, setup.w))
    ref.assert_close(dw, setup.to_w(setup.x, setup.c))


def test_jvp(setup):
    (y,), (slope,) = mx.jvp(setup.conv, setup.at, setup.direction)
    ref.assert_close(y, setup.forward(setup.x, setup.w))
    ref.assert_close(slope, setup.slope())


def test_gradient_of_the_gradient(setup):
    got = mx.grad(directional(setup), argnums=(0, 1))(*setup.at)
    for actual, expected in zip(got, setup.hessian(), strict=True):
        ref.assert_close(actual, expected)


def test_jvp_of_the_gradient(setup):
    gradient = mx.grad(setup.loss, argnums=(0, 1))
    _, got = mx.jvp(lambda x, w: list(gradient(x, w)), setup.at, setup.direction)
    for actual, expected in zip(got, setup.hessian(), strict=True):
        ref.assert_close(actual, expected)


def test_finite_differences(setup):
    """Of the oracle's loss: nothing here knows a formula for a derivative."""

    def loss(step):
        x, w = setup.x + step * setup.u, setup.w + step * setup.v
        return 0.5 * (setup.forward(x, w) ** 2).sum()

    step = 1e-3
    first = (loss(step) - loss(-step)) / (2 * step)
    second = (loss(step) - 2 * loss(0) + loss(-step)) / step**2
    along = directional(setup)
    scale = np.abs(first) + np.abs(second) + loss(0)
    assert abs(along(*setup.at).item() - first) <= 1e-4 * scale
    curvature = mx.jvp(along, setup.at, setup.direction)[1][0].item()
    assert abs(curvature - second) <= 1e-4 * scale


def test_weight_grad_is_differentiable(setup):
    at, along = [setup.at[0], setup.dy], [setup.direction[0], setup.dy * 2 - 1]

    def function(x, dy):
        return ml.weight_grad(x, dy, setup.relation)

    c, t = setup.c, ref.to_numpy(along[1]).astype(np.float64)
    (dx, ddy) = mx.vjp(function, at, [setup.direction[1]])[1]
    ref.assert_close(dx, setup.to_x(c, setup.v))
    ref.assert_close(ddy, setup.forward(setup.x, setup.v))
    (slope,) = mx.jvp(function, at, along)[1]
    ref.assert_close(slope, setup.to_w(setup.u, c) + setup.to_w(setup.x, t))


def assert_both_orders(setup, dtype="float32", tolerance=None):
    dx, dw = mx.vjp(setup.conv, setup.at, [setup.dy])[1]
    assert dx.dtype == dw.dtype == setup.at[0].dtype
    ref.assert_close(dx, setup.to_x(setup.c, setup.w), dtype)
    ref.assert_close(dw, setup.to_w(setup.x, setup.c), dtype)
    second = mx.grad(directional(setup), argnums=(0, 1))(*setup.at)
    for actual, expected in zip(second, setup.hessian(), strict=True):
        assert actual.dtype == setup.at[0].dtype
        ref.assert_close(actual, expected, tolerance or dtype)


@pytest.mark.parametrize("groups", cases.GROUPS, ids=lambda g: "{}to{}by{}".format(*g))
def test_groups(groups):
    assert_both_orders(Setup(*pair(KINDS[0], n=25), *groups))


@pytest.mark.parametrize("groups", (1, 2))
def test_given_edges(groups):
    assert_both_orders(Setup(*multi_edges(), groups=groups))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", KINDS[:4], ids=str)
def test_every_route(route, case):
    with ml.routes.only(route):
        assert_both_orders(Setup(*pair(case, n=25)))


def test_half_precision_stays_half():
    # Second derivatives pass through rounded first ones: a wider tolerance.
    setup = Setup(*pair(KINDS[0], n=25), dtype="float16")
    assert_both_orders(setup, "float16", tolerance="bfloat16")


@pytest.mark.parametrize("case", (*KINDS, CASES[-2]), ids=str)
def test_no_rows(case):
    setup = Setup(*pair(case, "empty"))
    value, grads = mx.value_and_grad(setup.loss, argnums=(0, 1))(*setup.at)
    assert value.item() == 0
    second = mx.grad(directional(setup), argnums=(0, 1))(*setup.at)
    for got in (grads, second):
        assert [g.shape for g in got] == [a.shape for a in setup.at]
        assert not any(g.any().item() for g in got)


# Under MLX's transformations; the relation is built outside


@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize(
    "wrap", (mx.compile, mx.checkpoint), ids=("compile", "checkpoint")
)
def test_wrapped(wrap, case):
    setup = Setup(*pair(case, n=25))
    value, grads = mx.value_and_grad(wrap(setup.loss), argnums=(0, 1))(*setup.at)
    y = setup.forward(setup.x, setup.w)
    np.testing.assert_allclose(value.item(), 0.5 * (y**2).sum(), rtol=1e-5)
    ref.assert_close(grads[0], setup.to_x(y, setup.w))
    ref.assert_close(grads[1], setup.to_w(setup.x, y))


def test_compiled_gradients_follow_new_values():
    """Both orders in one trace. The route is the one without elementwise chains,
    since MLX's CPU backend calls a C++ compiler for each that it fuses.
    """
    setup = Setup(*pair(KINDS[3], n=25))

    def both(x, w):
        gradient = mx.grad(setup.loss, argnums=(0, 1))
        second = mx.jvp(lambda x, w: list(gradient(x, w)), [x, w], setup.direction)
        return [*gradient(x, w), *second[1]]

    step = mx.compile(both)
    with ml.routes.only("gather_gemm_scatter"):
        mx.eval(step(*(2 * a for a in setup.at)))
        got = step(*setup.at)
    y = setup.forward(setup.x, setup.w)
    wanted = (setup.to_x(y, setup.w), setup.to_w(setup.x, y), *setup.hessian())
    for actual, expected in zip(got, wanted, strict=True):
        ref.assert_close(actual, expected)


@pytest.fixture
def mappable():
    """On a GPU, the route whose operations all have a vmap rule in MLX."""
    if devices.current().backend == "cpu":
        yield
    else:
        with routes.only("gather_gemm_scatter"):
            yield


@pytest.mark.usefixtures("mappable")
@pytest.mark.parametrize("axes", ((0, None), (None, 0), (0, 0), (1, 2)), ids=str)
@pytest.mark.parametrize("case", KINDS[:3], ids=str)
def test_vmap(case, axes):
    setup = Setup(*pair(case, n=25))
    values = [
        (a, a2) if axis is not None else (a, a)
        for a, a2, axis in zip(setup.at, setup.direction, axes, strict=True)
    ]
    given = [
        a if axis is None else mx.stack([a, a2], axis=axis)
        for (a, a2), axis in zip(values, axes, strict=True)
    ]
    got = mx.vmap(setup.conv, in_axes=axes)(*given)
    exact = [[ref.to_numpy(a).astype(np.float64) for a in pair_] for pair_ in values]
    for i in range(2):
        ref.assert_close(got[i], setup.forward(exact[0][i], exact[1][i]))


@pytest.mark.usefixtures("mappable")
def test_vmap_of_the_gradient():
    setup = Setup(*pair(KINDS[0], n=25))
    gradient = mx.vmap(mx.grad(setup.loss, argnums=(0, 1)), in_axes=(0, None))
    dx, dw = gradient(mx.stack([setup.at[0], setup.direction[0]]), setup.at[1])
    for i, x in enumerate((setup.x, setup.u)):
        y = setup.forward(x, setup.w)
        ref.assert_close(dx[i], setup.to_x(y, setup.w))
        ref.assert_close(dw[i], setup.to_w(x, y))

"""The bias of a contraction, and its derivatives. On every route: test_table.py."""

import mlx.core as mx
import numpy as np
import reference as ref
from conftest import KINDS, Numbers, mappable, pair

import mlx_lattice as ml


def point(case, c_in=6, c_out=10, groups=1, dtype="float32", **given):
    """A relation, its numbers, a bias of its channels, and the float64 result."""
    relation, expected = pair(case, **given)
    numbers = Numbers(relation, c_in, c_out, groups, dtype)
    bias = mx.random.normal((c_out,), key=mx.random.key(3)).astype(numbers.x.dtype)
    x, w, _ = numbers.exact
    wanted = ref.conv(x, w, expected, groups=groups) + ref.to_numpy(bias).astype("f8")
    return relation, numbers, bias, wanted


def test_rows_without_edges_are_the_bias():
    relation = ml.Relation.from_edges([0], [1], [0], 2, 3, 1)
    bias = mx.array([1.0, -2.0])
    y = ml.conv(mx.ones((2, 4)), mx.zeros((1, 4, 2)), relation, bias=bias)
    np.testing.assert_array_equal(np.array(y), [[1, -2]] * 3)
    nothing = ml.Relation.from_edges([], [], [], 0, 3, 1)
    y = ml.conv(mx.ones((0, 4)), mx.zeros((1, 4, 2)), nothing, bias=bias)
    np.testing.assert_array_equal(np.array(y), [[1, -2]] * 3)


def test_second_order_equals_that_of_an_added_bias():
    relation, numbers, bias, _ = point(KINDS[0])

    def slope(fused):
        def loss(x, w, b):
            if fused:
                y = ml.conv(x, w, relation, bias=b)
            else:
                y = ml.conv(x, w, relation) + b
            return (y**3).mean()

        def norm(*at):
            return sum((g**2).sum() for g in mx.grad(loss, (0, 1, 2))(*at))

        return mx.grad(norm, (0, 1, 2))(numbers.x, numbers.w, bias)

    for got, wanted in zip(slope(True), slope(False), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-5)


def test_jvp():
    relation, numbers, bias, _ = point(KINDS[0])
    at = [numbers.x, numbers.w, bias]
    along = [mx.cos(a) for a in at]

    def conv(x, w, b):
        return ml.conv(x, w, relation, bias=b)

    def apart(x, w, b):
        return ml.conv(x, w, relation) + b

    _, got = mx.jvp(conv, at, along)
    _, wanted = mx.jvp(apart, at, along)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
    _, got = mx.jvp(lambda b: conv(*at[:2], b), at[2:], along[2:])
    np.testing.assert_allclose(got[0], np.tile(along[2], (relation.n_out, 1)))


def test_vmap():
    relation, numbers, bias, _ = point(KINDS[0])
    biases = mx.stack([bias, 2 * bias])

    def conv(b):
        return ml.conv(numbers.x, numbers.w, relation, bias=b)

    with mappable():
        got = mx.vmap(conv)(biases)
    for each, b in zip(got, biases, strict=True):
        np.testing.assert_allclose(each, conv(b), rtol=1e-5, atol=1e-6)

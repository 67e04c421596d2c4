"""Reductions: compiled and portable ones agree under every transformation."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import mappable

import mlx_lattice as ml
from mlx_lattice import backends, ops
from mlx_lattice.geometry.points import reduce_segments

N, C = 60, 5


def tensor():
    coords = cases.geometry("batches", 3, N).astype(np.int32)
    coords = np.random.default_rng(0).permutation(coords)
    rng = np.random.default_rng(1)
    feats = np.stack([rng.permutation(len(coords)) for _ in range(C)], axis=1)
    feats = mx.array(feats.astype(np.float32) / 10 - 2)
    return ml.SparseTensor(mx.array(coords), feats)


def functions():
    """Every reduction as a function of features alone, by name."""
    x, rng = tensor(), np.random.default_rng(2)
    rows = mx.array(rng.integers(0, 20, len(x)).astype(np.int32))
    inverse = mx.array(rng.integers(-1, len(x), 90).astype(np.int32))
    near = np.array(x.coords).astype(np.float32)
    near[:, 1:] += rng.uniform(-0.9, 0.9, (len(x), 3))
    points = mx.array(near)
    edges = rng.integers(0, (len(x), 9, 4), (80, 3))
    edges = np.unique(edges, axis=0)
    for columns in ((1, 2), (0, 2)):  # a neighbour table either way
        edges = edges[np.unique(edges[:, columns], axis=0, return_index=True)[1]]
    twice = np.concatenate([edges, edges[edges[:, 2] == 0] + [0, 0, 4]])
    relation = ml.Relation.from_edges(*twice.T.astype(np.int32), len(x), 9, 5)

    def on(function, **options):
        return lambda f: function(x.replace(f), **options)

    def pooled(name, *arguments, **options):
        function = getattr(ops, name)
        return lambda f: function(x.replace(f), *arguments, **options).feats

    return x.feats, {
        "max_pool": pooled("max_pool3d", 3, 2),
        "sum_pool": pooled("sum_pool3d", 3, 1),
        "avg_pool": pooled("avg_pool3d", 2),
        "general max": lambda f: ops.sparse_pool(f, relation, "max"),
        "general sum": lambda f: ops.sparse_pool(f, relation, "sum"),
        "global max": on(ops.global_max_pool),
        "global sum": on(ops.global_sum_pool),
        "global avg": on(ops.global_avg_pool),
        "segment sum": lambda f: reduce_segments(f, rows, 25, "sum"),
        "segment mean": lambda f: reduce_segments(f, rows, 25, "mean"),
        "segment max": lambda f: reduce_segments(f, rows, 25, "max"),
        "devoxelize": lambda f: ops.devoxelize(f, inverse),
        "nearest": on(ops.interpolate, points=points, mode="nearest"),
        "linear": on(ops.interpolate, points=points, renormalise=True),
    }


NAMES = tuple(functions()[1])


def transformed(name):
    """A reduction and what every transformation makes of it."""
    feats, made = functions()
    f, rng = made[name], np.random.default_rng(3)
    dx = mx.array(rng.standard_normal(feats.shape), mx.float32)

    def energy(x):
        return (f(x) ** 3).sum()

    def second(x):
        return (mx.grad(energy)(x) * dx).sum()

    with mappable():
        mapped = mx.vmap(f)(mx.stack([feats, -feats, dx]))
    return {
        "value": f(feats),
        "gradient": mx.grad(energy)(feats),
        "second": mx.grad(second)(feats),
        "third": mx.grad(lambda x: (mx.grad(second)(x) ** 2).sum())(feats),
        "tangent": mx.jvp(f, [feats], [dx])[1][0],
        "tangent of gradient": mx.jvp(mx.grad(energy), [feats], [dx])[1][0],
        "mapped": mapped,
        "half": f(feats.astype(mx.float16)),
        "half gradient": mx.grad(lambda x: f(x).sum())(feats.astype(mx.float16)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_portable_agree(name):
    found = transformed(name)
    with backends.portable_only():
        expected = transformed(name)
    for what, value in expected.items():
        assert found[what].dtype == value.dtype, what
        dtype = str(value.dtype).rpartition(".")[2]
        got, want = (ref.to_numpy(a).astype(np.float64) for a in (found[what], value))
        ref.assert_close(got, want, dtype, what=what)


def test_compiled_functions():
    feats, made = functions()
    for name in ("max_pool", "avg_pool", "segment max", "linear"):

        def gradient(x, f=made[name]):
            return mx.grad(lambda x: (f(x) ** 2).sum())(x)

        found = mx.compile(gradient)(feats)
        ref.assert_close(found, np.array(gradient(feats)).astype(np.float64))


@pytest.mark.parametrize("portable", (False, True))
def test_second_derivatives_against_differences(portable):
    feats, made = functions()
    rng = np.random.default_rng(5)
    dx = rng.standard_normal(feats.shape)
    for name, f in made.items():

        def gradient(x, f=f):
            return mx.grad(lambda x: (f(x) ** 2).sum())(x)

        def slope(x, gradient=gradient):
            return mx.grad(lambda x: (gradient(x) * mx.array(dx, mx.float32)).sum())(x)

        step = mx.array(dx, mx.float32)
        # The gradient is linear where the winners stay.
        with backends.portable_only() if portable else mx.stream(mx.cpu):
            found, moved = slope(feats), gradient(feats + step / 512) - gradient(feats)
        ref.assert_close(found, np.array(moved) * 512, "float16", what=name)


def test_weights_of_interpolation_have_derivatives_of_every_order():
    x = tensor()
    points = x.coords.astype(mx.float32) + mx.array([0, 0.3, 0.4, 0.2])
    dp = mx.array(np.random.default_rng(6).standard_normal(points.shape), mx.float32)
    dp = dp * mx.array([0, 1, 1, 1])

    def run(f, p):
        return ops.interpolate(x.replace(f), p)

    def energy(f, p):
        return (run(f, p) ** 2).sum()

    def results():
        gradient = mx.grad(energy, (0, 1))
        with mappable():
            both = mx.stack([x.feats, -x.feats])
            mapped = mx.vmap(run, in_axes=(0, None))(both, points)

        def along(f, p):
            return (gradient(f, p)[1] * dp).sum()

        return [
            *gradient(x.feats, points),
            *mx.grad(along, (0, 1))(x.feats, points),
            mx.jvp(run, [x.feats, points], [x.feats, dp])[1][0],
            mapped,
        ]

    found = results()
    with backends.portable_only():
        for a, b in zip(found, results(), strict=True):
            ref.assert_close(a, np.array(b).astype(np.float64))
    assert all(mx.isfinite(a).all().item() for a in found)

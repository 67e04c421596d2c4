"""The epilogue of a convolution: on every route and backend, against float64; and its
derivatives, which are those of the composed form.
"""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, bits, mappable, pair
from contractions import Point, exact, sample, work
from epilogues import ACTIVATIONS, FUNCTIONS, epilogue, oracle
from places import HERE, MetalHost
from test_table import admissible, rows, taken

import mlx_lattice as ml
from mlx_lattice.epilogue import ARRAYS, Epilogue, EpilogueFacts
from mlx_lattice.problem import FORWARD

# Which arrays there are: all, each alone, and others.
PARTS = (
    ARRAYS,
    ARRAYS[:-1],
    *((name,) for name in ARRAYS),
    ("shift", "scale"),
    ("mean", "var", "residual"),
    (),
)


def points() -> list:
    """(route, place, point, epilogue) for all that this machine can run."""
    found, draw = [], np.random.default_rng(0)
    for row in rows(passes=(FORWARD,)):
        route, _, place = row.values
        chosen = sample(
            f"{route.name}-epilogue",
            lambda p, w=place, r=route: not p.bias and taken(w, r, FORWARD, p),
            place.chips,
            1,
        )
        every = 3 if isinstance(place, MetalHost) else 1  # slow to compile
        for j, point in enumerate(chosen[::every]):
            activation = ACTIVATIONS[(j + len(found)) % len(ACTIVATIONS)]
            parts = PARTS[0] if j % 2 else PARTS[draw.integers(len(PARTS))]
            name = f"{row.id}-{point}-{EpilogueFacts(parts, activation)}"
            given = route, place, point, activation, parts
            found.append(pytest.param(*given, id=name.replace(" ", "")))
    return found


@pytest.mark.parametrize("route, place, point, activation, parts", points())
def test_row(route, place, point, activation, parts):
    if (
        mx.cuda.is_available()
        and route.name == "quantized_pointwise"
        and "x" in point.moved.split()
        and point.dtype != "float32"
    ):
        pytest.skip("MLX's matmul on CUDA refuses half rows that begin off 16 bytes")
    given = work(point, FORWARD)
    n, before = given.relation.n_out, int((point.moved.split() or ["0"])[-1] == "1")
    after = epilogue(n, point.shape[1], point.dtype, activation, parts, before)

    def run():
        with ml.routes.only(f"forward={route}"), ml.waive_determinism():
            return ml.conv(
                given.x, given.w, given.relation, groups=given.groups, epilogue=after
            )

    with place.inside():
        steady = admissible(route, FORWARD, point, deterministic=True)
    wanted = oracle(given.wanted, after)
    for variant, results in place.run(run, steady, point.chip).items():
        first, *others = results
        assert first.dtype == given.x.dtype
        ref.assert_close(first, wanted, point.dtype, f"{route.name} {variant}")
        if steady:
            assert all(bits(other) == bits(first) for other in others)


@pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_without_edges_are_what_the_epilogue_makes_of_zero(
    place, activation, dtype
):
    for scene in ("unrelated", "no_inputs", "no_outputs"):
        given = work(Point(scene, (16, 24, 1), dtype), FORWARD)
        after = epilogue(given.relation.n_out, 24, dtype, activation)
        wanted = oracle(np.zeros((given.relation.n_out, 24)), after)

        def run(given=given, after=after):
            return ml.conv(given.x, given.w, given.relation, epilogue=after)

        for results in place.run(run).values():
            ref.assert_close(results[0], wanted, dtype)


@pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_large_values_stay_what_they_are(place, activation):
    given = work(Point("surface", (16, 32, 1), "float32"), FORWARD)
    n = given.relation.n_out
    values = np.zeros((n, 32), np.float32)
    values[:5, :] = np.array([np.nan, 1e30, -1e30, 90, -90])[:, None]
    after = Epilogue(mx.zeros((32,)), None, mx.array(values), activation)

    def run():
        return ml.conv(given.x, given.w, given.relation, epilogue=after)

    with np.errstate(over="ignore"):
        wanted = FUNCTIONS[activation](values.astype(float))
    for results in place.run(run).values():
        np.testing.assert_allclose(exact(results[0]), wanted, rtol=1e-5, atol=1e-6)


# Errors


@pytest.mark.parametrize(
    "changes, error, words",
    (
        ({"scale": mx.ones((5,))}, ValueError, r"scale must have shape \(16,\)"),
        ({"residual": mx.ones((1, 16))}, ValueError, "residual must have shape"),
        ({"shift": mx.ones((16,), dtype=mx.float16)}, TypeError, "shift must be"),
        (
            {"activation": "tanh"},
            ValueError,
            "'leaky_relu', 'elu', or such as .*; got 'tanh'",
        ),
        ({"activation": "relu(0.5)"}, ValueError, r"got 'relu\(0.5\)'"),
        ({"activation": "elu(-1.0)"}, ValueError, r"got 'elu\(-1.0\)'"),
    ),
    ids=lambda v: "" if not isinstance(v, dict) else next(iter(v)),
)
def test_what_does_not_fit_is_refused(changes, error, words):
    relation, _ = pair(KINDS[0])
    numbers = Numbers(relation, 16, 16)
    after = epilogue(relation.n_out, 16, "float32")._replace(**changes)
    with pytest.raises(error, match=words):
        ml.conv(numbers.x, numbers.w, relation, epilogue=after)


# Derivatives: those of the composed form


def composed(x, w, relation, after: Epilogue, bias=None):
    """The same by a convolution and MLX operations."""
    y = ml.conv(x, w, relation, bias=bias)
    y = y if after.mean is None else y - after.mean
    y = y if after.var is None else y * mx.rsqrt(after.var + after.eps)
    y = y if after.scale is None else y * after.scale
    y = y if after.shift is None else y + after.shift
    y = y if after.residual is None else y + after.residual
    name, *slope = after.activation.rstrip(")").split("(")
    name = "gelu_approx" if name == "gelu_tanh" else name
    return getattr(mlx.nn, name)(y, *map(float, slope)) if name else y


def variables(activation):
    """A function of (x, w, scale, shift, residual), its composed form, and a point."""
    relation, _ = pair(KINDS[0], "surface", 50)
    numbers = Numbers(relation, 6, 7)
    after = epilogue(relation.n_out, 7, "float32", activation)

    def given(*arrays):
        return after._replace(**dict(zip(ARRAYS, arrays, strict=True)))

    def fused(x, w, *rest):
        return ml.conv(x, w, relation, epilogue=given(*rest))

    def apart(x, w, *rest):
        return composed(x, w, relation, given(*rest))

    return fused, apart, [numbers.x, numbers.w, *after.arrays]


ALL = tuple(range(2 + len(ARRAYS)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_any_order(activation):
    fused, apart, at = variables(activation)

    def slope(function):
        def loss(*at):
            return (function(*at) ** 3).mean()

        def norm(*at):
            return sum((g**2).sum() for g in mx.grad(loss, ALL)(*at))

        return mx.grad(loss, ALL)(*at), mx.grad(norm, ALL)(*at)

    for got, wanted in zip(slope(fused), slope(apart), strict=True):
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=2e-3, atol=1e-4 * mx.abs(w).max())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_gradients_of_what_there_is(parts, dtype):
    """The composed form's in float32; others round sums, which a variance enlarges."""
    relation, _ = pair(KINDS[0], "surface", 50)
    numbers = Numbers(relation, 6, 7)
    x, w = (a.astype(getattr(mx, dtype)) for a in (numbers.x, numbers.w))
    after = epilogue(relation.n_out, 7, dtype, "silu")
    given = {name: getattr(after, name) for name in parts}
    after = Epilogue(activation="silu", eps=after.eps, norm=after.norm, **given)

    def gradients(function, x, w, after):
        def loss(x, w, *arrays):
            now = after._replace(**dict(zip(parts, arrays, strict=True)))
            y = function(x, w, relation, now).astype(mx.float32)
            return (mx.sin(y) * y).mean()

        arrays = x, w, *(getattr(after, name) for name in parts)
        return mx.grad(loss, tuple(range(len(arrays))))(*arrays)

    def fused(x, w, relation, after):
        return ml.conv(x, w, relation, epilogue=after)

    wide = {name: array.astype(mx.float32) for name, array in given.items()}
    exact_arrays = [a.astype(mx.float32) for a in (x, w)]
    wanted = gradients(composed, *exact_arrays, after._replace(**wide))
    for got, expected in zip(gradients(fused, x, w, after), wanted, strict=True):
        slack = 1 if dtype == "float32" else 4
        ref.assert_close(got, exact(expected), dtype, slack=slack)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_jvp_and_vmap(activation):
    fused, apart, at = variables(activation)
    along = [mx.cos(a) for a in at]
    _, got = mx.jvp(fused, at, along)
    _, wanted = mx.jvp(apart, at, along)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
    _, got = mx.jvp(lambda s: fused(*at[:2], s, *at[3:]), [at[2]], [along[2]])
    _, wanted = mx.jvp(lambda s: apart(*at[:2], s, *at[3:]), [at[2]], [along[2]])
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
    scales = mx.stack([at[2], 2 * at[2]])
    with mappable():
        got = mx.vmap(lambda s: fused(*at[:2], s, *at[3:]))(scales)
    for each, s in zip(got, scales, strict=True):
        wanted = fused(*at[:2], s, *at[3:])
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-6)


def test_a_bias_is_folded_into_the_shift():
    relation, _ = pair(KINDS[0], "surface", 50)
    numbers = Numbers(relation, 6, 7)
    bias = mx.arange(7).astype(mx.float32)
    for parts in PARTS:
        after = epilogue(relation.n_out, 7, "float32", "silu", parts)
        got = ml.conv(numbers.x, numbers.w, relation, bias=bias, epilogue=after)
        wanted = composed(numbers.x, numbers.w, relation, after, bias)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", (4, 8))
def test_packed_weights_have_derivatives_by_all_else(bits):
    relation, _ = pair(KINDS[0], "surface", 50)
    numbers = Numbers(relation, 32, 24)
    packed = ml.quantize_weight(numbers.w, bits=bits, group_size=32)
    after = epilogue(relation.n_out, 24, "float32", "gelu")

    def given(*arrays):
        return after._replace(**dict(zip(ARRAYS, arrays, strict=True)))

    def fused(x, *rest):
        return ml.conv(x, packed, relation, epilogue=given(*rest))

    def apart(x, *rest):
        return composed(x, packed, relation, given(*rest))

    at = [numbers.x, *after.arrays]
    (y,), got = mx.vjp(fused, at, [numbers.dy])
    (z,), wanted = mx.vjp(apart, at, [numbers.dy])
    for g, w in zip((y, *got), (z, *wanted), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4)


def test_it_is_compiled():
    fused, _, at = variables("relu")
    compiled = mx.compile(lambda *at: fused(*at))
    np.testing.assert_array_equal(compiled(*at), fused(*at))

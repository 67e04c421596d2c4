"""Int8 features on every row of the table that takes them, bit for bit.

A new row is tested by being in the table, on every backend that is here.
"""

import random
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import reference_integers as ref
from cases import DTYPES
from conftest import bits
from contractions import SCENES, SHAPES, moved, scene
from epilogues import FUNCTIONS
from places import HERE, MetalHost

import mlx_lattice as ml
from mlx_lattice.problem import ARRAYS, FORWARD, IntegerFacts, Problem
from mlx_lattice.routes import TABLE, RouteError

# Beside the scale: what kernels may be given.
AFTER = (
    (),
    ("shift",),
    ("out_inverse",),
    ("shift", "residual"),
    ("shift", "residual", "residual_scale", "out_inverse"),
    ("residual", "residual_scale"),
    ("shift", "residual", "out_inverse"),
)
WEIGHTS = ((8, None), (4, 32), (4, 64), (4, 128))


@dataclass(frozen=True)
class Point:
    """One contraction; ``str(point)`` is its test id."""

    scene: str = "submanifold"
    shape: tuple[int, int, int] = (32, 32, 1)
    dtype: str = "float16"
    weight: tuple[int, int | None] = (8, None)
    there: tuple[str, ...] = ()
    activation: str = ""
    moved: bool = False
    chip: str = ""

    def __str__(self):
        c_in, c_out, groups = self.shape
        parts = [self.scene, f"{c_in}to{c_out}by{groups}", self.dtype]
        parts += ["int{}by{}".format(*self.weight), *self.there, self.activation]
        return "-".join([*filter(None, parts), *["moved"] * self.moved, self.chip])

    @property
    def facts(self) -> IntegerFacts:
        there = {"scale", *self.there}
        return IntegerFacts(tuple(n for n in ARRAYS if n in there), self.activation)

    def problem(self) -> Problem:
        """The facts by which routes are chosen."""
        c_in, c_out, groups = self.shape
        size, group = self.weight
        return Problem.forward(
            c_in=c_in,
            c_out=c_out,
            n_in=40,
            groups=groups,
            dtype=self.dtype,
            table=self.scene != "edges",
            bits=size,
            group_size=group,
            integer=self.facts,
        )


@cache
def given(point: Point):
    """(relation, x, weight, arrays by name, wanted) of a point."""
    relation, expected = scene(point.scene)
    c_in, c_out, groups = point.shape
    rng = np.random.default_rng([c_in, c_out, relation.n_in])
    x = rng.integers(-127, 128, (relation.n_in, c_in)).astype(np.int8)
    x[:1] = 127  # the greatest sums
    w = rng.normal(size=(relation.volume, c_in // groups, c_out)).astype(np.float32)
    size, group = point.weight
    w = ml.integer_weight(mx.array(w), bits=size, group_size=group)
    values = np.array(w.integers())[..., : c_in // groups].swapaxes(1, 2)
    scale = np.array(w.scale) * np.float32(0.01)
    arrays = {
        "scale": scale,
        "shift": rng.normal(size=c_out).astype(np.float32),
        "residual": rng.normal(size=(relation.n_out, c_out)).astype(np.float32),
        "residual_scale": np.float32([0.03]),
        "out_inverse": np.float32([20.0]),
        "row_scales": rng.uniform(0.5, 2, relation.n_in).astype(np.float32),
    }
    if point.facts.residual_int8:
        shape = relation.n_out, c_out
        arrays["residual"] = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        kind = getattr(mx, point.dtype)
        arrays["residual"] = mx.array(arrays["residual"]).astype(kind)
    arrays = {n: mx.array(a) for n, a in arrays.items() if n in point.facts.there}
    as_numpy = {n: np.array(a.astype(mx.float32)) for n, a in arrays.items()}
    rows = as_numpy.pop("row_scales", None)
    sums = ref.integer_sums(x, values, expected, groups, rows)
    wanted = ref.finished(sums, **as_numpy, activation=point.activation)
    if not point.facts.writes_int8:
        wanted = mx.array(wanted).astype(getattr(mx, point.dtype))
    x = mx.array(x)
    if point.moved:  # no vector may be read where arrays begin
        x = moved(x, 1)
        w = w.holding(moved(w.values, 1), w.multipliers, w.scale)
        arrays = {n: moved(a, 1) if a.size > 1 else a for n, a in arrays.items()}
    mx.eval(x, w.arrays, list(arrays.values()))
    return relation, x, w, arrays, mx.array(wanted)


def contracted(point: Point, route) -> mx.array:
    relation, x, w, arrays, _ = given(point)
    with ml.routes.only(f"forward={route}"):
        return ml.integer_conv(
            x,
            w,
            relation,
            **arrays,
            activation=point.activation,
            groups=point.shape[2],
            dtype=getattr(mx, point.dtype),
        )


def admissible(route, point: Point) -> bool:
    """Whether a row takes a point on the device of the block that this runs in."""
    try:
        ml.select(point.problem(), only=route.name)
    except RouteError:
        return False
    return True


def rows() -> list:
    """(route, place) wherever a row takes int8 features."""
    found = []
    for place in HERE:
        with place.inside():
            found += [
                pytest.param(route, place, id=f"{route.name}-{place.name}")
                for route in TABLE
                if FORWARD in route.passes
                and place.runs(route, FORWARD)
                and any(admissible(route, Point(shape=s)) for s in SHAPES[-6:])
                or admissible(route, Point())
            ]
    return found


def points() -> list:
    """(route, place, point): every scene and shape, beside others each."""
    found = []
    for row in rows():
        route, place = row.values
        rng = random.Random(row.id)
        scenes, shapes = list(SCENES), [*SHAPES, (96, 96, 1), (200, 260, 1)]
        # Emulated kernels take long to compile: every second point of one lap.
        laps, step = (1, 2) if isinstance(place, MetalHost) else (2, 1)
        for at in range(0, laps * max(len(scenes), len(shapes)), step):
            there = rng.choice(AFTER)
            if at % 7 == 3:
                there = (*there, "row_scales")
            point = Point(
                scenes[at % len(scenes)],
                shapes[(at * 5 + 2) % len(shapes)],
                DTYPES[at % 3],
                rng.choice(WEIGHTS),
                there,
                rng.choice(("", "relu", "leaky_relu(0.2)")),
                at % 4 == 1,
                rng.choice(place.chips),
            )
            for each in (point, replace(point, chip="")):
                with place.inside(each.chip):
                    able = admissible(route, each)
                if able:
                    id = f"{row.id}-{each}-{at}"
                    found.append(pytest.param(*row.values, each, id=id))
                    break
    return found


@pytest.mark.parametrize("route, place, point", points())
def test_row(route, place, point):
    wanted = given(point)[-1]
    results = place.run(lambda: contracted(point, route), chip=point.chip)
    for variant, made in results.items():
        for y in made:
            assert y.dtype == wanted.dtype and y.shape == wanted.shape
            assert bits(y) == bits(wanted), f"{route} {variant}"


def test_every_row_of_floats_refuses_int8_features():
    problem = Point().problem()
    for route in TABLE[:-1]:
        if "int8" in route.name or route.name == "quantized_sorted":
            continue  # the latter takes them on M1 to M4
        with pytest.raises(RouteError, match="int8|runs on|needs|extension|no "):
            ml.select(problem, only=route.name)


@pytest.mark.parametrize(
    "activation", ("gelu", "gelu_tanh", "silu", "leaky_relu(0.2)", "elu(0.5)")
)
def test_other_activations(activation):
    relation, x, w, arrays, _ = given(Point())
    y = ml.integer_conv(
        x, w, relation, **arrays, activation=activation, dtype=mx.float32
    )
    plain = ml.integer_conv(x, w, relation, **arrays, dtype=mx.float32)
    v = np.array(plain).astype(np.float64)
    wanted = FUNCTIONS[activation](v)
    np.testing.assert_allclose(np.array(y), wanted, rtol=2e-5, atol=2e-6)


def test_more_channels_than_float32_adds_up_exactly():
    """The floor multiplies in float32, in parts."""
    relation = ml.Relation.from_edges(*[mx.zeros(1, dtype=mx.int32)] * 3, 1, 1, 1)
    w = ml.integer_weight(mx.ones((1, 3000, 8)))
    x = mx.full((1, 3000), 127, dtype=mx.int8)
    x[:, ::7] = -126
    scale = mx.ones(8)
    y = ml.integer_conv(x, w, relation, scale=scale, dtype=mx.float32)
    wanted = int(np.array(x).astype(np.int64).sum() * 127)
    assert np.array(y).tolist() == [[float(np.float32(wanted))] * 8]


def test_int4_is_two_levels_of_integers():
    rng = np.random.default_rng(0)
    w = mx.array(rng.normal(size=(3, 70, 6)) * rng.uniform(0.1, 3, (3, 70, 1)))
    q = ml.integer_weight(w.astype(mx.float32), bits=4, group_size=32)
    values = np.array(q.integers()).reshape(3, 6, 3, 32)
    multipliers = np.array(q.multipliers)[..., None]
    assert multipliers.min() >= 1 and multipliers.max() <= 18
    assert (values % multipliers == 0).all()
    assert np.abs(values // multipliers).max() <= 7
    assert not np.array(q.integers())[..., 70:].any()
    error = np.array(q.dense() - w.astype(mx.float32))
    assert np.linalg.norm(error) < 0.12 * np.linalg.norm(np.array(w))


def test_bad_input():
    relation, x, w, arrays, _ = given(Point())
    scale = arrays["scale"]
    call = ml.integer_conv
    with pytest.raises(TypeError, match="features must be .*int8; got .*float16"):
        call(x.astype(mx.float16), w, relation, scale=scale)
    with pytest.raises(TypeError, match="ml.integer_weight makes one"):
        call(x, w.dense(), relation, scale=scale)
    with pytest.raises(ValueError, match=r"scale must have shape \(32,\)"):
        call(x, w, relation, scale=scale[:3])
    with pytest.raises(TypeError, match="needs its residual_scale"):
        residual = mx.zeros((relation.n_out, 32), dtype=mx.int8)
        call(x, w, relation, scale=scale, residual=residual)
    with pytest.raises(ValueError, match="do not fit a weight"):
        call(x[:, :7], w, relation, scale=scale)
    with pytest.raises(ValueError, match="could leave int32"):
        ml.integer_weight(mx.zeros((343, 512, 1)))
    with pytest.raises(ValueError, match="group_size must be None"):
        ml.integer_weight(mx.zeros((1, 32, 1)), group_size=32)
    with pytest.raises(TypeError, match="packed already"):
        ml.integer_weight(w)
    with pytest.raises(ValueError, match="has no gradient.*FakeQuant"):
        mx.grad(lambda s: call(x, w, relation, scale=s, dtype=mx.float32).sum())(scale)

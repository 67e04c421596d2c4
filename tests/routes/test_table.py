"""Every row of the route table, on every backend that is here, against float64.

A new row is tested by being in the table: `<route>-<pass>-<backend>-<point>`. What can
run follows from the row's needs; what cannot is refused with the sentence of one.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from cases import DTYPES
from conftest import bits
from contractions import (
    PACKINGS,
    SCENES,
    SHAPES,
    Point,
    Work,
    exact,
    sample,
    scene,
    stored,
    work,
)
from places import HERE, MetalHost

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.problem import (
    FORWARD,
    INPUT_GRAD,
    LAYOUTS,
    MLX_LAYOUT,
    PASSES,
    WEIGHT_GRAD,
)
from mlx_lattice.routes import TABLE, RouteError


def admissible(route, pass_, point, deterministic=False) -> bool:
    """Whether a row takes a point on the device of the block that this runs in."""
    if pass_ != FORWARD and point.bias:
        return False
    try:
        ml.select(point.problem(pass_, deterministic), only=route.name)
    except RouteError:
        return False
    return True


def taken(place, route, pass_, point) -> bool:
    """Whether a row takes a point in a place, on the point's chip."""
    with place.inside(point.chip):
        return admissible(route, pass_, point)


def rows(able=lambda *_: True, passes=PASSES) -> list:
    """(route, pass, place) wherever ``able`` says so inside the place."""
    found = []
    for place in HERE:
        with place.inside():
            found += [
                pytest.param(
                    route, pass_, place, id=f"{route.name}-{pass_}-{place.name}"
                )
                for route, pass_ in product(TABLE, passes)
                if pass_ in route.passes
                and place.runs(route, pass_)
                and able(route, pass_)
            ]
    return found


def points() -> list:
    """(route, pass, place, point) for all that this machine can run."""
    found = []
    for row in rows():
        route, pass_, place = row.values
        able, emulated = (
            partial(taken, place, route, pass_),
            isinstance(place, MetalHost),
        )
        chosen = sample(
            f"{route.name}-{pass_}", able, place.chips, 1 if emulated else 2
        )
        if emulated:  # slow to compile: each pass runs half of the points
            chosen = chosen[PASSES.index(pass_) % 2 :: 2] or chosen
        found += [pytest.param(*row.values, p, id=f"{row.id}-{p}") for p in chosen]
    return found


@pytest.mark.parametrize("route, pass_, place, point", points())
def test_row(route, pass_, place, point):
    if (
        mx.cuda.is_available()
        and route.name == "quantized_pointwise"
        and "x" in point.moved.split()
        and point.dtype != "float32"
    ):
        pytest.skip("MLX's matmul on CUDA refuses half rows that begin off 16 bytes")
    given = work(point, pass_)
    with place.inside():
        steady = admissible(route, pass_, point, deterministic=True)

    run = given.forced(route, pass_)
    for variant, results in place.run(run, steady, point.chip).items():
        first, *others = results
        assert first.dtype == given.x.dtype
        ref.assert_close(first, given.wanted, point.dtype, f"{route.name} {variant}")
        if steady:
            assert all(bits(other) == bits(first) for other in others)


def first(route, pass_, **changes) -> Point | None:
    """A point that a row takes in the place of this block, or None."""
    for dtype, packing, channels in product(DTYPES, PACKINGS[:2], (1, 16)):
        shapes = (16, 16, channels), (20, 5, channels)
        for shape in shapes[: 2 if channels == 1 else 1]:
            point = Point("reach", shape, dtype, packing)
            if admissible(route, pass_, point := replace(point, **changes)):
                return point
    return None


@pytest.mark.parametrize("route, pass_, place", rows())
def test_what_a_row_does_not_take_it_refuses_by_one_of_its_needs(route, pass_, place):
    points = [Point(scene=s) for s in SCENES]
    points += [Point(shape=s) for s in SHAPES] + [Point(dtype=d) for d in DTYPES]
    points += [Point(packing=p) for p in PACKINGS]
    refused = 0
    with place.inside():
        device = devices.current()
        for point in points:
            problem = point.problem(pass_, deterministic=True)
            expands = route.expands and problem.groups > 1
            expands = expands and route.expands(problem, device)
            asked = problem.dense if expands else problem
            reasons = [r for need in route.needs if (r := need(asked, device))]
            try:
                choice = ml.select(problem, only=route.name)
            except RouteError as error:
                refused += 1
                said = str(error)
                if device.backend not in route.on:
                    assert said.endswith(f"not on {device.backend}")
                elif reasons:
                    assert any(said.endswith(reason) for reason in reasons)
                else:  # it is not the point: what would run it is not here
                    assert "kernels" in said or f"no {pass_} pass" in said
            else:
                assert not reasons and choice.route is route
    if route is TABLE[-1]:
        assert refused == 0, "the floor takes everything"


SPARSE = rows(lambda route, pass_: first(route, pass_) is not None)


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("route, pass_, place", SPARSE)
def test_only_neighbours_are_read(route, pass_, place, value):
    """What is not finite stays where it has edges: nothing is multiplied by 0."""
    with place.inside():
        point = first(route, pass_)
    given = work(point, pass_)
    i, o, k = scene(point.scene)[1].edges.T
    poisoned = "dy" if pass_ == INPUT_GRAD else "x"
    values = ref.to_numpy(getattr(given, poisoned).astype(mx.float32))
    values[0] = value
    given = replace(given, **{poisoned: mx.array(values).astype(given.x.dtype)})
    touched = {FORWARD: o[i == 0], INPUT_GRAD: i[o == 0], WEIGHT_GRAD: k[i == 0]}[pass_]
    run = given.forced(route, pass_)
    for results in place.run(run, steady=False).values():
        y = exact(results[0])
        assert np.isfinite(np.delete(y, touched, axis=0)).all()
        assert not np.isfinite(y[touched]).all(axis=tuple(range(1, y.ndim))).any()


@pytest.mark.parametrize(
    "route, pass_, place",
    rows(lambda r, p: first(r, p) is not None, (FORWARD, INPUT_GRAD)),
)
def test_both_layouts_of_weights_are_read_and_give_the_same_bits(route, pass_, place):
    with place.inside():
        point = first(route, pass_, packing=None)
        if point is None:
            pytest.skip(f"{route.name} takes packed weights alone")
        problem = replace(point, layout=MLX_LAYOUT).problem(pass_)
        plan = ml.select(problem, only=route.name).plan
    given = work(point, pass_)
    results = []
    for layout in LAYOUTS:
        each = replace(given, w=stored(given.w, layout))
        for variant, made in place.run(each.forced(route, pass_), steady=False).items():
            ref.assert_close(made[0], given.wanted, point.dtype, f"{layout} {variant}")
            results.append(bits(made[0]))
    # MLX's own matmul may add up in another order.
    if plan.backend != "mlx" and problem.deterministic:
        assert all(result == results[0] for result in results)
    # Kernels of a GPU get contiguous arrays: either the stored one, or a copy.
    if plan.gpu is not None:
        assert plan.reads_stored != (plan.weights == "kernel-major copy")


@pytest.mark.parametrize(
    "route, pass_, place",
    rows(lambda r, p: first(r, p, packing=PACKINGS[1]) is not None, (FORWARD,)),
)
def test_padding_in_storage_reaches_no_output(route, pass_, place):
    """Channels of a packed weight beyond C_in, up to a whole group of scales."""
    with place.inside():
        point = first(route, pass_, packing=(4, 32), shape=(20, 5, 1))
    given = work(point, pass_)
    words = np.array(given.w.weight)
    words[..., 20 * 4 // 32 + 1 :] = 0x12345678
    words[..., 20 * 4 // 32] |= np.uint32(0xFFFF0000)  # channels 20 ... 23
    other = given.w.holding(mx.array(words), given.w.scales, given.w.biases)
    other = replace(given, w=other)
    for each in (given, other):
        run = each.forced(route, pass_)
        for results in place.run(run, steady=False).values():
            ref.assert_close(results[0], given.wanted, point.dtype)


# One large term and then small ones, each of which half the precision would lose.
SMALL = {"float16": 1, "bfloat16": 8}
LARGE, TERMS = 4096, 65


def long_sum(point, pass_) -> Work:
    """All rows of one side to one row of the other; pointwise rows add channels."""
    c_in, c_out, groups = point.shape
    kind, small = getattr(mx, point.dtype), SMALL[point.dtype]
    wanted = LARGE + (TERMS - 1) * small
    one, each = mx.zeros((TERMS,), dtype=mx.int32), mx.arange(TERMS, dtype=mx.int32)
    terms = np.full((TERMS, 1), small, np.float32)
    terms[0] = LARGE
    pointwise = point.scene == "pointwise"

    def first_of_groups(rows, channels):
        """The terms in the first channel of each group, 0 in the others."""
        y = np.zeros((len(rows), channels), np.float32)
        y[:, :: channels // groups] = rows
        return mx.array(y).astype(kind)

    if pass_ == WEIGHT_GRAD:
        line = mx.stack([one, each], axis=1)
        relation = (
            ml.CoordinateManager().submanifold_kernel_relation(line, kernel_size=1)
            if pointwise
            else ml.Relation.from_edges(each, each, one, TERMS, TERMS, 1)
        )
        x = mx.array(np.tile(terms, c_in)).astype(kind)
        dy, w = mx.ones((TERMS, c_out), dtype=kind), None
        wanted = np.full((1, c_in // groups, c_out), wanted)
        return Work(relation, x, w, dy, None, groups, wanted)
    if pointwise:
        line = mx.zeros((1, 2), dtype=mx.int32)
        relation = ml.CoordinateManager().submanifold_kernel_relation(
            line, kernel_size=1
        )
        x = dy = mx.array(terms.T).astype(kind)
        shape = (1, TERMS, 4) if pass_ == FORWARD else (1, 4, TERMS)
        w = mx.ones(shape, dtype=kind)
        wanted = np.full((1, 4), wanted)
    else:
        ends = (each, one) if pass_ == FORWARD else (one, each)
        sizes = (TERMS, 1) if pass_ == FORWARD else (1, TERMS)
        relation = ml.Relation.from_edges(*ends, each, *sizes, TERMS)
        w = mx.ones((TERMS, c_in // groups, c_out), dtype=kind)
        x, dy = first_of_groups(terms, c_in), first_of_groups(terms, c_out)
        wanted = np.full((1, c_out if pass_ == FORWARD else c_in), wanted)
    if pass_ == INPUT_GRAD:
        x = mx.zeros((1, 4 if pointwise else c_in), dtype=kind)
    if point.packing:
        w = ml.quantize_weight(w, bits=point.packing[0], group_size=point.packing[1])
    return Work(relation, x, w, dy, None, groups if not pointwise else 1, wanted)


def summed(route, pass_, dtype) -> Point | None:
    """A point of a row whose sums can be made long."""
    for name in ("reach", "pointwise"):
        if point := first(route, pass_, dtype=dtype, scene=name):
            return point
    return None


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize(
    "route, pass_, place", rows(lambda r, p: any(summed(r, p, d) for d in SMALL))
)
def test_sums_are_accumulated_in_float32(route, pass_, place, dtype):
    with place.inside():
        point = summed(route, pass_, dtype)
    if point is None:
        pytest.skip(f"{route.name} takes no {dtype}")
    given = long_sum(point, pass_)
    run = given.forced(route, pass_)
    for results in place.run(run, steady=False).values():
        ref.assert_close(results[0], given.wanted, dtype)

"""conv, its input gradient and weight_grad on every portable route."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, bits, build, multi_edges, pair

import mlx_lattice as ml

ROUTES = ("gather_gemm_scatter", "explicit_gemm", "grouped_gemm")
POINTWISE = cases.Case("submanifold", 3, 1)


def passes(numbers: Numbers, relation, groups=1) -> dict[str, mx.array]:
    """The results of all three passes."""

    def forward(x):
        return ml.conv(x, numbers.w, relation, groups=groups)

    (y,), (dx,) = mx.vjp(forward, [numbers.x], [numbers.dy])
    dw = ml.weight_grad(numbers.x, numbers.dy, relation, groups=groups)
    return {"y": y, "dx": dx, "dw": dw}


def check(relation, expected, c_in, c_out, groups=1, dtype="float32") -> None:
    """All three passes against the oracle, in the dtype that was given."""
    numbers = Numbers(relation, c_in, c_out, groups, dtype)
    x, w, dy = numbers.exact
    wanted = {
        "y": ref.conv(x, w, expected, groups=groups),
        "dx": ref.input_grad(dy, w, expected, groups=groups),
        "dw": ref.weight_grad(x, dy, expected, groups=groups),
    }
    for what, got in passes(numbers, relation, groups).items():
        assert got.dtype == numbers.x.dtype
        ref.assert_close(got, wanted[what], dtype, what)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_every_kind(route, case, dtype):
    with ml.routes.only(route):
        check(*pair(case), 6, 10, dtype=dtype)


@pytest.mark.parametrize("channels", cases.CHANNELS, ids=lambda c: f"{c[0]}to{c[1]}")
@pytest.mark.parametrize("route", ROUTES)
def test_channels(route, channels):
    with ml.routes.only(route):
        check(*pair(KINDS[0], n=25), *channels)


@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize("channels", ((1, 1), (33, 31)), ids=str)
def test_the_route_that_the_table_chooses(case, channels):
    check(*pair(case, "surface", 60), *channels)


@pytest.mark.parametrize("d", (1, 2, 4))
@pytest.mark.parametrize("route", ROUTES)
def test_other_dimensions(route, d):
    with ml.routes.only(route):
        for kind, kernel, stride in (("submanifold", 3, 1), ("forward", 2, 2)):
            check(*pair(cases.Case(kind, d, kernel, stride), n=30), 4, 5)


@pytest.mark.parametrize("kernel", (5, 7, (1, 3, 2)), ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_other_kernels(route, kernel):
    with ml.routes.only(route):
        check(*pair(cases.Case("submanifold", 3, kernel), "surface"), 5, 4)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("groups", cases.GROUPS, ids=lambda g: "{}to{}by{}".format(*g))
def test_groups(groups, dtype):
    c_in, c_out, groups = groups
    with ml.routes.only("gather_gemm_scatter"):
        check(*pair(KINDS[0], n=25), c_in, c_out, groups, dtype)


@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
def test_depthwise_of_every_kind(case):
    check(*pair(case, n=25), 6, 6, 6)


@pytest.mark.parametrize("route", ("explicit_gemm", "grouped_gemm"))
def test_routes_without_groups_say_so(route):
    relation, _ = pair(KINDS[0])
    numbers = Numbers(relation, 4, 4, 2)
    with ml.routes.only(route), pytest.raises(ml.RouteError, match="groups = 2, not 1"):
        ml.conv(numbers.x, numbers.w, relation, groups=2)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("groups", (1, 2, 4))
@pytest.mark.parametrize("kind", ("submanifold", "forward", "target", "general"))
def test_pointwise(kind, groups, dtype):
    manager, coords = ml.CoordinateManager(), mx.array(cases.geometry("negative"))
    offsets = ((0, 0, 0),) if kind == "general" else None
    case = cases.Case(kind, 3, 1, offsets=offsets)
    target = coords if case.needs_target else None
    relation = build(case, coords, target, manager)
    with ml.routes.only("pointwise"):
        expected = case.reference(np.array(coords), target)
        check(relation, expected, 4, 8, groups, dtype)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_pointwise_is_refused_elsewhere(case):
    relation, _ = pair(case)
    numbers = Numbers(relation, 3, 4)
    with (
        ml.routes.only("pointwise"),
        pytest.raises(ml.RouteError, match="not 1x1x1 on the input's own rows"),
    ):
        ml.conv(numbers.x, numbers.w, relation)


# Relations that were given as edges


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("route", ("gather_gemm_scatter", "grouped_gemm"))
@pytest.mark.parametrize("seed", range(3))
def test_edges_that_share_a_row_and_offset(seed, route, dtype):
    with ml.routes.only(route):
        check(*multi_edges(seed), 5, 3, dtype=dtype)


def test_grouped_channels_over_edges_that_share_a_row_and_offset():
    check(*multi_edges(1), 4, 6, 2)


def test_repeated_edges_count_each_time():
    relation = ml.Relation.from_edges([1, 1, 0], [0, 0, 0], [0, 0, 0], 2, 1, 1)
    y = ml.conv(mx.array([[1.0], [10.0]]), mx.ones((1, 1, 1)), relation)
    assert y.tolist() == [[21.0]]


@pytest.mark.parametrize("pass_", ("forward", "weight_grad"))
def test_explicit_gemm_needs_a_table(pass_):
    relation, _ = multi_edges()
    numbers = Numbers(relation, 4, 4)
    with (
        ml.routes.only(f"{pass_}=explicit_gemm"),
        pytest.raises(ml.RouteError, match="there is no neighbour table"),
    ):
        ml.conv(numbers.x, numbers.w, relation)
        ml.weight_grad(numbers.x, numbers.dy, relation)


@pytest.mark.parametrize("route", ("gather_gemm_scatter", "grouped_gemm"))
def test_the_order_in_which_edges_are_given_does_not_matter(route):
    relation, expected = multi_edges(2)
    mixed = np.random.default_rng(0).permutation(expected.edges).astype(np.int32)
    columns = [mx.array(c.copy()) for c in mixed.T]
    sizes = relation.n_in, relation.n_out, relation.volume
    other = ml.Relation.from_edges(*columns, *sizes)
    numbers = Numbers(relation, 5, 3)
    with ml.routes.only(route):
        first, second = passes(numbers, relation), passes(numbers, other)
    assert {k: bits(v) for k, v in first.items()} == {
        k: bits(v) for k, v in second.items()
    }


# Nothing to do


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
@pytest.mark.parametrize("route", (*ROUTES, "default"))
def test_no_rows(route, case, dtype):
    with ml.routes.only(f"forward={route}" if route != "default" else ""):
        check(*pair(case, "empty"), 3, 4, dtype=dtype)


@pytest.mark.parametrize("sizes", ((0, 3), (3, 0), (3, 4)), ids=str)
@pytest.mark.parametrize("route", (*ROUTES, "default"))
def test_no_edges(route, sizes):
    relation = ml.Relation.from_edges([], [], [], *sizes, 5)
    numbers = Numbers(relation, 3, 4)
    with ml.routes.only(route if route != "default" else ""):
        results = passes(numbers, relation)
    assert [r.shape for r in results.values()] == [
        (sizes[1], 4),
        (sizes[0], 3),
        (5, 3, 4),
    ]
    assert not any(r.any().item() for r in results.values())


@pytest.mark.parametrize("route", ROUTES)
def test_rows_without_edges_are_zero(route):
    case = cases.Case("target", 3, 3)
    coords = cases.geometry("negative")
    target = np.concatenate([[[0, 900, 900, 900]], coords[:5]]).astype(np.int32)
    relation = build(case, coords, target)
    numbers = Numbers(relation, 4, 4)
    with ml.routes.only(route):
        y = ml.conv(numbers.x, numbers.w, relation)
    assert not y[0].any().item() and y[1:].any(axis=1).all().item()


# Promises about numbers


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", (*KINDS, POINTWISE), ids=str)
def test_the_same_input_gives_the_same_bits(case, dtype):
    runs = []
    for _ in range(2):
        relation, _ = pair(case, "surface", 80)
        numbers = Numbers(relation, 8, 8, dtype=dtype)
        runs.append({k: bits(v) for k, v in passes(numbers, relation).items()})
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("route", ROUTES)
def test_sums_are_accumulated_in_float32(route, dtype):
    """Half would stop at 2048 and bfloat16 at 256, where one more is lost."""
    n, kind = 2560, getattr(mx, dtype)
    rows = mx.arange(n, dtype=mx.int32)
    none = mx.zeros_like(rows)
    across = ml.Relation.from_edges(rows, none, rows % 8, n, 1, 8)
    along = ml.Relation.from_edges(rows, rows, none, n, n, 1)
    ones = mx.ones((n, 1), dtype=kind)
    # Explicit GEMM needs a table, so there the sum runs over channels instead.
    wide = ml.Relation.from_edges([0], [0], [0], 1, 1, 1)
    with ml.routes.only(route):
        y = ml.conv(ones.T, mx.ones((1, n, 1), dtype=kind), wide)
        assert y.item() == n
        if route != "explicit_gemm":
            y = ml.conv(ones, mx.ones((8, 1, 1), dtype=kind), across)
            assert y.item() == n
        assert ml.weight_grad(ones, ones, along).item() == n


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_input_gradient_is_conv_over_the_transpose(case):
    relation, expected = pair(case)
    numbers = Numbers(relation, 6, 7)
    dx = ml.conv(numbers.dy, numbers.w.swapaxes(1, 2), relation.T)
    _, w, dy = numbers.exact
    ref.assert_close(dx, ref.input_grad(dy, w, expected))
    ref.assert_close(dx, np.array(passes(numbers, relation)["dx"]))


def test_conv_transpose_is_conv_over_the_transpose():
    relation, expected = pair(cases.Case("forward", 3, 3, 2))
    up = Numbers(relation.T, 5, 6)
    x, w, _ = up.exact
    ref.assert_close(ml.conv(up.x, up.w, relation.T), ref.conv(x, w, expected.T))
    dw = ml.weight_grad(up.x, up.dy, relation.T)
    ref.assert_close(dw, ref.weight_grad(x, up.exact[2], expected.T))

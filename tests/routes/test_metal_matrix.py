"""The matrix routes on Metal against the oracle, on the CPU, with every check."""

import dataclasses

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, pair
from metal_checks import PASSES, VOLUMES, check, check_bias, checked, host, run

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.backends import dispatch_bounds, metal_matrix, metal_tiles
from mlx_lattice.inspect.cost import cost
from mlx_lattice.relation import Relation
from mlx_lattice.routes import selection, thresholds

host.require()

SORTED, GROUPED = "sorted_implicit_gemm", "grouped_gemm"

# Below, at and beyond an 8x8 matrix, a stage of 16 or 32 channels, tiles of 32 and 64.
CHANNELS = ((1, 1), (3, 5), (8, 24), (16, 16), (33, 31), (40, 65), (64, 64), (7, 130))
# Beyond the widest tiles of every pass: 128 columns, 128 x 64.
WIDE = ((9, 128), (130, 70), (24, 250))


@pytest.fixture(params=("whole", "split"))
def splitting(request, monkeypatch):
    """With and without sums, or edges, cut into parts."""
    split = request.param == "split"
    monkeypatch.setitem(thresholds.FILLING, "*", 6 if split else 1)
    monkeypatch.setitem(thresholds.PART_EDGES, "*", 2 if split else 1 << 20)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_every_kind(case, pass_, splitting):
    check(SORTED, pair(case), 12, 20, pass_, "float16")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("case", VOLUMES, ids=str)
def test_every_volume(case, pass_, splitting):
    check(SORTED, pair(case, "batches", 30), 17, 6, pass_)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_channel_count(dtype, channels, pass_, splitting):
    check(SORTED, pair(KINDS[0]), *channels, pass_, dtype)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", WIDE, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_widest_tiles(dtype, channels, pass_, splitting):
    check(SORTED, pair(KINDS[0], n=70), *channels, pass_, dtype)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", ((4, 4096), (4096, 4)), ids=str)
def test_4096_channels(channels, pass_):
    check(SORTED, pair(KINDS[0], n=9), *channels, pass_, "float16", orders=("random",))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_grouped_gemm_is_the_same_weight_gradient(dtype):
    check(GROUPED, pair(KINDS[2]), 24, 9, "weight_grad", dtype)


@pytest.mark.parametrize("n", (15, 17, 64, 65, 150))
@pytest.mark.parametrize("pass_", PASSES)
def test_rows_around_a_tile(pass_, n, splitting):
    check(SORTED, pair(cases.Case("submanifold", 2, 3), "block", n), 9, 33, pass_)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("geometry", ("empty", "one"))
@pytest.mark.parametrize("case", (KINDS[0], KINDS[3], KINDS[6]), ids=str)
def test_no_row_and_one_row(case, geometry, pass_):
    check(SORTED, pair(case, geometry), 10, 3, pass_, "bfloat16")
    if geometry == "empty":
        assert checked.launches == 0, "a kernel was launched for no rows"


@pytest.mark.parametrize("n_in, n_out", ((0, 5), (5, 0), (0, 0), (4, 6)))
def test_no_edges(n_in, n_out):
    none = mx.zeros((0,), dtype=mx.int32)
    relation = ml.Relation.from_edges(none, none, none, n_in, n_out, 3)
    x, w, dy = mx.ones((n_in, 4)), mx.ones((3, 4, 8)), mx.ones((n_out, 8))
    y = checked(metal_matrix.CONV[SORTED], x, w, relation, 1, False)
    assert y.shape == (n_out, 8) and not y.any().item()
    dw = checked(metal_matrix.WEIGHT_GRAD[SORTED], x, dy, relation, 1)
    assert dw.shape == w.shape and not dw.any().item()


@pytest.mark.parametrize("n_in", (0, 40))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_bias(dtype, n_in, splitting):
    if n_in:
        check_bias(SORTED, pair(KINDS[0], n=n_in), 12, 35, dtype)
        return
    none = mx.zeros((0,), dtype=mx.int32)
    relation = Relation.from_edges(none, none, none, 0, 7, 27)
    numbers = Numbers(relation, 12, 35, 1, dtype)
    bias = mx.arange(35).astype(numbers.x.dtype)
    arguments = numbers.x, numbers.w, relation, 1, False
    y = checked(metal_matrix.CONV[SORTED], *arguments, bias=bias)
    np.testing.assert_array_equal(ref.to_numpy(y), [ref.to_numpy(bias)] * 7)


@pytest.mark.parametrize("pass_", PASSES)
def test_work_is_cut_into_bounded_dispatches(pass_, monkeypatch):
    monkeypatch.setattr(dispatch_bounds, "matrix_limit", lambda device: 2000)
    monkeypatch.setitem(thresholds.FILLING, "*", 1)
    geometry = pair(cases.Case("submanifold", 2, 3), "block", 200)
    check(SORTED, geometry, 8, 40, pass_, "float16")
    assert checked.launches > 3


@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("region", (128, 28672))
def test_weights_beyond_the_cache(pass_, region, splitting, monkeypatch):
    monkeypatch.setitem(thresholds.CACHED_WEIGHTS, "*", 0)
    monkeypatch.setitem(thresholds.REGION_ROWS, "256", {"*": region})
    monkeypatch.setitem(thresholds.REGION_ROWS, "512", {"*": region})
    check(SORTED, pair(KINDS[0], n=150), 70, 140, pass_, "float16")


@pytest.mark.parametrize("share", (0.6, 0.2), ids=("whole", "cut"))
def test_regions_are_dispatched_whole_where_they_fit(share, monkeypatch):
    both = pair(cases.Case("submanifold", 2, 3), "block", 300)
    work = both[0].n_edges * 3 * 6
    monkeypatch.setattr(
        dispatch_bounds, "matrix_limit", lambda device: int(share * work)
    )
    monkeypatch.setitem(thresholds.REGION_ROWS, "256", {"*": 128})
    monkeypatch.setitem(thresholds.FILLING, "*", 1)
    check(SORTED, both, 3, 6, "forward", "float16")
    count = -(-both[0].n_out // 64)
    pieces, cut = metal_tiles.dispatches(count, 6, work)
    assert cut == (share == 0.2) and sum(length for _, length in pieces) == count
    assert cut or all(first % 2 == 0 for first, _ in pieces)
    assert checked.launches >= len(pieces) > 1


@pytest.mark.parametrize("share", (9, 0.6, 0.2), ids=("one", "whole", "cut"))
@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_wide_rows_are_summed_slice_by_slice(dtype, pass_, share, monkeypatch):
    relation, expected = pair(cases.Case("submanifold", 2, 3), "block", 150)
    numbers = Numbers(relation, 70, 90, 1, dtype)
    monkeypatch.setitem(thresholds.SLICE_BYTES, "*", 64)
    monkeypatch.setitem(thresholds.REGION_ROWS, "256", {"*": 64})
    monkeypatch.setitem(thresholds.FILLING, "*", 1)
    work = relation.n_edges * 70 * 90
    monkeypatch.setattr(
        dispatch_bounds, "matrix_limit", lambda device: int(share * work)
    )
    bias = mx.arange(90).astype(numbers.x.dtype)
    x, w, dy = numbers.exact
    conv = metal_matrix.CONV[SORTED]
    if pass_ == "forward":
        arguments = numbers.x, numbers.w, relation, 1, False
        y = checked(conv, *arguments, bias=bias)
        wanted = ref.conv(x, w, expected) + ref.to_numpy(bias)
    else:
        y = checked(conv, numbers.dy, numbers.w, relation.T, 1, True)
        wanted = ref.input_grad(dy, w, expected)
    ref.assert_close(y, wanted, dtype)
    assert checked.launches >= (2 if share == 9 else 4)


def test_partials_are_added_dispatch_by_dispatch(monkeypatch):
    monkeypatch.setitem(thresholds.PART_EDGES, "*", 2)
    monkeypatch.setitem(thresholds.PARTIAL_BYTES, "*", 3 * 3 * 64 * 4)
    both = pair(cases.Case("submanifold", 1, 3), n=100)
    check(SORTED, both, 8, 8, "weight_grad", "float16")
    few = checked.launches
    assert few > 4, "partials of one dispatch at a time"
    monkeypatch.setattr(dispatch_bounds, "matrix_limit", lambda device: 60)
    check(SORTED, both, 8, 8, "weight_grad", "float16")
    assert checked.launches > few


@pytest.mark.parametrize("pass_", PASSES)
def test_rows_are_sorted_by_region(pass_, monkeypatch):
    monkeypatch.setitem(thresholds.REGION_ROWS, "256", {"*": 64})
    check(SORTED, pair(KINDS[0], n=200), 8, 8, pass_, "float16")
    relation, _ = pair(KINDS[0], n=200)
    view = checked(metal_tiles.tiles, relation, 16)
    rows = np.array(view.rows)
    assert (np.sort(rows) == np.arange(relation.n_out)).all()
    assert (np.diff(rows // 64) >= 0).all()
    np.testing.assert_array_equal(view.table, np.array(relation.out_in)[rows])


def test_parts_of_a_weight_gradient():
    def parts(edges, rows, channels):
        shape, tiles = (27, channels, channels), (-(-channels // 64)) ** 2
        return metal_tiles.grad_parts(edges, 4 * rows * channels, shape, tiles)

    assert parts(100, 10, 64) == 1, "too few edges for a partial"
    assert parts(1_667_340, 100_000, 64) == 11, "as fill the GPU"
    assert parts(1_667_340, 100_000, 128) == 8, "as keep features in cache"
    assert parts(1_667_340, 100_000, 1024) == 28, "partials of 8 times the features"
    features = 97_000 * (512 + 2048) * 2
    wide = metal_tiles.grad_parts(957_000, features, (27, 512, 2048), 4 * 32)
    assert wide == 16, "as keep one offset's narrower side in cache"


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_missing_neighbours_are_not_read(value):
    relation, expected = pair(cases.Case("forward", 3, 2, 2))
    numbers = Numbers(relation, 4, 4)
    x = np.array(numbers.x)
    x[0] = value
    touched = expected.edges[expected.edges[:, 0] == 0, 1]
    conv = metal_matrix.CONV[SORTED]
    y = np.array(checked(conv, mx.array(x), numbers.w, relation, 1, False))
    clean = np.delete(y, touched, axis=0)
    assert np.isfinite(clean).all() and not np.isfinite(y[touched]).all()


def test_a_slice_of_an_array_is_read_in_place():
    relation, expected = pair(KINDS[0])
    numbers = Numbers(relation, 12, 8, 1, "float16")
    x, w, _ = numbers.exact
    flat = mx.concatenate([mx.zeros((1,), dtype=mx.float16), numbers.w.flatten()])
    sliced = flat[1:].reshape(numbers.w.shape)
    y = checked(metal_matrix.CONV[SORTED], numbers.x, sliced, relation, 1, False)
    ref.assert_close(y, ref.conv(x, w, expected), "float16")


def test_refusals_say_what_came():
    relation, _ = pair(KINDS[0])
    numbers = Numbers(relation, 4, 6, 2)
    with pytest.raises(ValueError, match="groups = 2"):
        metal_matrix.CONV[SORTED](numbers.x, numbers.w, relation, 2, False)
    with pytest.raises(ValueError, match="groups = 2"):
        metal_matrix.WEIGHT_GRAD[GROUPED](numbers.x, numbers.dy, relation, 2)


@pytest.mark.parametrize("route", (SORTED, "tensor_ops", "dense_channel", "cout16"))
def test_the_same_bits_on_every_run(route, splitting):
    relation, _ = pair(KINDS[0], n=90)
    numbers = Numbers(relation, 16, 16, 1, "float16")
    orders = ("forward", "random", "random", "reverse")
    for pass_ in PASSES[:: 2 if route == "cout16" else 1]:
        run(route, relation, numbers, pass_, orders=orders)


@pytest.mark.parametrize("channels", ((24, 40), (64, 16), (20, 9), (600, 8)), ids=str)
@pytest.mark.parametrize("route", (SORTED, "tensor_ops", "dense_channel", "cout16"))
@pytest.mark.parametrize("pass_", PASSES)
def test_operations_are_those_that_cost_says(pass_, route, channels, monkeypatch):
    monkeypatch.setattr(thresholds, "FILLING", {"*": 1})
    relation, _ = pair(KINDS[0], n=150)
    problem = ml.Problem.of(pass_, relation, *channels, mx.float16)
    device = devices.profile("m5-max")
    if route not in map(str, selection.candidates(problem, device)):
        pytest.skip("the route does not take these channels, or has no such pass")
    numbers = Numbers(relation, *channels, 1, "float16")
    with host.recording(checked=True) as record:
        if pass_ == "weight_grad":
            arguments = numbers.x, numbers.dy, relation, 1
            mx.eval(metal_matrix.WEIGHT_GRAD[route](*arguments))
        elif pass_ == "forward":
            arguments = numbers.x, numbers.w, relation, 1, False
            mx.eval(metal_matrix.CONV[route](*arguments))
        else:
            arguments = numbers.dy, numbers.w, relation.T, 1, True
            mx.eval(metal_matrix.CONV[route](*arguments))
    done = sum(launch.counts.matrix_flop for launch in record.report.launches)
    choice = routes.select(problem, device=device, only=route)
    said = cost(problem, device, choice=choice, relation=relation)
    assert done == pytest.approx(said.done_over_useful * said.useful_flops)
    assert said.done_over_useful > 1


@pytest.mark.parametrize(
    "route, facts, reason",
    (
        ("tensor_ops", {"dtype": "float32"}, "features are float32"),
        ("tensor_ops", {"device": "m4-max"}, "no neural accelerators"),
        ("cout16", {"c_out": 24}, "C_out = 24, not 16"),
        ("dense_channel", {"c_in": 24}, "C_in = 24 is not one of"),
        (SORTED, {"groups": 2}, "groups = 2, not 1"),
        (SORTED, {"table": False}, "no neighbour table"),
        ("dense_channel", {"device": "h200"}, "runs on metal, not on cuda"),
    ),
)
def test_forced_routes_that_cannot_run_raise(route, facts, reason):
    facts = {"c_in": 32, "c_out": 16, "n_in": 9000, "dtype": "float16"} | facts
    device = facts.pop("device", "m5-max")
    for pass_ in ml.routes.named(route).passes:
        problem = dataclasses.replace(ml.Problem.forward(**facts), pass_=pass_)
        with pytest.raises(ml.RouteError, match=reason):
            ml.explain(problem, device=device, only=route)

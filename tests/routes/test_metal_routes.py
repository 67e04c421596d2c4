"""The Metal routes against the float64 oracle, on the CPU and with every check."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, multi_edges, pair
from metal_checks import PASSES, VOLUMES, bounded, check, checked, host, run

import mlx_lattice as ml
from mlx_lattice.backends import dispatch_bounds, metal_conv

host.require()

# Below, at and beyond the four channels of a thread, odd ones everywhere.
CHANNELS = ((1, 1), (3, 5), (4, 4), (5, 3), (8, 24), (33, 7))
GROUPS = ((4, 6, 2), (8, 16, 4), (6, 10, 2), (3, 3, 3), (4, 12, 4))


FLOOR, DEPTHWISE = "relation_traversal", "depthwise"


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_every_kind(case, pass_):
    check(FLOOR, pair(case), 5, 6, pass_)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("case", VOLUMES, ids=str)
def test_every_volume(case, pass_):
    check(FLOOR, pair(case, "batches", 30), 3, 4, pass_)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_channel_count(dtype, channels, pass_):
    check(FLOOR, pair(KINDS[0]), *channels, pass_, dtype=dtype)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_groups(dtype, channels, pass_):
    *channels, groups = channels
    check(FLOOR, pair(KINDS[0], n=24), *channels, pass_, dtype, groups)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", ((1, 1, 1), (3, 3, 3), (4, 12, 4), (9, 9, 9)))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_depthwise(dtype, channels, pass_):
    *channels, groups = channels
    check(DEPTHWISE, pair(KINDS[3], n=24), *channels, pass_, dtype, groups)


@pytest.mark.parametrize("c_out", (4, 8, 20))
@pytest.mark.parametrize("c_in", (1, 3, 4, 16))
def test_vec4(c_in, c_out):
    check("vec4", pair(KINDS[0]), c_in, c_out, "forward")


@pytest.mark.parametrize("case", KINDS[1:], ids=str)
def test_vec4_kinds(case):
    check("vec4", pair(case), 5, 4, "forward")


@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_fp16_gather(channels, pass_):
    check("fp16_gather", pair(KINDS[0]), *channels, pass_, dtype="float16")


@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("case", KINDS[1:], ids=str)
def test_fp16_gather_kinds(case, pass_):
    check("fp16_gather", pair(case), 6, 5, pass_, dtype="float16")


@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_fp32_atomic(case, pass_):
    check("fp32_atomic", pair(case), 5, 6, pass_, deterministic=False)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_edges_without_a_table(dtype, pass_):
    check(FLOOR, multi_edges(), 3, 5, pass_, dtype=dtype)
    check(FLOOR, multi_edges(1), 6, 4, pass_, dtype, 2)


@pytest.mark.parametrize("piece", (2, 3))
@pytest.mark.parametrize("pass_", PASSES[:2])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_of_many_edges_are_added_in_pieces(dtype, pass_, piece, monkeypatch):
    monkeypatch.setitem(dispatch_bounds.SEGMENT_CUTS, "longest", 4)
    monkeypatch.setitem(dispatch_bounds.SEGMENT_CUTS, "piece", piece)
    check(FLOOR, multi_edges(), 3, 5, pass_, dtype=dtype)
    assert checked.launches > 1
    # One row that has all edges but one.
    rng = np.random.default_rng(0)
    out = np.array([0] * 40 + [2])
    edges = np.c_[rng.permutation(41), out, rng.integers(0, 2, 41)].astype(np.int32)
    relation = ml.Relation.from_edges(*map(mx.array, edges.T), 41, 4, 2)
    numbers = Numbers(relation, 4, 6, 2, dtype)
    got = run(FLOOR, relation, numbers, "forward", groups=2)
    x, w, _ = numbers.exact
    wanted = np.zeros((4, 6))
    for i, o, k in edges:
        for g in (0, 1):
            here = slice(3 * g, 3 * g + 3)
            wanted[o, here] += x[i, 2 * g : 2 * g + 2] @ w[k][:, here]
    ref.assert_close(got, wanted, dtype)


@pytest.mark.parametrize("pass_", PASSES[:2])
def test_atomics_over_edges_without_a_table(pass_):
    check("fp32_atomic", multi_edges(), 3, 5, pass_, deterministic=False)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("geometry", ("empty", "one"))
@pytest.mark.parametrize("case", (KINDS[0], KINDS[3], KINDS[6]), ids=str)
def test_no_row_and_one_row(case, geometry, pass_):
    check(FLOOR, pair(case, geometry), 2, 3, pass_)
    if geometry == "empty":
        assert checked.launches == 0, "a kernel was launched for no rows"


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("route", sorted(metal_conv.CONV))
def test_inputs_of_one_element(route, pass_):
    # MLX would pass each of them as a constant.
    if pass_ == "weight_grad" and route not in metal_conv.WEIGHT_GRAD:
        return
    if pass_ == "input_grad" and route == "vec4":
        return
    dtype = "float16" if route == "fp16_gather" else "float32"
    one = pair(cases.Case("submanifold", 3, 1), "one")
    c_out = 4 if route == "vec4" else 1
    order = {"deterministic": route != "fp32_atomic"}
    check(route, one, 1, c_out, pass_, dtype=dtype, **order)
    assert checked.launches > 0


@pytest.mark.parametrize("route", sorted(metal_conv.CONV))
@pytest.mark.parametrize("n_in, n_out", ((0, 5), (5, 0), (0, 0), (4, 6)))
def test_no_edges(route, n_in, n_out):
    none = mx.zeros((0,), dtype=mx.int32)
    relation = ml.Relation.from_edges(none, none, none, n_in, n_out, 3)
    dtype = mx.float16 if route == "fp16_gather" else mx.float32
    groups = 4 if route == DEPTHWISE else 1
    x, w = mx.ones((n_in, 4), dtype=dtype), mx.ones((3, 4 // groups, 8), dtype=dtype)
    y = checked(metal_conv.CONV[route], x, w, relation, groups, False)
    assert y.shape == (n_out, 8) and y.dtype == dtype and not y.any().item()
    if route in metal_conv.WEIGHT_GRAD:
        dy = mx.ones((n_out, 8), dtype=dtype)
        dw = checked(metal_conv.WEIGHT_GRAD[route], x, dy, relation, groups)
        assert dw.shape == w.shape and not dw.any().item()


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("route", sorted(metal_conv.CONV))
def test_work_is_cut_into_bounded_dispatches(route, pass_, monkeypatch):
    if pass_ == "weight_grad" and route not in metal_conv.WEIGHT_GRAD:
        return
    if pass_ == "input_grad" and route == "vec4":
        return
    work, limit = "multiply_adds", 2000
    if route == DEPTHWISE:
        work, limit = "elements", 50
    bounded(monkeypatch, work, limit)
    dtype = "float16" if route == "fp16_gather" else "float32"
    groups = 8 if route == DEPTHWISE else 1
    kwargs = {"deterministic": route != "fp32_atomic"}
    check(route, pair(KINDS[0]), 8, 8, pass_, dtype, groups, **kwargs)
    assert checked.launches > 3


def test_parts_of_a_weight_gradient(monkeypatch):
    monkeypatch.setitem(dispatch_bounds.METAL_CUTS, "part_edges", 3)
    check(FLOOR, pair(KINDS[0]), 5, 6, "weight_grad")
    check(DEPTHWISE, pair(KINDS[0]), 5, 10, "weight_grad", groups=5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_no_thread_adds_many_edges_and_partial_sums_are_few_at_a_time(
    dtype, monkeypatch
):
    monkeypatch.setitem(dispatch_bounds.METAL_CUTS, "thread_edges", 4)
    check(FLOOR, pair(KINDS[0]), 5, 6, "weight_grad", dtype=dtype)
    assert checked.launches == 2
    # 40 rows by 4 are ten parts; room for three at a time gives four rounds.
    monkeypatch.setitem(dispatch_bounds.METAL_CUTS, "partial_elements", 3 * 27 * 8 * 6)
    check(FLOOR, pair(KINDS[0]), 5, 6, "weight_grad", dtype=dtype)
    assert checked.launches == 2 * 4
    monkeypatch.setitem(dispatch_bounds.METAL_CUTS, "partial_elements", 3 * 27 * 10)
    check(DEPTHWISE, pair(KINDS[0]), 5, 10, "weight_grad", dtype, 5)
    assert checked.launches == 2 * 4


def test_a_slice_of_an_array_is_read_in_place():
    relation, expected = pair(KINDS[0])
    numbers = Numbers(relation, 4, 8)
    x, w, _ = numbers.exact
    flat = mx.concatenate([mx.zeros((1,)), numbers.w.flatten()])
    sliced = flat[1:].reshape(numbers.w.shape)
    y = checked(metal_conv.CONV["vec4"], numbers.x, sliced, relation, 1, False)
    ref.assert_close(y, ref.conv(x, w, expected))


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_missing_neighbours_are_not_read(value):
    relation, expected = pair(cases.Case("forward", 3, 2, 2))
    numbers = Numbers(relation, 4, 4)
    x = np.array(numbers.x)
    x[0] = value
    touched = expected.edges[expected.edges[:, 0] == 0, 1]
    for route in (FLOOR, "vec4"):
        y = np.array(
            checked(metal_conv.CONV[route], mx.array(x), numbers.w, relation, 1, False)
        )
        clean = np.delete(y, touched, axis=0)
        assert np.isfinite(clean).all() and not np.isfinite(y[touched]).all()


def test_refusals_say_what_came():
    relation, _ = pair(KINDS[0])
    numbers = Numbers(relation, 4, 6)
    with pytest.raises(ValueError, match="C_out = 6"):
        metal_conv.CONV["vec4"](numbers.x, numbers.w, relation, 1, False)
    with pytest.raises(ValueError, match="float32"):
        metal_conv.CONV["fp16_gather"](numbers.x, numbers.w, relation, 1, False)

"""The matrix routes on Metal against the oracle, on the CPU, with every check."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, pair
from metal_checks import checked, host

import mlx_lattice as ml
from mlx_lattice import tuning
from mlx_lattice.backends import metal_matrix
from mlx_lattice.relation import Relation

host.require()

PASSES = ("forward", "input_grad", "weight_grad")
SORTED, GROUPED = "sorted_implicit_gemm", "grouped_gemm"

# Below, at and beyond an 8x8 matrix, a stage of 16 or 32 channels, tiles of 32 and 64.
CHANNELS = ((1, 1), (3, 5), (8, 24), (16, 16), (33, 31), (40, 65), (64, 64), (7, 130))
VOLUMES = (
    cases.Case("submanifold", 3, 1),
    cases.Case("submanifold", 3, (1, 3, 5)),
    cases.Case("submanifold", 3, 4),
    cases.Case("submanifold", 3, 7),
    cases.Case("submanifold", 4, 3),
    cases.Case("forward", 2, 3, 2, padding=1, support="reach"),
    cases.Case("transposed", 1, 3, 2),
)


def run(route, relation, numbers, pass_, **checks):
    """One pass on one route."""
    if pass_ == "weight_grad":
        call, arrays = metal_matrix.WEIGHT_GRAD[route], (numbers.x, numbers.dy)
        return checked(call, *arrays, relation, 1, **checks)
    call = metal_matrix.CONV[route]
    if pass_ == "input_grad":
        return checked(call, numbers.dy, numbers.w, relation.T, 1, True, **checks)
    return checked(call, numbers.x, numbers.w, relation, 1, False, **checks)


def check(route, both, c_in, c_out, pass_, dtype="float32", **checks):
    """One pass on one route gives what the oracle gives, in any order of threads."""
    relation, expected = both
    numbers = Numbers(relation, c_in, c_out, 1, dtype)
    got = run(route, relation, numbers, pass_, **checks)
    x, w, dy = numbers.exact
    wanted = {
        "forward": lambda: ref.conv(x, w, expected),
        "input_grad": lambda: ref.input_grad(dy, w, expected),
        "weight_grad": lambda: ref.weight_grad(x, dy, expected),
    }[pass_]()
    assert got.dtype == numbers.x.dtype
    ref.assert_close(got, wanted, dtype, f"{route} {pass_}")


@pytest.fixture(params=("whole", "split"))
def splitting(request, monkeypatch):
    """With and without sums, or edges, cut into parts."""
    split = request.param == "split"
    monkeypatch.setitem(tuning.FILLING, "*", 6 if split else 1)
    monkeypatch.setitem(tuning.PART_EDGES, "*", 2 if split else 1 << 20)


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
    relation, expected = pair(cases.Case("submanifold", 3, 3), n=max(n_in, 1))
    if n_in == 0:
        none = mx.zeros((0,), dtype=mx.int32)
        relation = Relation.from_edges(none, none, none, 0, 7, 27)
        expected = None
    numbers = Numbers(relation, 12, 35, 1, dtype)
    bias = mx.arange(35).astype(numbers.x.dtype)
    y = checked(
        metal_matrix.CONV[SORTED], numbers.x, numbers.w, relation, 1, False, bias=bias
    )
    wanted = np.zeros((relation.n_out, 35))
    if expected is not None:
        wanted = ref.conv(*numbers.exact[:2], expected)
    ref.assert_close(y, wanted + ref.to_numpy(bias).astype(np.float64), dtype)


@pytest.mark.parametrize("pass_", PASSES)
def test_work_is_cut_into_bounded_dispatches(pass_, monkeypatch):
    monkeypatch.setattr(tuning, "matrix_limit", lambda device: 2000)
    monkeypatch.setitem(tuning.FILLING, "*", 1)
    geometry = pair(cases.Case("submanifold", 2, 3), "block", 200)
    check(SORTED, geometry, 8, 40, pass_, "float16")
    assert checked.launches > 3


@pytest.mark.parametrize("pass_", PASSES[:2])
def test_weights_beyond_the_cache(pass_, splitting, monkeypatch):
    monkeypatch.setitem(tuning.CACHED_WEIGHTS, "*", 0)
    check(SORTED, pair(KINDS[0], n=100), 70, 140, pass_, "float16")


@pytest.mark.parametrize("pass_", PASSES)
def test_rows_are_sorted_by_region(pass_, monkeypatch):
    monkeypatch.setitem(tuning.REGION_ROWS, "256", {"*": 64})
    check(SORTED, pair(KINDS[0], n=200), 8, 8, pass_, "float16")
    relation, _ = pair(KINDS[0], n=200)
    view = checked(metal_matrix.tiles, relation, 16)
    rows = np.array(view.rows)
    assert (np.sort(rows) == np.arange(relation.n_out)).all()
    assert (np.diff(rows // 64) >= 0).all()
    np.testing.assert_array_equal(view.table, np.array(relation.out_in)[rows])


def test_parts_of_a_weight_gradient():
    def parts(edges, rows, channels):
        shape, tiles = (27, channels, channels), (-(-channels // 64)) ** 2
        return metal_matrix.grad_parts(edges, 4 * rows * channels, shape, tiles)

    assert parts(100, 10, 64) == 1, "too few edges for a partial"
    assert parts(1_667_340, 100_000, 64) == 11, "as fill the GPU"
    assert parts(1_667_340, 100_000, 128) == 8, "as keep features in cache"
    assert parts(1_667_340, 100_000, 1024) == 28, "partials of 8 times the features"


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

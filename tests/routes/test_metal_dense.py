"""dense_channel and cout16 on Metal against the oracle, with every check."""

import cases
import mlx.core as mx
import pytest
import reference as ref
from conftest import KINDS, Numbers, pair
from metal_checks import PASSES, VOLUMES, check, check_bias, checked, host
from test_metal_matrix import splitting  # noqa: F401

from mlx_lattice.backends import dispatch_bounds, metal_matrix

host.require()

DENSE = ((16, 16), (16, 64), (32, 32), (64, 16), (64, 64))


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", DENSE, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dense_channel(dtype, channels, pass_):
    check("dense_channel", pair(KINDS[0]), *channels, pass_, dtype)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("case", (*KINDS[1:], *VOLUMES), ids=str)
def test_dense_channel_relations(case, pass_):
    check("dense_channel", pair(case, n=30), 16, 32, pass_, "float16")


@pytest.mark.parametrize("pass_", (PASSES[0], PASSES[2]))
@pytest.mark.parametrize("c_in", (1, 3, 8, 16, 31, 33, 72, 130))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_cout16(dtype, c_in, pass_):
    check("cout16", pair(KINDS[0]), c_in, 16, pass_, dtype)


@pytest.mark.parametrize("pass_", (PASSES[0], PASSES[2]))
@pytest.mark.parametrize("case", (*KINDS[1:], *VOLUMES), ids=str)
def test_cout16_relations(case, pass_):
    check("cout16", pair(case, n=30), 7, 16, pass_, "bfloat16")


@pytest.mark.parametrize("route, tile", (("dense_channel", 64), ("cout16", 128)))
@pytest.mark.parametrize("extra", (-1, 0, 1))
def test_rows_around_a_tile(route, tile, extra):
    n = tile + extra
    coords = mx.array([[0, i] for i in range(n)], dtype=mx.int32)
    case = cases.Case("submanifold", 1, 3)
    from conftest import build

    both = build(case, coords), case.reference(coords.tolist())
    check(route, both, 16, 16, "forward", "float16")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("geometry", ("empty", "one"))
@pytest.mark.parametrize("route", ("dense_channel", "cout16"))
def test_no_row_and_one_row(route, geometry, pass_):
    if route == "cout16" and pass_ == "input_grad":
        return
    check(route, pair(KINDS[3], geometry), 16, 16, pass_)
    if geometry == "empty":
        assert checked.launches == 0, "a kernel was launched for no rows"


@pytest.mark.parametrize("route", ("dense_channel", "cout16"))
@pytest.mark.parametrize("pass_", (PASSES[0], PASSES[2]))
def test_work_is_cut_into_bounded_dispatches(route, pass_, monkeypatch):
    monkeypatch.setattr(dispatch_bounds, "matrix_limit", lambda device: 20_000)
    check(route, pair(KINDS[0], n=100), 16, 16, pass_, "float16")
    assert checked.launches > 3


def test_refusals_say_what_came():
    relation, _ = pair(KINDS[0])
    numbers = Numbers(relation, 16, 24)
    for route, text in (("dense_channel", "C_out = 24"), ("cout16", "C_out = 24")):
        with pytest.raises(ValueError, match=text):
            metal_matrix.CONV[route](numbers.x, numbers.w, relation, 1, False)
        with pytest.raises(ValueError, match=text):
            metal_matrix.WEIGHT_GRAD[route](numbers.x, numbers.dy, relation, 1)


def test_a_slice_of_an_array_is_read_in_place():
    relation, expected = pair(KINDS[0])
    numbers = Numbers(relation, 16, 16, 1, "float16")
    x, w, _ = numbers.exact
    flat = mx.concatenate([mx.zeros((1,), dtype=mx.float16), numbers.x.flatten()])
    sliced = flat[1:].reshape(numbers.x.shape)
    for route in ("dense_channel", "cout16"):
        y = checked(metal_matrix.CONV[route], sliced, numbers.w, relation, 1, False)
        ref.assert_close(y, ref.conv(x, w, expected), "float16")


@pytest.mark.parametrize("route", ("dense_channel", "cout16"))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_bias(dtype, route):
    check_bias(route, pair(KINDS[0], n=70), 32, 16, dtype)

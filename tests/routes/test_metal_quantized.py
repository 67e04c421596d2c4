"""Packed weights on Metal against the oracle, on the CPU and with every check."""

from functools import partial

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, multi_edges, pair
from metal_checks import bounded, checked, host
from quantized_checks import check_packed, floats, problem

import mlx_lattice as ml
from mlx_lattice.backends import dispatch_bounds, metal
from mlx_lattice.quantized import BITS, GROUP_SIZES
from mlx_lattice.routes import thresholds

host.require()

FLOOR, MATRIX = "quantized_traversal", ("quantized_sorted", "quantized_tensor_ops")
ROUTES = sorted(metal.QUANTIZED)
# Below, at and beyond a word, a group of scales, four and 64 written channels.
CHANNELS = ((1, 1), (3, 5), (8, 4), (32, 16), (33, 7), (64, 65), (100, 33), (130, 3))
GROUPS = ((4, 6, 2), (40, 10, 2), (6, 6, 6), (128, 8, 2))


def refused(route, dtype) -> bool:
    return route == "quantized_tensor_ops" and dtype == "float32"


def check(route, both, c_in, c_out, bits=4, size=32, groups=1, dtype="float32"):
    """A route gives what the oracle gives with the dequantised weight."""
    run = partial(checked, metal.QUANTIZED[route])
    given = both, c_in, c_out, bits, size, groups, dtype, route
    if refused(route, dtype):
        with pytest.raises(ValueError, match="got float32"):
            check_packed(run, *given)
    else:
        check_packed(run, *given)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_packing(route, bits, size, dtype):
    for c_in in (20, size, 130):
        check(route, pair(KINDS[0], n=20), c_in, 7, bits, size, dtype=dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("case", KINDS, ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_every_kind(route, case, bits):
    check(route, pair(case), 20, 6, bits, dtype="float16")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_every_channel_count(route, channels, dtype):
    for bits in BITS:
        check(route, pair(KINDS[2]), *channels, bits, dtype=dtype)


@pytest.mark.parametrize("cached", (0, thresholds.CACHED_WEIGHTS["*"]))
@pytest.mark.parametrize("filling", (1, 12), ids=("whole", "split"))
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("route", MATRIX)
def test_tiles_whole_and_split(route, bits, dtype, filling, cached, monkeypatch):
    monkeypatch.setitem(thresholds.FILLING, "*", filling)
    monkeypatch.setitem(thresholds.CACHED_WEIGHTS, "*", cached)
    both = pair(KINDS[0], "batches", 100)
    check(route, both, 33, 70, bits, dtype=dtype)
    if not refused(route, dtype):
        assert checked.launches == (1 if filling == 1 else 2)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", GROUPS, ids=str)
def test_groups(channels, dtype, bits):
    *channels, groups = channels
    check(FLOOR, pair(KINDS[0], n=24), *channels, bits, 32, groups, dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("route", ROUTES)
def test_nothing_beyond_a_weight_of_one_line_is_read(route, bits):
    check(route, pair(cases.Case("submanifold", 3, 1)), 64, 1, bits, 64)
    check(route, pair(cases.Case("submanifold", 3, 1)), 250, 1, bits, 128)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_edges_without_a_table(dtype, bits):
    check(FLOOR, multi_edges(), 35, 5, bits, dtype=dtype)
    check(FLOOR, multi_edges(1), 6, 4, bits, 64, 2, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("geometry", ("empty", "one"))
@pytest.mark.parametrize("case", (KINDS[0], KINDS[3], KINDS[6]), ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_no_row_and_one_row(route, case, geometry, dtype):
    check(route, pair(case, geometry), 5, 3, dtype=dtype)
    if geometry == "empty" and not refused(route, dtype):
        assert checked.launches == 0, "a kernel was launched for no rows"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("n_in, n_out", ((0, 5), (5, 0), (0, 0), (4, 6)))
def test_no_edges(route, n_in, n_out):
    none = mx.zeros((0,), dtype=mx.int32)
    relation = ml.Relation.from_edges(none, none, none, n_in, n_out, 3)
    x, q = problem(relation, 8, 4, 4, 32, dtype="float16")
    y = checked(metal.QUANTIZED[route], x, q, relation, 1)
    assert y.shape == (n_out, 4) and y.dtype == mx.float16 and not y.any().item()


def test_work_is_cut_into_bounded_dispatches(monkeypatch):
    bounded(monkeypatch, "multiply_adds", 2000)
    check(FLOOR, pair(KINDS[0]), 20, 8)
    assert checked.launches > 3
    check(FLOOR, multi_edges(), 20, 8)
    assert checked.launches > 3
    monkeypatch.setattr(dispatch_bounds, "matrix_limit", lambda device: 2000)
    monkeypatch.setitem(thresholds.FILLING, "*", 1)
    for route in MATRIX:
        check(route, pair(KINDS[0], "batches", 150), 20, 8, dtype="float16")
        assert checked.launches > 1


@pytest.mark.parametrize("route", MATRIX)
def test_matrix_tiles_refuse_groups(route):
    relation, _ = pair(KINDS[0])
    x, q = problem(relation, 8, 4, 4, 32, groups=2)
    with pytest.raises(ValueError, match=f"{route} runs one group"):
        metal.QUANTIZED[route](x, q, relation, 2)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_missing_neighbours_and_padding_are_not_read(value, route):
    relation, expected = pair(cases.Case("forward", 3, 2, 2))
    x, q = problem(relation, 20, 4, 8, 32, dtype="float16")
    x = np.array(x)
    x[0] = value
    touched = expected.edges[expected.edges[:, 0] == 0, 1]
    y = np.array(checked(metal.QUANTIZED[route], mx.array(x), q, relation, 1))
    clean = np.delete(y, touched, axis=0)
    assert np.isfinite(clean).all() and not np.isfinite(y[touched]).all()


@pytest.mark.parametrize("route", ROUTES)
def test_padding_in_storage_reaches_no_output(route):
    relation, _ = pair(KINDS[0])
    x, q = problem(relation, 20, 5, 4, 32, dtype="float16")
    y = checked(metal.QUANTIZED[route], x, q, relation, 1)
    words = np.array(q.weight)
    words[..., 20 * 4 // 32 + 1 :] = 0x12345678
    words[..., 20 * 4 // 32] |= np.uint32(0xFFFF0000)  # channels 20 ... 23
    other = q.holding(mx.array(words), q.scales, q.biases)
    again = checked(metal.QUANTIZED[route], x, other, relation, 1)
    assert mx.array_equal(y, again).item()


@pytest.mark.parametrize("filling", (1, 12), ids=("whole", "split"))
@pytest.mark.parametrize("route", MATRIX)
def test_bias(route, filling, monkeypatch):
    monkeypatch.setitem(thresholds.FILLING, "*", filling)
    relation, expected = pair(KINDS[0], "batches", 100)
    x, q = problem(relation, 20, 70, 4, 32, dtype="float16")
    bias = mx.arange(70).astype(x.dtype)
    y = checked(metal.QUANTIZED[route], x, q, relation, 1, bias=bias)
    wanted = ref.conv(floats(x), floats(q.dense()), expected) + floats(bias)
    ref.assert_close(y, wanted, "float16", route)

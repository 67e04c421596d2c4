"""Metal reductions against float64 loops, on the CPU and with every check."""

from types import SimpleNamespace

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, pair
from metal_checks import bounded, checked, host

from mlx_lattice import tuning
from mlx_lattice.backends import metal

host.require()

CHANNELS = (1, 3, 4, 9)
SHAPES = ((30, 1, 12), (25, 8, 9), (7, 3, 40), (1, 2, 1))


def features(n, channels, dtype="float32", seed=0):
    """Features in MLX and, rounded alike, in float64."""
    x = mx.array(cases.features(n, channels, seed)).astype(getattr(mx, dtype))
    return x, ref.to_numpy(x).astype(np.float64)


def tables(shape, seed=0):
    """A table of rows, some absent and some named often, and float32 weights."""
    rows, volume, n = shape
    rng = np.random.default_rng(seed)
    table = rng.integers(-1, n, (rows, volume)).astype(np.int32)
    table[table == n // 2] = 0  # a row that nobody names
    return table, rng.standard_normal(table.shape).astype(np.float32)


def maxima(x, members):
    """The greatest of x over lists of rows, and the first row that has it."""
    shape = len(members), x.shape[1]
    y, rows = np.zeros(shape), np.full(shape, -1)
    for o, listed in enumerate(members):
        if len(listed):
            rows[o] = np.asarray(listed)[np.argmax(x[listed], axis=0)]
            y[o] = np.take_along_axis(x, rows[o][None], axis=0)[0]
    return y, rows


# By tables


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sums_and_products(dtype, shape, weighted):
    table, weights = tables(shape)
    for channels in CHANNELS:
        x, exact = features(shape[2], channels, dtype)
        dy, dy_exact = features(shape[0], channels, dtype, 1)
        y_wanted, x_wanted = np.zeros_like(dy_exact), np.zeros_like(exact)
        products = np.zeros(table.shape)
        for o, k in zip(*np.nonzero(table >= 0), strict=True):
            i, weight = table[o, k], float(weights[o, k]) if weighted else 1
            y_wanted[o] += weight * exact[i]
            x_wanted[i] += weight * dy_exact[o]
            products[o, k] = exact[i] @ dy_exact[o]
        given = mx.array(weights) if weighted else None
        at = mx.array(table)
        y = checked(metal.gather_sum, x, at, given)
        assert y.dtype == x.dtype
        ref.assert_close(y, y_wanted, dtype)
        back = checked(metal.scatter_sum, dy, at, shape[2], given)
        assert back.dtype == x.dtype
        ref.assert_close(back, x_wanted, dtype)
        ref.assert_close(checked(metal.row_products, x, dy, at), products)


def check_max(both, channels, dtype="float32"):
    relation, expected = both
    x, exact = features(relation.n_in, channels, dtype)
    y, rows = checked(metal.gather_max, x, relation.out_in)
    table = expected.out_in
    values, won = maxima(exact, [row[row >= 0] for row in table])
    assert y.dtype == x.dtype and rows.dtype == mx.int32
    np.testing.assert_array_equal(ref.to_numpy(y), values)
    np.testing.assert_array_equal(np.array(rows), won)
    dy, dy_exact = features(relation.n_out, channels, dtype, 1)
    dx = checked(metal.spread_max, dy, rows, relation.in_out)
    wanted = np.zeros_like(exact)
    for o, c in zip(*np.nonzero(won >= 0), strict=True):
        wanted[won[o, c], c] += dy_exact[o, c]
    ref.assert_close(dx, wanted, dtype)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_max_kinds(case):
    check_max(pair(case), 3)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_max(dtype, channels):
    check_max(pair(KINDS[2], "batches"), channels, dtype)


@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_max_of_few_rows(geometry):
    check_max(pair(KINDS[3], geometry), 3)


# By segments


def check_segments(of, count, channels, dtype="float32"):
    """Sums and maxima of rows by segment number, as a scatter and by batch element."""
    of = np.array(of, np.int32)
    x, exact = features(len(of), channels, dtype)
    members = [np.flatnonzero(of == s) for s in range(count)]
    sums = np.array([exact[listed].sum(axis=0) for listed in members])
    best, won = maxima(exact, members)
    at = mx.array(of)[:, None]
    order = np.argsort(of, kind="stable").astype(np.int32)
    starts = np.searchsorted(of[order], np.arange(count + 1))
    batch = SimpleNamespace(
        starts=tuple(starts.tolist()),
        order=None if (order == np.arange(len(of))).all() else mx.array(order),
    )
    for name, given in (("scatter", (at, count)), ("segment", (batch,))):
        y = checked(getattr(metal, f"{name}_sum"), x, *given)
        assert y.dtype == x.dtype
        ref.assert_close(y, sums, dtype, name)
        y, rows = checked(getattr(metal, f"{name}_max"), x, *given)
        assert y.dtype == x.dtype and rows.dtype == mx.int32
        np.testing.assert_array_equal(ref.to_numpy(y), best)
        np.testing.assert_array_equal(np.array(rows), won)


@pytest.fixture(params=(0, 2, 5))
def short(request, monkeypatch):
    """Segments are whole, or cut into pieces of pieces."""
    if request.param:
        monkeypatch.setitem(tuning.METAL_CUTS, "piece", request.param)
        monkeypatch.setitem(tuning.METAL_CUTS, "longest", 4)
    return request.param


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_segments(dtype, channels, short):
    rng = np.random.default_rng(0)
    of = rng.integers(0, 7, 60)
    of[of == 3] = 2  # an empty segment
    check_segments(of, 8, channels, dtype)
    check_segments(np.sort(of), 9, channels, dtype)
    assert checked.launches == {0: 1, 2: 7, 5: 3}[short]


@pytest.mark.parametrize(
    "of", ([], [0], [2, 2], [1, 0, 1], [0] * 40, [2] * 21), ids=str
)
def test_few_rows_and_one_segment(of, short):
    check_segments(of, 3, 2)
    if not of:
        assert checked.launches == 0


def test_one_segment_that_holds_almost_all():
    of = np.r_[np.zeros(3000, int), np.arange(1, 20)]
    check_segments(np.random.default_rng(2).permutation(of), 20, 1)
    assert checked.launches == 2


@pytest.mark.parametrize("weighted", (False, True))
def test_scattered_sums_in_pieces(weighted, short):
    test_sums_and_products("float16", (25, 8, 9), weighted)
    test_sums_and_products("float32", (40, 3, 2), weighted)


# Values, limits, nothing at all


def test_nan_wins_and_the_first_of_equals(short):
    values = mx.array([1.0, np.nan, 3.0, np.nan] * 3)[:, None]
    ties = mx.array([-0.0, 0.0, -1.0, 0.0] * 3)[:, None]
    at = mx.array([0] * 11 + [1], dtype=mx.int32)[:, None]
    table = mx.array([[0, 1, 2, 3], [4, 2, -1, -1], [-1, -1, -1, -1]], mx.int32)
    for x, of_segments, of_tables in (
        (values, [1, 11, -1], [1, 2, -1]),
        (ties, [0, 11, -1], [0, 4, -1]),
    ):
        assert checked(metal.scatter_max, x, at, 3)[1][:, 0].tolist() == of_segments
        assert checked(metal.gather_max, x, table)[1][:, 0].tolist() == of_tables


def test_negative_maxima_are_not_zero(short):
    x, at = mx.full((9, 2), -3.0), mx.zeros((9, 1), dtype=mx.int32)
    assert (checked(metal.scatter_max, x, at, 1)[0] == -3).all().item()
    assert (checked(metal.gather_max, x, at)[0] == -3).all().item()


def test_work_is_cut_into_bounded_dispatches(monkeypatch):
    bounded(monkeypatch, "elements", 50)
    check_max(pair(KINDS[0]), 3)
    assert checked.launches > 3
    test_sums_and_products("float32", (25, 8, 9), True)
    assert checked.launches > 3
    check_segments([0, 2, 1, 1] * 40, 3, 4)
    assert checked.launches > 2


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_inputs_of_one_element(dtype):
    # MLX would pass each of them as a constant.
    test_sums_and_products(dtype, (1, 1, 1), True)
    check_max(pair(KINDS[0], "one"), 1, dtype)
    check_segments([0], 1, 1, dtype)


@pytest.mark.parametrize("n, rows, channels", ((0, 3, 2), (3, 0, 2), (3, 2, 0)))
def test_nothing_is_launched_for_nothing(n, rows, channels):
    x, y = mx.zeros((n, channels)), mx.zeros((rows, channels))
    table = mx.full((rows, 2), -1, dtype=mx.int32)
    at = mx.full((rows, 1), -1, dtype=mx.int32)
    for call, arguments, shape in (
        (metal.gather_sum, (x, table), y.shape),
        (metal.gather_max, (x, table), y.shape),
        (metal.spread_max, (y, y.astype(mx.int32), mx.zeros((n, 0))), x.shape),
        (metal.row_products, (x, y, table), table.shape),
        (metal.scatter_sum, (y, table, n), x.shape),
        (metal.scatter_max, (y, at, n), x.shape),
    ):
        result = checked(call, *arguments)
        result = result[0] if isinstance(result, tuple) else result
        assert result.shape == shape and not result.any().item()
        if call is not metal.row_products or not channels:
            assert checked.launches == 0

"""Metal pooling, segments and interpolation against the oracle, with every check."""

import itertools

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, pair
from metal_checks import checked, host

from mlx_lattice.backends import metal, metal_kernels, metal_pooling

host.require()

CHANNELS = (1, 3, 4, 9)
MODES = ("sum", "avg", "avgvol")
REDUCTIONS = ("sum", "mean", "max", "min")


def features(n, channels, dtype="float32", seed=0):
    """Features in MLX and, rounded alike, in float64."""
    x = mx.array(cases.features(n, channels, seed)).astype(getattr(mx, dtype))
    return x, ref.to_numpy(x).astype(np.float64)


def check_max(both, channels, dtype="float32"):
    relation, expected = both
    x, exact = features(relation.n_in, channels, dtype)
    y, winner = checked(metal.max_pool, x, relation.out_in)
    assert y.dtype == x.dtype
    ref.assert_close(y, ref.pool(exact, expected, "max"), dtype)
    table, won = expected.out_in, np.array(winner)
    for o, c in np.ndindex(*won.shape):
        values = [exact[i, c] if i >= 0 else -np.inf for i in table[o]]
        wanted = int(np.argmax(values)) if max(values) > -np.inf else -1
        assert won[o, c] == wanted
    dy, dy_exact = features(relation.n_out, channels, dtype, 1)
    dx = checked(metal.spread_winners, dy, relation.in_out, winner)
    wanted = np.zeros_like(exact)
    picked = np.zeros_like(dy_exact)
    for o, c in np.ndindex(*won.shape):
        if won[o, c] >= 0:
            wanted[table[o, won[o, c]], c] += dy_exact[o, c]
            picked[o, c] = exact[table[o, won[o, c]], c]
    ref.assert_close(dx, wanted, dtype)
    selected = checked(metal.select_winners, x, relation.out_in, winner)
    ref.assert_close(selected, picked, dtype)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_max_pool_kinds(case):
    check_max(pair(case), 3)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_max_pool(dtype, channels):
    check_max(pair(KINDS[2], "batches"), channels, dtype)


@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_max_pool_of_few_rows(geometry):
    check_max(pair(KINDS[3], geometry), 3)


def test_max_pool_of_negative_features_is_not_zero():
    relation, _ = pair(KINDS[2])
    x = mx.full((relation.n_in, 2), -3.0)
    y, _ = checked(metal.max_pool, x, relation.out_in)
    assert (y == -3).all().item()


def test_nan_wins_a_maximum():
    table = mx.array([[0, 1, 2], [2, -1, 0], [-1, -1, 1]], dtype=mx.int32)
    x = mx.array([[1.0], [np.nan], [np.nan]])
    y, winner = checked(metal.max_pool, x, table)
    assert np.isnan(np.array(y)).all() and winner.flatten().tolist() == [1, 0, 2]


def check_sum(both, channels, mode, dtype="float32"):
    relation, expected = both
    x, exact = features(relation.n_in, channels, dtype)
    y = checked(metal.sum_pool, x, relation.out_in, mode)
    assert y.dtype == x.dtype
    ref.assert_close(y, ref.pool(exact, expected, mode), dtype)
    dy, dy_exact = features(relation.n_out, channels, dtype, 1)
    counts = None
    if mode == "avg":
        counts = (relation.out_in >= 0).sum(axis=1).astype(mx.int32)
    wanted = ref.pool_grad(exact, dy_exact, expected, mode)
    over = mode if mode == "avgvol" else "sum"
    dx = checked(metal.sum_pool, dy, relation.in_out, over, counts)
    ref.assert_close(dx, wanted, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_sum_pool_kinds(case, mode):
    check_sum(pair(case), 3, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_sum_pool(dtype, channels, mode):
    check_sum(pair(KINDS[0], "batches"), channels, mode, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_sum_pool_of_few_rows(geometry, mode):
    check_sum(pair(KINDS[0], geometry), 3, mode)
    if geometry == "empty":
        assert checked.launches == 0


def check_segments(of, count, reduce, channels, dtype="float32", contiguous=False):
    of = np.array(of, np.int32)
    build = metal.Segments.contiguous if contiguous else metal.Segments.of
    segments = build(mx.array(of), count)
    x, exact = features(len(of), channels, dtype)
    y, winner = checked(metal.reduce_segments, x, segments, reduce)
    wanted, rows = np.zeros((count, channels)), np.full((count, channels), -1)
    function = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[reduce]
    for s in set(of.tolist()) - {-1}:
        members = np.flatnonzero(of == s)
        wanted[s] = function(exact[members], axis=0)
        if reduce in ("max", "min"):
            pick = {"max": np.argmax, "min": np.argmin}[reduce]
            rows[s] = members[pick(exact[members], axis=0)]
    ref.assert_close(y, wanted, dtype)
    np.testing.assert_array_equal(np.array(winner), rows)

    dy, dy_exact = features(count, channels, dtype, 1)
    dx = checked(metal.spread_segments, dy, segments, reduce, winner)
    back = np.zeros_like(exact)
    for r, s in enumerate(of):
        if s >= 0:
            share = {"sum": 1, "mean": 1 / np.count_nonzero(of == s)}.get(reduce)
            back[r] = dy_exact[s] * (rows[s] == r if share is None else share)
    ref.assert_close(dx, back, dtype)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_segments(dtype, reduce):
    of = np.random.default_rng(0).integers(-1, 7, 60)
    of[of == 3] = 2  # an empty segment
    check_segments(of, 8, reduce, 5, dtype)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("of", ([], [0], [2, 2], [1, 0, 1, -1]), ids=str)
def test_few_rows_in_segments(of, reduce):
    check_segments(of, 3, reduce, 2)
    if not of:
        assert checked.launches == 0


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("limit", (100, metal_kernels.ELEMENTS))
def test_long_segments_are_cut_into_parts(limit, dtype, reduce, monkeypatch):
    monkeypatch.setattr(metal_pooling, "PART_ROWS", 4)
    monkeypatch.setattr(metal_kernels, "ELEMENTS", limit)
    of = np.sort(np.random.default_rng(1).choice([0, 0, 0, 2, 3], 90))
    check_segments(of, 4, reduce, 3, dtype, contiguous=True)


def test_first_of_equal_values_wins(monkeypatch):
    monkeypatch.setattr(metal_pooling, "PART_ROWS", 2)
    segments = metal.Segments.contiguous(mx.zeros((12,), dtype=mx.int32), 1)
    for reduce in ("max", "min"):
        _, winner = checked(metal.reduce_segments, mx.ones((12, 2)), segments, reduce)
        assert winner.tolist() == [[0, 0]]
    x = mx.array([1.0, np.nan, 3.0, np.nan] * 3)[:, None]
    _, winner = checked(metal.reduce_segments, x, segments, "max")
    assert winner.item() == 1


def corners(coords, queries, d, seed=0):
    """Rows and weights of the corners of random points, and the points."""
    rng = np.random.default_rng(seed)
    low, high = (coords[:, 1:].min(0), coords[:, 1:].max(0)) if len(coords) else (0, 1)
    points = rng.uniform(np.array(low) - 1.0, np.array(high) + 1.0, (queries, d))
    index = {row: i for i, row in enumerate(ref.rows_of(coords))}
    base = np.floor(points)
    rows, weights = [], []
    for corner in itertools.product((0, 1), repeat=d):
        sites = ref.rows_of(np.c_[np.zeros(queries), base + corner])
        rows.append([index.get(site, -1) for site in sites])
        part = points - base
        weights.append(np.prod(np.where(corner, part, 1 - part), axis=1))
    shape = queries, 2**d
    rows = np.array(rows, np.int32).T.reshape(shape)
    return rows, np.array(weights, np.float32).T.reshape(shape), points


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("d, channels", ((1, 1), (2, 3), (3, 4), (4, 9)))
@pytest.mark.parametrize("queries", (0, 1, 25))
def test_interpolate(d, channels, queries, dtype):
    coords = cases.geometry("block", d, 30)
    rows, weights, points = corners(coords, queries, d)
    x, exact = features(len(coords), channels, dtype)
    arrays = mx.array(rows), mx.array(weights)
    y = checked(metal.interpolate, x, *arrays)
    ref.assert_close(y, ref.interpolate(coords, exact, points), dtype)

    dy, dy_exact = features(queries, channels, dtype, 1)
    dx = checked(metal.interpolate_input_grad, dy, *arrays, len(coords))
    wanted, products = np.zeros_like(exact), np.zeros(rows.shape)
    for q, j in np.ndindex(*rows.shape):
        if rows[q, j] >= 0:
            wanted[rows[q, j]] += float(weights[q, j]) * dy_exact[q]
            products[q, j] = dy_exact[q] @ exact[rows[q, j]]
    ref.assert_close(dx, wanted, dtype)
    dw = checked(metal.interpolate_weight_grad, x, dy, arrays[0])
    ref.assert_close(dw, products)


def test_work_is_cut_into_bounded_dispatches(monkeypatch):
    monkeypatch.setattr(metal_kernels, "ELEMENTS", 50)
    check_max(pair(KINDS[0]), 3)
    check_sum(pair(KINDS[0]), 3, "avg")
    check_segments([0, 2, 1, 1] * 40, 3, "mean", 4)
    test_interpolate(2, 3, 25, "float32")
    assert checked.launches > 3


def test_no_features():
    table = mx.array([[0, -1], [-1, -1]], dtype=mx.int32)
    for call in (metal.max_pool, metal.sum_pool):
        checked(call, mx.zeros((3, 0)), table)
        assert checked.launches == 0

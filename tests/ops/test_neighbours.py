"""k nearest rows and rows within a radius, against NumPy by brute force."""

import math

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from pooled import route  # noqa: F401 (a fixture for every test here)

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.ops import points as ops_points


def expected(points, queries, k=None, radius=math.inf):
    """For each query (rows of its batch element by (distance, row), distances)."""
    lists = []
    for query in queries.astype(np.float64):
        rows = np.flatnonzero(points[:, 0] == query[0])
        far = np.sqrt(((points[rows, 1:] - query[1:]) ** 2).sum(axis=1))
        order = np.lexsort((rows, far))
        order = order[far[order] <= radius][:k]
        lists.append((rows[order], far[order]))
    return lists


def assert_nearest(points, queries, k, radius=math.inf):
    """``knn`` gives the rows of brute force, in its order."""
    result = ops.knn(mx.array(points), k, mx.array(queries), radius=radius)
    assert result.rows.shape == result.distances.shape == (len(queries), k)
    assert result.rows.dtype == mx.int32 and result.distances.dtype == mx.float32
    lists = zip(np.array(result.rows), np.array(result.distances), strict=True)
    for (rows, far), wanted in zip(
        lists, expected(points, queries, k, radius), strict=True
    ):
        n = len(wanted[0])
        np.testing.assert_array_equal(rows[:n], wanted[0])
        np.testing.assert_allclose(far[:n], wanted[1], rtol=1e-6)
        assert (rows[n:] == -1).all() and np.isinf(far[n:]).all()


def assert_within(points, queries, radius):
    """``radius_neighbours`` gives the rows of brute force, in its order."""
    result = ops.radius_neighbours(mx.array(points), radius, mx.array(queries))
    wanted = expected(points, queries, radius=radius)
    assert result.starts.dtype == result.rows.dtype == mx.int32
    counts = [len(rows) for rows, _ in wanted]
    np.testing.assert_array_equal(np.array(result.counts), counts)
    np.testing.assert_array_equal(np.array(result.starts), np.cumsum([0, *counts]))
    rows, far = (np.concatenate(c) for c in zip(*wanted, strict=True))
    np.testing.assert_array_equal(np.array(result.rows), rows)
    np.testing.assert_allclose(np.array(result.distances), far, rtol=1e-6)


def lattice(dims, n=70, seed=0):
    """Rows of three batch elements, negative ones and repeats among them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-9, 9, (n, 1 + dims))
    rows[:, 0] = rng.integers(0, 3, n)
    rows[n // 2 : n // 2 + 5] = rows[:5]
    return rows.astype(np.int32)


def cloud(dims, n=70, seed=0, step=None):
    """Points of two batch elements; in steps of a power of two distances tie."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 1 + dims))
    if step:
        rows = np.round(rows / step) * step
    rows[:, 0] = rng.integers(0, 2, n)
    return rows.astype(np.float32)


@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_of_coordinates(dims):
    points, queries = lattice(dims), lattice(dims, 20, 1)
    queries[:, 0] = np.arange(20) % 4  # no point has batch index 3
    assert_nearest(points, queries, 9)
    assert_nearest(points, queries, 9, radius=math.sqrt(3))
    for radius in (0, math.sqrt(3), 6.5):
        assert_within(points, queries, radius)


@pytest.mark.parametrize("step", (None, 0.25))
@pytest.mark.parametrize("dims", (1, 3))
def test_of_points(dims, step):
    points, queries = cloud(dims, step=step), cloud(dims, 20, 1, step)
    queries[:3, 1:] += 40  # far from all
    assert_nearest(points, queries, 9)
    assert_nearest(points, queries, 9, radius=0.75)
    for radius in (0, 0.75, 6.5):
        assert_within(points, queries, radius)


def test_queries_are_the_points_by_default():
    points = mx.array(lattice(3, 60))
    default, named = ops.knn(points, 3), ops.knn(points, 3, points)
    assert mx.array_equal(default.rows, named.rows)
    assert not mx.any(default.distances[:, 0])


@pytest.mark.parametrize("kind", (np.int32, np.float32))
@pytest.mark.parametrize("n, q", [(0, 3), (4, 0), (0, 0), (1, 3), (3, 1)])
def test_few(n, q, kind):
    points = np.arange(n * 3).reshape(n, 3).astype(kind) * np.array([0, 1, 2], kind)
    queries = np.ones((q, 3), kind) * np.array([0, 1, 2], kind)
    nearest = ops.knn(mx.array(points), 5, mx.array(queries))
    assert nearest.rows.shape == (q, 5)
    np.testing.assert_array_equal((np.array(nearest.rows) >= 0).sum(axis=1), min(n, 5))
    lists = ops.radius_neighbours(mx.array(points), 100, mx.array(queries))
    assert lists.starts.shape == (q + 1,) and lists.rows.size == n * q
    for each in (nearest.lists(), lists):
        assert each.padded().rows.shape == (q, n if q else 0)
        assert each.padded(2).distances.shape == (q, 2)
    for by_rank in (False, True):
        relation = nearest.relation(by_rank=by_rank)
        assert (relation.n_in, relation.n_out, relation.n_edges) == (n, q, n * q)
    if n and q:
        assert_nearest(points, queries, 5)


@pytest.mark.parametrize("kind", (np.int32, np.float32))
def test_many_equal_points(kind):
    points = np.concatenate([np.full((60, 4), 0), lattice(3, 40)]).astype(kind)
    points[:, 0] = 0
    assert_nearest(points, points[50:70], 2)
    with pytest.raises(ValueError, match="keep one of equal points"):
        ops.knn(mx.zeros((1030, 4), mx.int32), 2)


def test_dense_and_sparse_at_once():
    """Cells grow only for points that lie apart."""
    rng = np.random.default_rng(0)
    points = np.concatenate(
        [rng.normal(0, 1e-3, (90, 3)), rng.normal(0, 1, (40, 3)), [[900, -900, 3]]]
    )
    points = np.insert(points, 0, 0, axis=1).astype(np.float32)
    assert_nearest(points, points[::9], 5)
    assert_nearest(points, points[-1:], 3)


def test_integers_that_float32_does_not_hold_are_refused():
    ends = np.array([[0, (1 << 31) - 1, 5], [0, (1 << 31) - 9, 1], [0, 1 << 30, 5]])
    assert_nearest(ends[:2].astype(np.int32), ends[:2].astype(np.int32), 3)
    for call in (ops.knn, ops.radius_neighbours):
        with pytest.raises(ValueError, match=r"must span less than 2\^24 cells"):
            call(mx.array(ends.astype(np.int32)), 2)


def test_blocks(monkeypatch):
    """A bound on memory changes nothing."""
    points = lattice(3, 200)
    monkeypatch.setattr(ops_points, "SLOTS", 64)
    monkeypatch.setattr(ops_points, "QUERIES", 37)
    assert_nearest(points, points, 7)
    assert_within(points, points, 4)


def test_of_tensors():
    coords = cases.geometry("batches", 3, 60)
    x = ml.SparseTensor(mx.array(coords), mx.ones((len(coords), 1)))
    result = ops.radius_neighbours(x, 1.5)
    wanted = ops.radius_neighbours(mx.array(coords), 1.5)
    assert mx.array_equal(result.rows, wanted.rows) and result.rows.size > len(x)
    with pytest.raises(ValueError, match="must be of one lattice; got strides"):
        ops.knn(x, 1, nn.MaxPool3d(2)(x))


def test_lists_tables_and_relations():
    points, queries = mx.array(lattice(3, 50)), mx.array(lattice(3, 12, 1))
    lists = ops.radius_neighbours(points, 5, queries)
    padded = lists.padded()
    width = padded.rows.shape[1]
    nearest = ops.knn(points, width, queries, radius=5)
    assert mx.array_equal(padded.rows, nearest.rows)
    assert mx.array_equal(padded.distances, nearest.distances)
    for field in ("starts", "rows", "distances", "queries"):
        assert mx.array_equal(getattr(nearest.lists(), field), getattr(lists, field))

    feats, rows = cases.features(50, 3), np.array(padded.rows)
    taken = np.where(rows[..., None] >= 0, feats[rows], 0).astype(np.float64)
    one, each = cases.weights(1, 3, 2), cases.weights(width, 3, 2)
    y = ops.sparse_conv(mx.array(feats), mx.array(one), lists.relation())
    ref.assert_close(y, taken.sum(axis=1) @ one[0])
    y = ops.sparse_conv(mx.array(feats), mx.array(each), nearest.relation(by_rank=True))
    ref.assert_close(y, np.einsum("qkc,kcd->qd", taken, each))
    with pytest.raises(ValueError, match="ranks must be at least"):
        lists.relation(by_rank=True, ranks=1)

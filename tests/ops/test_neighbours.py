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
from mlx_lattice.ops import neighbours


def expected(points, queries, k=None, radius=math.inf):
    """For each query the rows of its batch element by (distance, row), with those."""
    lists = []
    for query in queries.astype(np.float64):
        rows = np.flatnonzero(points[:, 0] == query[0])
        far = np.sqrt(((points[rows, 1:] - query[1:]) ** 2).sum(axis=1))
        order = np.lexsort((rows, far))
        order = order[far[order] <= radius][:k]
        lists.append((rows[order], far[order]))
    return lists


def assert_nearest(points, queries, k, radius=math.inf, asked=None):
    """``knn`` gives what brute force does, in its order."""
    asked = mx.array(queries) if asked is None else asked
    got = ops.knn(mx.array(points), k, asked, radius=radius)
    assert got.rows.shape == got.distances.shape == (len(queries), k)
    assert got.rows.dtype == mx.int32 and got.distances.dtype == mx.float32
    found = zip(np.array(got.rows), np.array(got.distances), strict=True)
    for (rows, far), wanted in zip(
        found, expected(points, queries, k, radius), strict=True
    ):
        n = len(wanted[0])
        np.testing.assert_array_equal(rows[:n], wanted[0])
        np.testing.assert_allclose(far[:n], wanted[1], rtol=1e-6)
        assert (rows[n:] == -1).all() and np.isinf(far[n:]).all()


def assert_within(points, queries, radius):
    """``radius_neighbours`` gives what brute force does, in its order."""
    got = ops.radius_neighbours(mx.array(points), radius, mx.array(queries))
    wanted = expected(points, queries, radius=radius)
    assert got.starts.dtype == got.rows.dtype == mx.int32
    counts = [len(rows) for rows, _ in wanted]
    np.testing.assert_array_equal(np.array(got.counts), counts)
    np.testing.assert_array_equal(np.array(got.starts), np.cumsum([0, *counts]))
    rows, far = (np.concatenate(c) for c in zip(*wanted, strict=True))
    np.testing.assert_array_equal(np.array(got.rows), rows)
    np.testing.assert_allclose(np.array(got.distances), far, rtol=1e-6)


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
    for radius in (0, 1, math.sqrt(3), 6.5):
        assert_within(points, queries, radius)


@pytest.mark.parametrize("step", (None, 0.25))
@pytest.mark.parametrize("dims", (1, 3))
def test_of_points(dims, step):
    points, queries = cloud(dims, step=step), cloud(dims, 20, 1, step)
    queries[:3, 1:] += 40  # far from all
    assert_nearest(points, queries, 9)
    assert_nearest(points, queries, 9, radius=0.75)
    for radius in (0, 0.25, 0.75, 6.5):
        assert_within(points, queries, radius)


def test_the_points_ask_of_themselves_by_default():
    points = lattice(3, 60)
    itself = (
        ops.knn(mx.array(points), 3),
        ops.knn(mx.array(points), 3, mx.array(points)),
    )
    assert mx.array_equal(itself[0].rows, itself[1].rows)
    assert not mx.any(itself[0].distances[:, 0])


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
    """Only the first k of equal points are looked at, and theirs are the rows."""
    points = np.concatenate([np.full((60, 4), 0), lattice(3, 40)])
    points[:, 0] = 0
    held = neighbours.first_of_repeats(mx.array(points.astype(kind)), 2)
    assert held[:3].tolist() == [0, 1, 60]
    assert_nearest(points.astype(kind), points[50:70].astype(kind), 2)


def test_dense_and_sparse_at_once():
    """Cells grow for those that lie apart alone."""
    rng = np.random.default_rng(0)
    points = np.concatenate(
        [rng.normal(0, 1e-3, (200, 3)), rng.normal(0, 1, (60, 3)), [[900, -900, 3]]]
    )
    points = np.insert(points, 0, 0, axis=1).astype(np.float32)
    assert_nearest(points, points[::9], 5)
    assert_nearest(points, points[-1:], 3)


def test_extremes_of_int32():
    ends = np.array([[0, -(1 << 31), 5], [0, (1 << 31) - 1, 5], [0, -(1 << 31) + 1, 5]])
    ends = ends.astype(np.int32)
    assert_within(ends, ends, 1)
    assert_nearest(ends, ends, 3, radius=2)
    with pytest.raises(ValueError, match="do not fit into 62 bits beside a row"):
        ops.knn(mx.array(ends), 2)
    near = ends[:, [0, 2, 2]] + np.array([[0, 0, 0], [0, 1 << 27, 0], [0, 3, 1 << 26]])
    assert_nearest(near.astype(np.int32), near.astype(np.int32), 3)


def test_blocks(monkeypatch):
    """A bound on memory changes nothing."""
    points = lattice(3, 200)
    wanted = ops.knn(mx.array(points), 7), ops.radius_neighbours(mx.array(points), 4)
    monkeypatch.setattr(neighbours, "SLOTS", 64)
    monkeypatch.setattr(neighbours, "QUERIES", 37)
    got = ops.knn(mx.array(points), 7), ops.radius_neighbours(mx.array(points), 4)
    for a, b in zip(got, wanted, strict=True):
        assert mx.array_equal(a.rows, b.rows)
        assert mx.array_equal(a.distances, b.distances)
    assert mx.array_equal(got[1].starts, wanted[1].starts)


def test_of_tensors():
    coords = cases.geometry("batches", 3, 60)
    x = ml.SparseTensor(mx.array(coords), mx.ones((len(coords), 1)))
    got = ops.radius_neighbours(x, 1.5)
    wanted = ops.radius_neighbours(mx.array(coords), 1.5)
    assert mx.array_equal(got.rows, wanted.rows) and got.rows.size > len(x)
    with pytest.raises(ValueError, match="must be of one lattice; got strides"):
        ops.knn(x, 1, nn.MaxPool3d(2)(x))


def test_forms_and_relations():
    points, queries = lattice(3, 50), lattice(3, 12, 1)
    lists = ops.radius_neighbours(mx.array(points), 5, mx.array(queries))
    padded = lists.padded()
    nearest = ops.knn(
        mx.array(points), padded.rows.shape[1], mx.array(queries), radius=5
    )
    assert mx.array_equal(padded.rows, nearest.rows)
    assert mx.array_equal(padded.distances, nearest.distances)
    for field in ("starts", "rows", "distances", "queries"):
        assert mx.array_equal(getattr(nearest.lists(), field), getattr(lists, field))

    feats, width = cases.features(50, 3), padded.rows.shape[1]
    rows = np.array(padded.rows)
    taken = np.where(rows[..., None] >= 0, feats[rows], 0).astype(np.float64)
    one, each = cases.features(3 * 2, 1).reshape(1, 3, 2), cases.features(width * 3, 2)
    y = ops.sparse_conv(mx.array(feats), mx.array(one), lists.relation())
    ref.assert_close(y, taken.sum(axis=1) @ one[0])
    each = each.reshape(width, 3, 2)
    y = ops.sparse_conv(mx.array(feats), mx.array(each), nearest.relation(by_rank=True))
    ref.assert_close(y, np.einsum("qkc,kcd->qd", taken, each))
    with pytest.raises(ValueError, match="ranks must be at least"):
        lists.relation(by_rank=True, ranks=1)


def test_as_a_tree_finds_them():
    spatial = pytest.importorskip("scipy.spatial")
    points = cloud(3, 1500)
    points[:, 0] = 0
    got = ops.knn(mx.array(points), 8)
    far, rows = spatial.cKDTree(points[:, 1:].astype(np.float64)).query(
        points[:, 1:], 8
    )
    np.testing.assert_array_equal(np.array(got.rows), rows)
    np.testing.assert_allclose(np.array(got.distances), far, rtol=1e-5)

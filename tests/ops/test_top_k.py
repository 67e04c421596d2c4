"""The best rows of each batch element, against NumPy, on every backend."""

import mlx.core as mx
import numpy as np
import pytest
from places import HERE, agreed

import mlx_lattice as ml
from mlx_lattice import ops
from mlx_lattice.geometry.lattice import best_rows

places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
SPECIAL = np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 6e4, -6e4


def rows_of(n, batches, is_sorted=False, seed=0):
    """Distinct rows; the second of several batch elements is empty."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-20, 20, (2 * n, 4))
    rows[:, 0] = rng.choice([b for b in range(batches) if b != 1], 2 * n)
    rows = rng.permutation(np.unique(rows, axis=0))[:n].astype(np.int32)
    return np.unique(rows, axis=0) if is_sorted else rows


def scores_of(n, dtype, seed=1):
    """Many equal scores, and the values whose order is a matter of definition."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-9, 9, n).astype(np.float32)
    if dtype != mx.int32:
        scores[rng.random(n) < 0.3] += 0.25
        some = rng.random(n) < 0.3
        scores[some] = rng.choice(np.array(SPECIAL, np.float32), some.sum())
    return mx.array(scores).astype(dtype)


def best(scores, batch, k):
    """Of each element the k of greatest score, the earlier first, NaNs last."""
    values = np.array(scores.astype(mx.float32), np.float64)
    kept = np.zeros(len(values), bool)
    for element in np.unique(batch):
        at = np.flatnonzero(batch == element)
        worse = np.where(np.isnan(values[at]), np.inf, -values[at])
        order = np.lexsort((np.isnan(values[at]), worse))
        kept[at[order[:k]]] = True
    return kept


def assert_best(place, rows, scores, k, beyond=0):
    """``best_rows`` flags the best rows, if the last batch index is known or beyond."""
    span = int(rows[:, 0].min()), int(rows[:, 0].max()) + beyond
    flags = agreed(place, best_rows, scores, mx.array(rows), span, k)
    np.testing.assert_array_equal(np.array(flags), best(scores, rows[:, 0], k))


@places
@pytest.mark.parametrize(
    "dtype", (mx.float32, mx.float16, mx.bfloat16, mx.int32), ids=str
)
@pytest.mark.parametrize("k, batches", ((1, 4), (40, 1), (40, 4), (299, 1)))
def test_rows(place, k, batches, dtype):
    """Few rows or all but one, of elements in order or mixed."""
    scores = scores_of(300, dtype)
    assert_best(place, rows_of(300, batches), scores, k)
    assert_best(place, rows_of(300, batches, True), scores, k, beyond=batches > 1)


@places
def test_far_batch_indices(place):
    """So many elements that a key has no bits left for a row's number."""
    rows = rows_of(200, 4)
    rows[:, 0] *= (1 << 31) // 4
    assert_best(place, rows, scores_of(200, mx.float32), 20)


@places
@pytest.mark.parametrize(
    "n, k", ((0, 0), (0, 1), (1, 0), (1, 1), (250, 0), (250, 30), (250, 250))
)
@pytest.mark.parametrize("batches", (1, 3))
def test_top_k(place, batches, k, n):
    """Rows, features and gradients; a set of at most k rows is kept as it is."""
    rows = rows_of(n, batches) if n else np.zeros((0, 4), np.int32)
    feats = mx.random.normal((n, 3), key=mx.random.key(0))
    scores = scores_of(n, mx.float16)
    mx.eval(feats)

    def run():
        x = ml.SparseTensor(mx.array(rows), feats)
        y = ops.top_k(x, scores, k)
        assert (y.key is x.key) == (len(y) == n)

        def loss(feats):
            return ops.top_k(x.replace(feats), scores, k).feats.square().sum()

        return y.coords, y.feats, mx.grad(loss)(feats)

    coords, best_feats, grad = agreed(place, run)
    mask = best(scores, rows[:, 0], k)
    np.testing.assert_array_equal(np.array(coords), rows[mask])
    np.testing.assert_array_equal(np.array(best_feats), np.array(feats)[mask])
    wanted = 2 * np.array(feats) * mask[:, None]
    np.testing.assert_allclose(np.array(grad), wanted, 1e-6)


def test_rows_that_are_no_set_are_refused():
    x = ml.SparseTensor(mx.array([[0, 1, 1], [0, 1, 1], [-1, 0, 0]]), mx.ones((3, 1)))
    with pytest.raises(ValueError, match="batch indices"):
        ops.top_k(x, mx.arange(3).astype(mx.float32), 1)

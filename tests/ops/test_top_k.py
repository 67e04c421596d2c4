"""The best rows of each batch element, against NumPy, on every backend."""

import mlx.core as mx
import numpy as np
import pytest
from places import HERE, agreed

import mlx_lattice as ml
from mlx_lattice import ops, sync
from mlx_lattice.geometry.lattice import best_rows

places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
dtypes = pytest.mark.parametrize(
    "dtype", (mx.float32, mx.float16, mx.bfloat16, mx.int32), ids=str
)
SPECIAL = np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 6e4, -6e4


def rows_of(n, batches, is_sorted=False, seed=0):
    """Distinct rows; the second batch element is empty, where there are several."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-20, 20, (2 * n, 4))
    rows[:, 0] = rng.choice([b for b in range(batches) if b != 1], 2 * n)
    rows = rng.permutation(np.unique(rows, axis=0))[:n].astype(np.int32)
    return np.unique(rows, axis=0) if is_sorted else rows


def scores_of(n, dtype, seed=1):
    """Many that are equal, and those that order is not plain of."""
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


@places
@dtypes
@pytest.mark.parametrize("k", (1, 40, 299))
@pytest.mark.parametrize("batches", (1, 4))
def test_rows(place, batches, k, dtype):
    """Tens of them or all but one, in the rows' order or mixed elements."""
    for is_sorted in (False, True):
        rows = rows_of(300, batches, is_sorted)
        scores, coords = scores_of(len(rows), dtype), mx.array(rows)
        wanted = best(scores, rows[:, 0], k)
        span = int(rows[:, 0].min()), int(rows[:, 0].max())
        for batches_in in (span, (span[0], span[1] + (batches > 1))):
            got = agreed(place, best_rows, scores, coords, batches_in, k)
            np.testing.assert_array_equal(np.array(got), wanted)


@places
def test_far_batch_indices(place):
    """So many elements that a key has no bits for a row's number too."""
    rows = rows_of(200, 4)
    rows[:, 0] *= (1 << 31) // 4
    scores = scores_of(200, mx.float32)
    span = int(rows[:, 0].min()), int(rows[:, 0].max())
    facts = scores, mx.array(rows), span, 20
    got = agreed(place, best_rows, *facts)
    np.testing.assert_array_equal(np.array(got), best(scores, rows[:, 0], 20))


@places
@pytest.mark.parametrize("n", (0, 1, 250))
@pytest.mark.parametrize("k", (0, 1, 30, 250))
@pytest.mark.parametrize("batches", (1, 3))
def test_top_k(place, batches, k, n):
    """Rows, features and gradients; a set of no more than k rows is kept as it is."""
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

    coords, kept, grad = agreed(place, run)
    mask = best(scores, rows[:, 0], k)
    np.testing.assert_array_equal(np.array(coords), rows[mask])
    np.testing.assert_array_equal(np.array(kept), np.array(feats)[mask])
    wanted = 2 * np.array(feats) * mask[:, None]
    np.testing.assert_allclose(np.array(grad), wanted, 1e-6)


def test_reads(monkeypatch):
    """Of one batch element the number of rows is known; of several once a set."""
    real, seen = sync.read, []
    monkeypatch.setattr(sync, "read", lambda *a: seen.append(a) or real(*a))
    for batches, reads in ((1, 0), (3, 2)):
        rows = rows_of(200, batches)
        x = ml.SparseTensor(mx.array(rows), mx.ones((200, 2)))
        x.coordinate_set.index  # noqa: B018
        seen.clear()
        y = ops.top_k(x, scores_of(200, mx.float32), 20)
        assert len(seen) <= reads and x.manager[y.key].settled
        seen.clear()
        assert len(ops.top_k(x, scores_of(200, mx.float32, 2), 30)) == 30 * (
            len(np.unique(rows[:, 0]))
        )
        most = np.unique(rows[:, 0], return_counts=True)[1].max()
        assert (ops.top_k(x, x.feats[:, 0], int(most)).key is x.key) and not seen


def test_a_wrong_set_is_said_to_be():
    x = ml.SparseTensor(mx.array([[0, 1, 1], [0, 1, 1], [-1, 0, 0]]), mx.ones((3, 1)))
    with pytest.raises(ValueError, match="batch indices"):
        ops.top_k(x, mx.arange(3).astype(mx.float32), 1)

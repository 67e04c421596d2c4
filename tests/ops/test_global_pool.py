"""Pooling of whole batch elements against the float64 oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from pooled import distinct, route, tensor  # noqa: F401 (a fixture for every test here)

import mlx_lattice as ml
from mlx_lattice import ops, sync
from mlx_lattice.ops import pool


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("mode", ("max", "sum", "avg"))
def test_global_pool(mode, shuffled, dtype):
    rng = np.random.default_rng(0)
    coords = cases.geometry("batches", 3, 80)
    coords = coords[np.lexsort(coords.T[::-1])]
    if shuffled:
        coords = rng.permutation(coords)
    size = int(coords[:, 0].max()) + 3  # two empty elements at the end
    x = tensor(coords, distinct(len(coords), 3), dtype, batch_size=size)
    exact = ref.to_numpy(x.feats).astype(np.float64)
    run = getattr(ops, f"global_{mode}_pool")
    y = run(x)
    assert y.shape == (size, 3) and y.dtype == x.dtype
    batch = coords[:, 0]
    ref.assert_close(y, ref_rows.global_pool(exact, batch, size, mode), dtype)

    dy = mx.array(cases.features(size, 3, 1)).astype(x.dtype)
    dx = mx.grad(lambda f: (run(x.replace(f)) * dy).sum())(x.feats)
    share, dy = np.zeros_like(exact), ref.to_numpy(dy)
    for b in set(batch.tolist()):
        rows = np.flatnonzero(batch == b)
        if mode == "max":
            at = rows[exact[rows].argmax(0)]
            share[at, np.arange(3)] = 1
        else:
            share[rows] = 1 if mode == "sum" else 1 / len(rows)
    ref.assert_close(dx, share * dy[batch], dtype)
    twice = mx.grad(
        lambda f: (
            mx.grad(lambda g: (run(x.replace(g)).astype(mx.float32) ** 2).sum())(f) ** 2
        ).sum()
    )
    assert mx.isfinite(twice(x.feats / 8)).all().item()


@pytest.mark.parametrize("mode", ("max", "sum", "avg"))
def test_global_pool_of_nothing(mode):
    run = getattr(ops, f"global_{mode}_pool")
    none = np.zeros((0, 4), np.int32)
    for size, given in ((1, {}), (0, {"batch_size": 0}), (3, {"batch_size": 3})):
        x = tensor(none, np.zeros((0, 5)), **given)
        np.testing.assert_array_equal(np.array(run(x)), np.zeros((size, 5)))
    assert mx.grad(lambda f: run(x.replace(f)).sum())(x.feats).shape == (0, 5)


def test_long_sums_do_not_drift():
    n = 300_000
    coords = np.stack([np.zeros(n, np.int32), np.arange(n, dtype=np.int32)], axis=1)
    feats = np.random.default_rng(0).random((n, 2), np.float32)
    x = tensor(coords, feats)
    expected = feats.astype(np.float64).mean(axis=0)[None]
    np.testing.assert_allclose(np.array(ops.global_avg_pool(x)), expected, rtol=2e-6)


def test_the_rows_of_one_element_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(pool, "_read_starts", lambda *_: pytest.fail("read"))
    rows = mx.array([[0, 5, 1, 2], [0, -3, 4, 4], [0, 5, 0, 2]])
    feats = mx.array(cases.features(3, 2))
    y = ops.global_sum_pool(ml.SparseTensor(rows, feats))
    ref.assert_close(y, np.array(feats).sum(axis=0, keepdims=True))


@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4, 9, 10, 17))
def test_starts_of_elements(size, shuffled, monkeypatch):
    """They are read at once, empty elements among them."""
    rng = np.random.default_rng(size)
    coords = np.unique(rng.integers(0, 9, (60, 4)), axis=0).astype(np.int32)
    coords[:, 0] = rng.choice([*range(0, size - 1, 2), size - 1], len(coords))
    coords = np.unique(coords, axis=0)
    coords = rng.permutation(coords) if shuffled else coords
    x = tensor(coords, np.ones((len(coords), 1)), batch_size=size)
    x.coordinate_set.index  # noqa: B018
    real, reads = sync.read, []
    monkeypatch.setattr(sync, "read", lambda *a: reads.append(a) or real(*a))
    found = pool.batch_rows(x)
    assert found.starts == (0, *np.cumsum(np.bincount(coords[:, 0], minlength=size)))
    order = np.arange(len(coords)) if found.order is None else np.array(found.order)
    assert (found.order is None) != shuffled
    np.testing.assert_array_equal(coords[order, 0], np.sort(coords[:, 0]))
    assert len(reads) == 1 + shuffled

"""Rows that operations keep, and their derivatives, on every backend that is here."""

import cases
import mlx.core as mx
import numpy as np
import pytest
from places import HERE, agreed

import mlx_lattice as ml
from mlx_lattice import ops

places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CHANNELS = 5


def rows_of(name, n):
    coords = cases.geometry(name, 3, n).astype(np.int32).reshape(-1, 4)
    return np.random.default_rng(n).permutation(coords)


def tensor(coords, seed=0, dtype=mx.float32):
    feats = np.random.default_rng(seed).normal(size=(len(coords), CHANNELS))
    return ml.SparseTensor(mx.array(coords), mx.array(feats.astype(np.float32))).astype(
        dtype
    )


def exact(array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


@places
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", (0.0, 0.4, 1.0))
@pytest.mark.parametrize(
    ("name", "n"), (("negative", 60), ("batches", 90), ("far", 1), ("empty", 0))
)
def test_prune(place, name, n, share, dtype):
    """Rows in their order, gradients of every order at once; the bits are moved."""
    coords = rows_of(name, n)
    mask = np.random.default_rng(1).random(len(coords)) < share
    x = tensor(coords, dtype=dtype)
    weight = tensor(coords[mask], 1, dtype).feats
    mx.eval(x.feats, weight)

    def both():
        fresh = ml.SparseTensor(mx.array(coords), x.feats)
        y = ops.prune(fresh, mx.array(mask))

        def loss(feats, w):
            kept = ops.prune(fresh.replace(feats), mx.array(mask)).feats
            return (w * kept * kept).sum()

        slope = mx.grad(loss)
        again = mx.grad(lambda f: (slope(f, weight) * x.feats).sum())
        _, (along,) = mx.jvp(
            lambda f: ops.prune(fresh.replace(f), mx.array(mask)).feats,
            [x.feats],
            [x.feats + 1],
        )
        return y.coords, y.feats, slope(x.feats, weight), again(x.feats), along

    kept, feats, slope, again, along = agreed(place, both)
    given = exact(x.feats)
    np.testing.assert_array_equal(np.array(kept), coords[mask])
    np.testing.assert_array_equal(exact(feats), given[mask])
    np.testing.assert_array_equal(exact(along), exact(x.feats + 1)[mask])
    w = np.zeros_like(given)
    w[mask] = exact(weight)
    for got, wanted in ((slope, 2 * w * given), (again, 2 * w * given)):
        np.testing.assert_allclose(exact(got), wanted, rtol=2e-2, atol=2e-2)
        assert not exact(got)[~mask].any()


@places
def test_joins_and_their_gradients(place):
    """Union, intersection and another order of the rows, against NumPy."""
    coords = rows_of("negative", 80)
    mine, theirs = coords[:50], coords[20:][::-1].copy()
    x, y = tensor(mine), tensor(theirs, 1)
    turned = tensor(mine[::-1].copy(), 2)
    mx.eval(x.feats, y.feats, turned.feats)

    def all_of_them():
        def run(a, b, c):
            first, second = x.replace(a), y.replace(b)
            joined = ops.union(first, second)
            return (
                joined.feats,
                ops.intersection(first, second).feats,
                ops.difference(first, second).feats,
                (first + turned.replace(c)).feats,
            )

        given = [x.feats, y.feats, turned.feats]
        found = run(*given)
        return *found, *mx.vjp(run, given, [f * f for f in found])[1]

    found = agreed(place, all_of_them)
    a, b, c = (exact(t.feats) for t in (x, y, turned))
    listed = sorted({*map(tuple, mine.tolist()), *map(tuple, theirs.tolist())})
    first = {tuple(row): i for i, row in enumerate(mine.tolist())}
    second = {tuple(row): i for i, row in enumerate(theirs.tolist())}
    common = [row for row in first if row in second]
    alone = [row for row in first if row not in second]
    da, db, dc = np.zeros_like(a), np.zeros_like(b), np.zeros_like(c)
    union, shared, rest = [], [], []
    for row in listed:
        total = sum(v[at[row]] for v, at in ((a, first), (b, second)) if row in at)
        union.append(total)
        for d, at in ((da, first), (db, second)):
            if row in at:
                d[at[row]] += total**2
    for row in common:
        i, j = first[row], second[row]
        shared.append(a[i] * b[j])
        da[i] += (a[i] * b[j]) ** 2 * b[j]
        db[j] += (a[i] * b[j]) ** 2 * a[i]
    for row in alone:
        rest.append(a[first[row]])
        da[first[row]] += a[first[row]] ** 2
    summed = a + c[::-1]
    da, dc = da + summed**2, dc + summed[::-1] ** 2
    expected = union, shared, rest, summed, da, db, dc
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(exact(got), np.array(wanted), rtol=1e-4, atol=1e-4)

"""Joins of two sets and what they share, against NumPy, on every backend."""

import mlx.core as mx
import numpy as np
import pytest
from places import HERE, agreed

import mlx_lattice as ml
from mlx_lattice import ops

places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)
CHANNELS = 3


@places
def test_rows_of_flags(place):
    """Bool features move from row to row, and stay bool."""
    rng = np.random.default_rng(5)
    rows = drawn(rng, 90)
    flags = rng.random((len(rows), 8)) < 0.5
    mask, order = rng.random(len(rows)) < 0.6, rng.permutation(len(rows))
    at = {tuple(row): flag for row, flag in zip(rows.tolist(), flags, strict=True)}

    def moved():
        x = ml.SparseTensor(mx.array(rows), mx.array(flags))
        turned = ml.SparseTensor(mx.array(rows[order]), mx.array(flags[order]))
        part = ops.prune(x, mx.array(mask))
        fine = ops.channel_to_space(x)
        results = {
            "pruned": part,
            "aligned": ops.align(turned, x),
            "rest": ops.difference(x, part),
            "joined": ops.union(part, ops.difference(x, part)),
            "back": ops.space_to_channel(fine),
        }
        assert fine.dtype == mx.bool_ and ops.cat([x, x]).dtype == mx.bool_
        assert all(y.dtype == mx.bool_ for y in results.values())
        sequences, _ = ops.to_sequences(x)
        assert sequences.dtype == mx.bool_
        assert len(ops.unbatch(ops.batch([part, x]))) == 6
        both = [a for y in results.values() for a in (y.coords, y.feats)]
        return [*both, sequences]

    *both, _ = agreed(place, moved)
    sizes = [mask.sum(), len(rows), (~mask).sum(), len(rows), len(rows)]
    for found, feats, size in zip(both[::2], both[1::2], sizes, strict=True):
        assert len(found) == size
        expected = [at[tuple(row)] for row in np.array(found).tolist()]
        np.testing.assert_array_equal(np.array(feats), expected)


def test_three_sets_are_joined():
    rng = np.random.default_rng(3)
    rows = drawn(rng, 150)
    parts = [rows[:70], rows[40:110], rows[90:]]
    manager = ml.CoordinateManager()
    given = [tensor(p, i, manager=manager) for i, p in enumerate(parts)]
    made = np.unique(rows, axis=0)
    each = [wide(x.coords, exact(x.feats), made) for x in given]
    for joined, expected in (
        (ops.union(*given), sum(each)),
        (
            ops.union(*given, combine=mx.maximum),
            np.maximum(np.maximum(*each[:2]), each[2]),
        ),
        (ops.union(*given, mx.subtract), each[0] - each[1] - each[2]),
    ):
        np.testing.assert_array_equal(np.array(joined.coords), made)
        np.testing.assert_allclose(exact(joined.feats), expected, 1e-6, 1e-6)
    with pytest.raises(TypeError, match="y must be a SparseTensor; got array"):
        ops.union(*given, given[0].feats)


def drawn(rng, n, batches=3, side=7):
    """Distinct rows in no order; the last batch elements may be empty."""
    rows = rng.integers(-side, side, (n, 4))
    rows[:, 0] = rng.integers(0, batches, n)
    return rng.permutation(np.unique(rows, axis=0)).astype(np.int32)


def tensor(rows, seed=0, dtype=mx.float32, **facts):
    feats = np.random.default_rng(seed).normal(size=(len(rows), CHANNELS))
    feats = mx.array(feats.astype(np.float32)).astype(dtype)
    return ml.SparseTensor(mx.array(rows), feats, **facts)


def exact(array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def wide(rows, feats, made):
    """Features of rows on those that were made, zeros of others."""
    at = {tuple(row): i for i, row in enumerate(np.array(rows).tolist())}
    found = np.zeros((len(made), feats.shape[1]))
    for o, row in enumerate(np.array(made).tolist()):
        if tuple(row) in at:
            found[o] = feats[at[tuple(row)]]
    return found


def check_union(x, y, joined):
    rows = np.concatenate([np.array(x.coords), np.array(y.coords)])
    rows = np.unique(rows, axis=0)
    np.testing.assert_array_equal(np.array(joined.coords), rows)
    total = wide(x.coords, exact(x.feats), rows) + wide(y.coords, exact(y.feats), rows)
    tolerance = 1e-6 if x.dtype == mx.float32 else 2e-2
    np.testing.assert_allclose(exact(joined.feats), total, tolerance, tolerance)


PAIRS = {
    "apart": lambda a: (a[: len(a) // 2], a[len(a) // 2 :]),
    "overlapping": lambda a: (a[: 2 * len(a) // 3], a[len(a) // 3 :]),
    "within": lambda a: (a[: len(a) // 3], a),
    "around": lambda a: (a, a[::2]),
    "turned": lambda a: (a, a[::-1]),
    "one": lambda a: (a[:1], a[1:2]),
    "none": lambda a: (a[:0], a),
    "neither": lambda a: (a[:0], a[:0]),
}


@places
@pytest.mark.parametrize("is_sorted", (False, True), ids=("mixed", "sorted"))
@pytest.mark.parametrize("pair", PAIRS)
def test_union(place, pair, is_sorted):
    """Of one manager and of two; gradients; the second call finds what was made."""
    rng = np.random.default_rng(len(pair))
    first, second = (np.ascontiguousarray(a) for a in PAIRS[pair](drawn(rng, 160)))
    if is_sorted:
        first, second = np.unique(first, axis=0), np.unique(second, axis=0)
    feats = tensor(first).feats, tensor(second, 1).feats
    mx.eval(feats)

    def joined(is_one=True):
        x = tensor(first)
        y = tensor(second, 1, manager=x.manager if is_one else None)
        if is_sorted:  # as of rows that the library made
            x.coordinate_set.is_sorted = y.coordinate_set.is_sorted = True

        def run(a, b):
            return ops.union(x.replace(a), y.replace(b)).feats

        made = ops.union(x, y)
        assert ops.union(x, y).key is made.key
        grads = mx.vjp(run, list(feats), [run(*feats) * 2])[1]
        return x, y, made, grads

    def both():
        found = [joined(is_one) for is_one in (True, False)]
        return [(made.coords, made.feats, *grads) for *_, made, grads in found]

    for coords, sums, *grads in agreed(place, both):
        x, y = tensor(first), tensor(second, 1)
        check_union(x, y, ml.SparseTensor(coords, sums))
        for given, grad in zip((x, y), grads, strict=True):
            twice = 2 * wide(coords, exact(sums), given.coords)
            np.testing.assert_allclose(exact(grad), twice, 1e-5, 1e-5)
    x, y, made, _ = joined()
    has = pair in ("within", "none", "neither"), pair in ("around", "turned", "neither")
    kept = {"within": y, "none": y, "around": x, "turned": x, "neither": x}
    if is_sorted and any(has):  # there is nothing to make
        assert made.key == kept[pair].key
    else:
        assert made.key not in (x.key, y.key)


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.bfloat16), ids=str)
@places
def test_what_two_sets_share(place, dtype):
    """Intersection and difference; of sets of which one holds the other, too."""
    rng = np.random.default_rng(3)
    rows = drawn(rng, 140)
    for first, second in ((rows[:80], rows[40:]), (rows[:50], rows), (rows, rows[:0])):

        def both(first=first, second=second):
            x, y = tensor(first, 0, dtype), tensor(second, 1, dtype)
            made = ops.intersection(x, y, mx.add), ops.difference(x, y)
            again = ops.intersection(x, y, mx.add), ops.difference(x, y)
            for a, b in zip(made, again, strict=True):
                assert a.key is b.key and mx.array_equal(a.feats, b.feats)
            assert (made[0].key is x.key) == (len(made[0]) == len(x))
            return [(each.coords, each.feats) for each in made]

        (common, sums), (left, others) = agreed(place, both)
        held = set(map(tuple, second.tolist()))
        has = np.array([tuple(row) in held for row in first.tolist()], bool)
        x, y = tensor(first, 0, dtype), tensor(second, 1, dtype)
        np.testing.assert_array_equal(np.array(common), first[has])
        np.testing.assert_array_equal(np.array(left), first[~has])
        np.testing.assert_array_equal(exact(others), exact(x.feats)[~has])
        total = exact(x.feats)[has] + wide(second, exact(y.feats), first[has])
        np.testing.assert_allclose(exact(sums), total, 2e-2, 2e-2)


def test_repeated_rows_are_an_error():
    rows = drawn(np.random.default_rng(1), 30)
    x, twice = tensor(rows), tensor(np.concatenate([rows, rows[:1]]))
    for join in (ops.union, ops.intersection, ops.difference):
        for pair in ((x, twice), (twice, x)):
            with pytest.raises(ValueError, match="must be unique"):
                join(*pair)


@pytest.mark.parametrize("is_turned", (False, True))
def test_rows_that_repeat_are_aligned_with_none(is_turned):
    """Each is among the other's rows, and there are as many of them."""
    rows = drawn(np.random.default_rng(8), 20)
    x, y = tensor(rows), tensor(np.concatenate([rows[:1], rows[:-1]]), 1)
    with pytest.raises(ValueError, match="unique; rows 0 and 1 are both"):
        ops.align(*((y, x) if is_turned else (x, y)))


@places
@pytest.mark.parametrize("order", ("sorted", "mixed"))
def test_unbatch(place, order):
    """Rows of an element in their order, its grid, gradients; one read for all."""
    rows = drawn(np.random.default_rng(8), 200, batches=4)
    rows = rows[rows[:, 0] != 1]
    rows = np.unique(rows, axis=0) if order == "sorted" else rows
    feats = tensor(rows).feats
    mx.eval(feats)

    def apart():
        x = ml.SparseTensor(mx.array(rows), feats, (1, 2, 1), batch_size=6)

        def loss(feats):
            parts = ops.unbatch(x.replace(feats))
            return sum((b + 1) * part.feats.sum() for b, part in enumerate(parts))

        parts = ops.unbatch(x)
        assert all(part.stride == x.stride and part.batch_size == 1 for part in parts)
        assert all(part.coordinate_set.settled for part in parts)
        return [(p.coords, p.feats) for p in parts], mx.grad(loss)(feats)

    parts, grad = agreed(place, apart)
    assert len(parts) == 6
    for element, (coords, part) in enumerate(parts):
        here = rows[:, 0] == element
        np.testing.assert_array_equal(np.array(coords), rows[here] * [0, 1, 1, 1])
        np.testing.assert_array_equal(np.array(part), np.array(feats)[here])
    np.testing.assert_array_equal(np.array(grad), rows[:, :1] + np.ones((1, CHANNELS)))

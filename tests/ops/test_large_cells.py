"""Maxima of cells of more places than a table has room for: rows name their cells."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import ops

SIZE = 1000  # of a cell of 10^9 places


@pytest.fixture(autouse=True, params=("fastest", "portable"))
def route(request):
    """Every promise holds for the device's own kernels and for MLX operations."""
    if request.param == "portable":
        request.getfixturevalue("portable_only")


def scan(n=200, channels=3, levels=4):
    """Rows in no order, over several cells of SIZE, and features with many ties."""
    rng = np.random.default_rng(0)
    coords = rng.integers(-1500, 1500, (n, 3))
    coords = np.unique(np.insert(coords, 0, rng.integers(0, 3, n), axis=1), axis=0)
    coords = rng.permutation(coords).astype(np.int32)
    feats = rng.integers(-levels, 0, (len(coords), channels)).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats)), coords, feats


def winners(coords, feats):
    """(cells, rows that win, offsets of these), by loops."""
    cells = coords // np.array((1, SIZE, SIZE, SIZE))
    unique = np.unique(cells, axis=0)
    places = coords[:, 1:] % SIZE @ np.array((SIZE * SIZE, SIZE, 1))
    rows = np.empty((len(unique), feats.shape[1]), np.int64)
    for at, cell in enumerate(unique):
        inside = np.flatnonzero((cells == cell).all(axis=1))
        inside = inside[np.argsort(places[inside])]
        rows[at] = inside[np.argmax(feats[inside], axis=0)]
    return unique, rows, places[rows]


def test_maxima_and_the_first_of_equal_ones():
    x, coords, feats = scan()
    y, indices = ops.max_pool3d(x, SIZE, padding=0, return_indices=True)
    cells, rows, offsets = winners(coords, feats)
    np.testing.assert_array_equal(np.array(y.coords), cells)
    np.testing.assert_array_equal(np.array(indices.rows), rows)
    np.testing.assert_array_equal(np.array(indices.offsets), offsets)
    wanted = np.take_along_axis(feats, rows, 0)
    np.testing.assert_array_equal(np.array(y.feats), wanted)
    back = np.zeros_like(feats)
    np.put_along_axis(back, rows, wanted, 0)
    up = ops.max_unpool(y, indices)
    np.testing.assert_array_equal(np.array(up.feats), back)


def test_gradients_go_to_the_rows_that_won():
    x, coords, feats = scan()
    _, rows, _ = winners(coords, feats)

    def run(f):
        return ops.max_pool3d(x.replace(f), SIZE, padding=0).feats

    wanted = np.zeros_like(feats)
    np.put_along_axis(wanted, rows, 2 * np.take_along_axis(feats, rows, 0), 0)
    for call in (run, mx.compile(run)):
        gradient = mx.grad(lambda f, call=call: call(f).square().sum())
        np.testing.assert_array_equal(np.array(gradient(x.feats)), wanted)
    step = mx.random.normal(feats.shape)
    ((_, (made,)), wanted) = (
        mx.jvp(run, [x.feats], [step]),
        np.take_along_axis(np.array(step), rows, 0),
    )
    np.testing.assert_array_equal(np.array(made), wanted)


def test_listed_offsets_keep_their_order(monkeypatch):
    """A cell's places in any order: the first of equal maxima goes by that."""
    rng = np.random.default_rng(1)
    places = rng.permutation(np.stack(np.indices((9, 8, 8)), -1).reshape(-1, 3))
    coords = np.unique(rng.integers(-20, 20, (300, 4)), axis=0).astype(np.int32)
    coords[:, 0] = abs(coords[:, 0]) % 2
    coords = rng.permutation(np.unique(coords, axis=0))
    feats = rng.integers(0, 3, (len(coords), 2)).astype(np.float32)
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(coords))
    listed = [tuple(map(int, place)) for place in places]
    relation = manager.kernel_relation(key, offsets=listed, stride=(9, 8, 8))
    rank = {place: at for at, place in enumerate(listed)}
    step = np.array((1, 9, 8, 8))
    cells = [tuple(c) for c in (coords // step).tolist()]
    ranks = [rank[tuple(c)] for c in (coords % step)[:, 1:].tolist()]
    wanted = np.zeros_like(feats)
    for cell in set(cells):
        inside = [i for i, c in enumerate(cells) if c == cell]
        inside.sort(key=ranks.__getitem__)
        for channel in range(2):
            wanted[inside[int(np.argmax(feats[inside, channel]))], channel] = 1
    grad = mx.grad(lambda f: ops.sparse_pool(f, relation, "max").sum())
    np.testing.assert_array_equal(np.array(grad(mx.array(feats))), wanted)


@pytest.mark.parametrize("size", (1001, (1000, 1000, 999)))
def test_kernels_that_overlap_are_refused(size):
    """From the centre of a row on they fill no cells, and would list 10^9 offsets."""
    x, *_ = scan()
    with pytest.raises(ValueError, match="offsets, and no more than 1,048,576"):
        ops.max_pool3d(x, size, stride=1000)

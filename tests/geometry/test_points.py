"""Cells of points, and weights of the cells around them, against NumPy everywhere."""

from functools import partial
from itertools import product

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from emulated_cuda import EMULATED, place_of
from places import HERE, agreed

from mlx_lattice.geometry.points import (
    NO_CELL,
    cells_of,
    corner_weights,
    reduce_segments,
)


@pytest.fixture(params=[*HERE, EMULATED], ids=lambda place: place.name)
def place(request):
    return place_of(request)


def points(n, columns, seed=0):
    """Float32 points, some of them on the lattice itself."""
    rng = np.random.default_rng([seed, n, columns])
    made = rng.normal(0, 9, (n, columns)).astype(np.float32)
    made[::3] = np.round(made[::3])
    return made


@pytest.mark.parametrize("has_batch", (False, True))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_cells(place, dims, has_batch):
    rng = np.random.default_rng(dims)
    for n, start, size in product((1, 300), (False, True), (False, True)):
        columns = dims if has_batch else 1 + dims
        at = points(n, columns)
        batch = rng.integers(0, 5, n).astype(np.int32) if has_batch else None
        first = rng.normal(size=columns).astype(np.float32) if start else None
        step = rng.uniform(0.3, 3, columns).astype(np.float32) if size else None
        wanted = at - first if start else at
        wanted = np.floor(wanted / step if size else wanted).astype(np.int32)
        if has_batch:
            wanted = np.concatenate([batch[:, None], wanted], axis=1)
        given = [None if a is None else mx.array(a) for a in (at, batch)]
        given += [None if a is None else tuple(a.tolist()) for a in (first, step)]
        got = agreed(place, partial(cells_of, *given))
        assert got.dtype == mx.int32
        np.testing.assert_array_equal(np.array(got), wanted)


def test_what_int32_does_not_hold(place):
    """The greatest float32 below 2^31 is held, and so is -2^31."""
    at = np.float32([np.nan, np.inf, -np.inf, 1e12, 2**31, 2147483520, -(2**31), -3e9])
    rows = mx.array(np.stack([np.zeros_like(at), at], axis=1))
    got = agreed(place, lambda: cells_of(rows))
    wanted = [NO_CELL] * 5 + [2147483520, -(2**31), NO_CELL]
    np.testing.assert_array_equal(np.array(got)[:, 1], wanted)
    np.testing.assert_array_equal(np.array(got)[:, 0], 0)


def weights_of(beyond, table, renormalise):
    """The same in float64, a corner after another."""
    dims, beyond = beyond.shape[1], np.asarray(beyond, np.float64)
    made = np.zeros(table.shape)
    for k, corner in enumerate(product((0, 1), repeat=dims)):
        share = np.where(np.array(corner) == 1, beyond, 1 - beyond).prod(axis=1)
        made[:, k] = np.where(table[:, k] >= 0, share, 0)
    if renormalise:
        total = made.sum(axis=1, keepdims=True)
        made /= np.where(total > 0, total, 1)
    return made


@pytest.mark.parametrize("renormalise", (False, True))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_weights(place, dims, renormalise):
    rng = np.random.default_rng(dims)
    for n, columns, has_size in ((1, dims, False), (300, 1 + dims, True)):
        at = points(n, columns, 1)
        size = rng.uniform(0.5, 2, columns).astype(np.float32) if has_size else None
        table = rng.integers(-1, 3, (n, 2**dims)).astype(np.int32)
        table[::4] = -1  # of points that have no cell around them
        cells = np.floor((at / size if has_size else at)[:, -dims:]).astype(np.int32)
        cells = np.concatenate([np.zeros((n, 1), np.int32), cells], axis=1)
        step, beyond = None, at[:, -dims:] - cells[:, 1:]
        given = [mx.array(at), mx.array(cells), mx.array(table), renormalise]
        if has_size:
            step = tuple(size.tolist())
            beyond = (at / size)[:, -dims:] - cells[:, 1:]
        got = agreed(place, partial(corner_weights, *given, step))
        wanted = weights_of(beyond, table, renormalise)
        np.testing.assert_allclose(np.array(got), wanted, rtol=1e-5, atol=1e-6)
        given[:2] = mx.array(beyond), None
        got = agreed(place, partial(corner_weights, *given))
        np.testing.assert_allclose(np.array(got), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalise", (False, True))
def test_derivatives_of_weights(place, renormalise):
    rng = np.random.default_rng(0)
    at = rng.uniform(0.1, 0.9, (40, 3)).astype(np.float32)
    table = rng.integers(-1, 5, (40, 8)).astype(np.int32)
    dw, move = rng.normal(size=(2, 40, 8)).astype(np.float32)
    move = move[:, :3]
    given = [mx.array(a) for a in (at, dw, move)]

    def run(p):
        return corner_weights(p, None, mx.array(table), renormalise)

    def derivatives():
        p, dy, dp = given
        _, (back,) = mx.vjp(run, [p], [dy])
        return back, mx.jvp(run, [p], [dp])[1][0]

    back, along = agreed(place, derivatives)
    step = 1e-6

    def slope(direction):
        above, below = (
            weights_of(at + by * direction.astype(np.float64), table, renormalise)
            for by in (step, -step)
        )
        return (above - below) / (2 * step)

    ref.assert_close(along, slope(move), slack=10)
    for axis in range(3):
        wanted = (slope(np.eye(3)[axis]) * dw).sum(axis=1)
        ref.assert_close(np.array(back)[:, axis], wanted, slack=10)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_means_of_segments(place, dtype):
    """Exact where all rows of a segment are alike; shares go back."""
    rng = np.random.default_rng(3)
    rows = rng.integers(-1, 9, 500).astype(np.int32)
    rows[rows == 4] = 3
    x = mx.array(rng.normal(size=(500, 5)).astype(np.float32)).astype(
        getattr(mx, dtype)
    )
    dy = mx.array(rng.normal(size=(9, 5)).astype(np.float32)).astype(x.dtype)

    def run():
        mean = partial(reduce_segments, rows=mx.array(rows), segments=9, reduce="mean")
        (y,), (dx,) = mx.vjp(mean, [x], [dy])
        return y, dx, mx.jvp(mean, [x], [x])[1][0]

    # MLX's own scatters add by atomics on CUDA.
    steady = place.name != "mlx" or not mx.cuda.is_available()
    y, dx, along = agreed(place, run, steady=steady)
    exact, share = ref.to_numpy(x).astype(np.float64), np.zeros((9, 500))
    for i in range(9):
        share[i] = (rows == i) / max(1, (rows == i).sum())
    for got in (y, along):
        assert got.dtype == x.dtype
        ref.assert_close(got, share @ exact, dtype)
    ref.assert_close(dx, share.T @ ref.to_numpy(dy).astype(np.float64), dtype)
    thirds = mx.full((3, 1), 1 / 3).astype(x.dtype)
    zeros = mx.zeros((3,), dtype=mx.int32)
    if steady:
        mean = agreed(place, lambda: reduce_segments(thirds, zeros, 1, "mean"))
        assert mean.item() == thirds[0].item()

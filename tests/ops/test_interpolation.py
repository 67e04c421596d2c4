"""Features at points, and of voxels at theirs: against the float64 oracle."""

from unittest.mock import patch

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from pooled import route, tensor  # noqa: F401 (a fixture for every test here)

import mlx_lattice as ml
from mlx_lattice import nn, ops


@pytest.mark.parametrize("renormalise", (False, True))
@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_linear_interpolation(dims, renormalise):
    rng = np.random.default_rng(dims)
    coords = cases.geometry("batches", dims, 80)
    feats = cases.features(len(coords), 3)
    near = coords[rng.integers(0, len(coords), 50)].astype(np.float64)
    near[:, 1:] += rng.uniform(-1.2, 1.2, (50, dims))
    far = np.full((1, 1 + dims), 900.0)
    points = np.concatenate([near, far, coords[:3]]).astype(np.float32)
    x = tensor(coords, feats)

    def run(f, p):
        return ops.interpolate(x.replace(f), p, renormalise=renormalise)

    def oracle(f, p):
        return ref_rows.interpolate(coords, f, p[:, 1:], p[:, 0], normalise=renormalise)

    y = run(x.feats, mx.array(points))
    ref.assert_close(y, oracle(feats, points.astype(np.float64)))

    dy = cases.features(len(points), 3, 1)

    def loss(f, p):
        return (run(f, p) * mx.array(dy)).sum()

    df, dp = mx.grad(loss, (0, 1))(x.feats, mx.array(points))
    unit = np.eye(len(coords))
    weights = oracle(unit, points.astype(np.float64))
    ref.assert_close(df, weights.T @ dy)
    # Central differences in float64; points on the lattice itself have a kink.
    exact, step = points.astype(np.float64)[:51], 1e-6
    for axis in range(1, 1 + dims):
        move = np.zeros(1 + dims)
        move[axis] = step
        slope = (oracle(feats, exact + move) - oracle(feats, exact - move)) / (2 * step)
        expected = (slope * dy[:51]).sum(axis=1)
        np.testing.assert_allclose(
            np.array(dp)[:51, axis], expected, atol=2e-3, rtol=2e-3
        )


def test_nearest_interpolation():
    coords = cases.geometry("negative", 3, 60)
    x = tensor(coords, cases.features(len(coords), 3))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(coords), 40)
    points = coords[rows].astype(np.float32)
    points[:, 1:] += rng.uniform(-0.49, 0.49, (40, 3))
    y = ops.interpolate(x, mx.array(points), mode="nearest")
    np.testing.assert_array_equal(np.array(y), np.array(x.feats)[rows])
    points[:, 1:] += 500
    assert not mx.any(ops.interpolate(x, mx.array(points), mode="nearest")).item()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("n, q", [(0, 3), (4, 0), (0, 0), (1, 2)])
def test_interpolation_of_few(n, q, dtype):
    x = tensor(np.arange(n * 3).reshape(n, 3) * [0, 1, 1], np.ones((n, 2)), dtype)
    for mode in ("linear", "nearest"):
        y = ops.interpolate(x, mx.zeros((q, 3)), mode=mode, renormalise=True)
        assert y.shape == (q, 2) and y.dtype == x.dtype
        assert mx.isfinite(y).all().item()


def test_interpolation_errors():
    x = tensor(cases.geometry("negative", 3, 10), np.ones((10, 2)))
    with pytest.raises(ValueError, match="mode must be"):
        ops.interpolate(x, mx.zeros((2, 4)), mode="cubic")
    with pytest.raises(ValueError, match=r"\(Q, 4\)"):
        ops.interpolate(x, mx.zeros((2, 3)))
    for bad in (np.nan, np.inf, 1e12):
        with pytest.raises(ValueError, match="finite and within int32"):
            ops.interpolate(x, mx.full((2, 4), bad))


def test_devoxelize_is_the_adjoint_of_summing():
    rng = np.random.default_rng(0)
    feats = mx.array(cases.features(6, 3))
    inverse = mx.array(rng.integers(-1, 6, 40).astype(np.int32))
    y = np.array(ops.devoxelize(feats, inverse))
    padded = np.concatenate([np.array(feats), np.zeros((1, 3))])
    np.testing.assert_array_equal(y, padded[np.array(inverse)])
    with pytest.raises(ValueError, match="integers"):
        ops.devoxelize(feats, mx.zeros((3,)))
    with pytest.raises(ValueError, match=r"features must have shape \(N, C\)"):
        ops.devoxelize(feats[0], inverse)


@pytest.mark.parametrize("row", (6, 10**8, 2**33 + 1, -(2**33)))
def test_devoxelize_of_rows_that_are_not_there(row):
    feats = mx.array(cases.features(6, 3))
    y = ops.devoxelize(feats, mx.array([0, row, 5], dtype=mx.int64))
    try:
        mx.eval(y)
    except RuntimeError as error:  # of the extension
        assert row > 0 and "an edge names row 6, but there are 6 rows" in str(error)
    else:
        np.testing.assert_array_equal(y, mx.stack([feats[0], feats[0] * 0, feats[5]]))
    few = ops.devoxelize(mx.ones((300, 1)), mx.array([0, 255], dtype=mx.uint8))
    assert few.tolist() == [[1], [1]]


# Linear upsampling


def upsampled(coords, feats, fine, scale, renormalise):
    """Features of fine rows in float64, by the definition."""
    rows = {tuple(map(int, row)): f for row, f in zip(coords, feats, strict=True)}
    out = np.zeros((len(fine), feats.shape[1]))
    for i, (batch, *cell) in enumerate(fine.tolist()):
        at = [(f + 0.5) / s - 0.5 for f, s in zip(cell, scale, strict=True)]
        base, total = np.floor(at), 0.0
        for corner in np.ndindex(*(2,) * len(scale)):
            place = base + corner
            weight = np.prod(1 - np.abs(np.array(at) - place))
            f = rows.get((batch, *map(int, place)))
            if f is not None:
                out[i] += weight * f
                total += weight
        if renormalise and total:
            out[i] /= total
    return out


@pytest.mark.parametrize("renormalise", (True, False))
@pytest.mark.parametrize("scale", ((2,), (3,), (1, 2), (2, 3, 4), (5, 5, 5), (2,) * 4))
def test_linear_upsampling(scale, renormalise):
    dims = len(scale)
    coords = cases.geometry("negative", dims, 60)
    feats = cases.features(len(coords), 3)
    rng = np.random.default_rng(dims)
    fine = coords[rng.integers(0, len(coords), 80)]
    fine[:, 1:] = fine[:, 1:] * scale + rng.integers(-3, 6, (80, dims))
    fine = np.unique(fine, axis=0).astype(np.int32)[::-1].copy()
    x = tensor(coords, feats, stride=tuple(scale))
    run = getattr(ops, f"upsample_linear{dims}d")
    y = run(x, scale, mx.array(fine), renormalise=renormalise)
    assert y.stride == (1,) * dims and mx.array_equal(y.coords, mx.array(fine))
    ref.assert_close(y.feats, upsampled(coords, feats, fine, scale, renormalise))
    weights = upsampled(coords, np.eye(len(coords)), fine, scale, renormalise)
    dy = cases.features(len(fine), 3, 1)

    def loss(f):
        z = run(x.replace(f), scale, mx.array(fine), renormalise=renormalise)
        return (z.feats * mx.array(dy)).sum()

    ref.assert_close(mx.grad(loss)(x.feats), weights.T @ dy)


@pytest.mark.parametrize("renormalise", (True, False))
def test_places_and_weights_are_kept_between_sets(renormalise):
    coords = cases.geometry("surface", 3, 90)
    x = tensor(coords, cases.features(len(coords), 4))
    pooled, looked = ops.avg_pool3d(x, 4), []
    index = x.manager[pooled.key].index
    kept = type(index).table

    def run(f):
        return ops.upsample_linear3d(pooled.replace(f), 4, renormalise=renormalise)

    def squares(f):
        return 0.5 * mx.square(run(f).feats).sum()

    def slopes(f):
        return 0.5 * mx.square(mx.grad(squares)(f)).sum()

    def noted(self, *given, **options):
        looked.append(self)
        return kept(self, *given, **options)

    given = np.array(pooled.coords), np.eye(len(pooled)), coords, (4, 4, 4)
    weights, f = upsampled(*given, renormalise), pooled.feats
    gram = weights.T @ weights
    with patch.object(type(index), "table", noted):
        for call in (run, mx.compile(lambda f: run(f).feats), run):
            y = call(f)
            y = y if isinstance(y, mx.array) else y.feats
            ref.assert_close(y, weights @ np.array(f, np.float64))
        for back in (mx.grad(squares), mx.compile(mx.grad(squares))):
            ref.assert_close(back(f), gram @ np.array(f, np.float64))
        twice = gram @ gram @ np.array(f, np.float64)
        ref.assert_close(mx.grad(slopes)(f), twice, what="second order")
        (_,), (moved,) = mx.jvp(lambda f: run(f).feats, [f], [f])
        ref.assert_close(moved, weights @ np.array(f, np.float64))
    assert looked == [index]


def test_linear_upsampling_goes_back_to_what_was_pooled():
    coords = cases.geometry("batches", 3, 90)
    x = tensor(coords, cases.features(len(coords), 4))
    pooled = nn.AvgPool3d(2)(x)
    y = nn.Upsample3d(2, mode="linear")(pooled)
    assert y.key == x.key
    fine, held = np.array(x.coords), np.array(pooled.feats, np.float64)
    expected = upsampled(np.array(pooled.coords), held, fine, (2, 2, 2), True)
    ref.assert_close(y.feats, expected)
    # A plane stays one, where all cells are there.
    cells = np.argwhere(np.ones((1, 4, 4, 4))).astype(np.int32)
    slope = mx.array(cells[:, 1:].astype(np.float32) + 0.5)
    plane = tensor(cells, np.array(slope), stride=2)
    inner = np.argwhere(np.ones((1, 6, 6, 6))).astype(np.int32)
    inner[:, 1:] += 1
    got = ops.upsample_linear3d(plane, 2, mx.array(inner)).feats
    ref.assert_close(got, (inner[:, 1:] + 0.5) / 2)
    with pytest.raises(ValueError, match="mode must be one of"):
        nn.Upsample3d(2, mode="cubic")
    with pytest.raises(ValueError, match="no coordinates of stride"):
        ops.upsample_linear3d(tensor(coords, cases.features(len(coords), 4)), 2)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize(("n", "q"), ((0, 0), (0, 5), (5, 0), (1, 1)))
def test_linear_upsampling_of_few(n, q, dtype):
    coords = cases.geometry("batches", 3, 40)
    kind = getattr(mx, dtype)
    feats = mx.array(cases.features(n, 3)).astype(kind)
    x = ml.SparseTensor(mx.array(coords[:n]), feats, 2)
    fine = coords[:q] * np.array([1, 2, 2, 2], dtype=np.int32)
    y = ops.upsample_linear3d(x, 2, mx.array(fine.reshape(-1, 4)))
    assert y.dtype == kind and y.shape == (q, 3)
    if n == q == 1:
        assert mx.array_equal(y.feats, feats)

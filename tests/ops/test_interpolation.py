"""Features at points, and of voxels at theirs: against the float64 oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from test_pooling import route, tensor  # noqa: F401 (a fixture for every test here)

from mlx_lattice import ops


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

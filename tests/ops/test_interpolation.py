"""Features at points, and of voxels at their own: against the float64 oracle."""

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

    exact, dy = points.astype(np.float64), cases.features(len(points), 3, 1)
    (y,), (df, dp) = mx.vjp(run, [x.feats, mx.array(points)], [mx.array(dy)])
    ref.assert_close(y, oracle(feats, exact))
    ref.assert_close(df, oracle(np.eye(len(coords)), exact).T @ dy)
    # Central differences in float64; points on the lattice itself have a kink.
    exact, step = exact[:51], 1e-6
    for axis in range(1, 1 + dims):
        move = step * np.eye(1 + dims)[axis]
        slope = (oracle(feats, exact + move) - oracle(feats, exact - move)) / (2 * step)
        wanted = (slope * dy[:51]).sum(axis=1)
        np.testing.assert_allclose(np.array(dp)[:51, axis], wanted, 2e-3, 2e-3)


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


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("n, q", [(0, 3), (4, 0), (0, 0), (1, 1)])
def test_few_rows_and_points(n, q, dtype):
    x = tensor(np.arange(n * 3).reshape(n, 3) * [0, 1, 1], np.ones((n, 2)), dtype)
    x = ml.SparseTensor(x.coords, x.feats, stride=2)
    at = mx.array(np.tile([0, 1, 2], (q, 1)).astype(np.int32))  # the first row
    for y in (
        ops.interpolate(x, at.astype(mx.float32), renormalise=True),
        ops.interpolate(x, at.astype(mx.float32), mode="nearest"),
        ops.upsample_linear2d(x, 2, at * mx.array([1, 2, 2])).feats,
    ):
        assert y.shape == (q, 2) and y.dtype == x.dtype
        assert mx.array_equal(y, mx.full((q, 2), float(n > 0), dtype=x.dtype)).item()


def test_devoxelize_takes_rows_and_zeros_for_minus_one():
    feats = mx.array(cases.features(6, 3))
    inverse = np.random.default_rng(0).integers(-1, 6, 40).astype(np.int32)
    padded = np.concatenate([np.array(feats), np.zeros((1, 3))])
    y = ops.devoxelize(feats, mx.array(inverse))
    np.testing.assert_array_equal(np.array(y), padded[inverse])
    few = ops.devoxelize(mx.ones((300, 1)), mx.array([0, 255], dtype=mx.uint8))
    assert few.tolist() == [[1], [1]]
    with pytest.raises(ValueError, match="integers"):
        ops.devoxelize(feats, mx.zeros((3,)))
    with pytest.raises(ValueError, match=r"features must have shape \(N, C\)"):
        ops.devoxelize(feats[0], mx.array(inverse))


@pytest.mark.parametrize("row", (6, 2**33 + 1, -(2**33)))
def test_devoxelize_of_absent_rows(row):
    feats = mx.array(cases.features(6, 3))
    y = ops.devoxelize(feats, mx.array([0, row, 5], dtype=mx.int64))
    try:
        mx.eval(y)
    except RuntimeError as error:  # of the extension
        assert row > 0 and "an edge names row 6, but there are 6 rows" in str(error)
    else:
        np.testing.assert_array_equal(y, mx.stack([feats[0], feats[0] * 0, feats[5]]))


# Linear upsampling


def upsampled(coords, feats, fine, scale, renormalise):
    """Features of fine rows in float64: interpolated at their centres."""
    at = (fine[:, 1:] + 0.5) / scale - 0.5
    return ref_rows.interpolate(coords, feats, at, fine[:, 0], normalise=renormalise)


@pytest.mark.parametrize("renormalise", (True, False))
@pytest.mark.parametrize("scale", ((3,), (1, 2), (2, 3, 4), (5, 5, 5), (2,) * 4))
def test_linear_upsampling(scale, renormalise):
    dims = len(scale)
    coords = cases.geometry("negative", dims, 60)
    feats = cases.features(len(coords), 3)
    rng = np.random.default_rng(dims)
    fine = coords[rng.integers(0, len(coords), 80)]
    fine[:, 1:] = fine[:, 1:] * scale + rng.integers(-3, 6, (80, dims))
    fine = np.unique(fine, axis=0).astype(np.int32)[::-1].copy()
    x = tensor(coords, feats, stride=scale)
    function = getattr(ops, f"upsample_linear{dims}d")

    def run(f):
        return function(x.replace(f), scale, mx.array(fine), renormalise=renormalise)

    y, dy = run(x.feats), cases.features(len(fine), 3, 1)
    assert y.stride == (1,) * dims and mx.array_equal(y.coords, mx.array(fine))
    weights = upsampled(coords, np.eye(len(coords)), fine, scale, renormalise)
    ref.assert_close(y.feats, weights @ feats)
    (dx,) = mx.vjp(lambda f: run(f).feats, [x.feats], [mx.array(dy)])[1]
    ref.assert_close(dx, weights.T @ dy)


def test_linear_upsampling_goes_back_to_what_was_pooled():
    coords = cases.geometry("batches", 3, 90)
    x = tensor(coords, cases.features(len(coords), 4))
    pooled = nn.AvgPool3d(2)(x)
    y = nn.Upsample3d(2, mode="linear")(pooled)
    assert y.key == x.key
    coarse = np.array(pooled.coords), np.array(pooled.feats, np.float64)
    ref.assert_close(y.feats, upsampled(*coarse, coords, (2, 2, 2), True))
    with pytest.raises(ValueError, match="mode must be one of"):
        nn.Upsample3d(2, mode="cubic")
    with pytest.raises(ValueError, match="no coordinates of stride"):
        ops.upsample_linear3d(x, 2)

"""grid_sample_3d against a float64 dense sampler; pruning by logits."""

import json
from itertools import product

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from foreign_arrays import arrays, needs_folder

import mlx_lattice as ml
from mlx_lattice import ops

SHAPE = (4, 3, 5)


def grid_tensor(channels=2, dtype="float32", batches=2):
    coords = cases.in_grid(SHAPE, 70)
    feats = mx.array(cases.features(len(coords), channels)).astype(getattr(mx, dtype))
    return ml.SparseTensor(
        mx.array(coords), feats, spatial_shape=SHAPE, batch_size=batches
    )


def sample(dense, at, mode):
    """PyTorch's rule in float64: zeros outside; `at` in units of cell centres."""
    out = np.zeros((*at.shape[:-1], dense.shape[-1]))
    for where in np.ndindex(*at.shape[:-1]):
        point, grid = at[where], dense[where[0]]
        if mode == "nearest":
            corners = [(np.floor(point + 0.5).astype(int), 1.0)]
        else:
            low = np.floor(point).astype(int)
            part = point - low
            corners = [
                (low + c, np.prod(np.where(c, part, 1 - part)))
                for c in map(np.array, product((0, 1), repeat=3))
            ]
        for cell, weight in corners:
            if (cell >= 0).all() and (cell < SHAPE).all():
                out[where] += weight * grid[tuple(cell)]
    return out


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("mode", ("trilinear", "nearest"))
@pytest.mark.parametrize("kind", ("voxel", "faces", "corners"))
def test_against_a_dense_sampler(kind, mode, dtype):
    x = grid_tensor(dtype=dtype)
    rng = np.random.default_rng(3)
    points = rng.uniform(-1.4, 1.4, (2, 3, 4, 3)).astype(np.float32)
    extent = np.array(SHAPE)
    if kind == "voxel":
        points = ((points + 1) / 2 * extent).astype(np.float32)
        options, at = {}, points - 0.5
    elif kind == "faces":
        options = {"units": "normalised"}
        at = ((points.astype(np.float64) + 1) * extent - 1) / 2
    else:
        options = {"units": "normalised", "align_corners": True}
        at = (points.astype(np.float64) + 1) / 2 * (extent - 1)
    dense = ref.to_numpy(x.to_dense()).astype(np.float64)
    y = ops.grid_sample_3d(x, mx.array(points), mode=mode, **options)
    assert y.dtype == x.dtype and y.shape == (2, 3, 4, 2)
    ref.assert_close(y, sample(dense, at, mode), dtype)


def test_cell_centres_give_the_features_themselves():
    x = grid_tensor()
    rows = np.array(x.coords)
    for b in (0, 1):
        mine = rows[:, 0] == b
        points = np.zeros((2, mine.sum(), 3), np.float32)
        points[b] = rows[mine, 1:] + 0.5
        for mode in ("trilinear", "nearest"):
            y = ops.grid_sample_3d(x, mx.array(points), mode=mode)
            np.testing.assert_array_equal(np.array(y[b]), np.array(x.feats)[mine])


def test_renormalise_of_constant_features_is_constant():
    x = grid_tensor()
    x = x.replace(mx.ones_like(x.feats))
    points = x.coords[None, :, 1:].astype(mx.float32) + 0.2
    points = mx.concatenate([points, points])
    y = np.array(ops.grid_sample_3d(x, points, renormalise=True))
    np.testing.assert_allclose(y[np.abs(y).max(-1) > 0], 1, rtol=1e-5)


def test_gradients_in_features_and_points():
    x = grid_tensor()
    rng = np.random.default_rng(5)
    points = rng.uniform(0.6, 2.4, (2, 6, 3)).astype(np.float32)
    points = np.where(np.abs(points % 1 - 0.5) < 0.05, points + 0.1, points)
    cotangent = rng.normal(size=(2, 6, 2))

    def total(feats, points):
        y = ops.grid_sample_3d(x.replace(feats), points)
        return (y * mx.array(cotangent.astype(np.float32))).sum()

    d_feats, d_points = mx.grad(total, (0, 1))(x.feats, mx.array(points))
    dense = np.array(x.to_dense()).astype(np.float64)

    def exact(points):
        return sample(dense, points.astype(np.float64) - 0.5, "trilinear") * cotangent

    expected = np.zeros_like(points, np.float64)
    for axis in range(3):
        step = np.zeros(3)
        step[axis] = 1e-4
        slope = exact(points + step) - exact(points - step)
        expected[..., axis] = slope.sum(-1) / 2e-4
    ref.assert_close(d_points, expected, "float16")
    # Linear in the features: the value is the gradient applied to them.
    value = (np.array(d_feats) * np.array(x.feats)).sum()
    assert value == pytest.approx(exact(points).sum(), rel=1e-4)


def test_no_rows_and_no_points():
    x = ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 2)))
    assert not ops.grid_sample_3d(x, mx.ones((2, 5, 3))).any().item()
    assert ops.grid_sample_3d(x, mx.ones((2, 0, 3))).shape == (2, 0, 2)
    assert ops.grid_sample_3d(grid_tensor(), mx.ones((0, 4, 3))).shape == (0, 4, 2)


# Pruning


def test_prune_by_logits():
    x = grid_tensor()
    logits = cases.features(len(x), 1, 9)
    logits[0], logits[1] = 0, np.nan
    kept = np.flatnonzero(logits[:, 0] > 0)
    for given in (mx.array(logits), mx.array(logits[:, 0])):
        y = ops.prune_by_logits(x, given)
        np.testing.assert_array_equal(np.array(y.coords), np.array(x.coords)[kept])
        np.testing.assert_array_equal(np.array(y.feats), np.array(x.feats)[kept])
    kept = np.flatnonzero(logits[:, 0] > 0.7)
    y = ops.prune_by_logits(x, mx.array(logits), 0.7)
    np.testing.assert_array_equal(np.array(y.coords), np.array(x.coords)[kept])


def test_prune_by_logits_of_a_tensor_in_another_order():
    x = grid_tensor()
    logits = mx.array(cases.features(len(x), 1, 9))
    order = mx.array(np.random.default_rng(0).permutation(len(x)))
    other = ml.SparseTensor(x.coords[order], logits[order], spatial_shape=SHAPE)
    y, expected = ops.prune_by_logits(x, other), ops.prune_by_logits(x, logits)
    assert mx.array_equal(y.coords, expected.coords).item()


def test_prune_by_logits_keeps_what_it_is_told():
    x = grid_tensor()
    low = mx.full((len(x),), -1.0)
    flags = np.random.default_rng(0).random(len(x)) < 0.3
    rows = np.array(x.coords)[flags]
    elsewhere = np.concatenate([rows[::-1], [[1, 99, 99, 99]]]).astype(np.int32)
    true = ml.SparseTensor(mx.array(elsewhere), mx.ones((len(elsewhere), 1)))
    for keep in (mx.array(flags), true):
        y = ops.prune_by_logits(x, low, keep=keep)
        np.testing.assert_array_equal(np.array(y.coords), rows)
    assert len(ops.prune_by_logits(x, low)) == 0


def test_prune_by_logits_gradient_and_mistakes():
    x = grid_tensor()
    logits = mx.array(cases.features(len(x), 1, 9))

    def total(feats, logits):
        return ops.prune_by_logits(x.replace(feats), logits).feats.sum()

    d_feats, d_logits = mx.grad(total, (0, 1))(x.feats, logits)
    kept = np.array(logits) > 0
    np.testing.assert_array_equal(np.array(d_feats), np.repeat(kept, 2, 1))
    assert not d_logits.any().item()
    with pytest.raises(ValueError, match="one a row"):
        ops.prune_by_logits(x, x.feats)
    with pytest.raises(ValueError, match="bool"):
        ops.prune_by_logits(x, logits, keep=logits)


@needs_folder
@pytest.mark.parametrize("mode", ("trilinear", "nearest"))
def test_trellis2_attributes(mode):
    """What TRELLIS.2 samples at the places of a mesh's texture."""
    case = arrays("nets/trellis2_attributes")
    config = json.loads(str(case["config"]))
    coords = mx.array(np.pad(case["coords"], ((0, 0), (1, 0))))
    x = ml.SparseTensor(coords, mx.array(case["attrs"]))
    points = (case["xyz"] - np.array(config["origin"])) / config["voxel_size"]
    points = mx.array(points.astype(np.float32))[None]
    found = ops.grid_sample_3d(x, points, mode=mode, renormalise=True)[0]
    error = np.linalg.norm(np.array(found) - case[f"out/{mode}"])
    assert error <= 2e-5 * np.linalg.norm(case[f"out/{mode}"])

"""grid_sample_3d against a float64 dense sampler; pruning by logits."""

import json

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
import reference_rows as ref_rows
from foreign_arrays import arrays, needs_folder

import mlx_lattice as ml
from mlx_lattice import ops

SHAPE = (4, 3, 5)
MODES = ("trilinear", "nearest")


def grid_tensor(dtype="float32"):
    coords = cases.in_grid(SHAPE, 70)
    feats = mx.array(cases.features(len(coords), 2)).astype(getattr(mx, dtype))
    return ml.SparseTensor(mx.array(coords), feats, spatial_shape=SHAPE, batch_size=2)


def sample(x, feats, at, mode):
    """PyTorch's rule in float64: zeros outside; ``at`` in units of cell centres."""
    at = np.asarray(at, np.float64)
    if mode == "nearest":
        at = np.floor(at + 0.5)
    flat = at.reshape(-1, 3)
    batch = np.repeat(np.arange(len(at)), flat.shape[0] // len(at))
    out = ref_rows.interpolate(np.array(x.coords), feats, flat, batch)
    return out.reshape(*at.shape[:-1], -1)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ("voxel", "faces", "corners"))
def test_against_a_dense_sampler(kind, mode, dtype):
    x = grid_tensor(dtype)
    points = np.random.default_rng(3).uniform(-1.4, 1.4, (2, 3, 4, 3))
    points, extent = points.astype(np.float32), np.array(SHAPE)
    if kind == "voxel":
        points = ((points + 1) / 2 * extent).astype(np.float32)
        options, at = {}, points - 0.5
    elif kind == "faces":
        options = {"units": "normalised"}
        at = ((points.astype(np.float64) + 1) * extent - 1) / 2
    else:
        options = {"units": "normalised", "align_corners": True}
        at = (points.astype(np.float64) + 1) / 2 * (extent - 1)
    y = ops.grid_sample_3d(x, mx.array(points), mode=mode, **options)
    assert y.dtype == x.dtype and y.shape == (2, 3, 4, 2)
    ref.assert_close(y, sample(x, ref.to_numpy(x.feats), at, mode), dtype)


def test_renormalise_of_constant_features_is_constant():
    x = grid_tensor()
    x = x.replace(mx.ones_like(x.feats))
    points = mx.stack([x.coords[:, 1:] + 0.2] * 2)
    y = np.array(ops.grid_sample_3d(x, points, renormalise=True))
    np.testing.assert_allclose(y[np.abs(y).max(-1) > 0], 1, rtol=1e-5)


def test_gradients_in_features_and_points():
    x = grid_tensor()
    rng = np.random.default_rng(5)
    points = rng.uniform(0.6, 2.4, (2, 6, 3)).astype(np.float32)
    points = np.where(np.abs(points % 1 - 0.5) < 0.05, points + 0.1, points)
    cotangent = rng.normal(size=(2, 6, 2)).astype(np.float32)
    (d_feats, d_points) = mx.vjp(
        lambda f, p: ops.grid_sample_3d(x.replace(f), p),
        [x.feats, mx.array(points)],
        [mx.array(cotangent)],
    )[1]

    def exact(points):
        at = points.astype(np.float64) - 0.5
        return sample(x, np.array(x.feats), at, "trilinear") * cotangent

    expected = np.zeros(points.shape)
    for axis, step in enumerate(1e-4 * np.eye(3)):
        slope = (exact(points + step) - exact(points - step)) / 2e-4
        expected[..., axis] = slope.sum(-1)
    ref.assert_close(d_points, expected, "float16")
    # Linear in the features: the value is the gradient applied to them.
    value = (np.array(d_feats) * np.array(x.feats)).sum()
    assert value == pytest.approx(exact(points).sum(), rel=1e-4)


def test_no_rows_and_no_points():
    x = ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 2)))
    assert not ops.grid_sample_3d(x, mx.ones((2, 5, 3))).any().item()
    assert ops.grid_sample_3d(x, mx.ones((2, 0, 3))).shape == (2, 0, 2)
    assert ops.grid_sample_3d(grid_tensor(), mx.ones((0, 4, 3))).shape == (0, 4, 2)
    assert ops.grid_sample_3d(grid_tensor(), mx.ones((2, 3))).shape == (2, 2)


# Pruning


def test_prune_by_logits():
    x = grid_tensor()
    logits = cases.features(len(x), 1, 9)
    logits[0], logits[1] = 0, np.nan
    order = mx.array(np.random.default_rng(0).permutation(len(x)))
    mixed = ml.SparseTensor(x.coords[order], mx.array(logits)[order])
    for values in (mx.array(logits), mx.array(logits[:, 0]), mixed):
        for options in ({}, {"threshold": 0.7}):
            kept = np.flatnonzero(logits[:, 0] > options.get("threshold", 0))
            y = ops.prune_by_logits(x, values, **options)
            np.testing.assert_array_equal(np.array(y.coords), np.array(x.coords)[kept])
            np.testing.assert_array_equal(np.array(y.feats), np.array(x.feats)[kept])


def test_prune_by_logits_keeps_named_rows():
    x = grid_tensor()
    low = mx.full((len(x),), -1.0)
    flags = np.random.default_rng(0).random(len(x)) < 0.3
    rows = np.array(x.coords)[flags]
    elsewhere = np.concatenate([rows[::-1], [[1, 99, 99, 99]]]).astype(np.int32)
    named = ml.SparseTensor(mx.array(elsewhere), mx.ones((len(elsewhere), 1)))
    for keep in (mx.array(flags), named):
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
@pytest.mark.parametrize("mode", MODES)
def test_trellis2_attributes(mode):
    """The samples that TRELLIS.2 takes at the places of a mesh's texture."""
    case = arrays("nets/trellis2_attributes")
    config = json.loads(str(case["config"]))
    coords = mx.array(np.pad(case["coords"], ((0, 0), (1, 0))))
    x = ml.SparseTensor(coords, mx.array(case["attrs"]))
    points = (case["xyz"] - np.array(config["origin"])) / config["voxel_size"]
    points = mx.array(points.astype(np.float32))[None]
    y = ops.grid_sample_3d(x, points, mode=mode, renormalise=True)[0]
    error = np.linalg.norm(np.array(y) - case[f"out/{mode}"])
    assert error <= 2e-5 * np.linalg.norm(case[f"out/{mode}"])

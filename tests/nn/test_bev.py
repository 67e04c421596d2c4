"""ToBEV: the dense map by NumPy, its gradient, and what it refuses."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn

SHAPE = (3, 5, 4)


def tensor(dtype="float32", count=20):
    rng = np.random.default_rng(0)
    cells = rng.permutation(2 * np.prod(SHAPE))[:count]
    coords = np.stack(np.unravel_index(cells, (2, *SHAPE)), axis=1).astype(np.int32)
    feats = rng.normal(size=(count, 6)).astype(np.float32)
    x = ml.SparseTensor(
        mx.array(coords), mx.array(feats), spatial_shape=SHAPE, batch_size=3
    )
    return coords, feats, x.astype(getattr(mx, dtype))


def expected(coords, feats, axis):
    """Channel c * D + d, as OpenPCDet's view of (B, C, D, H, W) has it."""
    dense = np.zeros((3, 6, *SHAPE), np.float32)
    dense[coords[:, 0], :, coords[:, 1], coords[:, 2], coords[:, 3]] = feats
    dense = np.moveaxis(dense, 2 + axis, 2)
    return np.moveaxis(dense.reshape(3, -1, *dense.shape[3:]), 1, -1)


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("axis", (0, 1, 2, -1))
def test_features_at_their_places(axis, dtype):
    coords, _, x = tensor(dtype)
    feats = np.array(x.feats.astype(mx.float32))
    y = nn.ToBEV(axis)(x)
    assert y.dtype == x.dtype
    held = expected(coords, feats, axis % 3)
    assert np.array_equal(np.array(y.astype(mx.float32)), held)


def test_gradient_and_no_rows():
    coords, feats, x = tensor()
    weights = mx.random.normal((3, 5, 4, 18))
    grad = mx.grad(lambda f: (nn.ToBEV()(x.replace(f)) * weights).sum())(x.feats)
    folded = np.array(weights).reshape(3, 5, 4, 6, 3)
    b, z, y, c = coords.T
    assert np.array_equal(np.array(grad), folded[b, y, c, :, z])
    none = ml.SparseTensor(
        mx.zeros((0, 4), mx.int32), mx.zeros((0, 6)), spatial_shape=SHAPE, batch_size=2
    )
    assert not nn.ToBEV()(none).any() and nn.ToBEV()(none).shape == (2, 5, 4, 18)


@pytest.mark.parametrize("dense", (nn.ToBEV(), ml.SparseTensor.to_dense))
def test_derivatives_of_a_map(dense):
    _, _, x = tensor()

    def of(feats):
        return dense(x.replace(feats))

    moved, weights = mx.random.normal((2, *x.shape))
    y, dy = mx.jvp(of, [x.feats], [moved])
    assert mx.array_equal(y[0], of(x.feats)) and mx.array_equal(dy[0], of(moved))
    assert mx.array_equal(mx.vmap(of)(weights[None])[0], of(weights))
    # Of the sum of cubes: forward over reverse, reverse over reverse, and once more.
    slope = mx.grad(lambda feats: (of(feats) ** 3).sum())
    assert mx.allclose(slope(x.feats), 3 * x.feats**2)
    assert mx.allclose(mx.jvp(slope, [x.feats], [moved])[1][0], 6 * x.feats * moved)
    second = mx.grad(lambda feats: (slope(feats) * weights).sum())
    assert mx.allclose(second(x.feats), 6 * x.feats * weights)
    assert mx.allclose(mx.jvp(second, [x.feats], [moved])[1][0], 6 * weights * moved)

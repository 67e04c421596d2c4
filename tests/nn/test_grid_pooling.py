"""Grid pooling and unpooling, DropPath and LayerScale against NumPy."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from reference_attention import tensor

import mlx_lattice as ml
from mlx_lattice import nn


def linear(layer, x):
    return x @ np.array(layer.weight, np.float64).T + np.array(layer.bias, np.float64)


def gelu(x):
    return np.array(mlx.nn.gelu(mx.array(x.astype(np.float32))))


def normed(x):
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5)


@pytest.mark.parametrize("stride", (2, (1, 3, 2)))
@pytest.mark.parametrize("name", ("batches", "negative", "one"))
def test_pooling_and_back(name, stride):
    x = tensor(name)
    pool = nn.GridPooling(1, 6, stride)
    unpool = nn.GridUnpooling(6, 1, 5, stride)
    rows, feats = np.array(x.coords), np.array(x.feats, np.float64)
    steps = np.array([1, *np.broadcast_to(stride, 3)])
    cells, parent = np.unique(rows // steps, axis=0, return_inverse=True)
    parent = parent.reshape(-1)
    y, wide = pool(x), linear(pool.proj, feats)
    wide = np.stack([wide[parent == c].max(0) for c in range(len(cells))])
    expected = gelu(normed(wide))
    assert np.array_equal(np.array(y.coords), cells)
    ref.assert_close(y.feats, expected)
    mean = [feats[parent == c].mean(0) for c in range(len(cells))]
    ref.assert_close(pool.positions(x).feats, np.stack(mean))
    up, skip = unpool.proj.layers[0], unpool.proj_skip.layers[0]
    back = gelu(normed(linear(up, expected)))[parent]
    z = unpool(y, x)
    assert z.key == x.key
    ref.assert_close(z.feats, gelu(normed(linear(skip, feats))) + back)


def test_pooling_of_no_rows():
    x = tensor("empty")
    pool, unpool = nn.GridPooling(1, 4), nn.GridUnpooling(4, 1, 3)
    assert pool(x).shape == (0, 4) and unpool(pool(x), x).shape == (0, 3)


def test_drop_path_drops_whole_rows():
    mx.random.seed(1)
    layer, x = nn.DropPath(0.25), mx.ones((4000, 3))
    y = np.array(layer(x))
    assert set(np.unique(y).tolist()) == {0.0, np.float32(4 / 3)}
    assert (y == y[:, :1]).all() and abs((y == 0).mean() - 0.25) < 0.03
    z = layer(ml.SparseTensor(mx.array(cases.geometry("one", 3, 1)), x[:1]))
    assert z.shape == (1, 3)
    assert layer(x.astype(mx.float16)).dtype == mx.float16
    assert layer.eval()(x) is x
    with pytest.raises(ValueError, match="from 0 to below 1"):
        nn.DropPath(1.0)


def test_layer_scale():
    layer, x = nn.LayerScale(3, 0.5), tensor()
    layer.gamma = mx.array([1.0, 2.0, 3.0])
    y = layer(x.replace(mx.ones((len(x), 3), dtype=mx.bfloat16)))
    assert y.key == x.key and y.dtype == mx.bfloat16
    assert y.feats.tolist() == [[1.0, 2.0, 3.0]] * len(x)
    np.testing.assert_array_equal(np.array(layer(mx.ones((2, 3)))), [[1, 2, 3]] * 2)
    for wrong in (x.replace(mx.ones((len(x), 4))), mx.ones((2, 1))):
        with pytest.raises(ValueError, match="expected 3 channels"):
            layer(wrong)

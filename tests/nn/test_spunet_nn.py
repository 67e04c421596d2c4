"""SpUNet: rows, gradients, precision, arguments. io/ has the published results."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from differences import assert_slope
from foreign_nets import filled
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models

CHANNELS, LAYERS = (4, 6, 7, 8, 8, 5, 6, 4), (1, 2, 1, 1, 1, 1, 1, 2)


def small(classes=5, enc_mode=False):
    """A net with weights that keep the size of features."""
    net = models.SpUNet(3, classes, 4, CHANNELS, LAYERS, enc_mode)
    shapes = {name: p.shape for name, p in tree_flatten(net.parameters())}
    return net.load_weights(list(filled(shapes).items())).eval()


def scene(geometry, count=40):
    coords = cases.geometry(geometry, 3, count)
    feats = cases.features(len(coords), 3)
    return ml.SparseTensor(mx.array(coords), mx.array(feats))


@pytest.mark.parametrize("classes", (5, 0))
@pytest.mark.parametrize("enc_mode", (False, True))
def test_rows_and_channels(enc_mode, classes):
    net, x = small(classes, enc_mode), scene("batches")
    y = net(x)
    if enc_mode:
        assert y.shape == (x.batch_size, classes or CHANNELS[3])
    else:
        assert y.key == x.key and y.channels == (classes or CHANNELS[-1])


@pytest.mark.parametrize("enc_mode", (False, True))
def test_no_rows(enc_mode):
    net = small(5, enc_mode)
    x = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 3)), batch_size=2)
    y = net(x)
    assert y.shape == ((2, 5) if enc_mode else (0, 5))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_in_half(dtype):
    net, x = small(), scene("batches")
    expected = np.array(net(x).feats)
    net.set_dtype(getattr(mx, dtype))
    y = net(x.astype(getattr(mx, dtype)))
    apart = np.array(y.feats.astype(mx.float32)) - expected
    assert np.linalg.norm(apart) <= 10 * ref.TOLERANCE[dtype] * np.linalg.norm(expected)


def test_gradients():
    x = scene("batches", 90)
    assert_slope(small(), lambda net: net(x).feats.square().mean())


@pytest.mark.parametrize(
    ("channels", "layers"), (((8, 8, 8), (1, 1, 1)), ((8, 8), (1,)), ((), ()))
)
def test_stages_come_in_pairs(channels, layers):
    with pytest.raises(ValueError, match="as many of both; got"):
        models.SpUNet(3, 5, 8, channels, layers)


def test_stages_without_blocks():
    """The encoder's may be: a decoder's first block takes the skip's channels in."""
    with pytest.raises(ValueError, match=r"one block or more.* got layers = \(1, 0\)"):
        models.SpUNet(3, 5, 8, (8, 6), (1, 0))
    x = ml.SparseTensor([[0, 1, 2, 3], [0, 1, 2, 4]], mx.ones((2, 3)))
    assert models.SpUNet(3, 5, 8, (8, 6), (0, 1))(x).shape == (2, 5)
    assert models.SpUNet(3, 5, 8, (8, 6), (0, 0), enc_mode=True)(x).shape == (1, 5)


def test_the_published_size():
    """39.2 million parameters, as of the configuration for ScanNet."""
    net = models.SpUNet(6, 20)
    sizes = [p.size for _, p in tree_flatten(net.trainable_parameters())]
    assert sum(sizes) == pytest.approx(39.2e6, rel=0.01)

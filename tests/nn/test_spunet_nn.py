"""SpUNet: the forward and one step of training in float64, from the published names."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from differences import assert_gradients, cross_entropy
from foreign_nets import PointceptUNet, filled, pointcept_shapes
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import io, models

CHANNELS, LAYERS = (4, 6, 7, 8, 8, 5, 6, 4), (1, 2, 1, 1, 1, 1, 1, 2)


def small(classes=5, enc_mode=False, seed=0):
    """A net with weights in the published names, and the same net in float64."""
    net = models.SpUNet(3, classes, 4, CHANNELS, LAYERS, enc_mode)
    state = filled(pointcept_shapes(3, classes, 4, CHANNELS, LAYERS, enc_mode), seed)
    assert io.import_checkpoint(state, net.eval(), "spconv").complete
    return net, PointceptUNet(state, enc_mode)


def scene(geometry, count=40):
    coords = cases.geometry(geometry, 3, count)
    feats = cases.features(len(coords), 3)
    return coords, feats, ml.SparseTensor(mx.array(coords), mx.array(feats))


@pytest.mark.parametrize("classes", (5, 0))
@pytest.mark.parametrize("geometry", ("negative", "batches", "one"))
@pytest.mark.parametrize("enc_mode", (False, True))
def test_is_the_published_net(geometry, enc_mode, classes):
    net, exact = small(classes, enc_mode)
    coords, feats, x = scene(geometry)
    y = net(x)
    expected = exact(coords, feats)
    if enc_mode:
        assert y.shape == (x.batch_size, classes or CHANNELS[3])
    else:
        assert y.key == x.key
        y = y.feats
    ref.assert_close(y, expected)


@pytest.mark.parametrize("enc_mode", (False, True))
def test_no_rows(enc_mode):
    net, _ = small(5, enc_mode)
    x = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 3)), batch_size=2)
    y = net(x)
    assert y.shape == ((2, 5) if enc_mode else (0, 5))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_in_half(dtype):
    net, exact = small()
    coords, feats, x = scene("batches")
    net.set_dtype(getattr(mx, dtype))
    y = net(x.astype(getattr(mx, dtype)))
    expected = exact(coords, feats)
    apart = np.array(y.feats.astype(mx.float32)) - expected
    assert np.linalg.norm(apart) <= 10 * ref.TOLERANCE[dtype] * np.linalg.norm(expected)


# Published names, and here: a kernel of each kind, both parts of norms, the last bias.
PARAMETERS = {
    "conv_input.0.weight": "conv_input.layers.0.weight",
    "conv_input.1.weight": "conv_input.layers.1.weight",
    "down.1.0.weight": "down.1.layers.0.weight",
    "enc.1.block1.conv2.weight": "enc.1.block1.conv2.weight",
    "enc.2.block0.bn1.bias": "enc.2.block0.bn1.bias",
    "up.2.0.weight": "up.2.layers.0.weight",
    "dec.0.block0.proj.0.weight": "dec.0.block0.proj.layers.0.weight",
    "dec.0.block1.bn2.weight": "dec.0.block1.bn2.weight",
    "final.weight": "final.weight",
    "final.bias": "final.bias",
}


def test_gradients_of_a_step_of_training():
    """Of a cross entropy, norms by their batch: float64 differences, some entries."""
    net, exact = small()
    coords, feats, x = scene("batches", 90)
    labels = np.random.default_rng(3).integers(0, 5, len(coords))

    def loss(net):
        scores = net(x).feats
        return mlx.nn.losses.cross_entropy(scores, mx.array(labels), reduction="mean")

    net.train()
    value, grads = mlx.nn.value_and_grad(net, loss)(net)
    grads = dict(tree_flatten(grads))

    def exact_loss() -> float:
        return cross_entropy(exact(coords, feats, training=True), labels)

    assert abs(value.item() - exact_loss()) <= 1e-5 * abs(value.item())
    found = {}
    for name, here in PARAMETERS.items():
        weight, found[name] = exact.p[name], np.array(grads[here])
        if weight.ndim == 5 and weight.shape[1] == 1:  # spconv multiplies its memory
            c_out, c_in = weight.shape[0], weight.shape[-1]
            found[name] = found[name].reshape(c_out, c_in).T
    assert_gradients(exact_loss, exact.p, found)


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

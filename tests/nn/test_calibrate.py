"""Calibration: lower errors of every layer, the same bits each time; the digits."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn


def batch(seed=0, channels=20, n=150):
    coords = cases.geometry("surface", 3, n, seed)
    rng = np.random.default_rng(seed)
    # Channels of very different size, none negative: what follows a ReLU.
    feats = np.abs(rng.normal(size=(len(coords), channels))) * np.geomspace(
        0.05, 5, channels
    )
    return ml.SparseTensor(mx.array(coords), mx.array(feats.astype(np.float32)))


def make_net():
    mx.random.seed(1)
    return nn.Sequential(
        nn.SubmConv3d(20, 48, 3),
        nn.BatchNorm(48),
        nn.ReLU(),
        nn.Conv3d(48, 32, 2, 2, groups=2, bias=False),
        nn.ReLU(),
        nn.Linear(32, 24),
        nn.ReLU(),
        nn.GenerativeConvTranspose3d(24, 16),
        nn.GlobalMaxPool(),
        mlx.nn.Linear(16, 8),
    )


def error(net, reference, x):
    y = reference.eval()(x)
    return (mx.linalg.norm(net(x) - y) / mx.linalg.norm(y)).item()


@pytest.mark.parametrize("activations", (None, 8))
def test_a_copy_runs_and_the_model_keeps_its_layers(activations):
    net = nn.Sequential(nn.SubmConv3d(20, 64, 3), mlx.nn.Linear(64, 64)).eval()
    layers = list(net.layers)

    def call(model, x):
        assert model is not net
        assert all(a is b for a, b in zip(net.layers, layers, strict=True))
        return model(x)

    packed, report = ml.calibrate(net, [batch()], 8, activations=activations, call=call)
    assert [error.path for error in report.layers] == ["layers.0", "layers.1"]
    assert type(net.layers[1]) is mlx.nn.Linear
    assert type(packed.layers[1]).__name__ == "QuantizedLinear"


@pytest.mark.parametrize("bits", (4, 8))
def test_every_layer_gets_better(bits):
    net, batches = make_net(), [batch(s) for s in range(3)]
    before = dict(tree_flatten(net.parameters()))
    packed, report = ml.calibrate(net, batches, bits, 32)
    assert all(v is before[k] for k, v in tree_flatten(net.parameters()))
    assert net.training and all(m.training for m in net.modules())
    paths = [layer.path for layer in report.layers]
    assert sorted(paths) == [f"layers.{i}" for i in (0, 3, 5, 7)]
    assert set(report.kept) == {"layers.9"}
    assert "MLX's own layers pack whole groups" in str(report)
    for layer in report.layers:
        assert 0 < layer.after < layer.before < {4: 0.2, 8: 0.02}[bits]
        assert f"{layer.path}" in str(report)
    assert np.mean([e.after / e.before for e in report.layers]) < 0.85
    plain = make_net()
    mlx.nn.quantize(plain, 32, bits, class_predicate=lambda path, _: path in paths)
    assert error(packed.eval(), net, batches[0]) < error(plain.eval(), net, batches[0])


def test_the_errors_are_those_of_the_layers():
    net = nn.Sequential(nn.SubmConv3d(20, 16, 3)).eval()
    x = batch()
    packed, report = ml.calibrate(net, [x], 4, 32)
    y = net(x).feats
    plain = net.layers[0].to_quantized(32, 4)
    for layer, wanted in (
        (plain, report.layers[0].before),
        (packed.layers[0], report.layers[0].after),
    ):
        bias = net.layers[0].bias
        norm = mx.linalg.norm(y - bias)
        found = mx.linalg.norm(layer(x).feats - y) / norm
        assert found.item() == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("activations", (None, 8))
def test_layers_that_no_batch_reaches_are_packed_plainly(activations):
    class Two(mlx.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.SubmConv3d(20, 16, 3), nn.Linear(16, 16)

        def __call__(self, x, scale):
            return self.used(x) * scale

    net = Two()
    packed, report = ml.calibrate(
        net, [(none(), 1.0), (batch(), 2.0)], 4, 32, activations=activations
    )
    errors = {layer.path: layer.before for layer in report.layers}
    assert errors["spare"] is None and errors["used"] > 0
    assert "not reached by the batches" in str(report)
    rows, plain = batch(channels=16).feats, net.spare.to_quantized(32, 4)
    assert "input_scale" not in packed.spare
    apart = packed.spare(rows) - plain(rows)
    assert mx.linalg.norm(apart) < 0.2 * mx.linalg.norm(plain(rows))


def test_nets_of_several_arguments():
    x = batch(n=60)
    net = models.SPVCNN(20, 5, 1.0, planes=(16,) * 9)
    points = x.coords[:, 1:].astype(mx.float32) + 0.3
    inputs = points, x.feats, x.coords[:, 0]
    packed, report = ml.calibrate(net, [inputs], 4, 32)
    reached = [layer for layer in report.layers if layer.before is not None]
    assert len(reached) == len(report.layers) > 5
    assert all(layer.after <= layer.before for layer in reached)
    assert any(layer.after < 0.9 * layer.before for layer in reached)
    assert mx.isfinite(packed.eval()(*inputs)).all()


def none():
    return ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 20)))


def test_empty_batches():
    net = nn.Sequential(nn.SubmConv3d(20, 16, 3))
    _, report = ml.calibrate(net, [none()], 4, 32)
    assert report.layers[0].before == report.layers[0].after == 0
    _, both = ml.calibrate(net, [none(), batch()], 4, 32)
    assert both.layers[0].after < both.layers[0].before


def test_mistakes_are_sentences():
    net, x = nn.Sequential(nn.SubmConv3d(20, 16, 3)), batch()
    int8 = {"activations": 8}
    for batches, options, said in (
        ([], {}, "at least one batch"),
        ([x], {"class_predicate": lambda *_: False}, "no layer of the model is to be"),
        ([x], {"bits": 3}, "bits must be 4 or 8"),
        ([x], {"group_size": 16}, "group_size must be"),
        ([batch(channels=4)], {}, "do not fit"),
        ([batch(channels=4)], int8, "do not fit"),
        ([x], {"activations": 4}, "activations must be 8"),
        ([x], int8 | {"bits": 8, "group_size": 64}, "group_size must be None"),
    ):
        with pytest.raises(ValueError, match=said):
            ml.calibrate(net, batches, **options)
        # A failed run leaves the model as it was.
        assert net.training and type(net.layers[0]) is nn.SubmConv3d
    own = {"bits": 4, "group_size": 32}  # as mlx.nn.quantize takes them
    for call in (ml.calibrate, lambda net, _, **o: nn.fake_quantize(net, **o)):
        with pytest.raises(TypeError, match="True or False here; got {'bits': 4"):
            call(make_net(), [x], bits=8, class_predicate=lambda *_: own)


@pytest.mark.parametrize("activations", (None, 8))
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_features_that_are_not_finite(value, activations):
    """They chose the plain packing, with errors of nan%."""
    wrong = batch(1)
    wrong = wrong.replace(wrong.feats.at[3, 2].add(value))
    with pytest.raises(ValueError, match="at layers.0 are not all finite"):
        ml.calibrate(make_net(), [batch(), wrong], 8, activations=activations)

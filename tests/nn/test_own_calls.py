"""Subclasses with a call of their own: no layer takes their place that has none."""

import mlx.core as mx
import mlx.nn
import pytest

import mlx_lattice as ml
from mlx_lattice import nn


class Doubled:
    def __call__(self, x):
        return super().__call__(x) * 2


class Conv(Doubled, nn.SubmConv3d): ...


class Linear(Doubled, nn.Linear): ...


class OfMlx(mlx.nn.Linear):
    def __call__(self, x):
        return x.replace(super().__call__(x.feats) * 2)


class Norm(Doubled, nn.BatchNorm): ...


class NormOfMlx(Doubled, mlx.nn.BatchNorm): ...


KINDS = {
    Conv: lambda: Conv(32, 32, 3),
    Linear: lambda: Linear(32, 32),
    OfMlx: lambda: OfMlx(32, 32),
}


def scan():
    coords = mx.array([[0, i, j, 0] for i in range(5) for j in range(4)], mx.int32)
    return ml.SparseTensor(coords, mx.random.normal((20, 32), key=mx.random.key(1)))


def net_of(layer):
    return nn.Sequential(nn.SubmConv3d(32, 32, 3), nn.ReLU(), layer)


@pytest.mark.parametrize("kind", (Conv, Linear))
def test_a_layer_with_its_own_call_is_not_packed(kind):
    net = net_of(KINDS[kind]())
    with pytest.raises(TypeError, match=f"{kind.__name__} has a __call__ of its own"):
        mlx.nn.quantize(net, 32, 8)
    assert type(net.layers[0]) is nn.SubmConv3d  # nothing was done
    with pytest.raises(TypeError, match="FakeQuant takes a float"):
        nn.FakeQuant(KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activations", (None, 8))
def test_what_chooses_layers_leaves_it_in_float(kind, activations):
    net, x = net_of(KINDS[kind]()), scan()
    wanted = net(x).feats
    options = {"bits": 8, "group_size": None if activations else 32}
    made, report = ml.calibrate(net, [x], activations=activations, **options)
    assert type(made.layers[2]) is kind and type(made.layers[0]) is not nn.SubmConv3d
    assert "of its own" in report.kept["layers.2"]
    assert mx.allclose(made(x).feats, wanted, atol=0.05)
    nn.fake_quantize(net)
    assert type(net.layers[2]) is kind and type(net.layers[0]) is nn.FakeQuant


def test_one_that_packs_itself_is_packed_so():
    class Own(Conv):
        def to_quantized(self, *args, **kwargs):
            return nn.Sequential(nn.SubmConv3d(32, 32, 3), nn.ReLU())

    net = nn.Sequential(Own(32, 32, 3))
    mlx.nn.quantize(net, 32, 8, class_predicate=nn.keep_float())
    assert type(net.layers[0]) is nn.Sequential


@pytest.mark.parametrize("kind", (Norm, NormOfMlx))
def test_a_norm_with_its_own_call_is_not_converted(kind):
    net = nn.Sequential(nn.SubmConv3d(32, 32, 3), nn.BatchNorm(32), kind(32))
    with pytest.raises(TypeError, match=f"{kind.__name__} has a __call__ of its own"):
        nn.convert_sync_batchnorm(net)
    assert type(net.layers[1]) is nn.BatchNorm  # nothing was done

"""What users do with modules: calls of their own, sharing, arrays as parameters."""

import copy
import pickle

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn

# Subclasses with a call of their own


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


def scan(channels=32):
    coords = mx.array([[0, i, j, 0] for i in range(5) for j in range(4)], mx.int32)
    return ml.SparseTensor(
        coords, mx.random.normal((20, channels), key=mx.random.key(1))
    )


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


@pytest.mark.parametrize("kind", (Norm, NormOfMlx))
def test_a_norm_with_its_own_call_is_not_converted(kind):
    net = nn.Sequential(nn.SubmConv3d(32, 32, 3), nn.BatchNorm(32), kind(32))
    with pytest.raises(TypeError, match=f"{kind.__name__} has a __call__ of its own"):
        nn.convert_sync_batchnorm(net)
    assert type(net.layers[1]) is nn.BatchNorm  # nothing was done


# Layers that a net has twice


class Twice(mlx.nn.Module):
    """Calls one convolution and one norm twice, and has them under three names."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.SubmConv3d(8, 8, 3), nn.BatchNorm(8)
        self.stages = [{"conv": self.conv, "norm": self.norm}, [self.conv, self.norm]]

    def __call__(self, x):
        x = self.norm(self.conv(x))
        stage, (conv, norm) = self.stages
        return norm(conv(stage["norm"](stage["conv"](x))))

    def parts(self):
        stage, (conv, norm) = self.stages
        return [self.conv, stage["conv"], conv], [self.norm, stage["norm"], norm]


def fake(net):
    nn.fake_quantize(net, class_predicate=lambda *_: True)
    return net


MADE = {
    "copied": copy.deepcopy,
    "pickled": lambda net: pickle.loads(pickle.dumps(net)),
    "fake": fake,
    "synchronised": nn.convert_sync_batchnorm,
}


@pytest.mark.parametrize("how", MADE)
def test_it_stays_one_and_trains_as_one(how):
    net = MADE[how](Twice())
    for same in net.parts():
        assert len(set(map(id, same))) == 1
    x, optimizer = scan(8), mlx.optimizers.SGD(0.1)
    step = mlx.nn.value_and_grad(net, lambda x: mx.square(net(x).feats - 1).mean())
    losses = []
    for _ in range(5):
        loss, grads = step(x)
        optimizer.update(net, grads)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for same in net.parts():
        assert all(mx.array_equal(same[0].weight, each.weight) for each in same)


# Arrays set as parameters


COORDS = mx.array([[0, i, j, 0] for i in range(4) for j in range(3)])
rng = np.random.default_rng(0)
X = ml.SparseTensor(COORDS, mx.array(rng.standard_normal((12, 4), dtype=np.float32)))


def uniform(*shape) -> np.ndarray:
    return rng.uniform(0.5, 2, shape).astype(np.float32)


LAYERS = {
    "conv": lambda: nn.SubmConv3d(4, 4, 3),
    "strided": lambda: nn.Conv3d(4, 6, 2, stride=2),
    "linear": lambda: nn.Linear(4, 3),
    "batch": lambda: nn.BatchNorm(4).eval(),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm(4, affine=True),
    "layer": lambda: nn.LayerNorm(4),
    "rms": lambda: nn.RMSNorm(4),
    "prelu": lambda: nn.PReLU(4),
    "scale": lambda: nn.LayerScale(4),
    "packed": lambda: nn.SubmConv3d(32, 4, 1).to_quantized(32, 8),
    "packed linear": lambda: nn.Linear(32, 4).to_quantized(32, 8),
}
PARAMETERS = [
    (name, parameter)
    for name, make in LAYERS.items()
    for parameter, value in make().items()
    if isinstance(value, mx.array) and value.dtype == mx.float32
]


@pytest.mark.parametrize("as_list", (False, True))
@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_arrays_of_numpy_are_parameters(name, parameter, as_list):
    """MLX's Module makes attributes of them, and the layer goes on without."""
    layer = LAYERS[name]()
    value = uniform(*layer[parameter].shape)
    setattr(layer, parameter, value.tolist() if as_list else value)
    assert isinstance(layer[parameter], mx.array)
    assert np.array_equal(layer[parameter], value)
    x = X if "packed" not in name else X.replace(mx.tile(X.feats, (1, 8)))
    other = LAYERS[name]()
    other.update({**layer.parameters(), parameter: mx.array(value)})
    assert mx.array_equal(layer(x).feats, other(x).feats)


def test_a_bias_where_none_was():
    layer = nn.SubmConv3d(4, 4, 3, bias=False)
    plain = layer(X).feats
    layer.bias = uniform(4)
    assert "bias" in layer.trainable_parameters()
    assert mx.allclose(layer(X).feats, plain + layer.bias, atol=1e-5)
    layer.bias = None
    assert mx.array_equal(layer(X).feats, plain)


@pytest.mark.parametrize("value", (3.0, "a", [[1.0], [2.0, 3.0]]))
def test_what_is_no_array(value):
    for layer in (nn.SubmConv3d(4, 4, 3), nn.BatchNorm(4), nn.Linear(4, 4)):
        with pytest.raises(TypeError, match="bias must be an array"):
            layer.bias = value
        assert "bias" in layer.trainable_parameters()


@pytest.mark.parametrize("shape", ((27, 4, 4), (27, 4, 6), (4, 4)))
def test_weights_of_another_layout(shape):
    """(K, C_in, C_out): the layer took 27 for its channels, and gave 4."""
    layer = nn.SubmConv3d(4, 4, 3)
    layer.weight = mx.zeros(shape)
    with pytest.raises(
        ValueError, match=r"layer's weight has shape \(C_out, .*io\.conv"
    ):
        layer(X)


def test_statistics_stay_frozen_in_nets():
    """MLX asks none of a net's layers: their ``unfreeze`` did not run."""
    net = nn.Sequential(nn.SubmConv3d(4, 4, 3), nn.BatchNorm(4), nn.SyncBatchNorm(4))
    net.layers.append(nn.FakeQuant(nn.Linear(4, 4)))
    before = dict(tree_flatten(net.trainable_parameters()))
    assert len(before) == 8
    for unfreeze in (
        lambda net: net.freeze().unfreeze(),
        lambda net: net.freeze().unfreeze(keys=["running_mean", "weight", "bias"]),
        lambda net: copy.deepcopy(net.freeze()).unfreeze(),
        lambda net: pickle.loads(pickle.dumps(net)).freeze().unfreeze(),
        lambda net: nn.convert_sync_batchnorm(net.freeze()).unfreeze(),
    ):
        made = unfreeze(net)
        assert dict(tree_flatten(made.trainable_parameters())).keys() == before.keys()
        net.unfreeze()
    half = net.freeze().unfreeze(keys="bias")
    names = dict(tree_flatten(half.trainable_parameters()))
    assert {name.rpartition(".")[2] for name in names} == {"bias"}
    net.unfreeze()
    sgd = mlx.optimizers.AdamW(0.1, weight_decay=0.5)
    net.eval()
    held = {k: v for k, v in tree_flatten(net.parameters()) if k not in before}
    sgd.update(net, mlx.nn.value_and_grad(net, lambda: net(X).feats.sum())()[1])
    now = dict(tree_flatten(net.parameters()))
    assert len(held) == 5
    assert all(mx.array_equal(now[name], held[name]) for name in held)

"""What is set in the place of a parameter is one, or a sentence."""

import copy
import pickle

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
import reference as ref
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn

COORDS = mx.array([[0, i, j, 0] for i in range(4) for j in range(3)])
rng = np.random.default_rng(0)
X = ml.SparseTensor(COORDS, mx.array(rng.standard_normal((12, 4), dtype=np.float32)))


def drawn(*shape) -> np.ndarray:
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
    value = drawn(*layer[parameter].shape)
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
    layer.bias = drawn(4)
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


def test_weights_of_numpy_give_the_oracle_s_values():
    layer = nn.SubmConv3d(4, 5, 3)
    layer.weight, layer.bias = drawn(5, 3, 3, 3, 4), drawn(5)
    rel = ref.relation("submanifold", np.array(COORDS), kernel_size=3)
    kio = ref.weight_kio(np.array(layer.weight))
    right = ref.conv(np.array(X.feats), kio, rel, np.array(layer.bias))
    ref.assert_close(layer(X).feats, right, "float32")


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

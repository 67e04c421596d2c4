"""Names of other libraries: a few work, the others raise with the page of names."""

from collections import OrderedDict

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.io import import_checkpoint

COORDS = mx.array([[0, 0, 0, 0], [0, 1, 1, 1], [1, 2, 0, 3]])


def tensor(**options) -> ml.SparseTensor:
    feats = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    return ml.SparseTensor(COORDS, feats, **options)


def test_spconv_s_names_of_a_tensor_s_parts():
    x = tensor(spatial_shape=[3, 2, 4])
    assert x.features is x.feats and x.indices is x.coords
    doubled = x.replace_feature(x.feats * 2)
    assert doubled.key == x.key and mx.array_equal(doubled.feats, x.feats * 2)
    assert x.dense().shape == (2, 4, 3, 2, 4)
    assert mx.array_equal(x.dense()[1, :, 2, 0, 3], x.feats[2])
    assert mx.array_equal(x.dense(channels_first=False), x.to_dense())


@pytest.mark.parametrize("dtype", ("float16", np.float16, None))
def test_dtypes_are_mlx_s(dtype):
    with pytest.raises(TypeError, match=r"one of MLX's, such as mx\.float16; got"):
        tensor().astype(dtype)


@pytest.mark.parametrize("shape", ((3,), (2, 4), (3, 5), (4, 1), (1, 3, 4)))
def test_values_that_do_not_fit_features(shape):
    x, wide = tensor(), tensor().replace(mx.ones((3, 8)))
    for values in (mx.ones(shape), np.ones(shape)):
        with pytest.raises(ValueError, match=r"values of shape \(4,\), \(3, 1\) or"):
            x * values
    with pytest.raises(ValueError, match=r"got \(3, 8\)\. Join channels with"):
        x + wide
    for fitting in ((), (1,), (4,), (1, 4), (3, 1), (3, 4)):
        assert mx.array_equal((x * mx.ones(fitting)).feats, x.feats)
    one = x.replace(x.feats[:, :1])
    assert mx.array_equal((one * x).feats, x.feats[:, :1] * x.feats)


def test_unknown_names_are_refused_as_ever():
    for place in (ml, nn, ops):
        with pytest.raises(AttributeError, match="'SubMConv2d'; docs/coming_from.md"):
            place.SubMConv2d  # noqa: B018
    assert not hasattr(ml, "mx")


def test_layers_by_number():
    for net in (nn.Sequential(*named().values()), nn.Sequential(named())):
        layers = net.layers
        layers = list(layers.values()) if isinstance(layers, dict) else layers
        assert net[0] is layers[0] and net[-1] is layers[2]
        assert net[1:].layers == layers[1:] and net["layers"] is net.layers
        with pytest.raises(IndexError):
            net[3]
        with pytest.raises(TypeError, match="for layer in net.layers"):
            list(net)
        assert "layers" in net and len(tree_flatten(net.parameters())) == 6


def named() -> OrderedDict:
    return OrderedDict(conv=nn.SubmConv3d(4, 5, 3), norm=nn.BatchNorm(5), act=nn.ReLU())


def test_an_ordered_dict_names_the_layers():
    net, x = nn.Sequential(named()).eval(), tensor()
    parts = list(net.layers.values())
    assert mx.array_equal(net(x).feats, nn.Sequential(*parts).eval()(x).feats)
    names = [name for name, _ in tree_flatten(net.parameters())]
    assert "layers.conv.weight" in names
    again = nn.Sequential(nn.Sequential(**named()), mlx.nn.Identity()).eval()
    state = {
        f"0.{n.removeprefix('layers.')}": p for n, p in tree_flatten(net.parameters())
    }
    assert import_checkpoint(state, again, "spconv").complete
    assert mx.array_equal(again(x).feats, net(x).feats)
    mlx.nn.quantize(wide := nn.Sequential(OrderedDict(a=nn.SubmConv3d(32, 32, 3))))
    assert type(wide.layers["a"]) is nn.QuantizedSubmConv3d
    assert nn.Sequential().layers == [] and len(nn.Sequential(parts[0]).layers) == 1
    with pytest.raises(TypeError, match="modules by name, not both; got 1 and act"):
        nn.Sequential(nn.ReLU(), act=nn.ReLU())
    with pytest.raises(TypeError, match="must have names"):
        nn.Sequential({1: nn.ReLU()})


def test_names_of_layers_are_parts_of_names_of_weights():
    for name in ("a.b", "", "0"):
        with pytest.raises(ValueError, match=f"none is empty, .* got '{name}'"):
            nn.Sequential({name: nn.ReLU()})


@pytest.mark.parametrize(
    "shape", (np.array([3, 2, 4]), mx.array([3, 2, 4]), tuple(np.array([3, 2, 4])))
)
def test_extents_from_numpy(shape):
    x = tensor(spatial_shape=shape)
    assert x.spatial_shape == (3, 2, 4) and type(x.spatial_shape[0]) is int
    assert x.to_dense().shape == tensor().to_dense(shape).shape == (2, 3, 2, 4, 4)
    assert nn.SubmConv3d(4, 5, np.int64(3)).kernel_size == (3, 3, 3)
    with pytest.raises(ValueError, match="an int or 3 ints, one per spatial axis"):
        tensor(spatial_shape=np.array([3, 2]))
    with pytest.raises(ValueError, match="an int or 3 ints, one per spatial axis"):
        tensor(spatial_shape=np.array([3.0, 2.0, 4.0]))


# ops.unique_sum


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_sums_of_rows_that_repeat(dtype):
    rng = np.random.default_rng(0)
    coords = rng.integers(-3, 3, size=(400, 4)).astype(np.int32)
    coords[:, 0] = rng.integers(0, 3, size=400)
    feats = mx.array(rng.normal(size=(400, 5))).astype(getattr(mx, dtype))
    wide = np.array(feats.astype(mx.float32)).astype(np.float64)
    rows, inverse = np.unique(coords, axis=0, return_inverse=True)
    expected = np.zeros((len(rows), 5))
    np.add.at(expected, inverse.reshape(-1), wide)
    y = ops.unique_sum(mx.array(coords), feats)
    assert y.feats.dtype == feats.dtype and len(y) < 400
    np.testing.assert_array_equal(np.array(y.coords), rows)
    error = np.array(y.feats.astype(mx.float32)) - expected
    bound = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    assert np.linalg.norm(error) <= bound * np.linalg.norm(expected)
    again = ops.unique_sum(ml.SparseTensor(mx.array(coords), feats))
    assert mx.array_equal(again.feats, y.feats)


def test_a_sequential_counts_and_takes_layers():
    first, x = nn.SubmConv3d(4, 5, 3), tensor()
    net = nn.Sequential(nn.SubmConv3d(4, 4, 3), nn.ReLU())
    assert len(net) == 2 and len(nn.Sequential()) == 0
    net[0] = first
    assert net[0] is first and len(net) == 2
    assert net(x).channels == 5
    assert set(net.parameters()) == {"layers"}
    net[-1] = nn.Identity()
    assert mx.array_equal(net(x).feats, first(x).feats)
    named = nn.Sequential(OrderedDict(conv=nn.SubmConv3d(4, 4, 3), relu=nn.ReLU()))
    named[0] = first
    assert len(named) == 2 and named.layers["conv"] is first
    with pytest.raises(TypeError, match="one by one"):
        named[0:1] = [first]


@pytest.mark.parametrize("layer", (None, [nn.ReLU()], 3))
def test_a_sequential_s_layers_are_called(layer):
    with pytest.raises(TypeError, match="takes layers and functions"):
        nn.Sequential(layer, nn.ReLU())
    with pytest.raises(TypeError, match="takes layers and functions"):
        nn.Sequential(relu=nn.ReLU(), other=layer)


def test_a_conv_norm_act_s_layers_are_called():
    conv = nn.SubmConv3d(4, 4, 3)
    for layers in ((3,), (conv, "batch"), (conv, None, "relu")):
        with pytest.raises(TypeError, match="a ConvNormAct takes layers and functions"):
            nn.ConvNormAct(*layers)


@pytest.mark.parametrize("block", (nn.Sequential, nn.ConvNormAct))
def test_a_class_is_not_a_layer(block):
    with pytest.raises(TypeError, match=r"class BatchNorm; write .* BatchNorm\(...\)"):
        block(nn.SubmConv3d(4, 4, 3), nn.BatchNorm)

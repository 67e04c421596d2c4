"""Modules: mlx.nn's conventions, and the numbers of the functions they call."""

import inspect
import pickle

import cases
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
import reference as ref
from conftest import drawn
from mlx.utils import tree_flatten

from mlx_lattice import nn, ops

DIMS = (1, 2, 3, 4)


def tensor(dims=3, channels=4, n=50, dtype="float32", name="negative"):
    return drawn(name, dims, n, channels, dtype)


def kernel_major(weight):
    """(C_out, k..., C_in) to the oracle's (K, C_in, C_out)."""
    return ref.weight_kio(ref.to_numpy(weight))


def oracle(kind, layer, x, target=None):
    relation = ref.relation(
        kind,
        np.array(x.coords),
        target=None if target is None else np.array(target.coords),
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        support=getattr(layer, "support", "cell"),
    )
    y = ref.conv(
        ref.to_numpy(x.feats),
        kernel_major(layer.weight),
        relation,
        ref.to_numpy(layer.bias) if "bias" in layer else None,
        groups=layer.groups,
    )
    return y, relation


# Convolutions

FORMS = [
    ("Conv", "forward", {"kernel_size": 3}),
    ("Conv", "forward", {"kernel_size": 2, "stride": 2, "bias": False}),
    (
        *("Conv", "forward"),
        {"kernel_size": 3, "stride": 2, "padding": 1, "support": "reach"},
    ),
    ("Conv", "target", {"kernel_size": 3}),
    ("SubmConv", "submanifold", {"kernel_size": 4}),  # as many offsets as channels
    ("SubmConv", "submanifold", {"kernel_size": 3, "dilation": 2, "groups": 2}),
    ("ConvTranspose", "transposed", {}),
    ("GenerativeConvTranspose", "generative", {"kernel_size": 3, "stride": 2}),
]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name, kind, options", FORMS, ids=str)
def test_convolutions(name, kind, options, dims):
    dtype = cases.DTYPES[dims % 3]
    layer = getattr(nn, f"{name}{dims}d")(4, 4, **options)
    layer.set_dtype(getattr(mx, dtype))
    x, targets = tensor(dims, n=30, dtype=dtype), [None]
    if kind in ("target", "transposed"):
        targets = [tensor(dims, n=20, name="block")]
    if kind == "transposed":  # onto its own finer rows if there is no target
        x, fine = getattr(nn, f"MaxPool{dims}d")(2)(x), x
        targets.append(fine)
        assert layer(x).key == fine.key
    for target in targets:
        y = layer(x) if target is None else layer(x, target)
        expected, relation = oracle(kind, layer, x, target)
        np.testing.assert_array_equal(np.array(y.coords), relation.out_coords)
        assert y.dtype == x.dtype
        ref.assert_close(y.feats, expected, dtype)


def test_constructors_read_like_mlx():
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding"]
    names += ["dilation", "groups", "bias"]
    for dims in DIMS:
        for family in ("Conv", "ConvTranspose", "GenerativeConvTranspose"):
            signature = inspect.signature(getattr(nn, f"{family}{dims}d"))
            assert list(signature.parameters)[:8] == names
    layer = nn.Conv3d(6, 8, (3, 1, 2), 2, groups=2)
    assert layer.weight.shape == (8, 3, 1, 2, 3) and layer.bias.shape == (8,)
    assert dict(tree_flatten(layer.parameters())).keys() == {"weight", "bias"}
    assert "bias" not in nn.Conv3d(6, 8, 3, bias=False).parameters()
    assert "6, 8, kernel_size=(3, 1, 2), stride=(2, 2, 2)" in repr(layer)
    assert len(nn.Sequential(layer).leaf_modules()["layers"]) == 1


@pytest.mark.parametrize("name", ("Conv", "SubmConv", "ConvTranspose", "MaxPool"))
def test_names_of_a_family_are_classes_of_their_own(name):
    arguments = (2,) if name == "MaxPool" else (32, 32, 3)
    for dims in DIMS:
        cls = getattr(nn, f"{name}{dims}d")
        assert cls.__name__ == cls.__qualname__ == f"{name}{dims}d"
        assert pickle.loads(pickle.dumps(cls)) is cls and cls.__doc__
        layer = cls(*arguments)
        assert repr(layer).startswith(f"{name}{dims}d(")
        with pytest.raises(
            ValueError, match=f"{name}{dims}d got .* {dims % 4 + 1}d name"
        ):
            layer(tensor(dims % 4 + 1))

        class Own(cls):
            pass

        if name != "MaxPool":
            twin = getattr(nn, f"Quantized{name}{dims}d")
            assert type(Own(*arguments).to_quantized()) is twin


@pytest.mark.parametrize("dims", DIMS)
def test_dims_is_the_number_in_a_name(dims):
    x, numbered = tensor(dims), getattr(nn, f"Conv{dims}d")(4, 6, 3)
    layer = nn.Conv(4, 6, 3, dims=dims)
    layer.update(numbered.parameters())
    assert mx.array_equal(layer(x).feats, numbered(x).feats).item()
    assert type(layer.to_quantized(32, 8)) is nn.QuantizedConv
    assert isinstance(numbered, nn.Conv) and repr(layer).startswith("Conv(4, 6")
    pooled = nn.MaxPool(2, dims=dims)(x).feats
    assert mx.array_equal(pooled, getattr(nn, f"MaxPool{dims}d")(2)(x).feats).item()
    with pytest.raises(TypeError, match="dims"):
        getattr(nn, f"Conv{dims}d")(4, 6, 3, dims=dims)


def test_initial_weights_have_the_scale_of_mlx():
    ours, theirs = nn.Conv3d(16, 64, 3), mlx.nn.Conv3d(16, 64, 3)
    assert ours.weight.shape == theirs.weight.shape
    for layer in (ours, nn.ConvTranspose3d(16, 64, 3)):
        top = mx.abs(layer.weight).max().item()
        assert top == pytest.approx((16 * 27) ** -0.5, rel=0.01)


# The weight of each call is the parameter of that moment.


def test_no_stale_weights(tmp_path):
    x, layer = tensor(), nn.SubmConv3d(4, 6, 3)

    def check():
        ref.assert_close(layer(x).feats, oracle("submanifold", layer, x)[0])

    check()
    layer.weight[:, 1] = 2.0  # in place: the same Python object
    check()
    layer.weight += 1.0
    check()
    other = nn.SubmConv3d(4, 6, 3)
    other.save_weights(str(tmp_path / "w.safetensors"))
    layer.load_weights(str(tmp_path / "w.safetensors"), strict=True)
    assert mx.array_equal(layer.weight, other.weight).item()
    check()
    grads = mlx.nn.value_and_grad(layer, lambda x: (layer(x).feats ** 2).sum())(x)[1]
    mlx.optimizers.Adam(0.1).update(layer, grads)
    assert not mx.array_equal(layer.weight, other.weight).item()
    check()
    layer.update({"weight": mx.zeros_like(layer.weight)})
    check()


def test_gradients_of_parameters():
    x, layer = tensor(), nn.Conv3d(4, 6, 3, 2)
    y, relation = oracle("forward", layer, x)
    dy = cases.features(*y.shape, 3)
    grads = mlx.nn.value_and_grad(
        layer, lambda x: (layer(x).feats * mx.array(dy)).sum()
    )(x)[1]
    expected = ref.weight_grad(np.array(x.feats), dy, relation)
    ref.assert_close(kernel_major(grads["weight"]), expected)
    ref.assert_close(grads["bias"], ref.bias_grad(dy))


# Other layers

ACTIVATIONS = sorted(
    name
    for name in nn.__all__
    if getattr(getattr(nn, name), "__module__", "") == "mlx_lattice.nn.layers"
    and name not in ("DropPath", "Dropout", "LayerScale")
)


OWN = "elu", "gelu", "selu", "silu"  # those with kernels of their own on the CPU


def assert_same_activation(name, ours, theirs):
    """MLX's bits; of those with kernels of their own, its numbers."""
    if name.lower() in OWN:
        ref.assert_close(ours, ref.to_numpy(theirs), theirs.dtype)
    else:
        assert mx.array_equal(ours, theirs).item()


# Of a dtype that nothing here looks at, MLX compiles each once more.
@pytest.mark.parametrize(
    "name, dtype",
    [(n, "float32") for n in ACTIVATIONS]
    + [(n, d) for n in ("ReLU", "GELU", "SiLU") for d in ("float16", "bfloat16")],
)
def test_activations_are_those_of_mlx(name, dtype):
    x = tensor(dtype=dtype)
    layer, theirs = getattr(nn, name)(), getattr(mlx.nn, name)()
    layer.set_dtype(x.dtype), theirs.set_dtype(x.dtype)
    y = layer(x)
    assert y.key == x.key and y.dtype == x.dtype
    assert_same_activation(name, y.feats, theirs(x.feats))
    assert mx.array_equal(layer(x.feats), y.feats).item()
    assert isinstance(layer, getattr(mlx.nn, name))


def test_sequential_takes_any_layer():
    net = nn.Sequential(
        nn.SubmConv3d(4, 8, 3, bias=False),
        mlx.nn.LayerNorm(8),
        mlx.nn.relu,
        lambda x: x * 2.0,
        mlx.nn.Sequential(nn.MaxPool3d(2), mlx.nn.Linear(8, 8)),
        nn.Identity(),
        nn.Dropout(0.5),
        nn.GlobalAvgPool(),
        nn.Linear(8, 3),
        mlx.nn.Softmax(),
    )
    y = net.eval()(tensor())
    assert y.shape == (1, 3)
    np.testing.assert_allclose(np.array(y.sum(axis=1)), 1, rtol=1e-5)


def test_linear_and_dropout():
    x, layer = tensor(), nn.Linear(4, 5)
    expected = np.array(x.feats, np.float64) @ np.array(layer.weight, np.float64).T
    ref.assert_close(layer(x).feats, expected + np.array(layer.bias))
    drop = nn.Dropout(0.25)
    ones = tensor(n=400).replace(mx.ones((len(tensor(n=400)), 4)))
    kept = np.array(drop(ones).feats)
    assert set(np.unique(kept.round(4))) == {0.0, np.float32(1.3333)}
    assert mx.array_equal(drop.eval()(ones).feats, ones.feats).item()


@pytest.mark.parametrize("dims", DIMS)
def test_pooling_modules(dims):
    x = tensor(dims)
    for family, options in (
        ("max_pool", {}),
        ("sum_pool", {}),
        ("avg_pool", {"count": "volume"}),
    ):
        name = "".join(part.title() for part in family.split("_"))
        layer = getattr(nn, f"{name}{dims}d")(3, 2, support="reach", **options)
        y = layer(x)
        function = getattr(ops, f"{family}{dims}d")
        z = function(x, 3, 2, support="reach", **options)
        assert y.key == z.key and mx.array_equal(y.feats, z.feats).item()
        assert not layer.parameters()
    y, indices = getattr(nn, f"MaxPool{dims}d")(2)(x, return_indices=True)
    assert ops.max_unpool(y, indices).key == x.key
    assert getattr(nn, f"Upsample{dims}d")(2)(y).key == x.key
    for name in ("Max", "Sum", "Avg"):
        pooled = getattr(ops, f"global_{name.lower()}_pool")(x)
        assert mx.array_equal(getattr(nn, f"Global{name}Pool")()(x), pooled).item()


def test_every_name_is_documented():
    for name in nn.__all__:
        assert getattr(nn, name).__doc__, name

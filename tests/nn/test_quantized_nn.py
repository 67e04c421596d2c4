"""Quantised modules: nn.quantize over nets, files both ways, what stays in float."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from conftest import drawn
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn

FAMILIES = ("Conv", "SubmConv", "ConvTranspose", "GenerativeConvTranspose")
NETS = {
    "minkunet": lambda: models.MinkUNet14(3, 5),
    "torchsparse": lambda: models.MinkUNetTorchSparse(3, 5, 0.5),
    "resnet": lambda: models.SparseResNet(3, 5, (1, 1), (16, 32)),
    "spvcnn": lambda: models.SPVCNN(3, 5, 1.0, 0.5),
    "decoder": lambda: models.SparseVAEDecoder(7, (64, 32), 3, (2, 1)),
}


def tensor(channels=3, dims=3, n=40):
    return drawn("negative", dims, n, channels)


def scores(net, x):
    """What a net makes of a tensor; on rows that packing cannot change."""
    if isinstance(net, models.SPVCNN):
        return net(x.coords[:, 1:].astype(mx.float32) + 0.3, x.feats, x.coords[:, 0])
    cells = {}
    if isinstance(net, models.SparseVAEDecoder):
        cells["subdivisions"] = [mx.ones((len(x), 8), dtype=mx.bool_)]
    y = net(x, **cells)
    return y.feats if isinstance(y, ml.SparseTensor) else y


def distance(a, b) -> float:
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


def quantize(net, bits=8, size=32, predicate=None):
    mlx.nn.quantize(net, group_size=size, bits=bits, class_predicate=predicate)
    return net.eval()


@pytest.mark.parametrize("dims", (1, 2, 3, 4))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_convolution_has_a_twin(family, dims):
    bias = dims % 2 == 1
    layer = getattr(nn, f"{family}{dims}d")(20, 6, 2, groups=2, bias=bias)
    if bias:
        layer.bias = mx.arange(6) / 6
    x = tensor(20, dims)
    target = (x,) if family == "ConvTranspose" else ()
    if target:  # onto rows of its own, one level finer
        x = getattr(nn, f"Conv{dims}d")(20, 20, 2, 2)(x)
    twin = layer.to_quantized(group_size=32, bits=8)
    assert type(twin) is getattr(nn, f"Quantized{family}{dims}d")
    names = {"weight", "scales", "biases"} | ({"bias"} if bias else set())
    arrays = {k for k, v in twin.items() if isinstance(v, mx.array)}
    assert arrays == names and not tree_flatten(twin.trainable_parameters())
    q = ml.quantize_weight(layer.weight, bits=8, group_size=32, layout="module")
    held = twin.packed_weight()
    assert all(map(mx.array_equal, held.arrays, q.arrays))
    y, z = layer(x, *target), twin(x, *target)
    assert y.key == z.key and distance(z.feats, y.feats) < 0.02
    layer.weight = ml.dequantize_weight(q)
    ref.assert_close(z.feats, np.array(layer(x, *target).feats, np.float64))
    assert "20, 6, kernel_size" in repr(twin)
    assert "group_size=32, bits=8" in repr(twin)
    fresh = type(twin)(20, 6, 2, groups=2, bias=bias, group_size=32, bits=8)
    fresh.update(twin.parameters())
    assert mx.array_equal(fresh(x, *target).feats, z.feats).item()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("c_in, size", ((20, 32), (64, 64), (130, 128)))
def test_linear(c_in, size, dtype):
    layer = nn.Linear(c_in, 7)
    twin = layer.to_quantized(group_size=size, bits=8)
    assert isinstance(twin, mlx.nn.QuantizedLinear)
    assert twin.weight.ndim == 2 and f"input_dims={c_in}" in repr(twin)
    twin.set_dtype(getattr(mx, dtype))
    x = tensor(c_in).astype(getattr(mx, dtype))
    w = np.array(twin.packed_weight().dense()[0], np.float64)
    wanted = ref.to_numpy(x.feats) @ w + ref.to_numpy(twin.bias)
    for y in (twin(x).feats, twin(x.feats), twin(x.feats[None])[0]):
        # MLX's matrix product with packed weights on the CPU adds in the inputs' dtype.
        ref.assert_close(y, wanted, dtype, slack=2)
    dy = mx.array(cases.features(len(x), 7)).astype(x.dtype)
    _, (dx,) = mx.vjp(twin, [x.feats], [dy])
    ref.assert_close(dx, ref.to_numpy(dy).astype(np.float64) @ w.T, dtype)
    assert twin(x.feats[:0]).shape == (0, 7)
    fresh = nn.QuantizedLinear(c_in, 7, group_size=size, bits=8)
    fresh.load_weights(list(tree_flatten(twin.parameters())))
    assert mx.array_equal(fresh(x).feats, twin(x).feats).item()
    with pytest.raises(ValueError, match="the layer has in_channels = "):
        twin(mx.zeros((2, c_in + 1), dtype=x.dtype))
    with pytest.raises(TypeError, match="must have one dtype"):
        twin(
            mx.zeros((2, c_in), dtype=mx.float32 if dtype != "float32" else mx.float16)
        )


# Nets


@pytest.mark.parametrize("name", NETS)
def test_nets_quantize_save_and_load(name, tmp_path):
    mx.random.seed(0)
    bits = 4 if name in ("minkunet", "decoder") else 8
    net, x = NETS[name]().eval(), tensor(n=60)
    y = scores(net, x)
    predicate = nn.keep_float()
    quantize(net, bits, 32, predicate)
    z = scores(net, x)
    assert distance(z, y) < {4: 0.35, 8: 0.02}[bits]
    with ml.trace(net) as t:
        scores(net, x)
    layers = {p for p, m in net.named_modules() if "scales" in m}
    assert layers and layers == {r.layer for r in t if r.problem.bits == bits}
    assert {r.layer for r in t if not r.problem.bits} <= set(predicate.kept)
    net.save_weights(str(tmp_path / "net.safetensors"))
    fresh = quantize(NETS[name](), bits, 32, nn.keep_float())
    fresh.load_weights(str(tmp_path / "net.safetensors"), strict=True)
    assert mx.array_equal(scores(fresh, x), z).item()
    # MLX's loaders find out what is packed by the names in the file.
    held = mx.load(str(tmp_path / "net.safetensors"))
    found = quantize(NETS[name](), bits, 32, lambda path, _: f"{path}.scales" in held)
    found.load_weights(list(held.items()), strict=True)
    assert mx.array_equal(scores(found, x), z).item()


def test_everything_is_packed_without_a_predicate_and_only_once():
    net = quantize(models.MinkUNet14(3, 5), 8, 64)
    kinds = {type(m) for m in net.modules() if hasattr(m, "to_quantized")}
    assert kinds and all("Quantized" in k.__name__ for k in kinds)
    before = dict(tree_flatten(net.parameters()))
    quantize(net, 4, 32)
    assert all(v is before[k] for k, v in tree_flatten(net.parameters()))
    assert mx.isfinite(scores(net, tensor())).all().item()


def test_adapters_train_beside_packed_layers():
    net = nn.Sequential(nn.SubmConv3d(20, 20, 1), nn.SubmConv3d(20, 8, 3)).eval()
    quantize(net, 8, 32, lambda path, _: path.endswith("1"))
    x = tensor(20)
    names = [name for name, _ in tree_flatten(net.trainable_parameters())]
    assert names == ["layers.0.weight", "layers.0.bias"]
    step = mlx.nn.value_and_grad(net, lambda x: (net(x).feats ** 2).sum())
    grads = dict(tree_flatten(step(x)[1]))
    wide = nn.SubmConv3d(20, 8, 3)
    wide.weight = ml.dequantize_weight(net.layers[1].packed_weight())
    wide.bias = net.layers[1].bias
    twin = nn.Sequential(net.layers[0], wide)
    wanted = mlx.nn.value_and_grad(twin, lambda x: (twin(x).feats ** 2).sum())(x)[1]
    for name, w in tree_flatten(wanted):
        if name in grads:
            ref.assert_close(grads[name], np.array(w, np.float64))
    net.layers[1].unfreeze(keys="scales")
    with pytest.raises(ValueError, match=r"Freeze the layer \(layer.freeze\(\)\)"):
        mlx.nn.value_and_grad(net, lambda x: net(x).feats.sum())(x)


def test_files_of_other_shapes_are_refused():
    layer = nn.SubmConv3d(20, 6, 3).to_quantized(32, 8)
    weights = dict(tree_flatten(layer.parameters()))
    for bits, size in ((4, 32), (8, 64)):
        other = dict(tree_flatten(nn.SubmConv3d(20, 6, 3).to_quantized(size, bits)))
        other = {k: other[k] for k in weights}
        with pytest.raises(ValueError, match="Expected shape"):
            layer.load_weights(list(other.items()))
    for name, wrong, text in (
        ("weight", weights["weight"][..., :4], r"weight must be \(27, 6, 8\)"),
        ("scales", weights["scales"][:9], "scales must be"),
        ("biases", weights["biases"].astype(mx.float16), "got .* float16"),
    ):
        layer = nn.SubmConv3d(20, 6, 3).to_quantized(32, 8)
        layer.load_weights([(name, wrong)], strict=False)
        with pytest.raises((ValueError, TypeError), match=text):
            layer(tensor(20))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"bits": 3}, "bits must be 4 or 8; got 3"),
        ({"group_size": 16}, "group_size must be 32, 64 or 128; got 16"),
        ({"mode": "mxfp4"}, 'packed in mode "affine"'),
        ({"quantize_input": True, "bits": 5}, "bits must be 4 or 8; got 5"),
    ],
)
@pytest.mark.parametrize("layer", (nn.SubmConv3d(4, 4, 3), nn.Linear(4, 4)))
def test_what_cannot_be_packed(layer, options, text):
    with pytest.raises(ValueError, match=text):
        layer.to_quantized(**options)


# What stays in float


def test_keep_float_keeps_stems_and_heads_and_says_so():
    predicate = nn.keep_float()
    assert str(predicate) == "kept in float: none"
    net = quantize(models.MinkUNet14(3, 5), 8, 32, predicate)
    assert set(predicate.kept) == {"stem.layers.0.conv", "head"}
    assert isinstance(net.stem.layers[0].conv, nn.SubmConv3d)
    assert "stem.layers.0.conv: 3 input channels a group, fewer than 16" in str(
        predicate
    )
    assert 'head: "head" in its path' in str(predicate)
    fine = nn.keep_float(few_inputs=1, few_outputs=1, names=())
    assert not fine.kept and fine("a", nn.SubmConv3d(1, 1, 3))
    assert not fine("a", nn.ReLU())
    depthwise = nn.SubmConv3d(64, 64, 3, groups=64)
    assert not predicate("block", depthwise)
    assert predicate.kept["block"].startswith("1 input channels a group")
    assert not predicate("last", nn.Linear(64, 2))
    assert predicate.kept["last"] == "2 output channels, fewer than 8"
    assert predicate("block", nn.SubmConv3d(64, 64, 3)) and "block" not in (
        predicate.kept
    )

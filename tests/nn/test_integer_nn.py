"""Integer layers: their values, chains that stay in int8, and what refuses integers."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from conftest import drawn
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn, ops
from mlx_lattice.nn.fused import convolved

FAMILIES = ("Conv", "SubmConv", "ConvTranspose", "GenerativeConvTranspose")
SCALE = 4 / 127
MOVED = mx.array([0, 9, 9, 9], dtype=mx.int32)


def tensor(channels=20, dims=3, n=40, dtype="float32"):
    return drawn("negative", dims, n, channels, dtype)


def integer(layer, bits=8, input_scale=SCALE, output_scale=None):
    """The integer twin of a layer, with static scales."""
    size = 32 if bits == 4 else None
    twin = layer.to_quantized(size, bits, quantize_input=True)
    scales = (None if s is None else mx.array([s]) for s in (input_scale, output_scale))
    return twin.calibrated(*scales)


def wide(layer, twin):
    """A float layer gets the values that the integers of its twin stand for."""
    layer.weight = dense(twin).swapaxes(1, 2).swapaxes(0, 1).reshape(layer.weight.shape)
    return layer


def dense(twin):
    """The float weight (K, C_in, C_out) of a twin, without the scale of features."""
    w = twin.packed_weight().dense()
    return w / twin.input_scale if "input_scale" in twin else w


def close(y, z, most=1e-5):
    y, z = (mx.array(getattr(a, "feats", a)).astype(mx.float32) for a in (y, z))
    return mx.abs(y - z).max().item() <= most * max(1, mx.abs(z).max().item())


def values_of(x: ml.IntegerTensor) -> np.ndarray:
    return np.array(x.values).astype(np.int32)


@pytest.mark.parametrize("dims", (1, 2, 3, 4))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_convolution(family, dims):
    bits = 4 if dims % 2 else 8
    layer = getattr(nn, f"{family}{dims}d")(20, 6, 2, groups=2)
    layer.bias = mx.arange(6) / 6
    x = tensor(20, dims, 30)
    target = ()
    if family == "ConvTranspose":  # onto rows of its own, one level finer
        target = (x,)
        x = getattr(nn, f"Conv{dims}d")(20, 20, 2, 2)(x)
    twin = integer(layer, bits)
    assert type(twin) is getattr(nn, f"Quantized{family}{dims}d")
    assert twin.mode == "integer" and not tree_flatten(twin.trainable_parameters())
    names = {"weight", "scales", "bias", "input_scale"}
    names |= {"multipliers"} if bits == 4 else set()
    assert {k for k, v in twin.items() if isinstance(v, mx.array)} == names
    assert f"bits={bits}, int8 features calibrated" in repr(twin)
    before = layer(x, *target)
    rounded = ml.IntegerTensor.rounded(x, SCALE)
    y = twin(x, *target)
    assert y.key == before.key and y.dtype == mx.float32
    assert mx.array_equal(twin(rounded, *target).feats, y.feats)
    assert close(y, wide(layer, twin)(rounded.dequantized(), *target))
    size = mx.linalg.norm(before.feats)
    assert mx.linalg.norm(y.feats - before.feats) / size < {8: 0.02, 4: 0.12}[bits]
    out = integer(getattr(nn, f"{family}{dims}d")(20, 6, 2, groups=2), bits)
    out.update(twin.parameters())
    out.calibrated(output_scale=mx.array([0.02]))
    z = out(rounded, *target)
    assert isinstance(z, ml.IntegerTensor) and "to int8" in repr(out)
    wanted = np.clip(np.rint(np.array(y.feats) / np.float32(0.02)), -127, 127)
    assert np.abs(values_of(z) - wanted).max() <= 1
    assert np.mean(values_of(z) == wanted) > 0.99


@pytest.mark.parametrize("bits", (8, 4))
def test_rows_without_a_scale_have_their_own(bits):
    layer, x = nn.SubmConv3d(20, 6, 3), tensor()
    twin = integer(layer, bits, None)
    assert "input_scale" not in twin and "int8 features by row" in repr(twin)
    rows = np.abs(np.array(x.feats)).max(axis=1, keepdims=True) / np.float32(127)
    values = np.rint(np.array(x.feats) * (1 / rows))
    y = wide(layer, twin)(x.replace(mx.array(values * rows)))
    assert close(twin(x), y)
    none = twin(x.replace(mx.zeros_like(x.feats)))
    assert mx.array_equal(none.feats, mx.broadcast_to(twin.bias, none.shape))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("scale", (SCALE, None))
def test_dtypes(dtype, scale):
    x = tensor(dtype=dtype)
    layer, line = nn.SubmConv3d(20, 6, 3), nn.Linear(20, 7)
    exact = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for each in (layer, line):
        twin = integer(each, input_scale=scale)
        y = twin(x)
        assert y.dtype == x.dtype
        assert close(y, twin(x.astype(mx.float32)), exact)
        if scale is not None:
            held = ml.IntegerTensor.rounded(x, scale)
            assert mx.array_equal(twin(held).feats, y.feats)
        none = ml.SparseTensor(mx.zeros((0, 4), mx.int32), x.feats[:0])
        assert twin(none).shape == (0, y.channels)
        assert twin(none).dtype == x.dtype


@pytest.mark.parametrize("bits", (8, 4))
def test_linear(bits):
    layer, x = nn.Linear(20, 7), tensor()
    layer.bias = mx.arange(7) / 7
    twin = integer(layer, bits)
    assert isinstance(twin, mlx.nn.QuantizedLinear) and twin.weight.ndim == 2
    assert f"bits={bits}, int8 features calibrated" in repr(twin)
    y = twin(x)
    rounded = ml.IntegerTensor.rounded(x, SCALE)
    assert close(y, rounded.dequantized().feats @ dense(twin)[0] + layer.bias)
    assert mx.array_equal(twin(x.feats[None])[0], y.feats)
    fresh = nn.QuantizedLinear(
        20, 7, bits=bits, mode="integer", group_size=32 if bits == 4 else None
    ).calibrated(mx.array([1.0]))
    fresh.load_weights(list(tree_flatten(twin.parameters())), strict=True)
    assert mx.array_equal(fresh(x).feats, y.feats)
    with pytest.raises(TypeError, match="features are int8 with a scale"):
        nn.Linear(20, 7).to_quantized(32, 8)(rounded)


# Chains


def chain(bits=8, folded=True):
    """A block of two convolutions beside its input; all of it in int8."""
    block = models.blocks.BasicBlock(20, 20).eval()
    norms = [block.conv1.norm, block.conv2.norm]
    for norm in norms:
        norm.running_mean = mx.random.normal((20,)) * 0.1
        norm.weight = mx.random.normal((20,))  # of both signs
        norm.bias = mx.random.normal((20,)) * 0.1
    ours = models.blocks.BasicBlock(20, 20).eval()
    ours.update(block.parameters())
    for part, name in ((ours.conv1, "conv1"), (ours.conv2, "conv2")):
        twin = integer(part.conv, bits, 0.03, 0.02 if name == "conv1" else 0.03)
        if folded:
            scale, shift = part.norm.scale_shift()
            twin.scales, twin.bias = twin.scales * scale, shift
            part.norm = nn.FoldedNorm()
        part.conv = twin.calibrated()
    return block, ours


@pytest.mark.parametrize("folded", (True, False))
def test_a_block_never_leaves_int8(folded):
    block, ours = chain(folded=folded)
    x = ml.IntegerTensor.rounded(tensor(), 0.03)
    with ml.trace(ours) as t:
        y = ours(x)
    assert isinstance(y, ml.IntegerTensor) and y.key == x.key
    for part in (block.conv1, block.conv2):
        twin = (ours.conv1 if part is block.conv1 else ours.conv2).conv
        wide(part.conv, twin if not folded else integer(part.conv))
    middle = block.conv1(x.dequantized())
    middle = ml.IntegerTensor.rounded(middle, 0.02).dequantized()
    z = ml.IntegerTensor.rounded(block.conv2(middle, residual=x.dequantized()), 0.03)
    assert np.abs(values_of(y) - values_of(z)).max() <= 1
    assert np.mean(values_of(y) == values_of(z)) > 0.98
    assert (y.values > 0).any() and (y.values >= 0).all()
    first, last = (record.problem.integer for record in t)
    assert first.writes_int8 and first.activation == "relu"
    assert last.writes_int8 and last.residual_int8 and last.activation == "relu"
    told = [(norm.layer, norm.norm.parts, norm.norm.launches) for norm in t.norms]
    assert told == [
        ("conv1.norm", ("BatchNorm", "ReLU"), 0),
        ("conv2.norm", ("BatchNorm", "residual", "ReLU"), 0),
    ]
    assert "to int8" in str(ml.explain(x, ours.conv1))


def test_residuals_of_every_kind():
    conv, norm = nn.SubmConv3d(20, 20, 3), nn.BatchNorm(20).eval()
    x = tensor()
    twin = integer(conv)
    held = ml.IntegerTensor.rounded(x, SCALE)
    plain = twin(x).feats + held.dequantized().feats
    y = convolved(twin, None, held, residual=held)
    assert close(y, plain)
    y = convolved(twin, None, held, residual=x)
    assert close(y, twin(x).feats + x.feats)
    y = convolved(twin, norm, x, activation=ops.relu, residual=held)
    assert close(y, ops.relu(norm(twin(x)).feats + held.dequantized().feats), 1e-4)
    # What the convolution cannot have is computed after it.
    y = convolved(twin, norm, x, activation=mlx.nn.tanh, residual=held)
    assert close(y, mlx.nn.tanh(norm(twin(x)).feats + held.dequantized().feats), 1e-4)


def test_nets_by_nn_quantize():
    x = tensor(20, n=60)
    net = models.MinkUNet14(20, 5).eval()
    y = net(x).feats
    mlx.nn.quantize(net, bits=8, quantize_input=True, class_predicate=nn.keep_float())
    kinds = {m.mode for m in net.modules() if hasattr(m, "scales")}
    assert kinds == {"integer"}
    z = net(x).feats
    assert mx.linalg.norm(z - y) / mx.linalg.norm(y) < 0.05
    with ml.trace(net) as t:
        net(x)
    integers = [r.problem.integer for r in t if r.problem.integer]
    assert len(integers) > 20 and all(facts.row_scales for facts in integers)


# Integers are no values


def test_integers_are_refused_by_what_computes_in_float():
    x = ml.IntegerTensor.rounded(tensor(), SCALE)
    layers = (
        nn.SubmConv3d(20, 4, 3), nn.BatchNorm(20), nn.ReLU(), nn.Linear(20, 4),
        nn.LayerNorm(20), nn.MaxPool3d(2, 2), nn.GlobalMaxPool(), nn.GlobalAvgPool(),
        nn.SubmConv3d(20, 4, 3).to_quantized(32, 8), ops.relu, ops.sigmoid,
        lambda x: x + x, lambda x: x * 2.0, lambda x: -x,
        lambda x: ml.IntegerTensor(x.coords + MOVED, x.values, x.scale).to_dense(),
        lambda x: ops.cat([tensor(), x]), lambda x: ops.cat([x, tensor()]),
        lambda x: nn.Sequential(nn.SubmConv3d(20, 4, 3), nn.BatchNorm(4)).eval()(x),
    )  # fmt: skip
    for layer in layers:
        with pytest.raises(TypeError, match="int8"):
            layer(x)
    with pytest.raises(TypeError, match="feats must be float32"):
        tensor().replace(x.values)
    assert x.dtype == mx.int8 and x.shape == (len(x), 20)
    assert "20 int8" in repr(x) and repr(x).startswith("IntegerTensor(")


def test_an_integer_tensor():
    y = tensor(dtype="float16")
    x = ml.IntegerTensor.rounded(y, SCALE)
    wanted = np.clip(np.rint(np.array(y.feats, np.float32) / SCALE), -127, 127)
    assert np.array_equal(values_of(x), wanted.astype(np.int32))
    back = x.dequantized()
    assert back.dtype == mx.float16 and back.key == y.key
    assert x.astype(mx.float32).dtype == mx.float32
    assert close(x.astype(mx.float32), wanted * np.float32(SCALE))
    again = ml.IntegerTensor.from_arrays(x.arrays())
    assert mx.array_equal(again.values, x.values) and again.float_dtype == mx.float32
    none = ml.IntegerTensor.rounded(y, 0.0)
    assert not none.values.any() and not none.dequantized().feats.any()
    for values, scale, kind in (
        (x.values, mx.array(1.0), ValueError),
        (x.values[:1], mx.array([1.0]), ValueError),
        (y.feats, mx.array([1.0]), TypeError),
        (x.values, mx.array([1]), TypeError),
    ):
        with pytest.raises(kind):
            ml.IntegerTensor(y.coords, values, scale)


def test_cat_joins_integers_in_the_greatest_scale():
    y = tensor()
    x = ml.IntegerTensor.rounded(y, 0.02)
    same = ops.cat([x, x])
    assert mx.array_equal(same.values[:, :20], same.values[:, 20:])
    assert mx.array_equal(same.values[:, 20:], x.values) and same.scale is x.scale
    coarse = ml.IntegerTensor.rounded(y, 0.05)
    both = ops.cat([x, coarse])
    assert both.scale.item() == coarse.scale.item()
    assert mx.array_equal(both.values[:, 20:], coarse.values)
    wanted = np.rint(values_of(x) * np.float32(0.02) / np.float32(0.05))
    assert np.abs(values_of(both)[:, :20] - wanted).max() <= 1
    assert np.mean(values_of(both)[:, :20] == wanted) > 0.99

"""calibrate() for int8 features: what is packed, folded, kept in float, refused."""

import copy
import pickle

import cases
import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import numpy as np
import pytest
import reference_integers as ref
from conftest import bits as bits_of
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models, nn, ops
from mlx_lattice.models.trellis2 import ConvNeXtBlock

PACK_ALL = nn.keep_float(few_inputs=1, few_outputs=1, names=())


def batch(seed=0, channels=20, n=120):
    coords = cases.geometry("surface", 3, n, seed)
    feats = np.random.default_rng(seed).normal(size=(len(coords), channels))
    return ml.SparseTensor(mx.array(coords), mx.array(feats.astype(np.float32)))


class Net(mlx.nn.Module):
    """Everything that decides whether a result may be int8."""

    def __init__(self):
        super().__init__()
        block, conv = models.blocks.BasicBlock, models.blocks.conv_norm
        self.first = conv(nn.SubmConv3d(20, 32, 3, bias=False))
        self.block = block(32, 32)
        self.down = nn.Sequential(nn.Conv3d(32, 32, 2, 2), nn.BatchNorm(32), nn.ReLU())
        self.up = conv(nn.ConvTranspose3d(32, 32, bias=False))
        self.mixed = nn.Sequential(nn.SubmConv3d(64, 24, 3), nn.ReLU())
        self.line = nn.Linear(24, 24)
        self.added = nn.SubmConv3d(24, 24, 1)
        self.last = nn.SubmConv3d(24, 24, 3)

    def __call__(self, x):
        x = self.block(self.first(x))
        y = self.up(self.down(x), x)
        y = self.line(self.mixed(ops.cat([y, x])))
        y = y + self.added(y)  # which no integer layer does
        return self.last(y)


def distance(y, z) -> float:
    y, z = (getattr(a, "feats", a) for a in (y, z))
    return (mx.linalg.norm(y - z) / mx.linalg.norm(z)).item()


def integers(net):
    return {p: m for p, m in net.named_modules() if getattr(m, "mode", "") == "integer"}


def of_layers():
    layers = nn.SubmConv3d(20, 32, 3), nn.BatchNorm(32), nn.ReLU()
    return nn.Sequential(*layers, nn.SubmConv3d(32, 32, 3)).eval()


INT8 = {
    "first.conv", "block.conv1.conv", "block.conv2.conv", "down.layers.0", "up.conv",
    "mixed.layers.0",
}  # fmt: skip


def trained(net, *x, steps=3):
    """A net whose norms have seen a batch."""
    net.train()
    for _ in range(steps):
        mx.eval(getattr(y := net(*x), "feats", y), net.state)
    return net.eval()


@pytest.mark.parametrize("bits", (8, 4))
def test_a_net_stays_in_int8_where_it_can(bits):
    net, batches = trained(Net(), batch()), [batch(s) for s in range(2)]
    before = dict(tree_flatten(net.parameters()))
    made, report = ml.calibrate(net, batches, bits, activations=8)
    assert all(v is before[k] for k, v in tree_flatten(net.parameters()))
    layers = integers(made)
    assert set(layers) == {e.path for e in report.layers} == INT8 | {
        "line", "added", "last",
    }  # fmt: skip
    assert {p for p, m in layers.items() if "output_scale" in m} == INT8
    assert {e.path for e in report.layers if e.writes_int8} == INT8
    norms = {p for p, m in made.named_modules() if isinstance(m, nn.FoldedNorm)}
    assert norms == set(report.folded) == {
        "first.norm", "block.conv1.norm", "block.conv2.norm", "down.layers.1",
        "up.norm",
    }  # fmt: skip
    # What cat joins has the greatest of their scales.
    parts = [layers[path].output_scale for path in ("up.conv", "block.conv2.conv")]
    greatest = max(parts, key=mx.array.item)
    assert layers["mixed.layers.0"].input_scale is greatest
    assert layers["up.conv"].output_scale is greatest  # it is only joined
    most = {8: 0.02, 4: 0.12}[bits]
    for error in report.layers:
        assert 0 < error.after < most and error.after < 1.2 * error.before
        assert layers[error.path].rounding_error == error.after
        assert f"{error.path}" in str(report)
    assert f"int{bits}" in str(report) and ", int8 features: error" in str(report)
    x = batch(5)
    assert distance(made(x), net(x)) < 2 * most
    with ml.trace(made) as t:
        made(x)
    facts = {r.layer: r.problem.integer for r in t}
    assert {layer for layer, f in facts.items() if f.writes_int8} == INT8
    assert facts["block.conv2.conv"].residual_int8
    error = layers["last"].rounding_error
    assert {r.layer: r.rounding_error for r in t}["last"] == error
    assert "rounded" in t.table() and '"rounding_error": 0.0' in t.to_json()
    assert "when it was calibrated" in str(ml.explain(x, made.first.conv))
    again, same = ml.calibrate(net, batches, bits, activations=8)
    assert same == report
    parameters = dict(tree_flatten(again.parameters()))
    assert all(
        mx.array_equal(v, parameters[k]) for k, v in tree_flatten(made.parameters())
    )


def whole(name):
    """A net in evaluation, what it is called with, and layers that write int8."""
    x, small = batch(n=60), ((16,) * 8, (1,) * 8)
    few = x.replace(x.feats[:, :3])
    if name == "minkunet":
        net = models.MinkUNet(3, 5, *small, stem_channels=16)
        return trained(net, few), (few,), {"stem.layers.0.conv", "encoder.0.down.conv"}
    if name == "resnet":
        return trained(models.SparseResNet(20, 5, (1, 1), (16, 32)), x), (x,), set()
    if name == "spunet":
        return trained(models.SpUNet(20, 5, 16, *small), x), (x,), set()
    if name == "convnext":
        block, x = ConvNeXtBlock(16, 2), batch(0, 16)
        block.mlp[2].weight = mx.random.normal(block.mlp[2].weight.shape) * 0.1
        return block, (x,), {"mlp.0"}
    if name == "spvcnn":
        given = mx.random.uniform(0, 2, (300, 3)), mx.random.normal((300, 4))
        net = models.SPVCNN(4, 5, 0.3, planes=(16,) * 9, dropout=0.0)
        return trained(net, *given), given, set()
    x = ml.SparseTensor(few.coords - few.coords.min(axis=0), few.feats)
    net = models.PTv3(
        3, 5, stride=(2,), enc_depths=(1, 1), enc_channels=(16, 16),
        enc_num_head=(2, 2), enc_patch_size=(16, 16), dec_depths=(1,),
        dec_channels=(16,), dec_num_head=(2,), dec_patch_size=(16,),
    )  # fmt: skip
    held = {p.rpartition(".")[0] for p, _ in net.named_modules() if "fc1" in p}
    return net.eval(), (x,), {f"{path}.fc1" for path in held}


WHOLE = "minkunet", "resnet", "spunet", "convnext", "spvcnn", "ptv3"


@pytest.mark.parametrize("name", WHOLE)
def test_whole_nets(name):
    net, given, some = whole(name)
    options = {"class_predicate": PACK_ALL} if name == "convnext" else {}
    made, _ = ml.calibrate(net, [given], 8, activations=8, **options)
    assert distance(made(*given), net(*given)) < 0.1
    assert writers(made) and some <= writers(made)


class Twice(mlx.nn.Module):
    """Layers that are shared, norms of two layers, results that leave the net."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.SubmConv3d(20, 20, 3) for _ in range(3))
        self.norm, self.own = nn.BatchNorm(20), nn.BatchNorm(20)

    def __call__(self, x):
        run = nn.Sequential
        x = run(self.a, self.norm, nn.ReLU())(x)
        x = run(self.b, self.norm, nn.ReLU())(x)  # its norm is that of a, too
        y = run(self.c, self.own, nn.ReLU())(x)
        return y, run(self.c, self.own, nn.ReLU())(y)


def test_shared_layers_and_norms():
    net, x = Twice().eval(), batch()
    made, report = ml.calibrate(net, [x], 8, activations=8)
    assert report.folded == ("own",)
    assert type(made.norm) is nn.BatchNorm
    writes = {e.path for e in report.layers if e.writes_int8}
    assert writes == {"a", "b"}  # a result of c leaves the net
    for y, z in zip(made(x), net(x), strict=True):
        assert y.dtype == mx.float32 and distance(y, z) < 0.06


def test_what_is_kept_in_float():
    net = nn.Sequential(
        nn.SubmConv3d(3, 16, 3), nn.BatchNorm(16), nn.ReLU(), nn.SubmConv3d(16, 16, 3),
        nn.GlobalMaxPool(), mlx.nn.Linear(16, 16), mlx.nn.Linear(16, 4),
    ).eval()  # fmt: skip
    x = batch(channels=3)
    made, report = ml.calibrate(net, [x], 8, activations=8)
    assert set(report.kept) == {"layers.0", "layers.6"}
    assert set(integers(made)) == {"layers.3", "layers.5"}
    assert isinstance(made.layers[5], nn.QuantizedLinear)
    assert type(made.layers[1]) is nn.BatchNorm and distance(made(x), net(x)) < 0.03


@pytest.mark.parametrize("make", (lambda *c: nn.SubmConv3d(*c, 3), nn.Linear))
def test_a_float_layer_writes_integers_behind_its_activation(make):
    net = nn.Sequential(make(20, 32), nn.GELU(), make(32, 32)).eval()
    made, _ = ml.calibrate(
        net, [batch()], 8, activations=8, class_predicate=lambda at, _: at[-1] != "0"
    )
    assert set(integers(made)) == {"layers.2"} and "output_scale" in made.layers[0]
    assert distance(made(batch()), net(batch())) < 0.03


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_half(dtype):
    net, kind = trained(Net(), batch()), getattr(mx, dtype)
    net.set_dtype(kind)
    x = batch().astype(kind)
    made, _ = ml.calibrate(net, [x], 8, activations=8)
    y = made(x)
    assert y.dtype == kind
    assert distance(y.astype(mx.float32), net(x).astype(mx.float32)) < 0.06


@pytest.mark.parametrize("rows", (0, 120))
def test_batches_without_a_value_choose_no_scale(rows):
    net, x = of_layers(), batch()
    if rows:  # zeros everywhere: scales would be 0 too
        net.layers[0].bias = net.layers[0].bias * 0
        given = x.replace(x.feats * 0)
    else:
        given = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 20)))
    made, _ = ml.calibrate(net, [given], 8, activations=8)
    assert not any("input_scale" in layer for layer in integers(made).values())
    assert distance(made(x), net(x)) < 0.03


@pytest.mark.parametrize("bits", (4, 8))
def test_a_net_cast_to_half_keeps_its_scales(bits):
    # 0.02 / 127 times a weight's scale is no normal number of half.
    x = batch()
    x = x.replace(x.feats * 0.02)
    net = nn.Sequential(nn.SubmConv3d(20, 32, 3), nn.ReLU(), nn.SubmConv3d(32, 32, 3))
    made, _ = ml.calibrate(net.eval(), [x], bits, activations=8)
    scales = {
        (at, name): layer[name]
        for at, layer in integers(made).items()
        for name in ("scales", "input_scale", "output_scale", "output_inverse")
        if name in layer
    }
    y = made(x)
    made.set_dtype(mx.float16)
    for (at, name), scale in scales.items():
        assert mx.array_equal(integers(made)[at][name], scale)
    assert integers(made)["layers.0"].bias.dtype == mx.float16
    assert distance(made(x.astype(mx.float16)).astype(mx.float32), y) < 0.03


def test_an_integer_net_is_an_ordinary_one():
    x = batch()
    made, _ = ml.calibrate(Net().eval(), [x], 8, activations=8)
    y = made(x).feats
    compiled = ml.compile(made)
    for _ in range(3):
        assert mx.array_equal(compiled(x).feats, y)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert mx.array_equal(other(x).feats, y)
    with ml.verify():
        assert mx.array_equal(made(x).feats, y)
    nn.tie_scales(made)
    assert mx.array_equal(made(x).feats, y)
    for layer in integers(made).values():  # as load_weights does: no array is tied
        layer.update({k: v + 0 for k, v in layer.parameters().items()})
    assert distance(made(x), y) < 1e-6


def test_int4_weights_that_are_held_as_int8():
    x = batch()
    made, _ = ml.calibrate(Net().eval(), [x], 4, activations=8)
    y, layers = made(x).feats, integers(made)
    packed = sum(layer.packed_weight().nbytes for layer in layers.values())
    assert nn.unpack_int4(made) == tuple(sorted(layers))
    assert nn.unpack_int4(made) == ()
    assert mx.array_equal(made(x).feats, y)
    assert not any("multipliers" in layer for layer in layers.values())
    held = sum(layer.packed_weight().nbytes for layer in layers.values())
    assert held < 2 * packed  # groups of 64 are no longer filled up
    made.last.weight[:] = 0  # the weight is a parameter: nothing else is kept of it
    assert mx.array_equal(made(x).feats, mx.zeros_like(y) + made.last.bias)


class Shared(mlx.nn.Module):
    """A tower and a head, called on features of two sizes."""

    def __init__(self, ratio):
        super().__init__()
        self.ratio = ratio
        self.tower = nn.Sequential(nn.SubmConv3d(20, 32, 3, bias=False), nn.ReLU())
        self.head = nn.SubmConv3d(32, 8, 3, bias=False)

    def __call__(self, x):
        xs = x, x.replace(x.feats / self.ratio)
        return [nn.Sequential(self.tower, self.head)(each) for each in xs]


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("ratio", (1, 16))
def test_a_layer_called_on_features_of_very_different_size(ratio, bits):
    mx.random.seed(1)
    net, x = Shared(ratio).eval(), batch()
    made, report = ml.calibrate(
        net, [x, batch(1)], bits, activations=8, class_predicate=PACK_ALL
    )
    most = {8: 0.02, 4: 0.15}[bits]
    for mine, exact in zip(made(x), net(x), strict=True):
        assert distance(mine, exact) < 1.5 * most  # of two layers
    tower, head = report.layers
    assert max(tower.after, head.after) < most
    if ratio == 1:
        assert tower.writes_int8 and not tower.note and not head.note
        assert all("input_scale" in layer for layer in integers(made).values())
        return
    assert not tower.writes_int8 and "input_scale" not in made.head
    assert "input_scale" not in made.tower.layers[0]
    assert "by row, as its calls need scales of their own" in str(report)
    assert "writes floats, as its calls need scales of their own" in tower.note


class Tied(mlx.nn.Module):
    """A convolution in front of a norm, and by itself."""

    def __init__(self, call):
        super().__init__()
        self.conv, self.call = nn.SubmConv3d(8, 8, 3), call
        norm = nn.BatchNorm(8)
        norm.running_mean, norm.bias = mx.arange(8) / 20, mx.ones(8)
        norm.running_var = (1 + mx.arange(8)) / 10
        self.block = nn.Sequential(self.conv, norm, nn.ReLU())
        self.tail = nn.Sequential(nn.SubmConv3d(8, 8, 3), nn.ReLU(), self.conv)

    def __call__(self, x):
        return self.call(self, x)


TIED = {
    "then alone": (lambda net, x: net.conv(net.block(x)), 0),
    "alone before": (lambda net, x: net.block(net.conv(x)), 0),
    "twice": (lambda net, x: net.block(net.block(x)), 1),
    "last of another": (lambda net, x: net.conv(net.tail(x)), 0),
    "read as float": (lambda net, x: ops.sigmoid(net.conv(net.block(net.block(x)))), 0),
}


@pytest.mark.parametrize("name", TIED)
def test_a_convolution_that_is_called_by_itself_too(name):
    call, folded = TIED[name]
    net, x = Tied(call).eval(), batch(channels=8)
    made, report = ml.calibrate(net, [x], 8, activations=8, class_predicate=PACK_ALL)
    assert len(report.folded) == folded
    wanted = net(x).feats
    error = mx.linalg.norm(made(x).feats - wanted) / mx.linalg.norm(wanted)
    assert error.item() < 0.06


def writers(net):
    return {p for p, m in net.named_modules() if "output_scale" in m}


def chain():
    """Linear layers, norms, activations; dropout, which evaluation leaves out."""
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm(32), nn.ReLU(),
        nn.Dropout(0.2), mlx.nn.Linear(32, 24), mlx.nn.ReLU(),
        nn.Linear(24, 28, bias=False), nn.BatchNorm(28),
        nn.Linear(28, 6),
    )  # fmt: skip


def by_hand(net, x: np.ndarray) -> np.ndarray:
    """What the integers of a chain give: int64 sums, float32 operations after them."""
    layers = [m for m in net.layers if isinstance(m, mlx.nn.QuantizedLinear)]
    inverse = np.float32(1) / np.array(layers[0].input_scale)
    levels = np.clip(np.rint(x * inverse), -127, 127).astype(np.int64)
    acts = ["relu", "relu", "", ""]
    for layer, act in zip(layers, acts, strict=True):
        values = np.array(layer.packed_weight().integers())[0, :, : layer.in_channels]
        given = {"shift": np.array(layer.bias), "activation": act}
        if layer is not layers[-1]:
            given["out_inverse"] = np.array(layer.output_inverse)
        sums = levels @ values.T.astype(np.int64)
        levels = ref.finished(sums, np.array(layer.scales), **given)
        levels = levels if layer is layers[-1] else levels.astype(np.int64)
    return levels


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("of_rows", (True, False))
def test_a_chain_stays_in_int8(bits, of_rows):
    x = batch()
    given = x.feats if of_rows else x
    net = trained(chain(), given)
    made, report = ml.calibrate(
        net, [given], bits, activations=8, class_predicate=PACK_ALL
    )
    assert report.folded == ("layers.1", "layers.7")
    assert writers(made) == {"layers.0", "layers.4", "layers.6"}
    assert {e.path for e in report.layers if e.writes_int8} == writers(made)
    y = made(given)
    assert isinstance(y, mx.array if of_rows else ml.SparseTensor)
    y = y if of_rows else y.feats
    assert distance(y, net(given)) < {8: 0.04, 4: 0.2}[bits]
    wanted = by_hand(made, np.array(x.feats))
    assert y.dtype == mx.float32 and bits_of(y) == bits_of(mx.array(wanted))
    with ml.trace(made) as t:
        made(given)
    facts = {r.layer: r.problem.integer for r in t}
    assert {path for path, f in facts.items() if f.writes_int8} == writers(made)
    assert facts["layers.0"].activation == facts["layers.4"].activation == "relu"
    fused = {n.layer: str(n.norm) for n in t.norms}
    assert fused["layers.1"] == "BatchNorm + ReLU, with the layer before"
    assert fused.keys() == {"layers.1", "layers.4", "layers.7"}
    # What is no (N, C) leaves the chain between layers, and stays close.
    z = made(x.feats[None])
    assert z.shape == (1, *y.shape) and distance(z[0], y) < 0.02
    assert made(x.feats[:0]).shape == (0, 6)


def test_gradients_pass_straight_through():
    layer = nn.FakeQuant(nn.Linear(5, 3, bias=False)).eval()
    layer.input_scale = mx.array([0.01])
    x, inside = mx.array([[-3.0, -0.2, 0.26, 1.27, 1.276]]), mx.array([0, 1, 1, 1, 0])
    dx = mx.grad(lambda x: layer(x).sum())(x)
    assert mx.allclose(dx, inside * layer(mx.eye(5)).sum(axis=1))


def test_fake_quantised_layers_that_were_never_trained():
    net, x = of_layers(), batch()
    y = net(x)
    nn.fake_quantize(net)
    made, _ = ml.calibrate(net, [x], 8, activations=8)
    assert distance(made(x), y) < 0.03
    mlx.nn.quantize(net, bits=8, mode="affine", quantize_input=True)
    assert set(integers(net)) == {"layers.0", "layers.3"}
    assert distance(net(x), y) < 0.03


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("momentum", (0.1, None))
def test_a_layer_gives_what_its_integers_give(bits, momentum):
    x = batch()
    for layer in (nn.SubmConv3d(20, 8, 3, groups=2), nn.Linear(20, 8)):
        fake = nn.FakeQuant(layer, bits, momentum=momentum)
        names = {"weight", "bias"} | ({"input_scale"} if momentum else set())
        assert set(fake.parameters()) == names
        assert set(fake.trainable_parameters()) == {"weight", "bias"}
        fake.train()
        fake(x)
        fake(batch(1))
        fake.eval()
        y = fake(x)
        twin = fake.to_quantized(quantize_input=True)
        assert ("input_scale" in twin) == (momentum is not None)
        assert twin.bits == bits and distance(twin(x), y) < 1e-6
        held = nn.Sequential(fake)
        mlx.nn.quantize(held, bits=bits, quantize_input=True)
        assert mx.array_equal(held(x).feats, twin(x).feats)
        with pytest.raises(ValueError, match=f"was trained for int{bits} weights"):
            fake.to_quantized(bits=12 - bits, quantize_input=True)
    assert fake.to_quantized(32, 8).mode == "affine"


@pytest.mark.parametrize("bits", (8, 4))
def test_a_net_that_was_trained_gives_the_same_values(bits):
    mx.random.seed(3)
    net, x = Net(), batch()
    nn.fake_quantize(net, bits, class_predicate=PACK_ALL)
    assert sum(isinstance(m, nn.FakeQuant) for m in net.modules()) == 9
    target = mx.random.normal((len(x), 24))
    optimizer = optim.Adam(1e-3)
    step = mlx.nn.value_and_grad(net, lambda x: mx.square(net(x).feats - target).mean())
    net.train()
    losses = []
    for _ in range(6):
        loss, grads = step(x)
        optimizer.update(net, grads)
        mx.eval(net.state, optimizer.state)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    net.eval()
    y = net(x)
    made, report = ml.calibrate(net, [x], bits, activations=8)
    assert len(integers(made)) == 9 and len(report.folded) == 5
    assert distance(made(x), y) < 1e-5
    # Only where all readers were trained for one scale.
    writes = {p for p, m in integers(made).items() if "output_scale" in m}
    assert "block.conv1.conv" in writes and "first.conv" not in writes
    assert all(isinstance(m, nn.FakeQuant) for m in (net.first.conv, net.line))


def test_fake_quant_takes_float_layers_alone():
    with pytest.raises(TypeError, match="float convolution or Linear; got ReLU"):
        nn.FakeQuant(nn.ReLU())
    with pytest.raises(TypeError, match="got QuantizedLinear"):
        nn.FakeQuant(nn.Linear(32, 4).to_quantized(32, 8))
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        nn.FakeQuant(nn.Linear(32, 4), 3)

"""Chains of linear layers in int8: against int64, on rows and on tensors, in models."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference_integers as ref
from conftest import bits as bits_of

import mlx_lattice as ml
from mlx_lattice import models, nn
from mlx_lattice.models.trellis2.blocks import ConvNeXtBlock

PACK_ALL = nn.keep_float(few_inputs=1, few_outputs=1, names=())


def tensor(channels=20, n=120):
    coords = cases.geometry("surface", 3, n, 0)
    feats = np.random.default_rng(0).normal(size=(len(coords), channels))
    return ml.SparseTensor(mx.array(coords), mx.array(feats.astype(np.float32)))


def trained(net, *x, steps=3):
    net.train()
    for _ in range(steps):
        mx.eval(getattr(y := net(*x), "feats", y), net.state)
    return net.eval()


def distance(y, z) -> float:
    y, z = (getattr(a, "feats", a) for a in (y, z))
    return (mx.linalg.norm(y - z) / mx.linalg.norm(z)).item()


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
    x = tensor()
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


def test_a_chain_in_half_and_compiled():
    x = tensor()
    net = trained(chain(), x)
    net.set_dtype(mx.float16)
    x = x.astype(mx.float16)
    made, _ = ml.calibrate(net, [x], 8, activations=8, class_predicate=PACK_ALL)
    y = made(x)
    assert y.dtype == mx.float16 and distance(y, net(x)) < 0.04
    assert mx.array_equal(ml.compile(made)(x).feats, y.feats)


def test_a_file_keeps_the_chain(tmp_path):
    x = tensor().feats
    made, _ = ml.calibrate(
        trained(chain(), x), [x], 8, activations=8, class_predicate=PACK_ALL
    )
    made.save_weights(str(tmp_path / "chain.safetensors"))
    other = chain().eval()
    nn.integer_like(other, tmp_path / "chain.safetensors")
    other.load_weights(str(tmp_path / "chain.safetensors"), strict=True)
    assert writers(other) == writers(made)
    assert mx.array_equal(other(x), made(x))


def test_a_chain_that_was_trained_gives_the_same_values():
    net, x = chain(), tensor().feats
    nn.fake_quantize(net, class_predicate=PACK_ALL)
    y = trained(net, x)(x)
    made, _ = ml.calibrate(net, [x], 8, activations=8, class_predicate=PACK_ALL)
    assert writers(made) == {"layers.0", "layers.4", "layers.6"}
    assert distance(made(x), y) < 1e-5


class Shared(mlx.nn.Module):
    """Layers that are called by themselves too, and a result that leaves its chain."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(20, 20) for _ in range(3))
        self.norm, self.own = nn.BatchNorm(20), nn.BatchNorm(20)

    def __call__(self, x):
        y = nn.Sequential(self.a, self.norm, nn.ReLU(), self.b)(x)
        z = nn.Sequential(self.c, self.own, nn.ReLU())(y)
        return y + z + self.a(x)


def test_layers_that_are_called_by_themselves_too():
    x = tensor().feats
    net = trained(Shared(), x)
    made, report = ml.calibrate(net, [x], 8, activations=8, class_predicate=PACK_ALL)
    assert report.folded == ("own",)  # a gives its own result too
    assert type(made.norm) is nn.BatchNorm and type(made.own) is nn.FoldedNorm
    assert writers(made) == {"a"}  # in the chain; by itself it gives floats
    assert made.a(x).dtype == mx.float32
    assert distance(made(x), net(x)) < 0.03


def test_a_float_layer_rounds_what_integers_alone_read():
    x = tensor(3).feats
    net = trained(
        nn.Sequential(nn.Linear(3, 16), nn.BatchNorm(16), nn.ReLU(), nn.Linear(16, 16)),
        x,
    )
    made, report = ml.calibrate(net, [x], 8, activations=8)
    assert set(report.kept) == {"layers.0"} and report.folded == ()
    assert type(made.layers[0]) is nn.Linear and writers(made) == {"layers.0"}
    assert made.layers[3].input_scale is made.layers[0].output_scale
    assert distance(made(x), net(x)) < 0.02


def test_blocks_of_models():
    x = tensor(16)
    block = ConvNeXtBlock(16, 2)
    block.mlp[2].weight = mx.random.normal(block.mlp[2].weight.shape) * 0.1
    made, _ = ml.calibrate(block, [x], 8, activations=8, class_predicate=PACK_ALL)
    assert writers(made) == {"mlp.0"} and distance(made(x), block(x)) < 0.02

    points = mx.random.uniform(0, 2, (300, 3))
    given = points, mx.random.normal((300, 4))
    net = trained(models.SPVCNN(4, 5, 0.3, planes=(16,) * 9, dropout=0.0), *given)
    made, report = ml.calibrate(net, [given], 8, activations=8)
    norms = {f"point_transforms.{at}.layers.1" for at in range(3)}
    assert norms <= set(report.folded)
    assert distance(made(*given), net(*given)) < 0.06
    with ml.trace(made) as t:
        made(*given)
    facts = {r.layer: r.problem.integer for r in t}
    assert facts["point_transforms.0.layers.0"].activation == "relu"


def test_a_transformer_of_points():
    x = tensor(4, 60)
    x = ml.SparseTensor(x.coords - x.coords.min(axis=0), x.feats)
    net = models.PTv3(
        4, 5, stride=(2,), enc_depths=(1, 1), enc_channels=(16, 16),
        enc_num_head=(2, 2), enc_patch_size=(16, 16), dec_depths=(1,),
        dec_channels=(16,), dec_num_head=(2,), dec_patch_size=(16,),
    ).eval()  # fmt: skip
    made, report = ml.calibrate(net, [x], 8, activations=8)
    held = writers(made)
    paths = {p.rpartition(".")[0] for p, m in made.named_modules() if "fc1" in p}
    assert paths and {f"{path}.fc1" for path in paths} <= held
    assert {p for p in held if p.endswith("cpe.0")}
    assert distance(made(x), net(x)) < 0.1

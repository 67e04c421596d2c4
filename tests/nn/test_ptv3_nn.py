"""Point Transformer V3 against float64: forward, a step of training, its arguments."""

import random
import re

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from differences import assert_gradients, cross_entropy
from foreign_nets import filled
from foreign_ptv3 import PTv3
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import io, models
from mlx_lattice.models.ptv3 import VARIANTS

SIZES = {
    "stride": (2, 2),
    "enc_depths": (1, 2, 1),
    "enc_channels": (6, 12, 12),
    "enc_num_head": (1, 2, 1),
    "enc_patch_size": (7, 5, 4),
    "dec_depths": (2, 1),
    "dec_channels": (12, 6),
    "dec_num_head": (2, 1),
    "dec_patch_size": (7, 5),
}
ENCODER = tuple(zip(SIZES["enc_patch_size"], SIZES["enc_num_head"], strict=True))
DECODER = tuple(zip(SIZES["dec_patch_size"], SIZES["dec_num_head"], strict=True))


def small(variant="m1", classes=5, flash=True, enc_mode=False, **more):
    """A net with weights in the published names, and the same net in float64."""
    sizes = {**SIZES, "drop_path": 0.0, "shuffle_orders": False, **more}
    sizes |= {"enable_flash": flash, "enc_mode": enc_mode, "rope_base": 20.0}
    net = models.PTv3(3, classes, variant, **sizes)
    named = {n.replace(".layers.", "."): a for n, a in tree_flatten(net.parameters())}
    state = filled({n: a.shape for n, a in named.items()})
    assert io.import_checkpoint(state, net.eval(), "spconv").complete
    form = variant, ENCODER, () if enc_mode else DECODER, flash, 20.0
    exact = PTv3(state, *form, dec_rope=more.get("dec_rope_enable", True))
    exact.legacy = net.legacy
    return net, exact


def scene(geometry="batches", count=60):
    """Coordinates from 0, features, a tensor of them, and a place of each row."""
    coords = cases.geometry(geometry, 3, count)
    coords[:, 1:] -= coords[:, 1:].min(0) if len(coords) else 0
    feats = cases.features(len(coords), 3)
    places = (coords[:, 1:] + 0.3 * cases.features(len(coords), 3, 5)).astype("f4")
    return coords, feats, ml.SparseTensor(mx.array(coords), mx.array(feats)), places


@pytest.mark.parametrize("flash", (True, False))
@pytest.mark.parametrize("geometry", ("batches", "block", "one"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_is_the_published_net(variant, geometry, flash):
    net, exact = small(variant, flash=flash)
    coords, feats, x, places = scene(geometry)
    y = net(x, mx.array(places))
    assert y.key == x.key
    levels, expected = exact(coords, feats, places)
    ref.assert_close(y.feats, expected)
    for here, there in zip(net.encode(x, mx.array(places)), levels, strict=True):
        ref.assert_close(here.feats, there)


@pytest.mark.parametrize("more", ({"dec_rope_enable": False}, {"layer_scale": 0.3}))
def test_options_of_the_third_form(more):
    net, exact = small("m3", **more)
    coords, feats, x, places = scene()
    y = net(x, mx.array(places)).feats
    ref.assert_close(y, exact(coords, feats, places)[1])


@pytest.mark.parametrize("flash", (True, False))
def test_legacy_blocks(flash):
    """Pointcept 1.5.1: a convolution reads the MLP branch of the block before."""
    depths = {"enc_depths": (1, 3, 2), "dec_depths": (2, 2)}
    net, exact = small(legacy=True, flash=flash, **depths)
    coords, feats, _, _ = scene()
    coords[:, 1:] += 7 - coords[:, 1:].max()  # 3 bits, and 4 since Pointcept 1.6.0
    y = net(ml.SparseTensor(mx.array(coords), mx.array(feats))).feats
    ref.assert_close(y, exact(coords, feats)[1])
    exact.legacy = False
    assert np.abs(exact(coords, feats)[1] - np.array(y)).max() > 1e-2


@pytest.mark.parametrize(
    "variant, given, expected",
    (("m1", None, True), ("m1", False, False), ("m2", None, False)),
)
def test_what_is_published_says_whether_blocks_are_legacy(variant, given, expected):
    net, exact = small(variant, legacy=given)
    net.about = models.PUBLISHED["ptv3-scannet"]
    exact.legacy = expected
    assert net.legacy == expected
    coords, feats, x, _ = scene()
    ref.assert_close(net(x).feats, exact(coords, feats)[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_relative_positions(variant):
    """Tables of each block, by their published names; cells far beyond the bound."""
    net, exact = small(variant, flash=False, enable_rpe=True)
    names = [name for name in exact.p if name.endswith("attn.rpe.rpe_table")]
    assert len(names) == 4 + 3 and "enc.enc1.block1.attn.rpe.rpe_table" in names
    bound = int((4 * 7) ** (1 / 3) * 2)  # of patches of 7
    table = exact.p["enc.enc0.block0.attn.rpe.rpe_table"]
    assert table.shape == (3 * (2 * bound + 1), 1)
    coords, feats, _, places = scene()
    coords[:, 1:] *= 3
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))
    assert np.ptp(coords[:, 1:], axis=0).max() > bound
    y = net(x, mx.array(places)).feats
    ref.assert_close(y, exact(coords, feats, places)[1])
    for name in names:
        exact.p[name] = 0 * exact.p[name]
    other = exact(coords, feats, places)[1]
    assert np.abs(other - np.array(y)).max() > 1e-2


@pytest.mark.parametrize("classes", (0, 5))
def test_encoder_alone(classes):
    net, exact = small("m2", classes, enc_mode=True)
    coords, feats, x, _ = scene()
    levels, last = exact(coords, feats)
    for s in (1, 0):
        levels[s] = np.concatenate(
            [levels[s], levels[s + 1][exact.scenes[s + 1][1]]], 1
        )
    found = net.encode(x)
    ref.assert_close(net.upcast(found).feats, levels[0])
    if classes:
        ref.assert_close(net(x).feats, exact.linear("seg_head", levels[0]))
    else:
        assert net(x).key == found[-1].key
        ref.assert_close(net(x).feats, last)


@pytest.mark.parametrize("variant", ("m1", "m3"))
def test_no_rows(variant):
    net, _ = small(variant)
    x = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 3)), batch_size=2)
    assert net(x, mx.zeros((0, 3))).shape == (0, 5)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("variant", ("m1", "m3"))
def test_in_half(variant, dtype):
    net, exact = small(variant)
    coords, feats, x, places = scene()
    net.set_dtype(getattr(mx, dtype))
    assert net.dtype == getattr(mx, dtype)
    y = net(x.astype(net.dtype), mx.array(places))
    expected = exact(coords, feats, places)[1]
    apart = np.array(y.feats.astype(mx.float32)) - expected
    assert np.linalg.norm(apart) <= 10 * ref.TOLERANCE[dtype] * np.linalg.norm(expected)


# Published names: each kind of layer, on both sides of a pooling, encoder and decoder.
PARAMETERS = (
    "embedding.stem.norm.weight",
    "enc.enc0.block0.cpe.0.weight",
    "enc.enc0.block0.attn.qkv.weight",
    "enc.enc1.down.proj.weight",
    "enc.enc1.down.norm.0.bias",
    "enc.enc1.block1.attn.qkv.bias",
    "enc.enc1.block1.cpe.1.weight",
    "enc.enc2.block0.norm1.0.weight",
    "dec.dec1.up.proj.0.weight",
    "dec.dec1.block0.cpe.0.weight",
    "dec.dec0.up.proj_skip.1.weight",
    "dec.dec0.block1.mlp.0.fc1.weight",
    "seg_head.bias",
)


@pytest.mark.parametrize(
    "variant, rpe", [*((v, False) for v in VARIANTS), ("m1", True)]
)
def test_gradients_of_a_step_of_training(variant, rpe):
    """Of a cross entropy, norms by their batch: float64 differences, some entries."""
    more = {"flash": False, "enable_rpe": True} if rpe else {}
    net, exact = small(variant, layer_scale=None if variant == "m1" else 0.7, **more)
    coords, feats, x, places = scene(count=50)
    labels = np.random.default_rng(3).integers(0, 5, len(coords))

    def loss(net):
        scores = net(x, mx.array(places)).feats
        return mlx.nn.losses.cross_entropy(scores, mx.array(labels), reduction="mean")

    net.train()
    value, grads = mlx.nn.value_and_grad(net, loss)(net)
    grads = {n.replace(".layers.", "."): g for n, g in tree_flatten(grads)}

    def exact_loss() -> float:
        return cross_entropy(exact(coords, feats, places, training=True)[1], labels)

    assert abs(value.item() - exact_loss()) <= 1e-5 * abs(value.item())
    first = "embedding.stem." + ("conv" if variant == "m1" else "linear")
    names = [*PARAMETERS, f"{first}.weight"]
    names += ["enc.enc1.block0.attn.rpe.rpe_table"] * rpe
    names += ["enc.enc1.block0.ls2.0.gamma"] if variant != "m1" else []
    assert_gradients(exact_loss, exact.p, {n: np.array(grads[n]) for n in names})


def test_orders_are_shuffled_in_training_alone():
    net, _ = small(shuffle_orders=True)
    x = scene()[2]
    before, again = net(x).feats, net(x).feats
    assert mx.array_equal(before, again)
    random.seed(0)
    net.train()
    orders = [level.orders for level in net._levels(x, None)]
    assert len(set(orders)) > 1 and all(sorted(o) == sorted(net.order) for o in orders)


def test_rows_in_another_order():
    net, _ = small()
    x = scene()[2]
    shuffle = mx.array(np.random.default_rng(0).permutation(len(x)))
    other = ml.SparseTensor(x.coords[shuffle], x.feats[shuffle])
    ref.assert_close(net(other).feats, np.array(net(x).feats[shuffle]))


@pytest.mark.parametrize("variant", ("m1", "m3"))
def test_a_traced_graph_has_nothing_of_patches(variant, tmp_path):
    """Curves and cuts are of the coordinates: a step does not work them out again."""
    net, _ = small(variant)
    _, _, known, places = scene()
    fresh, kept = (ml.SparseTensor(known.coords + 0, known.feats) for _ in "ab")
    places = mx.array(places)
    mx.eval(fresh.coords, kept.coords, known.feats, places, net(kept, places).feats)

    def operations(x, file):
        run = mx.compile(lambda feats: net(x.replace(feats=feats), places).feats)
        mx.export_to_dot(str(file), run(x.feats))
        return sorted(re.findall(r'label ="([^"]*)", shape=rect', file.read_text()))

    found = operations(fresh, tmp_path / "a.dot")
    assert found == operations(kept, tmp_path / "b.dot")
    assert found and not any("Sort" in name for name in found)


def test_a_folder_of_it(tmp_path):
    net, _ = small("m2")
    x = scene()[2]
    net.save_pretrained(tmp_path)
    read = models.from_pretrained(tmp_path)
    assert type(read) is models.PTv3 and read.variant == "m2"
    assert mx.array_equal(read(x).feats, net(x).feats)


@pytest.mark.parametrize("classes", (0, 5))
def test_one_level(classes):
    """No strides, and so no decoder: the encoder's features are the net's."""
    sizes = {name: values[:1] for name, values in SIZES.items() if name[:3] == "enc"}
    sizes |= {name: () for name in SIZES if name[:3] != "enc"}
    net = models.PTv3(3, classes, **sizes).eval()
    x = scene()[2]
    features = net.encode(x)[0].feats
    wanted = net.seg_head(features) if classes else features
    assert mx.allclose(net(x).feats, wanted, atol=1e-5).item()


def test_mistakes_are_named():
    x = scene()[2]
    with pytest.raises(ValueError, match="must count from 0"):
        low = mx.array([0, 1, 0, 0])
        small()[0](ml.SparseTensor(x.coords - low, x.feats))
    with pytest.raises(ValueError, match="pass positions"):
        small("m3")[0](x)
    with pytest.raises(ValueError, match="must have 3 entries"):
        small(enc_depths=(1, 1))
    with pytest.raises(ValueError, match="a level fewer"):
        small(dec_depths=(1, 1, 1))
    with pytest.raises(ValueError, match="share the cuts"):
        small(dec_patch_size=(7, 6))
    with pytest.raises(ValueError, match="powers of two"):
        small(stride=(2, 3))
    with pytest.raises(ValueError, match="variant must be"):
        small("m4")
    with pytest.raises(ValueError, match="legacy=True is for m1"):
        small("m2", legacy=True)
    with pytest.raises(ValueError, match="order must be"):
        small(order=("z", "peano"))
    with pytest.raises(ValueError, match="has no classes"):
        small(classes=0)[0].score_voxels(None)


def test_configurations():
    config = {"type": "PT-v3m1", "in_channels": 4, "cls_mode": True}
    net = models.PTv3.of_config({**config, "enable_rpe": False})
    assert net.variant == "m1" and net.enc_mode and net.order == ("z", "z-trans")
    for wrong, why in (
        ({"pdnorm_bn": True}, "does not do pdnorm_bn=True"),
        ({"enable_rpe": True}, "needs enable_flash=False"),
        ({"windows": 3}, "PTv3 has no windows"),
        ({"type": "PT-v2m2"}, "pass variant"),
    ):
        with pytest.raises(ValueError, match=why):
            models.PTv3.of_config({**config, **wrong})


def test_the_published_size():
    """46.2 million parameters, as the paper counts for ScanNet."""
    net = models.PTv3(6, 20)
    sizes = [p.size for _, p in tree_flatten(net.trainable_parameters())]
    assert sum(sizes) == pytest.approx(46.2e6, rel=0.01)

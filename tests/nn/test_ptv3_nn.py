"""Point Transformer V3: rows, gradients, arguments. io/ has the published results."""

import random

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from foreign_nets import filled
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import models
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


def small(variant="m1", classes=5, flash=True, enc_mode=False, **more):
    """A net with weights that keep the size of features."""
    sizes = {**SIZES, "drop_path": 0.0, "shuffle_orders": False, **more}
    sizes |= {"enable_flash": flash, "enc_mode": enc_mode, "rope_base": 20.0}
    net = models.PTv3(3, classes, variant, **sizes)
    shapes = {name: p.shape for name, p in tree_flatten(net.parameters())}
    return net.load_weights(list(filled(shapes).items())).eval()


def scene(geometry="batches", count=60):
    """A tensor whose coordinates count from 0, and a place of each row."""
    coords = cases.geometry(geometry, 3, count)
    coords[:, 1:] -= coords[:, 1:].min(0) if len(coords) else 0
    feats = cases.features(len(coords), 3)
    places = (coords[:, 1:] + 0.3 * cases.features(len(coords), 3, 5)).astype("f4")
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))
    return x, mx.array(places)


@pytest.mark.parametrize("flash", (True, False))
@pytest.mark.parametrize("geometry", ("batches", "block", "one"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_and_levels(variant, geometry, flash):
    net, (x, places) = small(variant, flash=flash), scene(geometry)
    y = net(x, places)
    assert y.key == x.key and mx.isfinite(y.feats).all()
    levels = net.encode(x, places)
    assert [level.channels for level in levels] == list(SIZES["enc_channels"])
    assert net.upcast(levels).channels == sum(SIZES["enc_channels"])


@pytest.mark.parametrize(
    "variant, legacy, expected",
    (("m1", None, True), ("m1", False, False), ("m2", None, False)),
)
def test_what_is_published_says_whether_blocks_are_legacy(variant, legacy, expected):
    net, (x, _) = small(variant, legacy=legacy), scene()
    net.about = models.PUBLISHED["ptv3-scannet"]
    assert net.legacy == expected
    other = small(variant, legacy=expected)
    assert mx.array_equal(net(x).feats, other(x).feats)


def test_orders_are_shuffled_in_training_alone():
    net, (x, _) = small(shuffle_orders=True), scene()
    before, again = net(x).feats, net(x).feats
    assert mx.array_equal(before, again)
    random.seed(0)
    net.train()
    orders = [level.orders for level in net._levels(x, None)]
    assert len(set(orders)) > 1 and all(sorted(o) == sorted(net.order) for o in orders)


def test_rows_in_another_order():
    net, (x, _) = small(), scene()
    shuffle = mx.array(np.random.default_rng(0).permutation(len(x)))
    other = ml.SparseTensor(x.coords[shuffle], x.feats[shuffle])
    ref.assert_close(net(other).feats, np.array(net(x).feats[shuffle]))


def test_mistakes_are_named():
    x, _ = scene()
    with pytest.raises(ValueError, match="must count from 0"):
        low = mx.array([0, 1, 0, 0])
        small()(ml.SparseTensor(x.coords - low, x.feats))
    with pytest.raises(ValueError, match="pass positions"):
        small("m3")(x)
    with pytest.raises(ValueError, match="must have 3 entries in the encoder"):
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
        small(classes=0).score_voxels(None)


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

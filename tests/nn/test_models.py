"""Nets: training, gradients, half precision, the smallest inputs, published sizes."""

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from conftest import drawn
from differences import assert_slope
from foreign_nets import filled
from mlx.utils import tree_flatten
from training import every_parameter_gets_a_gradient, lowers_the_loss

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.models import trellis2

EIGHT, ONES = (4, 8, 8, 16, 16, 8, 8, 4), (1,) * 8
PTV3 = {
    "stride": (2, 2),
    "enc_depths": (1, 2, 1),
    "enc_channels": (6, 12, 12),
    "enc_num_head": (1, 2, 1),
    "enc_patch_size": (7, 5, 4),
    "dec_depths": (2, 1),
    "dec_channels": (12, 6),
    "dec_num_head": (2, 1),
    "dec_patch_size": (7, 5),
    "drop_path": 0.0,
    "shuffle_orders": False,
    "rope_base": 20.0,
}


def ptv3(variant, **more):
    return lambda: models.PTv3(3, 5, variant, **PTV3, **more)


NETS = {
    "minkunet": lambda dims=3: models.MinkUNet(3, 5, EIGHT, ONES, dims=dims),
    "torchsparse": lambda dims=3: models.MinkUNetTorchSparse(3, 5, 0.125, dims=dims),
    "resnet": lambda dims=3: models.SparseResNet(3, 5, (1, 2), (8, 16), dims=dims),
    "spunet": lambda: models.SpUNet(3, 5, 4, EIGHT, (1, 2, *ONES[2:])),
    "spunet encoder": lambda: models.SpUNet(3, 5, 4, EIGHT, ONES, True),
    "spvcnn": lambda: models.SPVCNN(3, 5, 1.0, planes=(4, *EIGHT), dropout=0.0),
    "ptv3 m1": ptv3("m1"),
    "ptv3 m1, rpe": ptv3("m1", enable_flash=False, enable_rpe=True),
    "ptv3 m2": ptv3("m2", layer_scale=0.7),
    "ptv3 m3": ptv3("m3", layer_scale=0.7),
}
OTHERS = {
    "decoder": lambda: models.SparseVAEDecoder(7, (16, 8), 3, (1, 0)),
    "encoder": lambda: models.SparseVAEEncoder(3, (8, 8), 4, (1, 1)),
    "flow": lambda: models.SLatFlowModel(
        8, 3, 16, 8, 4, 1, 2, pe_mode="rope", share_mod=True
    ),
    "flow, added places": lambda: models.SLatFlowModel(8, 3, 16, 8, 4, 1, 2),
}
POOLED = "resnet", "spunet encoder"


def net_of(name):
    """A net with weights that keep the size of features."""
    net = (NETS | OTHERS)[name]()
    shapes = {path: p.shape for path, p in tree_flatten(net.parameters())}
    return net.load_weights(list(filled(shapes).items()))


def tensor(name="batches", dims=3, n=60, **facts):
    """A tensor whose coordinates count from 0."""
    x = drawn(name, dims, n)
    low = x.coords.min(axis=0) if len(x) else 0
    return ml.SparseTensor(x.coords - low, x.feats, **facts)


def output(net, x):
    """The features of a net's output."""
    places = x.coords[:, 1:].astype(x.dtype) + 0.3
    if isinstance(net, models.SPVCNN):
        return net(places, x.feats, x.coords[:, 0])
    if isinstance(net, models.SLatFlowModel):
        return net(x, 500.0, mx.ones((x.batch_size, 3, 8))).feats
    y = net(x, places) if isinstance(net, models.PTv3) else net(x)
    return getattr(y, "feats", y)


def loss(net, x):
    return (output(net, x) - 1).square().mean()


def total(net, x):
    return output(net, x).square().sum()


@pytest.mark.parametrize(
    "name, dims",
    (
        *(("minkunet", 1), ("torchsparse", 2), ("resnet", 3)),
        pytest.param("minkunet", 4, marks=pytest.mark.native),
    ),
)
def test_training_lowers_the_loss(name, dims):
    mx.random.seed(0)
    lowers_the_loss(NETS[name](dims), loss, tensor(dims=dims))


@pytest.mark.parametrize("name", NETS)
def test_gradients(name):
    net, x = net_of(name).eval(), tensor(n=50)
    every_parameter_gets_a_gradient(net, loss, x)
    assert_slope(net, lambda net: loss(net, x))


@pytest.mark.parametrize("name", NETS)
def test_rows_and_shapes(name):
    net, x = net_of(name).eval(), tensor(batch_size=40)
    y = output(net, x)
    assert y.shape == (40 if name in POOLED else len(x), 5)
    assert mx.isfinite(y).all()
    if name[:4] not in ("ptv3", "spvc") and name not in POOLED:
        assert net(x).key == x.key


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("rows", ("empty", "one"))
@pytest.mark.parametrize("name", NETS | OTHERS)
def test_few_rows(name, rows, training):
    net, x = net_of(name).train(training), tensor(rows, batch_size=2)
    before = dict(tree_flatten(net.parameters()))
    value, grads = mlx.nn.value_and_grad(net, total)(net, x)
    assert mx.isfinite(value)
    for path, grad in tree_flatten(grads):
        assert mx.isfinite(grad).all(), path
    if rows == "empty" or not training:
        for path, held in tree_flatten(net.parameters()):
            assert mx.array_equal(held, before[path]), path


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("name", NETS)
def test_half(name, dtype):
    net, x, kind = net_of(name).eval(), tensor(), getattr(mx, dtype)
    expected = np.array(output(net, x))
    net.set_dtype(kind)
    y = output(net, x.astype(kind))
    assert y.dtype == kind
    apart = np.linalg.norm(ref.to_numpy(y) - expected)
    assert apart <= 10 * ref.TOLERANCE[dtype] * np.linalg.norm(expected)


def test_dense_decoders_of_few_elements():
    decoder = trellis2.SparseStructureDecoder(1, 4, 1, (8, 8, 8))
    assert decoder(mx.zeros((0, 4, 2, 2, 2))).shape == (0, 1, 8, 8, 8)
    assert decoder(mx.zeros((2, 4, 2, 2, 3))).shape == (2, 1, 8, 8, 12)


MILLIONS = {
    # As published: MinkowskiEngine, SPVNAS, Pointcept's configurations and paper.
    "MinkUNet34C": (lambda: models.MinkUNet34(3, 20, "C"), 37.8),
    "MinkUNetTorchSparse": (lambda: models.MinkUNetTorchSparse(4, 19), 21.7),
    "SPVCNN": (lambda: models.SPVCNN(4, 19), 21.8),
    "SpUNet": (lambda: models.SpUNet(6, 20), 39.2),
    "PTv3": (lambda: models.PTv3(6, 20), 46.2),
    "SLatFlowModel": (lambda: models.SLatFlowModel(**trellis2.FLOW), 1291),
    "SparseStructureFlowModel": (
        lambda: models.SparseStructureFlowModel(**trellis2.STRUCTURE_FLOW),
        1291,
    ),
}


@pytest.mark.parametrize("name", MILLIONS)
def test_published_numbers_of_parameters(name):
    """Nothing is evaluated."""
    make, millions = MILLIONS[name]
    sizes = [p.size for _, p in tree_flatten(make().trainable_parameters())]
    assert sum(sizes) == pytest.approx(1e6 * millions, rel=0.01)


@pytest.mark.parametrize(
    "make",
    (
        models.MinkUNet14,
        lambda *channels: models.MinkUNet34(*channels, "C"),
        models.SparseResNet14,
        models.SparseResNet34,
    ),
)
def test_published_sizes_run(make):
    y = output(make(3, 20).eval(), tensor(n=20))
    assert y.shape[1] == 20 and mx.isfinite(y).all()


def test_stages_without_blocks():
    """The encoder's may be: a decoder's first block takes the skip's channels in."""
    x = ml.SparseTensor([[0, 1, 2, 3], [0, 1, 2, 4]], mx.ones((2, 3)))
    assert models.SpUNet(3, 5, 8, (8, 6), (0, 1))(x).shape == (2, 5)
    assert models.SpUNet(3, 5, 8, (8, 6), (0, 0), enc_mode=True)(x).shape == (1, 5)


@pytest.mark.parametrize(
    "make, said",
    (
        (lambda: models.MinkUNet18(3, 20, "C"), "plans A, B, D"),
        (lambda: models.MinkUNet50(3, 20, "D"), "has the plans A, B, C; got 'D'"),
        (lambda: models.MinkUNet(3, 20, (1, 2)), "four encoder"),
        (lambda: models.MinkUNet(3, 5, EIGHT, ONES, stem=()), "stem must have a"),
        (lambda: models.MinkUNet(3, 5, EIGHT, (2, 0, *ONES[2:])), "1 or more; got 0"),
        (lambda: models.SparseResNet(3, 5, (1, 0), (8, 8)), "1 or more; got 0"),
        (lambda: models.Bottleneck(4, 4, 2), "a Bottleneck has stride 1; got 2"),
        (lambda: models.SPVCNN(4, 5, planes=(1, 2)), "planes has one entry"),
        (lambda: models.SpUNet(3, 5, 8, (8, 8), (1,)), "as many of both; got"),
        (lambda: models.SpUNet(3, 5, 8, (8, 6), (1, 0)), "one block or more.*got lay"),
        (lambda: models.SparseVAEDecoder(7, (16, 8), 4, (1,)), "one entry for each st"),
        (lambda: models.SparseVAEDecoder(7, (12, 8), 4, (1, 1)), "multiple of 8"),
        (lambda: models.SparseVAEEncoder(6, (8, 20), 4, (1, 1)), "multiple of 8 and"),
        (lambda: models.SLatFlowModel(8, 4, 16, 8, 4, 1, pe_mode="a"), "pe_mode must"),
    ),
)
def test_impossible_plans_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# SPVCNN takes points.


def cloud():
    """Points, their features, and two batch elements of three."""
    points = mx.array(1.5 * cases.features(70, 3, 1))
    batch = 2 * (mx.arange(70) % 3 > 0)
    return points, mx.array(cases.features(70, 3)), batch.astype(mx.int32)


def test_points_of_map_coordinates():
    made, (points, feats, batch) = net_of("spvcnn").eval(), cloud()
    near, wide = made(points, feats, batch), np.array(points, np.float64)
    # 1e7 is a whole number of the coarsest cells.
    for far in (wide + 1e7, (wide + 1e7).tolist()):
        assert mx.allclose(made(far, feats, batch), near, atol=1e-4)
    near = ml.SparseTensor.from_points(points, voxel_size=1.0)
    feats = mx.array(cases.features(len(near), 3))
    scores = []
    for move in (0, 10**8):
        coords = near.coords + mx.array([0, move, move, move])
        x = ml.SparseTensor(coords, feats)
        scores.append(made.score_voxels(models.Voxels(x, None)))
    assert mx.allclose(*scores, atol=1e-4)


def test_points_keep_their_order_and_their_batch_element():
    made, (points, feats, batch) = net_of("spvcnn").eval(), cloud()
    y = np.array(made(points, feats, batch))
    shuffle = np.random.default_rng(1).permutation(70)
    at = mx.array(shuffle)
    shuffled = np.array(made(points[at], feats[at], batch[at]))
    np.testing.assert_allclose(shuffled, y[shuffle], atol=2e-5)
    mine = np.flatnonzero(np.array(batch) == 2)
    at = mx.array(mine)
    np.testing.assert_allclose(
        np.array(made(points[at], feats[at])), y[mine], atol=2e-5
    )
    np.testing.assert_array_equal(np.array(made(points, feats, batch)), y)

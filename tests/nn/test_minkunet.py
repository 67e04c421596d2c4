"""MinkUNet in both published layouts: names, shapes, and the forward in float64."""

import re

import cases
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from differences import assert_gradients, cross_entropy
from foreign_nets import (
    SPVNAS,
    MinkowskiUNet,
    filled,
    minkowski_shapes,
    spvnas_shapes,
)
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import io, models

PLANS = models.unets.PLANS
SMALL = (4, 6, 8, 8, 8, 6, 6, 4)


def minkowski():
    shapes = minkowski_shapes(PLANS[18]["A"], (2,) * 8, 3, 20)
    return models.MinkUNet18(3, 20), shapes, MinkowskiUNet


def torchsparse():
    shapes = spvnas_shapes(models.unets.PLANES, 4, 19)
    return models.MinkUNetTorchSparse(4, 19), shapes, SPVNAS


def small_minkowski():
    layers = (1, 2, 1, 1, 1, 1, 2, 1)
    shapes = minkowski_shapes(SMALL, layers, 3, 5)
    return models.MinkUNet(3, 5, SMALL, layers), shapes, MinkowskiUNet


def small_torchsparse():
    widths = [int(0.25 * c) for c in models.unets.PLANES]
    net = models.MinkUNetTorchSparse(4, 5, width=0.25)
    return net, spvnas_shapes(widths, 4, 5), SPVNAS


def small_bottlenecks():
    layers = (1, 2, 1, 1, 1, 1, 2, 1)
    shapes = minkowski_shapes(SMALL, layers, 3, 5, bottleneck=True)
    net = models.MinkUNet(3, 5, SMALL, layers, bottleneck=True)
    return net, shapes, MinkowskiUNet


def spvcnn():
    return models.SPVCNN(4, 19), torchsparse()[1], SPVNAS


LAYOUTS = {"minkowski": minkowski, "torchsparse": torchsparse}
PUBLISHED = LAYOUTS | {"spvcnn": spvcnn}
SMALL_LAYOUTS = {"minkowski": small_minkowski, "torchsparse": small_torchsparse}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_and_shapes_load_strictly(name):
    net, shapes, _ = PUBLISHED[name]()
    library = "minkowski" if name == "minkowski" else "torchsparse"
    state = {name: mx.broadcast_to(mx.array(0.5), s) for name, s in shapes.items()}
    report = io.import_checkpoint(state, net, library)
    assert report.complete and len(report.matched) == len(
        tree_flatten(net.parameters())
    )
    apart = "tracked" if name == "spvcnn" else "point_transforms|tracked"
    unused = {n for n in shapes if re.search(apart, n)}
    assert set(report.ignored) == unused


@pytest.mark.parametrize("largest", (8, 9, 15))
def test_cells_that_torchsparse_leaves_out(largest):
    """Where the last fine cells are even, at some level: not at 15, 7, 3 and 1."""
    net, shapes, exact = small_torchsparse()
    net = models.MinkUNetTorchSparse(4, 5, width=0.25, trimmed=True).eval()
    state = filled(shapes)
    io.import_checkpoint(state, net, "torchsparse")
    coords = np.random.default_rng(1).integers(0, largest + 1, (80, 4))
    coords[:, 0] %= 2
    coords[0, 1:] = largest
    coords = np.unique(coords, axis=0).astype(np.int32)
    feats = cases.features(len(coords), 4)
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))
    exact = exact(state)
    whole, exact.trimmed = exact(coords.astype(np.int64), feats), True
    trimmed = exact(coords.astype(np.int64), feats)
    ref.assert_close(net(x).feats, trimmed)
    assert (np.abs(whole - trimmed).max() > 1e-3) == (largest != 15)
    none = ml.SparseTensor(mx.zeros((0, 4), mx.int32), mx.zeros((0, 4)))
    assert net(none).shape == (0, 5)


@pytest.mark.parametrize("depth", (50, 101))
def test_deep_nets_load_strictly(depth):
    planes, layers = PLANS[depth]["B"], models.unets.LAYERS[depth]
    net = getattr(models, f"MinkUNet{depth}")(3, 20, "B")
    shapes = minkowski_shapes(planes, layers, 3, 20, bottleneck=True)
    state = {name: mx.broadcast_to(mx.array(0.5), s) for name, s in shapes.items()}
    assert io.import_checkpoint(state, net, "minkowski").complete


NETS = SMALL_LAYOUTS | {"bottlenecks": small_bottlenecks}


@pytest.mark.parametrize("geometry", ("negative", "batches", "one"))
@pytest.mark.parametrize("name", NETS)
def test_is_the_published_net(name, geometry):
    """A state dict in the library's own names and layouts, loaded and run."""
    net, shapes, exact = NETS[name]()
    library = name if name in LAYOUTS else "minkowski"
    state = filled(shapes)
    report = io.import_checkpoint(state, net.eval(), library)
    assert report.complete
    coords = cases.geometry(geometry, 3, 40)
    feats = cases.features(len(coords), 3 if library == "minkowski" else 4)
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))
    y = net(x)
    assert y.key == x.key
    ref.assert_close(y.feats, exact(state)(coords, feats))


def offsets_reversed(kernel):
    """MinkowskiEngine's and ours: (C_out, x, y, z, C_in) as (K, C_in, C_out)."""
    c_out, *size, c_in = kernel.shape
    kernel = kernel.transpose(3, 2, 1, 4, 0).reshape(-1, c_in, c_out)
    return kernel[0] if len(kernel) == 1 else kernel


# Published names, and here.
PARAMETERS = {
    "conv0p1s1.kernel": "stem.layers.0.conv.weight",
    "bn0.bn.weight": "stem.layers.0.norm.weight",
    "conv3p4s2.kernel": "encoder.2.down.conv.weight",
    "block2.1.conv1.kernel": "encoder.1.blocks.layers.1.conv1.conv.weight",
    "block3.0.norm2.bn.bias": "encoder.2.blocks.layers.0.conv2.norm.bias",
    "convtr5p8s2.kernel": "decoder.1.up.conv.weight",
    "block8.0.downsample.0.kernel": "decoder.3.blocks.layers.0.shortcut.conv.weight",
    "final.kernel": "head.weight",
}
LAST = "block7.1.conv3.kernel", "decoder.2.blocks.layers.1.conv3.conv.weight"


@pytest.mark.parametrize("name", ("minkowski", "bottlenecks"))
def test_gradients_of_a_step_of_training(name):
    """Of a cross entropy, norms by their batch: float64 differences, some entries."""
    net, shapes, exact = NETS[name]()
    state = filled(shapes)
    io.import_checkpoint(state, net, "minkowski")
    exact = exact(state)
    exact.training = True
    coords = cases.geometry("batches", 3, 60)
    feats = cases.features(len(coords), 3)
    labels = np.random.default_rng(3).integers(0, 5, len(coords))
    x = ml.SparseTensor(mx.array(coords), mx.array(feats))

    def loss(net):
        scores, y = net(x).feats, mx.array(labels)
        return mlx.nn.losses.cross_entropy(scores, y, reduction="mean")

    value, grads = mlx.nn.value_and_grad(net.train(), loss)(net)
    grads = dict(tree_flatten(grads))
    wanted = PARAMETERS | (dict([LAST]) if name == "bottlenecks" else {})
    found = {
        name: offsets_reversed(np.array(grads[here]))
        if name.endswith("kernel")
        else np.array(grads[here])
        for name, here in wanted.items()
    }
    exact_loss = lambda: cross_entropy(exact(coords, feats), labels)  # noqa: E731
    assert abs(value.item() - exact_loss()) <= 1e-5 * abs(value.item())
    assert_gradients(exact_loss, exact.p, found, entries=2)


def test_stems():
    net = models.MinkUNet(3, 5, SMALL, (1,) * 8, stem=(3, 1, 3), stem_channels=6)
    shapes = [m.conv.weight.shape for m in net.stem.layers]
    assert shapes == [(6, 3, 3, 3, 3), (6, 1, 1, 1, 6), (6, 3, 3, 3, 6)]

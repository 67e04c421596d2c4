"""State dicts of torch-pointcloud's classes load by their names and give its outputs.

`data/torch_pointcloud.npz` is from torch-pointcloud 0.0.18: names and shapes of the
state dicts of small nets of its own classes, and what they returned in float64 on the
CPU (spconv 2.3.8, attention without FlashAttention). The weights are
`foreign_nets.filled` of the names and shapes. SPVCNN needs CUDA there: it has names
and shapes only.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from foreign import torchsparse_name
from foreign_nets import filled, spvnas_shapes
from mlx.utils import tree_flatten
from published_cases import assert_close

import mlx_lattice as ml
from mlx_lattice import models
from mlx_lattice.io import import_checkpoint

with np.load(Path(__file__).parent / "data/torch_pointcloud.npz") as file:
    DATA = dict(file)
CASES = json.loads(bytes(DATA.pop("cases")))
PTV3 = [name for name in CASES if name.startswith("ptv3")]


def imported(name, net, library="spconv"):
    """The net with the weights of a case, and the case's state dict."""
    state = filled(CASES[name]["shapes"])
    assert import_checkpoint(state, net, library).complete
    return net.eval(), state


def scene(name, shape=None):
    coords = mx.array(DATA[f"{name}/coords"].astype(np.int32))
    feats = np.random.default_rng(1).normal(size=(len(coords), 4))
    feats = mx.array(feats.astype(np.float32))
    return ml.SparseTensor(coords, feats, spatial_shape=shape, batch_size=2)


def test_spunet():
    net, _ = imported("spunet", models.SpUNet(4, 3, **CASES["spunet"]["config"]))
    assert_close(net(scene("spunet")).feats, DATA["spunet/out"])


@pytest.mark.parametrize("name", PTV3)
def test_ptv3(name):
    """Legacy or not, with tables, rotations, and encoders alone."""
    config = CASES[name]["config"]
    classes = 0 if config.get("enc_mode") else 3
    net, _ = imported(name, models.PTv3(4, classes, **config))
    x = scene(name)
    y = net(x, 0.3 * x.coords[:, 1:].astype(mx.float32))
    expected = DATA[f"{name}/out"]
    if not classes:
        coords = DATA[f"{name}/out_coords"]
        order = np.lexsort(coords.T[::-1])
        assert np.array_equal(np.array(y.coords), coords[order])
        expected = expected[order]
    assert_close(y.feats, expected)


def at(rows, coords):
    """Which of rows sorted by their coordinates have the given ones."""
    places = {tuple(row): i for i, row in enumerate(np.array(rows).tolist())}
    return mx.array([places[tuple(row)] for row in coords.tolist()])


@pytest.mark.parametrize("prefix", ("", "backbone_3d."))
@pytest.mark.parametrize(
    "name, kind",
    (
        ("second", models.VoxelBackBone8x),
        ("second_residual", models.VoxelResBackBone8x),
    ),
)
def test_second(name, kind, prefix):
    net, state = imported(name, kind(4))
    before = dict(tree_flatten(net.parameters()))
    rest = {"backbone.blocks.0.1.conv.weight": mx.zeros((8, 8, 3, 3))}
    state = {prefix + n: a + 0 for n, a in state.items()} | rest
    report = import_checkpoint(state, net, "spconv")
    assert report.complete and "backbone.blocks.0.1.conv.weight" in report.ignored
    after = dict(tree_flatten(net.parameters()))
    assert all(mx.array_equal(after[n], a) for n, a in before.items())
    y = net(scene(name, (41, 40, 36)))
    assert len(y) == DATA[f"{name}/count"]
    rows = at(y.coords, DATA[f"{name}/out_coords"])
    assert_close(y.feats[rows][:, :6], DATA[f"{name}/out"])


def test_voxelnext():
    grid = models.GridRecipe(
        (0.4, 0.4, 0.2),
        (-6.4, -6.4, -4.2, 6.4, 6.4, 3.8),
        ("x", "y", "z", "intensity"),
    )
    net = models.VoxelNeXt(
        grid,
        (("car",), ("truck", "bus")),
        (8, 8, 12, 16, 16),
        16,
        branches=(*models.detection.heads.BRANCHES, ("vel", 2, 2)),
        head_kernel=1,
    )
    net, _ = imported("voxelnext", net)
    for h, head in enumerate(net(scene("voxelnext", grid.spatial_shape))):
        for branch, y in head.items():
            rows = at(y.coords, DATA["voxelnext/out_coords"])
            assert len(rows) == len(y)
            assert_close(y.feats[rows], DATA[f"voxelnext/{branch}{h}"])


# A block of each kind, in torch-pointcloud and in SPVNAS.
SPVNAS = {
    "stem.1.conv.kernel": "stem.3.kernel",
    "encoder.block2.downsample.conv.kernel": "stage3.0.net.0.kernel",
    "encoder.block0.blocks.1.conv1.kernel": "stage1.2.net.0.kernel",
    "encoder.block1.blocks.0.conv_skip.kernel": "stage2.1.downsample.0.kernel",
    "encoder.block3.fusion.lin.weight": "point_transforms.0.0.weight",
    "decoder.block1.fusion.norm.module.bias": "point_transforms.1.1.bias",
    "decoder.block0.upsample.conv.conv.kernel": "up1.0.net.0.kernel",
    "decoder.block1.upsample.residual.conv1.kernel": "up2.1.0.net.0.kernel",
    "decoder.block2.blocks.0.conv2.kernel": "up3.1.1.net.3.kernel",
    "head.weight": "classifier.0.weight",
}


def test_spvcnn():
    planes = CASES["spvcnn"]["config"]["planes"]
    net, state = imported("spvcnn", models.SPVCNN(4, 3, planes=planes), "torchsparse")
    theirs = filled(spvnas_shapes(planes, 4, 3))
    shapes = {name: tuple(array.shape) for name, array in theirs.items()}
    for name, place in SPVNAS.items():
        assert tuple(state[name].shape) == shapes[place]
        theirs[place] = state[name]
    before = dict(tree_flatten(net.parameters()))
    import_checkpoint(theirs, net, "torchsparse")
    same = [
        f"{torchsparse_name(path.replace('.layers.', '.'))}.{leaf}"
        for name, array in tree_flatten(net.parameters())
        for path, _, leaf in [name.rpartition(".")]
        if mx.array_equal(array, before[name])
    ]
    leaf = {place.replace(".kernel", ".weight") for place in SPVNAS.values()}
    assert set(same) == leaf

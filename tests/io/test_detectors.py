"""OpenPCDet's detectors: published checkpoints give their features and boxes.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the nets.
"""

import json

import foreign_arrays
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, nn
from mlx_lattice.io import import_checkpoint, load_state

NETS = foreign_arrays.FOLDER / "nets"
BACKBONES = {
    "pcdet_second": models.VoxelBackBone8x,
    "pcdet_unetv2": models.UNetV2,
    "pcdet_centerpoint": models.VoxelResBackBone8x,
    "pcdet_voxelnext": models.VoxelResBackBone8xVoxelNeXt,
}


def case_of(name: str) -> tuple[dict, dict]:
    """A case's arrays, and its configuration."""
    if not (NETS / f"{name}.npz").exists():
        pytest.skip("no shared/oracle/nets beside the checkout")
    with np.load(NETS / f"{name}.npz") as file:
        case = dict(file)
    return case, json.loads(str(case["config"]))


def difference(actual, expected) -> float:
    """Relative error of an array."""
    expected = np.asarray(expected, np.float64)
    assert tuple(actual.shape) == expected.shape
    apart = np.array(actual, np.float64) - expected
    return float(np.linalg.norm(apart) / np.linalg.norm(expected))


def scene(case, config) -> ml.SparseTensor:
    shape = config["sparse_shape"]
    return ml.SparseTensor(
        mx.array(case["coords"]), mx.array(case["feats"]), spatial_shape=shape
    )


def assert_rows(x: ml.SparseTensor, case, name, coords=None):
    """A tensor has a case's rows, in any order, and its features where it has them."""
    rows = case.get(f"{name}/coords", coords)
    places = np.lexsort(np.array(x.coords).T[::-1]), np.lexsort(rows.T[::-1])
    assert np.array_equal(np.array(x.coords)[places[0]], rows[places[1]])
    if f"{name}/shape" in case:
        assert list(x.spatial_shape) == case[f"{name}/shape"].tolist()
    if f"{name}/feats" in case:
        feats = case[f"{name}/feats"][places[1]]
        assert difference(x.feats[mx.array(places[0])], feats) <= 2e-5


def test_voxels():
    case, config = case_of("pcdet_voxels")
    grid = config["voxel_size"], config["point_cloud_range"]
    most = config["max_points_per_voxel"], config["max_number_of_voxels"]
    hard = models.hard_voxels(mx.array(case["points"]), *grid, *most)
    expected = ("voxels", "voxel_coords", "voxel_num_points", "voxel_features")
    found = (*hard, models.mean_vfe(hard))
    for name, array in zip(expected, found, strict=True):
        assert np.array_equal(np.array(array), case[f"out/{name}"]), name
    points, rest = mx.array(case["dynamic_points"][:, 1:]), case["dynamic_points"]
    batch = mx.array(rest[:, 0].astype(np.int32))
    x = models.dynamic_voxels(points, *grid, batch)
    assert np.array_equal(np.array(x.coords), case["out/dynamic/coords"])
    # The same sums; backends add in orders of their own.
    assert difference(x.feats, case["out/dynamic/feats"]) <= 1e-6


@pytest.mark.parametrize("name", BACKBONES)
def test_stages_of_the_backbones(name):
    """From the whole detector's state, of which a backbone takes its own part."""
    case, config = case_of(name)
    held = config.get("backbone_3d", {})
    options = {"widths": config["widths"]} if "widths" in config else {}
    if "CHANNELS" in held:
        options = {"channels": held["CHANNELS"], "out_channels": held["OUT_CHANNEL"]}
    net = BACKBONES[name](config["input_channels"], **options).eval()
    state = load_state(NETS / f"{name}.safetensors")
    assert import_checkpoint(state, net, "spconv").complete
    x = scene(case, config)
    made = net.stages(x)
    encoded = made.pop("out")
    assert_rows(encoded, case, "out/enc" if "out/enc/coords" in case else "mid/enc")
    rows = case["mid/x_conv3/coords"]
    for stage, y in made.items():
        if stage.startswith("up"):  # a decoder's, on the rows of a stage before
            level = max(1, int(stage[2:]) - 1)
            rows = case[f"mid/x_conv{level}/coords"]
        assert_rows(y, case, f"mid/{stage}", rows)
    if "out/bev" in case:
        bev = mx.moveaxis(nn.ToBEV()(encoded), -1, 1)
        assert difference(bev, case["out/bev"]) <= 2e-5
    if "out/point_features" in case:
        _, y = net(x)
        assert y.key == x.key
        assert difference(y.feats, case["out/point_features"]) <= 2e-5

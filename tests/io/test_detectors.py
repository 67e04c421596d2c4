"""OpenPCDet's detectors: published checkpoints give their features and boxes.

Reads `shared/oracle/nets` beside the checkout: weights and outputs of the nets.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from published_cases import case_of, difference, weights_of

import mlx_lattice as ml
from mlx_lattice import cli, models, nn
from mlx_lattice.io import import_checkpoint, load_state

BACKBONES = {
    "pcdet_second": models.VoxelBackBone8x,
    "pcdet_unetv2": models.UNetV2,
    "pcdet_centerpoint": models.VoxelResBackBone8x,
    "pcdet_voxelnext": models.VoxelResBackBone8xVoxelNeXt,
}


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
    state = load_state(weights_of(name))
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


DETECTORS = {"pcdet_centerpoint": "CenterPoint", "pcdet_voxelnext": "VoxelNeXt"}


def published(config, kind) -> dict:
    """A case's configuration as OpenPCDet's files have it, base ones merged."""
    features = ["x", "y", "z", "intensity", "elongation"]
    voxels = {
        "NAME": "transform_points_to_voxels",
        "VOXEL_SIZE": config["voxel_size"],
        "MAX_POINTS_PER_VOXEL": 5,
        "MAX_NUMBER_OF_VOXELS": {"train": 16000, "test": 40000},
    }
    names = {
        "CenterPoint": ("VoxelResBackBone8x", "CenterHead"),
        "VoxelNeXt": ("VoxelResBackBone8xVoxelNeXt", "VoxelNeXtHead"),
    }
    encoder, head = names[kind]
    return {
        "CLASS_NAMES": config["class_names"],
        "DATA_CONFIG": {
            "POINT_CLOUD_RANGE": config["point_cloud_range"],
            "POINT_FEATURE_ENCODING": {"used_feature_list": features},
            "DATA_PROCESSOR": [{"NAME": "shuffle_points"}, voxels],
        },
        "MODEL": {
            "NAME": kind,
            "VFE": {"NAME": "MeanVFE"},
            "BACKBONE_3D": {"NAME": encoder, **config["backbone_3d"]},
            "BACKBONE_2D": {"NAME": "BaseBEVBackbone", **config.get("backbone_2d", {})},
            "DENSE_HEAD": {"NAME": head, **config["dense_head"]},
        },
    }


def detector(name):
    """A detector with its published weights, of its published configuration."""
    case, config = case_of(name)
    kind = DETECTORS[name]
    _, arguments = models.published_arguments(published(config, kind))
    if "widths" in config:  # which OpenPCDet's file fixes
        arguments["widths"] = config["widths"]
    net = getattr(models, kind)(**arguments).eval()
    assert list(net.grid.spatial_shape) == config["sparse_shape"]
    report = import_checkpoint(weights_of(name), net, "spconv")
    assert report.complete
    return net, case, config


@pytest.mark.parametrize("name", DETECTORS)
def test_heads_and_boxes(name):
    net, case, config = detector(name)
    x = scene(case, config)
    predictions = net(x)
    for i, head in enumerate(predictions):
        for branch, y in head.items():
            expected = case[f"out/head/{i}/{branch}"]
            if name == "pcdet_voxelnext":
                rows = case["out/enc/coords"]
                held = {"y/coords": rows, "y/feats": expected}
                assert_rows(y, held, "y")
            else:
                assert difference(mx.moveaxis(y, -1, 1), expected) <= 2e-5
    if "mid/bev_2d" in case:
        flat = net.backbone_2d(net.to_bev(net.backbone_3d(x)))
        assert difference(mx.moveaxis(flat, -1, 1), case["mid/bev_2d"]) <= 2e-5
    for element, heads in enumerate(net.decode(predictions)):
        for i, found in enumerate(heads):
            assert_boxes(found[:3], case, f"out/decoded/{i}/{element}")
    for element, found in enumerate(net.boxes(predictions)):
        found = found._replace(labels=found.labels + 1)  # OpenPCDet counts from 1
        assert_boxes(found, case, f"out/final/{element}")


def assert_boxes(found, case, name):
    boxes, scores, labels = found
    assert difference(boxes, case[f"{name}/boxes"]) <= 2e-5
    assert difference(scores, case[f"{name}/scores"]) <= 2e-5
    assert labels.tolist() == case[f"{name}/labels"].tolist()


@pytest.mark.parametrize("bits", (None, 8))
def test_convert_to_a_folder(bits, tmp_path, capsys):
    """The command, with OpenPCDet's configuration and the counter that it saves."""
    case, config = case_of("pcdet_voxelnext")
    name = tmp_path / "config.json"
    name.write_text(json.dumps(published(config, "VoxelNeXt")))
    state = load_state(weights_of("pcdet_voxelnext"))
    state["global_step"] = mx.array([123])
    mx.save_safetensors(str(tmp_path / "net.safetensors"), state)
    given = ["convert", str(tmp_path / "net.safetensors"), str(tmp_path / "net")]
    given += ["--library", "spconv", "--config", str(name)]
    given += ["--bits", "8", "--group-size", "32"] if bits else []
    assert cli.main(given) == 0, capsys.readouterr().err
    net = models.VoxelNeXt.from_pretrained(tmp_path / "net")
    assert "329 of 329 parameters matched, 0 tensors left over" in (
        capsys.readouterr().err
    )
    assert net.classes == tuple(config["class_names"])
    packed = [n for n, module in net.named_modules() if "scales" in module]
    assert bool(packed) == bool(bits)
    x = scene(case, config)
    if bits:
        order = np.lexsort(case["out/enc/coords"].T[::-1])
        for branch, y in net(x)[1].items():
            expected = case[f"out/head/1/{branch}"][order]
            assert difference(y.feats, expected) <= 0.03, branch
        return
    for element, boxes in enumerate(net.detect(x)):
        boxes = boxes._replace(labels=boxes.labels + 1)
        assert_boxes(boxes, case, f"out/final/{element}")


def test_configurations(tmp_path):
    """What a published file may say besides, and what is refused."""
    _, config = case_of("pcdet_voxelnext")

    def arguments(change=None, kind="VoxelNeXt", wanted=None):
        given = published(config, kind)
        if change:
            change(given["MODEL"]["DENSE_HEAD"])
        return models.published_arguments(given, wanted)[1]

    def iou(head):
        head["IOU_BRANCH"], head["RECTIFIER"] = True, [0.5] * 5
        branch = {"out_channels": 1, "num_conv": 2}
        dictionary = head["SEPARATE_HEAD_CFG"]["HEAD_DICT"]
        head["SEPARATE_HEAD_CFG"] = {"HEAD_DICT": dictionary | {"iou": branch}}

    made = arguments(iou)
    assert made["decoding"].by_class and made["decoding"].rectifier == (0.5,) * 5
    assert ("iou", 1, 2) in made["branches"] and made["head_kernel"] == 1
    models.VoxelNeXt(**made)
    wrong = {
        "DOUBLE_FLIP": lambda head: head.update(DOUBLE_FLIP=True),
        "not one of OpenPCDet's .* KeyError": lambda head: head.pop("NUM_HM_CONV"),
    }
    for said, change in wrong.items():
        with pytest.raises(ValueError, match=said):
            arguments(change)
    with pytest.raises(ValueError, match="expected one of CenterPoint, VoxelNeXt"):
        given = published(config, "VoxelNeXt")
        models.published_arguments(given | {"MODEL": {"NAME": "PointPillar"}})
    assert arguments(wanted="VoxelResBackBone8xVoxelNeXt")["in_channels"] == 5
    net = models.VoxelNeXt.of_config(published(config, "VoxelNeXt"))
    assert net.classes == tuple(config["class_names"])

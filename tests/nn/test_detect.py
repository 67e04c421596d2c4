"""The command detect: boxes in a table, files and a picture, and what it refuses."""

import csv
import json

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from processes import on_the_cpu_alone

from mlx_lattice import cli, models, nn
from mlx_lattice.commands import detect, segment
from mlx_lattice.io import read_points
from mlx_lattice.io.points import write_ply

pytest.importorskip("k3d", reason="the extra viz is not installed")

pytestmark = on_the_cpu_alone

GRID = models.GridRecipe(
    (0.4, 0.4, 0.25), (-12.8, -12.8, -4, 12.8, 12.8, 4), ("x", "y", "z", "ones")
)
HEADS = (("car", "van"), ("person",))
ABOUT = models.About(None, ("car", "van", "person"), ((200, 0, 0),) * 3)
# Scores of untrained weights are a tenth and a little.
DECODING = {"score_threshold": 0.1005, "max_boxes": 30, "nms_threshold": 0.1}
DECODING |= {"limit_range": GRID.point_range}
SMALL = {
    "layer_nums": (1, 1),
    "num_filters": (8, 8),
    "num_upsample_filters": (8, 8),
    "shared_channels": 8,
}
NETS = {
    "CenterPoint": lambda grid, wide: models.CenterPoint(
        grid, HEADS, (wide,) * 5, decoding=DECODING, **SMALL
    ),
    "VoxelNeXt": lambda grid, wide: models.VoxelNeXt(
        grid, HEADS, (wide,) * 5, wide, decoding=DECODING
    ),
}


def net(folder, name, bits=None, grid=GRID):
    mx.random.seed(0)
    made = NETS[name](grid, 32 if bits else 8)
    made.about = ABOUT
    if bits:
        mlx.nn.quantize(made, 32, bits, class_predicate=nn.keep_float())
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return net(tmp_path / "net", "VoxelNeXt")


@pytest.fixture
def scan(tmp_path):
    """A level ground with things on it, as KITTI keeps scans."""
    rng, path = np.random.default_rng(0), tmp_path / "scan.bin"
    points = rng.uniform((-12, -12, -2, 0), (12, 12, -1.8, 1), (700, 4))
    points[:300, 2] += 1.5 * rng.random(300)
    points.astype("<f4").tofile(path)
    return path


@pytest.mark.parametrize(
    ("name", "bits"), (("CenterPoint", None), ("VoxelNeXt", None), ("VoxelNeXt", 8))
)
def test_boxes_of_a_scan(name, bits, scan, tmp_path, capsys):
    made, out = net(tmp_path / "net", name, bits), tmp_path / "out"
    given = ["detect", str(scan), "--model", str(made), "--out", str(out)]
    assert cli.main(given) == 0
    printed = capsys.readouterr()
    assert "700 points ->" in printed.err
    # What the net itself says of the points.
    found = models.from_pretrained(made).detect_points(read_points(scan).points)
    order = np.argsort(-np.array(found.scores), kind="stable")
    boxes, labels = np.array(found.boxes)[order], np.array(found.labels)[order]
    assert 0 < len(boxes) <= 60
    told = json.loads((out / "scan.json").read_text())
    assert told["classes"] == list(ABOUT.classes)
    assert told["voxel_size"] == list(GRID.voxel_size)
    with (out / "scan.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(told["boxes"]) == len(boxes)
    for row, held, box, label in zip(rows, told["boxes"], boxes, labels, strict=True):
        assert row["class"] == held["class"] == ABOUT.classes[label]
        numbers = [float(row[name]) for name in detect.COLUMNS[:7]]
        assert np.allclose(numbers, box, atol=1e-4)
        assert numbers == [held[name] for name in detect.COLUMNS[:7]]
    assert f"{len(boxes)} boxes;" in printed.err
    assert f" {told['boxes'][0]['score']:.2f} " in printed.out
    picture = (out / "scan.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_scores_that_are_asked_for(scan, folder, tmp_path, capsys, monkeypatch):
    drawn, save = [], segment.save_figure
    monkeypatch.setattr(
        segment, "save_figure", lambda *args: drawn.append(args[3:]) or save(*args)
    )
    given = ["detect", str(scan), "--model", str(folder), "--out", str(tmp_path)]
    assert cli.main([*given, "--score", "0.9"]) == 0
    assert "no box has a score above 0.9; --score sets" in capsys.readouterr().out
    assert json.loads((tmp_path / "scan.json").read_text())["boxes"] == []
    # A picture without boxes has its title and legend, too.
    (legend, title), *_ = drawn
    assert title == (
        f"scan.bin: VoxelNeXt from {folder}; 0 boxes with a score above 0.9"
    )
    assert [text for _, text in legend] == [f"{name} 0" for name in ABOUT.classes]
    assert "0 boxes with a score above 0.9" in (tmp_path / "scan.html").read_text()
    assert (tmp_path / "scan.csv").read_text().strip().startswith("class,score,x")
    assert cli.main([*given, "--score", "0"]) == 0
    assert "more in the files" in capsys.readouterr().out
    assert cli.main([*given, "--score", "0", "--json", "--quiet"]) == 0
    printed, written = (
        capsys.readouterr(),
        json.loads((tmp_path / "scan.json").read_text()),
    )
    assert json.loads(printed.out)["boxes"] == written["boxes"] and printed.err == ""


def test_a_map_projection(scan, folder, tmp_path):
    """A scan around 0, and the same one where a map has it, as doubles."""
    points = read_points(scan).points.astype(np.float64)
    near, far = tmp_path / "near.ply", tmp_path / "far.ply"
    centre = np.array([500_000.0, 4_000_000.0, 300.0])
    for path, at in ((near, points), (far, points + centre)):
        write_ply(path, dict(zip("xyz", at.T, strict=True)))
    here = detect.run(near, folder, tmp_path / "near")
    there = detect.run(far, folder, tmp_path / "far", centre=centre)
    boxes = [found.document["boxes"] for found in (here, there)]
    assert len(boxes[0]) > 0
    at = [np.array([[b["x"], b["y"], b["z"]] for b in each]) for each in boxes]
    # float32 rounds points differently: the best boxes are the same.
    assert np.abs(at[1][:5] - centre - at[0][:5]).max() < 2e-2
    with pytest.raises(ValueError, match="no points in the net's range.*--centre X"):
        detect.run(far, folder, tmp_path / "far")


def refused(capsys, *given) -> str:
    assert cli.main(["detect", *map(str, given)]) in (1, 2)
    return capsys.readouterr().err


def test_a_scan_is_not_written_over(folder, tmp_path, capsys):
    scan = tmp_path / "scan.csv"  # as the table of boxes is named
    scan.write_text("x,y,z,intensity\n1,2,0,0.5\n3,1,0,0.5\n")
    text = scan.read_text()
    said = refused(capsys, scan, "--model", folder, "--out", tmp_path)
    assert f"cannot write {scan}: it is read, too" in said
    assert scan.read_text() == text


def test_what_is_refused(scan, folder, tmp_path, capsys):
    for more, why in (
        (("--score", "nan"), "argument --score: must be 0 to 1; got nan"),
        (("--score", "1.5"), "argument --score: must be 0 to 1; got 1.5"),
        (("--centre", "nan", "0", "0"), "argument --centre: must be finite; got nan"),
    ):
        assert why in refused(capsys, scan, "--model", folder, *more)
    models.SpUNet(2, 3, 32, (32, 32), layers=(1, 1)).save_pretrained(tmp_path / "unet")
    said = refused(capsys, scan, "--model", tmp_path / "unet")
    assert "is a SpUNet, which finds no boxes" in said
    write_ply(tmp_path / "none.ply", {axis: np.zeros(0, np.float32) for axis in "xyz"})
    said = refused(capsys, tmp_path / "none.ply", "--model", folder)
    assert "has no points in the net's range" in said
    grid = models.GridRecipe(
        GRID.voxel_size, GRID.point_range, ("x", "y", "z", "elongation")
    )
    net(tmp_path / "more", "VoxelNeXt", grid=grid)
    given = scan, "--model", tmp_path / "more", "--out", tmp_path / "out"
    said = refused(capsys, *given)
    assert "no elongation (intensity): give the attribute, or pass fill=True" in said
    assert cli.main(["detect", *map(str, given), "--fill"]) == 0

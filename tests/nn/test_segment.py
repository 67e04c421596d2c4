"""The command segment: points by class in colour, a picture, and what it refuses."""

import json
import re
import warnings
from pathlib import Path

import foreign_arrays
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, models, nn
from mlx_lattice.commands import segment
from mlx_lattice.io import read_points
from mlx_lattice.io.points import write_ply

pytest.importorskip("k3d", reason="the extra viz is not installed")
DATA = foreign_arrays.FOLDER.parent / "data"
ABOUT = models.About(
    models.VoxelRecipe(0.4, ("ones", "height"), centred=True, from_zero=True),
    ("floor", "wall", "rest"),
    ((200, 0, 0), (0, 200, 0), (0, 0, 200)),
)
NETS = {
    "SpUNet": lambda: models.SpUNet(2, 3, 32, (32, 32), layers=(1, 1)),
    "MinkUNet": lambda: models.MinkUNet(2, 3, (32,) * 8, (1,) * 8),
    "SPVCNN": lambda: models.SPVCNN(2, 3, 1.0, 0.5),
}


@pytest.fixture
def folder(tmp_path):
    return net(tmp_path / "net", "SpUNet")


def net(folder, name, bits=None):
    mx.random.seed(0)
    made = NETS[name]()
    made.about = ABOUT
    if bits:
        mlx.nn.quantize(made, 32, bits, class_predicate=nn.keep_float())
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def scan(tmp_path):
    """A corner of a room, colours and all."""
    rng, path = np.random.default_rng(0), tmp_path / "room.ply"
    points = rng.uniform(0, 5, (900, 3)).astype(np.float32)
    points[np.arange(900), np.arange(900) % 3] = 0
    colours = rng.integers(0, 256, (900, 3)).astype(np.uint8)
    columns = dict(zip("xyz", points.T, strict=True))
    columns |= dict(zip(("red", "green", "blue"), colours.T, strict=True))
    write_ply(path, columns)
    return path


@pytest.mark.parametrize("bits", (None, 8, 4))
@pytest.mark.parametrize("name", NETS)
def test_points_by_class(name, bits, scan, tmp_path, capsys):
    made = net(tmp_path / "net", name, bits)
    out = tmp_path / "out"
    given = ["segment", str(scan), "--model", str(made), "--out", str(out)]
    assert cli.main([*given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["points"] == sum(c["points"] for c in document["classes"]) == 900
    assert all(Path(path).is_file() for path in document["files"])
    assert cli.main(given) == 0
    printed = capsys.readouterr()
    assert "900 points ->" in printed.err
    before, after = read_points(scan), read_points(out / "room.ply")
    assert np.array_equal(after.points, before.points)
    # What the net itself says of each point.
    read = models.from_pretrained(made)
    scores = read.score_points(before.points, before.attributes).astype(mx.float32)
    chances = np.array(mx.softmax(scores, axis=1))
    labels = after.attributes["labels"]
    assert np.allclose(chances[np.arange(900), labels], chances.max(1), atol=1e-5)
    assert np.allclose(after.attributes["confidence"], chances.max(1), atol=1e-5)
    palette = np.array(ABOUT.colours)
    assert np.array_equal(after.attributes["colours"], palette[labels])
    found = np.bincount(labels, minlength=3)
    for i, label in enumerate(ABOUT.classes):
        line = re.search(rf"  {label} +{found[i]:,} points", printed.out)
        assert (line is not None) == (found[i] > 0)
    picture = (out / "room.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    page = (out / "room.html").read_text()
    assert "<title>room.ply</title>" in page and f"{type(read).__name__} from" in page
    assert all(f"<span>{ABOUT.classes[i]}</span>" in page for i in set(labels))


@pytest.mark.parametrize("scan", ("pcl_milk_clorox.pcd", "small_gicp_target.ply"))
def test_real_scans(scan, folder, tmp_path):
    if not (DATA / scan).exists():
        pytest.skip("no shared/data beside the checkout")
    found = segment.run(DATA / scan, folder, tmp_path / "out")
    ply, picture, _ = map(Path, found.document["files"])
    read = read_points(ply)
    assert np.array_equal(read.points, read_points(DATA / scan).points)
    assert picture.stat().st_size > 20_000


def warnings_for(points, folder, tmp_path) -> str:
    """Segment points; return the warnings that a user may filter by category."""
    write_ply(tmp_path / "a.ply", dict(zip("xyz", points.T, strict=True)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        segment.run(tmp_path / "a.ply", folder, tmp_path / "out")
    ours = [w for w in caught if w.category is ml.LatticeWarning]
    return "\n".join(str(w.message) for w in ours)


@pytest.mark.parametrize(
    "scale, count, warned",
    (
        (1, 900, ""),
        (1e-2, 20_000, "20,000 points fall into"),
        (1e-2, 5, "5 points fall into"),
        (1, 4000, ""),
        (1e3, 900, ""),
    ),
)
def test_a_scan_in_another_unit_is_warned_of(scale, count, warned, folder, tmp_path):
    rng = np.random.default_rng(0)
    points = (rng.uniform(0, 5, (count, 3)) * scale).astype(np.float32)
    out = warnings_for(points, folder, tmp_path)
    assert (warned in out) if warned else "points fall into" not in out
    if warned:
        assert "measures 0.0" in out and "a voxel 0.4. Scale the coordinates" in out


def test_one_class_is_warned_of(scan, folder, tmp_path):
    made = models.from_pretrained(folder)
    points = read_points(scan).points
    assert "nearly all" not in warnings_for(points, folder, tmp_path)
    made.final.bias = mx.array([0.0, 1000.0, 0.0])
    made.save_pretrained(tmp_path / "one")
    out = warnings_for(points, tmp_path / "one", tmp_path)
    assert "nearly all points get the class wall. Check that the scan's unit" in out
    # A net of one class has nothing to tell apart.
    alone = models.SpUNet(2, 1, 32, (32, 32), layers=(1, 1))
    alone.about = models.About(models.VoxelRecipe(0.4, ("ones", "height")))
    alone.save_pretrained(tmp_path / "alone")
    out = warnings_for(points, tmp_path / "alone", tmp_path)
    assert "nearly all" not in out


def refused(capsys, *given) -> str:
    assert cli.main(["segment", *map(str, given)]) in (1, 2)
    return capsys.readouterr().err


def test_what_is_refused(scan, folder, tmp_path, capsys):
    assert "no folder nothing-here" in refused(capsys, scan, "--model", "nothing-here")
    assert "there is no file" in refused(capsys, tmp_path / "a.ply", "--model", folder)
    encoder = models.SpUNet(2, 3, 32, (32, 32), layers=(1, 1), enc_mode=True)
    encoder.about = ABOUT
    for made, why in (
        (models.SparseResNet14(2, 3), "is a SparseResNet14, which does not score"),
        (NETS["SpUNet"](), "does not say how its voxels are made: set net.about"),
        (encoder, "enc_mode"),
    ):
        made.save_pretrained(tmp_path / "made")
        assert why in refused(capsys, scan, "--model", tmp_path / "made")
    write_ply(tmp_path / "none.ply", {axis: np.zeros(0, np.float32) for axis in "xyz"})
    said = refused(capsys, tmp_path / "none.ply", "--model", folder)
    assert "holds no points" in said
    said = refused(capsys, scan, "--model", folder, "--out", scan.parent)
    assert "it is read, too; choose another place" in said
    blocked = tmp_path / "file"
    blocked.write_text("")
    (tmp_path / "taken" / "room.png").mkdir(parents=True)
    # Before the net is read, which is not there.
    for out, why in (
        (blocked / "in", f"cannot write to {blocked / 'in'}: {blocked} is not a"),
        (tmp_path / "taken", "room.png: it is a folder; choose another place"),
    ):
        said = refused(capsys, scan, "--model", "nothing-here", "--out", out)
        assert why in said and said.count("\n") == 1
    said = refused(capsys, scan, "--model", folder, "--up", "w")
    assert "argument --up: invalid choice: 'w'" in said


@pytest.mark.parametrize("up", segment.AXES)
def test_any_axis_upwards_without_a_mirror(up):
    turned = segment.upright(np.eye(3), up)
    assert np.linalg.det(turned) == 1
    assert turned["xyz".index(up[-1]), 2] == (-1 if up[0] == "-" else 1)

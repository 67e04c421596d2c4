"""The commands segment to a file and evaluate: labels, IoU, and what is refused."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_lattice import cli, io, models
from mlx_lattice.io.points import read_columns, write_ply
from mlx_lattice.nn import metrics

laspy = pytest.importorskip("laspy")
pytest.importorskip("matplotlib")

NAMES = ("floor", "wall", "rest")


@pytest.fixture
def folder(tmp_path):
    mx.random.seed(0)
    net = models.SpUNet(2, 3, 32, (32, 32), layers=(1, 1))
    recipe = models.VoxelRecipe(0.4, ("intensity", "height"), from_zero=True)
    net.about = models.About(recipe, NAMES)
    net.save_pretrained(tmp_path / "net")
    return tmp_path / "net"


@pytest.fixture
def scan(tmp_path):
    """A LAZ file on a map, whose classification is not what the net finds."""
    rng, count = np.random.default_rng(0), 4000
    made = laspy.LasData(laspy.LasHeader(point_format=7, version="1.4"))
    made.header.offsets, made.header.scales = (4e5, 5e6, 0), (0.001,) * 3
    made.x, made.y = 4e5 + rng.uniform(0, 30, count), 5e6 + rng.uniform(0, 20, count)
    made.z = np.where(rng.random(count) < 0.4, rng.uniform(0, 4, count), 0)
    made.intensity = rng.integers(0, 8, count)
    made.classification = rng.integers(0, 3, count)
    made.gps_time = np.arange(count)
    made.write(tmp_path / "scan.laz")
    return tmp_path / "scan.laz"


def run(*words):
    return cli.main([str(word) for word in words])


def test_segment_in_tiles_to_a_file(scan, folder, tmp_path, capsys):
    out = tmp_path / "new" / "labelled.laz"
    given = ("--tile", 12, "--overlap", 4, "--votes", 4, "--out", out)
    assert run("segment", scan, "--model", folder, *given) == 0
    printed = capsys.readouterr()
    assert "8 tiles, 4 views of each" in printed.err
    assert f"wrote {out}, with the classes as classification" in printed.err
    assert [path.name for path in out.parent.iterdir()] == ["labelled.laz"]
    cloud, net = io.read_points(scan), models.from_pretrained(folder)
    found = models.segment_points(
        net, cloud.points, cloud.attributes, tile=12, overlap=4, votes=4
    )
    before, after = laspy.read(scan), laspy.read(out)
    assert np.array_equal(after.classification, found.labels)
    assert np.array_equal(after.confidence, found.confidence)
    for name in ("X", "Y", "Z", "gps_time", "intensity"):
        assert np.array_equal(after[name], before[name])

    # The same numbers from the net and from its file; by NumPy, too.
    capsys.readouterr()
    read = []
    for way in (("--model", folder, *given[:-2]), ("--predicted", out)):
        assert run("evaluate", scan, *way, "--json", "--ignore", 2) == 0
        read.append(json.loads(capsys.readouterr().out))
    truth, kept = before.classification, before.classification != 2
    hits = [((truth == c) & (found.labels == c) & kept).sum() for c in range(3)]
    either = [(((truth == c) | (found.labels == c)) & kept).sum() for c in range(3)]
    for each in read:
        assert each["points"] == kept.sum()
        shares = [c["iou"] for c in each["classes"]]
        for share, hit, any_of in zip(shares, hits, either, strict=False):
            assert share == (pytest.approx(hit / any_of) if any_of else None)
    ours, others = (np.array(each["confusion"]) for each in read)
    assert np.array_equal(ours[:2, :2], others[:2, :2])
    assert [c["name"] for c in read[0]["classes"]] == list(NAMES)
    assert read[1]["classes"][1]["name"] == "class 1"


def test_the_table_of_several_scans_is_that_of_all_points(tmp_path, capsys):
    rng = np.random.default_rng(0)
    names, expected = [], metrics.ConfusionMatrix(4)
    for i, classes in enumerate((2, 4)):
        truth, found = rng.integers(0, classes, (2, 50))
        expected.update(found, truth)
        places = dict.fromkeys("xyz", np.arange(50.0))
        np.savez(tmp_path / f"truth{i}.npz", **places, segment=truth)
        write_ply(tmp_path / f"found{i}.ply", {**places, "label": found.astype("u1")})
        names += [tmp_path / f"truth{i}.npz"]
    found = [str(name).replace("truth", "found")[:-3] + "ply" for name in names]
    line = ("evaluate", *names, "--predicted", *found, "--labels", "segment")
    assert run(*line) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == str(expected).strip()


def test_classes_that_do_not_occur_have_no_line(tmp_path, capsys):
    places = dict.fromkeys("xyz", np.arange(4.0))
    for name, labels in (("a.ply", [0, 2, 2, 255]), ("b.ply", [0, 2, 0, 2])):
        write_ply(tmp_path / name, {**places, "label": np.array(labels, np.uint8)})
    line = ("evaluate", tmp_path / "a.ply", "--predicted", tmp_path / "b.ply")
    assert run(*line, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in found["classes"]] == ["class 0", "class 2", "class 255"]
    assert found["confusion"] == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]


def test_points_that_are_left_out_keep_their_place(folder, tmp_path, capsys):
    """A copy has all points of the file, -1 where the net read none."""
    rng = np.random.default_rng(0)
    columns = dict(zip("xyz", rng.uniform(0, 5, (3, 90)), strict=True))
    columns["intensity"] = rng.random(90).astype(np.float32)
    columns["class"] = (np.arange(90) % 3).astype(np.uint8)
    columns["x"][4], columns["intensity"][7] = np.nan, np.inf
    write_ply(tmp_path / "a.ply", columns)
    out = tmp_path / "b.ply"
    assert run("segment", tmp_path / "a.ply", "--model", folder, "--out", out) == 0
    assert "a.ply: 2 points left out" in capsys.readouterr().err
    read = read_columns(out)
    assert np.flatnonzero(read["label"] == -1).tolist() == [4, 7]
    assert read["confidence"][4] == 0
    for name, column in columns.items():
        assert np.array_equal(read[name], column, equal_nan=True)
    # The truth is the file's class, and the prediction its label.
    assert run("evaluate", tmp_path / "a.ply", "--predicted", out, "--json") == 0
    known = read["label"] != -1
    # Point 7 has a place, and a label that is missing; point 4 has no place.
    right = (read["label"] == columns["class"]) & known
    found = json.loads(capsys.readouterr().out)
    assert found["points"] == 89
    assert found["overall_accuracy"] == pytest.approx(right.sum() / 89)


def refused(capsys, *words) -> str:
    assert run(*words) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_what_is_refused(scan, folder, tmp_path, capsys):
    model = ("--model", folder)
    for words, said in (
        (
            ("--tile", 5, "--overlap", 5),
            "--tile must be larger than 0 and than --overlap; got 5 and 5",
        ),
        (("--votes", 99), "argument --votes: must be 1 to 24; got 99"),
        (("--overlap", 5), "--overlap needs --tile"),
        (("--out", tmp_path / "a.pcd"), "labels are written to .las, .laz, .ply, .npz"),
        (("--out", scan), "it is read, too; choose another place"),
    ):
        assert said in refused(capsys, "segment", scan, *model, *words)
    places = dict.fromkeys("xyz", np.arange(5.0, dtype=np.float32))
    plain, other = tmp_path / "plain.ply", tmp_path / "other.ply"
    write_ply(plain, {**places, "intensity": places["x"]})
    write_ply(other, {**places, "intensity": places["x"], "label": places["x"] / 2})
    out = ("--out", tmp_path / "a.las")
    said = refused(capsys, "segment", plain, *model, *out)
    assert "a .las file needs a LAS or LAZ file as its source" in said
    for words, said in (
        ((scan,), "pass either --model"),
        ((scan, *model, "--predicted", scan), "pass either --model"),
        ((scan, scan, "--predicted", scan), "got 1 for 2 scans"),
        ((plain, *model), "plain.ply has no labels beside intensity: expected an int"),
        ((scan, *model, "--labels", "wood"), "scan.laz has no dimension wood"),
        ((other, "--predicted", scan), "labels must be an integer for each point"),
        ((scan, "--predicted", plain), "scan.laz has 4,000 points and"),
        ((scan, *model, "--up", "w"), "argument --up: invalid choice: 'w'"),
    ):
        assert said in refused(capsys, "evaluate", *words)
    made = laspy.read(scan)
    made.classification[3] = 11
    made.write(scan)
    said = refused(capsys, "evaluate", scan, *model)
    assert "has label 11, and the net has the classes 0 to 2" in said
    assert "--ignore 11" in said
    assert run("evaluate", scan, *model, "--ignore", 11) == 0

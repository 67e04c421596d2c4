"""Scenes and the command view: what the page holds, and what is refused."""

import base64
import html
import json
import re
import subprocess
import sys
import zlib

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import cli, models, ops, scene
from mlx_lattice.io.points import write_ply

msgpack = pytest.importorskip("msgpack", reason="the extra viz is not installed")
pytest.importorskip("k3d", reason="the extra viz is not installed")
pytestmark = pytest.mark.native  # no kernel decides what a page holds


def held(page: str) -> list[dict]:
    """The objects of a page, as its script reads them."""
    data = re.search(r'msgpackDecode\(inflated\("([^"]+)"', page)[1]
    return msgpack.unpackb(zlib.decompress(base64.b64decode(data)))["objects"]


def values(stored: dict) -> np.ndarray:
    """An array as k3d stores it."""
    kind, data = stored["dtype"], stored.get("data") or stored["compressed_data"]
    if "compressed_data" in stored:
        data = zlib.decompress(data)
    return np.frombuffer(data, kind).reshape(stored["shape"])


def rows(page: str) -> list[tuple[str, str, str]]:
    """The ids, name and count of each entry of the legend."""
    found = re.findall(r'data-ids="([\d ]+)">.*?<span>(.*?)</span><small>(.*?)<', page)
    return [(ids, html.unescape(name), count) for ids, name, count in found]


POINTS = np.random.default_rng(0).uniform(0, 4, (300, 3)).astype(np.float32)


def test_each_class_has_a_switch_a_colour_and_its_points():
    labels = np.arange(300) % 3 - 1
    palette = [(255, 0, 0), (0, 128, 64)]
    made = ml.Scene("room", "net").points(
        mx.array(POINTS), labels=labels, classes=("a <b>",), palette=palette
    )
    page = made.html()
    objects = {str(each["id"]): each for each in held(page)}
    legend = rows(page)
    assert [(name, count) for _, name, count in legend] == [
        ("no class", "100"),
        ("a <b>", "100"),
        ("class 1", "100"),
    ]
    for (ids, *_), label in zip(legend, (-1, 0, 1), strict=True):
        positions = values(objects[ids]["positions"])
        assert np.array_equal(positions.reshape(-1, 3), POINTS[labels == label])
    colours = [objects[ids]["color"] for ids, *_ in legend]
    assert colours[1:] == [0xFF0000, 0x008040]
    assert "<b>" not in page.split("<script>")[0].split("</style>")[1]


def test_a_page_needs_no_network():
    page = ml.Scene("</script><script>alert(1)</script>").points(POINTS).html()
    assert "alert(1)</script>" not in page
    assert not re.search(r'(src|href)=["\']?https?:', page)


def test_own_colours_are_kept_beside_the_classes():
    colours = np.random.default_rng(1).integers(0, 256, (300, 3))
    page = ml.Scene().points(POINTS, labels=POINTS[:, 0] > 2, colours=colours).html()
    assert 'id="own"' in page
    packed = colours[POINTS[:, 0] > 2] @ [65536, 256, 1]
    assert np.array_equal(values(held(page)[1]["custom_data"]["own"]), packed)
    alone = ml.Scene().points(POINTS, colours=colours / 255).html()
    assert 'id="own"' not in alone
    assert np.array_equal(values(held(alone)[0]["colors"]), colours @ [65536, 256, 1])


def test_many_points_are_thinned_and_bad_points_left_out(monkeypatch):
    monkeypatch.setattr(scene, "MOST_POINTS", 100)
    points = np.concatenate([POINTS, [[np.nan, 0, 0]]])
    page = ml.Scene().points(points).html()
    assert "100 of 301 points are drawn" in page
    assert rows(page)[0][2] == "100"


def test_many_voxels_are_drawn_as_points(monkeypatch):
    monkeypatch.setattr(scene, "MOST_CUBES", 2)
    cubes = ml.Scene().voxels([[0, 0, 0], [1, 0, 0], [2, 0, 0]])
    assert "3 voxels are drawn as points" in cubes.note
    assert repr(cubes) == "Scene('scene', points: 3)"


def test_corners_of_boxes_are_those_of_the_operation():
    rng = np.random.default_rng(2)
    boxes = rng.uniform(0.5, 3, (5, 9)).astype(np.float32)
    found = scene._corners(boxes.astype(np.float64))
    flat = np.array(ops.box_corners(mx.array(boxes)))
    for box, corners, around in zip(boxes, found[:, :8], flat, strict=True):
        low, high = box[2] - box[5] / 2, box[2] + box[5] / 2
        wanted = {(*xy, z) for xy in around.round(3).tolist() for z in (low, high)}
        wanted = np.array(sorted(wanted))
        have = np.array(sorted(map(tuple, corners.round(3).tolist())))
        assert np.allclose(have, wanted, atol=2e-3)
    page = ml.Scene().boxes(boxes, scores=[0.5, 0.25, 1, 0, 0.125]).html()
    lines, text = held(page)
    assert text["text"] == ["0.50", "0.25", "1.00", "0.00", "0.12"]
    assert values(lines["indices"]).size == 5 * 13 * 2


def test_only_free_sides_of_voxels_are_drawn():
    """Against a dense count: sides between an active and an inactive cell."""
    grid = np.random.default_rng(3).random((5, 6, 7)) < 0.4
    cells = np.argwhere(grid)
    dense = np.pad(grid, 1)
    free = sum(np.sum(dense & ~np.roll(dense, s, a)) for a in range(3) for s in (1, -1))
    corners, rows_of = scene._sides(cells)
    assert len(corners) == len(rows_of) == 4 * free
    # Normals point away from the cell that the side is of.
    sides = corners.reshape(-1, 4, 3).astype(float)
    normals = np.cross(sides[:, 1] - sides[:, 0], sides[:, 2] - sides[:, 0])
    away = sides.mean(axis=1) - (cells[rows_of[::4]] + 0.5)
    assert (np.sum(normals * away, axis=1) > 0).all()


def test_show_takes_colours_labels_strides_and_elements():
    coords = mx.array([[0, 1, 2, 3], [1, 0, 0, 0], [1, 0, 0, 1]])
    feats = mx.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=mx.bfloat16)
    x = ml.SparseTensor(coords, feats, stride=2)
    (mesh,) = held(x.show().html())
    corners = values(mesh["vertices"])
    assert np.array_equal(corners.min(axis=0), [2, 4, 6])
    assert np.array_equal(corners.max(axis=0), [4, 6, 8])
    assert set(values(mesh["colors"]).tolist()) == {0xFF0000}
    kinds = x.replace(mx.array([[0], [7], [7]])).show(element=1)
    assert [row[1:] for row in rows(kinds.html())] == [("class 7", "2")]
    second = x.show(labels=mx.array([0, 0, 1]), element=1, classes=("a", "b")).html()
    assert [row[1:] for row in rows(second)] == [("a", "1"), ("b", "1")]
    assert "element 1 of 2" in second
    assert "srcdoc" in x.show()._repr_html_()
    with pytest.raises(ValueError, match="element must be from 0 to 1; got 2"):
        x.show(element=2)
    with pytest.raises(ValueError, match=r"of shape \(3,\).*pass mx.argmax"):
        x.show(labels=x.feats)
    flat = ml.SparseTensor(mx.array([[0, 1, 2]]), mx.ones((1, 1)))
    assert repr(flat.show()) == "Scene('SparseTensor', voxels: 1)"
    empty = ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 1)))
    assert held(empty.show().html()) == []


@pytest.mark.parametrize(
    "call, said",
    (
        (lambda s: s.points(POINTS[:, :2]), r"points must have shape \(N, 3\)"),
        (lambda s: s.points(POINTS, labels=[1.5]), r"integers of shape \(300,\)"),
        (lambda s: s.points(POINTS, colours=POINTS), "floats from 0 to 1 or integers"),
        (lambda s: s.points(POINTS, colours=POINTS[:5]), r"shape \(300, 3\)"),
        (lambda s: s.boxes([[1, 2, 3]]), r"boxes must have shape \(N, 7 or more\)"),
        (lambda s: s.boxes([[0] * 7], scores=[1, 2]), r"scores must have shape \(1,\)"),
        (lambda s: s.mesh(b"solid"), "not a binary glTF"),
        (lambda s: s.voxels(POINTS), "coords must be integers; got float32. Make"),
        (lambda s: s.points(POINTS, labels=POINTS), "Pass scores.argmax"),
        (lambda s: s.points(POINTS, labels=[0] * 300, palette=["red"]), "palette must"),
        (lambda s: s.save("a.png"), "the file must be .html or .rrd; got 'a.png'"),
        (lambda s: ml.Scene(up="w"), "up must be one of"),
    ),
)
def test_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(ml.Scene())


def test_tables_of_notebooks():
    coords = mx.array([[0, 1, 2, 3], [2, -4, 0, 0], [2, 0, 0, 1]])
    x = ml.SparseTensor(coords, mx.zeros((3, 5)))
    table = x._repr_html_()
    assert "5 float32" in table and "-4 to 1 x 0 to 2 x 0 to 3" in table
    assert "<td>1, 0, 2</td>" in table
    relation = x.manager.submanifold_kernel_relation(x.key)
    assert "3x3x3" in relation._repr_html_()


def test_summary_counts_as_mlx_does():
    net = models.SpUNet(2, 3, 32, (32, 32), layers=(1, 1))
    net.conv_input.freeze()
    found = ml.summary(net)
    sizes = {path: 0 for path, _ in net.named_modules()}
    for name, array in tree_flatten(net.parameters()):
        sizes[name.rpartition(".")[0]] += array.size
    wanted = {path: count for path, count in sizes.items() if count}
    assert {each.path: each.parameters for each in found.layers} == wanted
    trainable = tree_flatten(net.trainable_parameters())
    assert found.trainable == sum(array.size for _, array in trainable)
    assert found.layers[0].path.startswith("conv_input")
    table = found._repr_html_()
    assert table.count("<tr>") == len(wanted) + 1 and found.title in table
    assert "SubmConv3d" in str(found) and str(found) == repr(found)
    with pytest.raises(TypeError, match="net must be a module; got SparseTensor"):
        ml.summary(ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 1))))


# The command


def viewed(capsys, *given) -> str:
    assert cli.main(["view", *map(str, given)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip().endswith(".html")
    return printed.err


def test_view_of_points_with_labels(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = dict(zip("xyz", POINTS.T, strict=True))
    labels = (np.arange(300) % 2 * 3).astype(np.uint8)
    reds = dict(red=labels * 80, green=labels, blue=labels)
    write_ply(tmp_path / "a.ply", columns | reds | {"label": labels})
    said = viewed(capsys, "a.ply")
    assert "points: 300) to a.html" in said
    page = (tmp_path / "a.html").read_text()
    assert [row[1:] for row in rows(page)] == [("class 0", "150"), ("class 3", "150")]
    # segment writes the colours of classes: they are the legend's too.
    assert [each["color"] for each in held(page)] == [0, 0xF00303]


def test_view_of_tensors_and_meshes(tmp_path, capsys):
    trimesh = pytest.importorskip("trimesh")
    arrays = {"coords": mx.array([[0, 1, 2, 3]]), "shape": mx.zeros((1, 8))}
    mx.save_safetensors(str(tmp_path / "latents.safetensors"), arrays)
    mx.savez(str(tmp_path / "x.npz"), coords=arrays["coords"], feats=mx.ones((1, 3)))
    box = trimesh.creation.box((1, 2, 3))
    for kind in ("ply", "glb", "obj", "stl"):
        box.export(tmp_path / f"box.{kind}")
    out = tmp_path / "out.html"
    for name in ("latents.safetensors", "x.npz"):
        assert "voxels: 1" in viewed(capsys, tmp_path / name, "--out", out)
    for kind in ("ply", "glb", "obj", "stl"):
        assert "meshes: 1" in viewed(capsys, tmp_path / f"box.{kind}", "--out", out)
        (mesh,) = held(out.read_text())
        corners = values(mesh["vertices"]).reshape(-1, 3)
        matrix = values(mesh["model_matrix"]).reshape(4, 4)
        assert len(values(mesh["indices"]).reshape(-1, 3)) == 12
        if kind != "glb":  # y is upwards in that file
            ends = corners @ matrix[:3, :3].T
            assert np.allclose(np.ptp(ends, axis=0), (1, 2, 3))


def test_view_says_what_is_wrong(tmp_path, capsys):
    write_ply(tmp_path / "a.ply", dict(zip("xyz", POINTS.T, strict=True)))
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"weight": mx.zeros((2,))})
    (tmp_path / "a.txt2").write_text("1 2 3")
    for given, said in (
        (["none.ply"], "there is no file none.ply"),
        ([tmp_path / "a.txt2"], "view shows .ply, .pcd"),
        ([tmp_path / "w.safetensors"], "must hold coords"),
        ([tmp_path / "a.ply", "--labels", "kind"], "has no attribute kind"),
        ([tmp_path / "a.ply", "--out", "a.png"], "must end in .html"),
        ([tmp_path / "a.ply", "--up", "w"], "invalid choice"),
    ):
        try:
            code = cli.main(["view", *map(str, given)])
        except SystemExit as ended:  # argparse refused the arguments
            code = ended.code
        assert code in (1, 2), given
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error


def test_a_recording_of_rerun(tmp_path, capsys):
    rerun = pytest.importorskip("rerun", reason="the extra rerun is not installed")
    write_ply(tmp_path / "a.ply", dict(zip("xyz", POINTS.T, strict=True)))
    viewed(capsys, tmp_path / "a.ply", "--out", tmp_path / "a.html", "--rerun")
    assert (tmp_path / "a.rrd").stat().st_size > 3000
    assert rerun.__version__
    boxes = ml.Scene().boxes([[0, 0, 0, 1, 2, 3, 0.5]], scores=[1]).voxels([[1, 2, 3]])
    assert boxes.save(tmp_path / "b.rrd").stat().st_size > 1000


def test_the_import_brings_no_viewer():
    code = "import sys, mlx_lattice; print([m for m in sys.modules if 'k3d' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout) == []

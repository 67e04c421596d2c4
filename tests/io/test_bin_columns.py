"""Columns of .bin files: KITTI's are read, others named by the error or asked for."""

import numpy as np
import pytest

from mlx_lattice import cli
from mlx_lattice.io import PointFileError, read_points

N = 1000
RNG = np.random.default_rng(0)
UNIFORM = RNG.uniform(-50, 50, (N, 3))
# A ground with things on it, in the order in which a scanner turns.
AROUND = np.linspace(0, 20 * np.pi, N)[:, None]
FAR = RNG.uniform(3, 60, (N, 1))
SCAN = np.hstack(
    [FAR * np.cos(AROUND), FAR * np.sin(AROUND), RNG.normal(-1.5, 0.3, (N, 1))]
)
SCENES = {"uniform": UNIFORM, "scanner": SCAN, "positive": UNIFORM + 50}
SHARE, BYTE = RNG.uniform(0, 1, (N, 1)), RNG.integers(0, 256, (N, 1))
RING, ZERO = RNG.integers(0, 32, (N, 1)), np.zeros((N, 1))
TIME = np.sort(RNG.uniform(0, 0.5, (N, 1)), axis=0)
COLOURS = RNG.integers(0, 256, (N, 3))
LAYOUTS = {
    "x y z": [],
    "byte, ring": [BYTE, RING],
    "intensity, time": [SHARE, TIME],
    "intensity, no time": [BYTE, ZERO],
    "intensity, ring, time": [SHARE, RING, TIME],
    "colours": [COLOURS],
    "colours, intensity": [COLOURS, SHARE],
}
KITTI = {"intensity": SHARE, "byte": BYTE, "label": RING, "nothing": ZERO}


@pytest.fixture(params=SCENES)
def xyz(request):
    return SCENES[request.param]


def written(path, columns, dtype="f4"):
    table = np.hstack(columns).astype(dtype)
    table.tofile(path)
    return table


@pytest.mark.parametrize("count", (20, N))
@pytest.mark.parametrize("last", KITTI)
def test_those_of_kitti_are_read(xyz, last, count, tmp_path):
    columns = [xyz[:count], KITTI[last][:count]]
    table = written(tmp_path / "a.bin", columns)
    cloud = read_points(tmp_path / "a.bin")
    assert np.array_equal(cloud.points, table[:, :3])
    assert np.array_equal(cloud.attributes["intensity"], table[:, 3])


@pytest.mark.parametrize("dtype", ("f4", "f8"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_others_are_refused(xyz, layout, dtype, tmp_path):
    columns = [each[:100] for each in (xyz, *LAYOUTS[layout])]
    written(tmp_path / "a.bin", columns, dtype)
    with pytest.raises(PointFileError, match="by columns= .--columns"):
        read_points(tmp_path / "a.bin")


@pytest.mark.parametrize("rounded", (False, True), ids=("from float32", "whole"))
def test_doubles_of_four_columns(xyz, rounded, tmp_path):
    table = np.hstack([xyz, SHARE]).astype("f4")
    table = np.round(table) if rounded else table
    written(tmp_path / "a.bin", [table], "f8")
    with pytest.raises(PointFileError, match="does not look like float32 x, y, z, int"):
        read_points(tmp_path / "a.bin")
    cloud = read_points(tmp_path / "a.bin", "x,y,z,intensity")
    assert np.array_equal(cloud.points, table[:, :3])


def test_other_bytes_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(RNG.bytes(16_000))
    with pytest.raises(PointFileError, match="neither from 0 to 1 nor whole numbers"):
        read_points(path)
    path.write_bytes(b"")
    assert len(read_points(path)) == 0


def test_sweeps_of_nuscenes(xyz, tmp_path):
    path = tmp_path / "a.pcd.bin"
    table = written(path, [xyz, BYTE, RING])
    assert np.array_equal(read_points(path).attributes["ring"], table[:, 4])
    written(path, [xyz, BYTE])
    with pytest.raises(PointFileError, match="float32 x, y, z, intensity, ring"):
        read_points(path)


@pytest.mark.parametrize("dtype", ("f4", "f8"))
@pytest.mark.parametrize("given", ("x, y,z,intensity,_,timestamp", None))
def test_columns_that_are_named(xyz, dtype, given, tmp_path):
    names = ["x", "y", "z", "intensity", "_", "timestamp"]
    table = np.hstack([xyz, SHARE, RING, TIME]).astype(dtype)
    np.save(tmp_path / "a.npy", table)
    np.savez(tmp_path / "a.npz", points=table)
    np.savetxt(tmp_path / "a.xyz", table, fmt="%.17g")
    np.savetxt(
        tmp_path / "a.csv", table, "%.17g", ",", header="a,b,c,d,e,f", comments=""
    )
    table.tofile(tmp_path / "a.bin")
    for name in ("a.npy", "a.npz", "a.xyz", "a.csv", "a.bin"):
        cloud = read_points(tmp_path / name, given or names)
        assert np.array_equal(cloud.points, table[:, :3].astype("f4"))
        assert sorted(cloud.attributes) == ["intensity", "timestamp"]
        assert np.array_equal(cloud.attributes["intensity"], table[:, 3])
        assert np.array_equal(cloud.attributes["timestamp"], table[:, 5])


def test_columns_that_do_not_fit(tmp_path):
    written(tmp_path / "a.bin", [UNIFORM, SHARE])
    np.save(tmp_path / "a.npy", np.hstack([UNIFORM, SHARE]))
    (tmp_path / "a.ply").write_bytes(b"ply\n")
    for name, columns, sentence in (
        ("a.bin", "x,y,z,a,b,c", "16,000 bytes are not a whole number of points of 6"),
        ("a.npy", "x,y,z", r"names 3 columns, x, y, z, and a\.npy has 4"),
        ("a.bin", "x,y,intensity", "must name x, y and z, and no column twice"),
        ("a.bin", "x,y,z,x", "must name x, y and z, and no column twice"),
        ("a.ply", "x,y,z", r"\.ply files name their columns"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_points(tmp_path / name, columns)
    np.save(tmp_path / "a.npy", np.zeros(3, [(axis, "f4") for axis in "xyz"]))
    with pytest.raises(ValueError, match="names its own columns"):
        read_points(tmp_path / "a.npy", "x,y,z")


@pytest.mark.parametrize("rows", (3, 4, 6))
def test_arrays_that_look_transposed(rows, tmp_path):
    np.save(tmp_path / "a.npy", RNG.uniform(-50, 50, (rows, N)))
    with pytest.raises(PointFileError, match="looks transposed"):
        read_points(tmp_path / "a.npy")


@pytest.mark.parametrize("command", ("segment", "detect"))
def test_commands_pass_columns(command, tmp_path, monkeypatch, capsys):
    module = pytest.importorskip(f"mlx_lattice.commands.{command}")
    asked = []

    def read(scan, columns, **options):
        asked.append(columns)
        raise ValueError("enough")

    monkeypatch.setattr(module, "read_points", read)
    kind = module.Segmentor if command == "segment" else module.Detector
    monkeypatch.setattr(module, "from_pretrained", lambda *_, **__: kind())
    given = [command, str(tmp_path / "a.bin"), "--model", "net", "--columns", "x,y,z"]
    assert cli.main([*given, "--out", str(tmp_path)]) == 1
    assert asked == ["x,y,z"] and "enough" in capsys.readouterr().err

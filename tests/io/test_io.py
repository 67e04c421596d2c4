"""Point-cloud files: what is read, what is refused, and with which sentence."""

import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from point_files import RGB, XYZ, pcd, ply_bytes, vtk, write

from mlx_lattice.io import PointFileError, points, read_points
from mlx_lattice.io.points import write_ply

# Formats that another package reads.
PACKAGES = {".las": "laspy", ".laz": "laspy"}
SCANS = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.mark.parametrize("text", (True, False), ids=("ascii", "binary"))
def test_ply(tmp_path, text):
    content = ply_bytes(text)
    cloud = read_points(write(tmp_path, "a.ply", content))
    np.testing.assert_array_equal(cloud.points, XYZ)
    names = ["colours", "intensity", "labels", "normals"]
    assert sorted(cloud.attributes) == names
    np.testing.assert_array_equal(cloud.attributes["colours"], RGB)
    np.testing.assert_array_equal(cloud.attributes["intensity"], np.arange(4) / 4)
    np.testing.assert_array_equal(cloud.attributes["normals"], [[0, 0, 1]] * 4)
    for length in range(0, len(content) // 2, 7):
        with pytest.raises(PointFileError):
            read_points(write(tmp_path, "b.ply", content[:length]))


def test_npy(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(XYZ.astype(">f8")))
    np.testing.assert_array_equal(read_points(path).points, XYZ)
    np.save(path, np.column_stack([XYZ, np.arange(4)]))
    np.testing.assert_array_equal(
        read_points(path).attributes["intensity"], np.arange(4)
    )
    np.save(path, np.column_stack([XYZ, RGB]))
    np.testing.assert_array_equal(read_points(path).attributes["columns"], RGB)
    table = np.zeros(4, [("x", "f4"), ("y", "f4"), ("z", "f4"), ("class", "i4")])
    table["x"], table["class"] = XYZ[:, 0], 3
    np.save(path, table)
    np.testing.assert_array_equal(read_points(path).attributes["labels"], [3] * 4)


def test_npy_errors_are_sentences(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, XYZ[:, :2])
    with pytest.raises(PointFileError, match=r"expected an array \(N, 3\) or wider"):
        read_points(path)
    np.save(path, np.array([{}], object))
    with pytest.raises(PointFileError, match="is not a readable array"):
        read_points(path)
    np.save(path, XYZ)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(PointFileError):
            read_points(path)
    path.write_bytes(
        content.replace(b"(4, 3), }" + b" " * 12, b"(4000000000000, 3), }")
    )
    with pytest.raises(PointFileError, match="is not a readable array"):
        read_points(path)
    np.save(path, np.zeros((3, 3), "U2"))
    with pytest.raises(PointFileError, match="must be one number per point"):
        read_points(path)


def test_npz(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, points=XYZ, colors=RGB, label=np.arange(4), scale=2.0)
    cloud = read_points(path)
    np.testing.assert_array_equal(cloud.points, XYZ)
    assert sorted(cloud.attributes) == ["colours", "labels"]
    np.savez(path, x=XYZ[:, 0], y=XYZ[:, 1], z=XYZ[:, 2])
    np.testing.assert_array_equal(read_points(path).points, XYZ)
    np.savez(path, anything=XYZ)
    np.testing.assert_array_equal(read_points(path).points, XYZ)
    content = path.read_bytes()
    with pytest.raises(PointFileError, match="not a complete NPZ file"):
        read_points(write(tmp_path, "b.npz", content[:-30]))
    np.savez(path, a=XYZ, b=RGB)
    with pytest.raises(PointFileError, match="its entries are: a, b"):
        read_points(path)
    np.savez(path, x=XYZ[:, 0], y=XYZ[:, 1], z=XYZ[:3, 2])
    with pytest.raises(PointFileError, match="as many rows"):
        read_points(path)


@pytest.mark.parametrize(
    "text, wanted",
    (
        ("x,y,z,nx,ny,nz\n1,2,3,0,0,1\n-1.5 , 2 , 3 ,0,1,0\n", {"normals": (2, 3)}),
        ("# X Y Z Intensity\n1 2 3 7\n-1.5 2 3 8\n", {"intensity": (2,)}),
        ("1 2 3 7\n\n-1.5 2 3 8", {"intensity": (2,)}),
        ("// from a scanner\n1\t2\t3\t4\t5\n-1.5\t2\t3\t4\t5\n", {"columns": (2, 2)}),
        ("\ufeff1;2;3\n-1.5;2;3\nnan;nan;nan\n", {}),
        ("# scan 7\n# intensity z y x\n7 3 2 1\n8 3 2 -1.5", {"intensity": (2,)}),
        ("//X Y Z R G B\n1 2 3 4 5 6\n-1.5 2 3 4 5 6\n", {"colours": (2, 3)}),
    ),
)
def test_tables(tmp_path, text, wanted):
    (tmp_path / "scan.csv").write_text(text)
    cloud = read_points(tmp_path / "scan.csv")
    np.testing.assert_array_equal(cloud.points, [[1, 2, 3], [-1.5, 2, 3]])
    assert {k: v.shape for k, v in cloud.attributes.items()} == wanted
    assert cloud.dropped == ("nan" in text)


@pytest.mark.parametrize(
    "text, sentence",
    (
        ("1 2 3\n4 five 6\n", "not a table of numbers.*; expected a point a line"),
        ("1 2\n3 4\n", "expected x, y, z a line, got 2 numbers"),
        ("x,y,z,w\n1,2,3\n", "names 4 columns, x, y, z, w, and has 3 numbers a line"),
        ("# a b c\n1,2,3\n", "has columns a, b, c; expected x, y and z among them"),
        ("x y z x\n1 2 3 4\n", "expected a name for each, once"),
        ("", "expected x, y, z a line"),
    ),
)
def test_table_errors_are_sentences(tmp_path, text, sentence):
    (tmp_path / "scan.txt").write_text(text)
    with pytest.raises(PointFileError, match=sentence):
        read_points(tmp_path / "scan.txt")


@pytest.mark.parametrize("count", ("99999999999", "+99999999999"))
def test_a_ply_file_that_promises_too_much(tmp_path, count):
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    lines += [f"property float {axis}" for axis in "xyz"] + ["end_header", ""]
    path = write(tmp_path, "scan.ply", "\n".join(lines).encode())
    with pytest.raises(PointFileError, match="promises 99999999999 rows"):
        read_points(path)


def test_names_of_other_programs(tmp_path):
    names = [*"xyz", "scalar_Intensity", "scalar_Label"]
    write_ply(tmp_path / "a.ply", {name: np.ones(2, "f4") for name in names})
    assert {*read_points(tmp_path / "a.ply").attributes} == {"intensity", "labels"}


def test_fields_and_entries_beside_coordinates(tmp_path):
    kind = [("x", "f4"), ("y", "f4"), ("z", "f4"), ("rgb", "u1", 3)]
    np.save(tmp_path / "a.npy", np.zeros(2, kind))
    assert read_points(tmp_path / "a.npy").attributes["colours"].shape == (2, 3)
    np.savez(tmp_path / "a.npz", pos=XYZ, x=np.ones(4))  # features, as graphs have
    with pytest.raises(PointFileError, match="has an entry x beside pos"):
        read_points(tmp_path / "a.npz")


def test_large_doubles_move_to_their_corner(tmp_path):
    rows = XYZ.astype(np.float64) / 16 + [4_500_000.25, 500_000.5, 100.125]
    np.save(tmp_path / "a.npy", rows)
    cloud = read_points(tmp_path / "a.npy")
    assert cloud.origin.tolist() == np.floor(rows.min(0)).tolist()
    np.testing.assert_allclose(cloud.points + cloud.origin, rows, atol=1e-6)


@pytest.mark.parametrize("suffix", (".las", ".laz"))
def test_las(tmp_path, suffix):
    laspy = pytest.importorskip("laspy")
    las = laspy.create(point_format=3, file_version="1.2")
    las.header.scales = [1e-4] * 3
    las.x, las.y, las.z = XYZ.astype(np.float64).T
    las.intensity, las.classification = np.arange(4), [2, 5, 6, 9]
    las.red, las.green, las.blue = RGB.astype(np.uint16).T * 256
    path = tmp_path / f"a{suffix}"
    if suffix == ".laz" and not laspy.LazBackend.detect_available():
        las.write(tmp_path / "plain.las")
        content = bytearray((tmp_path / "plain.las").read_bytes())
        content[104] |= 128  # the bit that says "compressed"
        path.write_bytes(content)
        with pytest.raises(ImportError, match=r"pip install 'laspy\[lazrs\]'"):
            read_points(path)
        return
    las.write(path)
    cloud = read_points(path)
    np.testing.assert_allclose(cloud.points, XYZ, atol=1e-4)
    np.testing.assert_array_equal(cloud.attributes["intensity"], np.arange(4))
    np.testing.assert_array_equal(cloud.attributes["labels"], [2, 5, 6, 9])
    np.testing.assert_array_equal(cloud.attributes["colours"], RGB * np.uint16(256))
    with pytest.raises(PointFileError):
        read_points(write(tmp_path, f"b{suffix}", path.read_bytes()[:-40]))
    with pytest.raises(PointFileError):
        read_points(write(tmp_path, f"c{suffix}", b"no LAS at all"))


@pytest.mark.parametrize(
    "name",
    ("ascii.pcd", "binary.pcd", "binary_compressed.pcd", "a.ply", "b.ply")
    + ("a.npy", "a.npz", "a.las"),
)
def test_corrupt_bytes_never_surface_as_another_error(tmp_path, name):
    """LAZ is left out: a corrupt length makes its decompressor abort the process."""
    path = tmp_path / name
    if name.endswith(".pcd"):
        path.write_bytes(pcd(path.stem))
    elif name.endswith(".ply"):
        path.write_bytes(ply_bytes(name == "a.ply"))
    elif name.endswith(".las"):
        laspy = pytest.importorskip("laspy")
        las = laspy.create(point_format=3, file_version="1.2")
        las.x, las.y, las.z = XYZ.astype(np.float64).T
        las.write(path)
    elif name.endswith(".npy"):
        np.save(path, XYZ)
    else:
        np.savez_compressed(path, points=XYZ, colors=RGB)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        broken = bytearray(content)
        for at in rng.integers(0, min(len(broken), 1000), 3):
            broken[at] = rng.integers(0, 256)
        try:
            cloud = read_points(write(tmp_path, name, bytes(broken)))
        except PointFileError:
            continue
        except ImportError as error:
            assert "pip install" in str(error)  # the bit that says "compressed" was hit
            continue
        assert np.isfinite(cloud.points).all()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, "a.las", b"LASF" + bytes(300))
    monkeypatch.setitem(__import__("sys").modules, "laspy", None)
    with pytest.raises(ImportError, match=r"pip install 'laspy\[lazrs\]'"):
        read_points(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(PointFileError, match=r"no reader for \.obj; expected one of"):
        read_points(write(tmp_path, "a.obj", b""))
    with pytest.raises(PointFileError, match="no reader for a folder"):
        read_points(tmp_path)
    for suffix in points.READERS:
        if suffix in PACKAGES and find_spec(PACKAGES[suffix]) is None:
            continue
        with pytest.raises(FileNotFoundError):
            read_points(tmp_path / f"none{suffix}")


@pytest.mark.parametrize(
    ("name", "n", "extent"),
    (
        ("small_gicp_target.ply", 69088, (42.36, 83.6, 13.75)),
        ("lpm_car_cloud400.csv", 24989, (126.72, 130.69, 40.02)),
        ("pcl_room_scan1.pcd", 112586, (29.25, 14.47, 3.06)),
        ("pcl_milk_clorox.pcd", 241407, (2.21, 1.09, 1.56)),
        ("pcl_table_mug.pcd", 209280, (1.17, 0.69, 1.9)),
    ),
)
def test_real_scans(name, n, extent):
    if not (SCANS / name).is_file():
        pytest.skip(f"no {name} in shared/data beside the checkout")
    cloud = read_points(SCANS / name)
    assert len(cloud) == n
    np.testing.assert_allclose(np.ptp(cloud.points, axis=0), extent, atol=5e-3)


@pytest.mark.parametrize("kind", ("ascii", "binary", "binary_compressed"))
def test_pcd(tmp_path, kind):
    cloud = read_points(write(tmp_path, "a.pcd", pcd(kind)))
    np.testing.assert_array_equal(cloud.points, XYZ)
    assert cloud.points.dtype == np.float32 and cloud.points.flags.c_contiguous
    assert sorted(cloud.attributes) == ["colours", "labels"]
    np.testing.assert_array_equal(cloud.attributes["colours"], RGB)
    np.testing.assert_array_equal(cloud.attributes["labels"], [0, 1, 2, 3])
    assert cloud.dropped == 0 and len(cloud) == 4 and not cloud.origin.any()


@pytest.mark.parametrize("kind", ("ascii", "binary", "binary_compressed"))
def test_pcd_of_no_points(tmp_path, kind):
    cloud = read_points(write(tmp_path, "a.pcd", pcd(kind, XYZ[:0])))
    assert cloud.points.shape == (0, 3) and cloud.attributes["colours"].shape == (0, 3)


@pytest.mark.parametrize("kind", ("ascii", "binary", "binary_compressed"))
def test_a_truncated_pcd_is_refused_at_every_length(tmp_path, kind):
    content = pcd(kind)
    whole = len(content.rstrip())
    for length in range(whole - (2 if kind == "ascii" else 0)):
        with pytest.raises(PointFileError, match="a.pcd"):
            read_points(write(tmp_path, "a.pcd", content[:length]))


@pytest.mark.parametrize("kind", ("ascii", "binary", "binary_compressed"))
@pytest.mark.parametrize("n", (5, 10**15))
def test_a_pcd_that_promises_too_much_is_refused(tmp_path, kind, n):
    with pytest.raises(PointFileError, match="truncated or its header is wrong"):
        read_points(write(tmp_path, "a.pcd", pcd(kind, n=n)))


def test_a_compressed_size_that_lzf_cannot_reach_is_refused(tmp_path):
    header = pcd("binary_compressed", n=10**6).split(b"DATA")[0]
    content = header + b"DATA binary_compressed\n"
    content += struct.pack("<II", 4, 10**6 * 21) + b"\x03abc"
    with pytest.raises(PointFileError, match="the header promises 21000000 bytes"):
        read_points(write(tmp_path, "a.pcd", content))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    (
        ("FIELDS x y z", "FIELDS x y w", "has no z: expected x, y and z, found"),
        ("DATA ascii", "DATA zip", "DATA must be ascii, binary or binary_compressed"),
        ("TYPE F", "TYPE Q", "bad PCD header"),
        ("3.5", "three", "could not convert string 'three' to float32"),
        ("3.5 ", "", "8 columns"),
    ),
)
def test_pcd_errors_are_sentences(tmp_path, old, new, sentence):
    content = pcd("ascii").decode().replace(old, new, 1).encode()
    with pytest.raises(PointFileError, match=sentence):
        read_points(write(tmp_path, "a.pcd", content))


def test_entries_that_are_not_the_points_are_not_read(tmp_path):
    path = tmp_path / "a.npz"
    beside = {"label": np.arange(4), "about": np.array({"a": 1})}
    np.savez_compressed(path, points=XYZ, boxes=np.array([{}] * 3), **beside)
    cloud = read_points(path)
    np.testing.assert_array_equal(cloud.points, XYZ)
    assert list(cloud.attributes) == ["labels"]
    columns = {name: XYZ[:, i] for i, name in enumerate("xyz")}
    np.savez(path, **columns, scale=2.0, other=np.arange(3), ring=np.arange(4))
    assert list(read_points(path).attributes) == ["ring"]


def test_no_points(tmp_path):
    np.savez(tmp_path / "a.npz", points=np.zeros((0, 3)), label=np.zeros(0, int))
    cloud = read_points(tmp_path / "a.npz")
    assert len(cloud) == 0 and cloud.attributes["labels"].shape == (0,)


@pytest.mark.parametrize("kind", ("ASCII", "BINARY"))
def test_vtk(tmp_path, kind):
    text = "\n".join(" ".join(map(str, row)) for row in XYZ.tolist())
    body = XYZ.astype(">f4").tobytes() if kind == "BINARY" else text.encode()
    whole = vtk(kind, body + b"\nVERTICES 4 8\n1 0\n1 1\n1 2\n1 3\n")
    (tmp_path / "scan.vtk").write_bytes(whole)
    np.testing.assert_array_equal(read_points(tmp_path / "scan.vtk").points, XYZ)
    for end in range(0, len(vtk(kind, body)) - 12):
        (tmp_path / "scan.vtk").write_bytes(whole[:end])
        with pytest.raises(PointFileError):
            read_points(tmp_path / "scan.vtk")


@pytest.mark.parametrize(
    "content, sentence",
    (
        (b"ply\n", "is not a legacy VTK file"),
        (vtk("XML", b"1 2 3"), "expected ASCII or BINARY in the third line"),
        (vtk("ASCII", b"1 2 3", "POINTS few float"), "a line POINTS with their number"),
        (vtk("ASCII", b"1 2 3", "POINTS 1 bit"), "points must be float, double"),
        (vtk("ASCII", b"1 2 x", "POINTS 1 float"), "not a number of float32"),
        (vtk("BINARY", b"1 2 3", f"POINTS {10**15} float"), "promises"),
        (vtk("ASCII", b"1 2 3" + b" " * 30), "promises 12 numbers, the file has 3"),
        (vtk("ASCII", b"1 2 40000", "POINTS 1 short"), "not a number of int16"),
        (vtk("ASCII", b"1 2 3", f"POINTS {'9' * 5000} float"), "with their number"),
    ),
)
def test_vtk_errors_are_sentences(tmp_path, content, sentence):
    (tmp_path / "scan.vtk").write_bytes(content)
    with pytest.raises(PointFileError, match=sentence):
        read_points(tmp_path / "scan.vtk")

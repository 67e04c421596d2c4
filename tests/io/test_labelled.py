"""Copies of scans with labels: every dimension and the header stay as they were."""

import numpy as np
import pytest

from mlx_lattice import io
from mlx_lattice.io import points
from mlx_lattice.io.points import read_columns, write_ply

laspy = pytest.importorskip("laspy")

WKT = 'PROJCS["WGS 84 / UTM zone 32N",AUTHORITY["EPSG","32632"]]\0'
COUNT = 5000


def las(path, kind=7, count=500, **extra):
    """A scan with a coordinate system, a record of its own, and extra dimensions."""
    header = laspy.LasHeader(point_format=kind, version="1.4")
    header.scales, header.offsets = (0.01, 0.01, 0.001), (432_000, 5_300_000, 100)
    header.generating_software = "another program"
    header.vlrs.append(laspy.VLR("LASF_Projection", 2112, "WKT", WKT.encode()))
    header.global_encoding.wkt = True
    for name, values in extra.items():
        params = laspy.ExtraBytesParams(
            name, values.dtype if values.ndim == 1 else f"3{values.dtype.str[1:]}"
        )
        header.add_extra_dim(params)
    header.add_extra_dim(
        laspy.ExtraBytesParams(
            "height", "int16", "above ground", offsets=[1.0], scales=[0.01]
        )
    )
    rng, made = np.random.default_rng(0), laspy.LasData(header)
    made.x, made.y, made.z = (rng.uniform(0, 90, (count, 3)) + header.offsets).T
    made.intensity = rng.integers(0, 65536, count)
    made.classification = rng.integers(0, 20, count)
    for name in (
        "return_number",
        "number_of_returns",
        "user_data",
        "edge_of_flight_line",
    ):
        made[name] = rng.integers(0, 2, count)
    if kind in (1, 7):
        made.gps_time = rng.uniform(0, 1e6, count)
    if kind == 7:
        made.red, made.green, made.blue = rng.integers(0, 65536, (3, count))
    made["height"] = rng.uniform(-5, 5, count)
    for name, values in extra.items():
        made[name] = values
    if kind == 7:
        made.evlrs = laspy.vlrs.vlrlist.VLRList([laspy.VLR("us", 9, "long", b"x" * 99)])
    made.write(path)
    return path


def same(before, after, *but):
    """All dimensions of two LAS files have the same bits, but for some."""
    for name in before.points.array.dtype.names:
        if name not in but:
            held = (before.points.array[name], after.points.array[name])
            assert held[0].tobytes() == held[1].tobytes(), name
    assert (after.header.scales == before.header.scales).all()
    assert (after.header.offsets == before.header.offsets).all()
    assert after.header.point_format.id == before.header.point_format.id
    assert after.header.version == before.header.version
    assert after.header.global_encoding.value == before.header.global_encoding.value
    assert after.header.generating_software == "another program"
    for old in before.header.vlrs:
        if "ExtraBytes" not in type(old).__name__:
            assert old.record_data_bytes() in [
                new.record_data_bytes() for new in after.header.vlrs
            ]
    assert [e.record_data for e in after.evlrs or ()] == [
        e.record_data for e in before.evlrs or ()
    ]


@pytest.mark.parametrize("suffix", (".las", ".laz"))
def test_every_dimension_of_a_las_file_stays(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(points, "CHUNK", 1200)
    rng = np.random.default_rng(1)
    odd = rng.normal(size=COUNT).astype(np.float32)
    odd[::7] = np.nan
    source = las(tmp_path / "scan.laz", count=COUNT, odd=odd)
    labels = rng.integers(-1, 200, COUNT)
    sure = rng.random(COUNT)
    path = tmp_path / f"labelled{suffix}"
    assert io.write_labelled(path, source, labels, sure) == "classification"
    before, after = laspy.read(source), laspy.read(path)
    same(before, after, "classification")
    assert after.header.are_points_compressed == (suffix == ".laz")
    expected = np.where(labels < 0, before.classification, labels)
    assert np.array_equal(after.classification, expected)
    assert np.array_equal(after.confidence, sure.astype(np.float32))
    assert np.allclose(after["height"], before["height"])
    dims = [
        (d.name, d.description)
        for d in after.point_format.extra_dimensions
        if d.name != "confidence"
    ]
    assert dims == [
        (d.name, d.description) for d in before.point_format.extra_dimensions
    ]
    read = io.read_points(path, attributes=("labels", "intensity"))
    assert set(read.attributes) == {"labels", "intensity"} and not read.dropped
    whole = io.read_points(source)  # of which a seventh has an odd value
    assert whole.dropped == len(odd[::7]) and np.array_equal(
        whole.rows, np.flatnonzero(~np.isnan(odd))
    )
    assert np.array_equal(read.origin, whole.origin) and whole.origin[1] > 5e6
    assert np.array_equal(read.points[whole.rows], whole.points)
    assert np.array_equal(read.attributes["labels"][whole.rows], expected[whole.rows])


@pytest.mark.parametrize("kind, room", ((1, 32), (7, 256)))
def test_labels_that_do_not_fit_are_a_dimension_of_their_own(kind, room, tmp_path):
    source = las(tmp_path / "scan.las", kind)
    labels = np.arange(500) % room
    path = tmp_path / "labelled.las"
    assert io.write_labelled(path, source, labels) == "classification"
    assert np.array_equal(laspy.read(path).classification, labels)
    assert "label" not in laspy.read(path).point_format.dimension_names
    labels[3] = room
    assert io.write_labelled(path, source, labels) == "label"
    same(laspy.read(source), laspy.read(path))
    assert np.array_equal(laspy.read(path).label, labels)
    # The number of classes decides, not the labels that were found.
    again = io.write_labelled(path, source, labels % 2, classes=room + 1)
    assert again == "label" and np.array_equal(laspy.read(path).label, labels % 2)


def test_a_label_that_the_file_has_is_set(tmp_path):
    old = np.full(500, 9, np.uint8)
    source, path = las(tmp_path / "scan.las", label=old), tmp_path / "labelled.las"
    labels = np.arange(500) % 5
    assert io.write_labelled(path, source, labels) == "classification and label"
    assert np.array_equal(laspy.read(path).label, labels)
    assert np.array_equal(laspy.read(path).classification, labels)
    with pytest.raises(ValueError, match="label from 0 to 255, which cannot hold"):
        io.write_labelled(path, source, np.arange(500))
    assert np.array_equal(laspy.read(path).label, labels)  # the old file is there


COLUMNS = {
    "x": np.linspace(0, 9, 60),
    "y": np.linspace(0, 5, 60).astype(np.float32),
    "z": np.zeros(60, np.float32),
    "red": np.arange(60, dtype=np.uint8),
    "green": np.arange(60, dtype=np.uint8),
    "blue": np.arange(60, dtype=np.uint8),
    "ring": np.arange(60, dtype=np.int16),
    "time": np.linspace(1e9, 2e9, 60),
}


@pytest.mark.parametrize("suffix", (".ply", ".npz"))
@pytest.mark.parametrize("source", ("scan.ply", "scan.npz", "scan.csv", "scan.las"))
def test_every_column_of_other_files_stays(source, suffix, tmp_path):
    source, path = tmp_path / source, tmp_path / f"labelled{suffix}"
    if source.suffix == ".ply":
        write_ply(source, COLUMNS)
    elif source.suffix == ".npz":
        np.savez(source, **COLUMNS, many=np.ones((60, 2)), wide=np.arange(60))
    elif source.suffix == ".csv":
        table = np.stack([*COLUMNS.values()], axis=1)
        np.savetxt(source, table, delimiter=",", header=",".join(COLUMNS), comments="")
    else:
        las(source, 7, 60)
    labels = np.arange(60) % 7
    assert io.write_labelled(path, source, labels, labels / 7) == "label"
    before, after = read_columns(source), read_columns(path)
    if suffix == ".ply" and source.suffix == ".npz":
        many = before.pop("many")
        assert np.array_equal(after["many_1"], many[:, 1])
    for name, column in before.items():
        assert np.array_equal(after[name], column), name
    assert after["label"].dtype == np.uint8
    assert np.array_equal(after["label"], labels)
    assert np.allclose(after["confidence"], labels / 7)
    labels[5] = -1
    io.write_labelled(path, source, labels)
    assert np.array_equal(read_columns(path)["label"], labels)


def test_what_is_refused(tmp_path):
    scan = las(tmp_path / "scan.las")
    write_ply(tmp_path / "scan.ply", COLUMNS)
    for path, source, labels, said in (
        ("a.pcd", scan, np.zeros(500, int), "labels are written to .las, .laz, .ply"),
        ("a", scan, np.zeros(500, int), "not to a file without a suffix"),
        ("a.laz", "scan.ply", np.zeros(60, int), "a .laz file needs a LAS or LAZ"),
        ("a.las", scan, np.zeros(499, int), "has 500 points, and there are 499 labels"),
        ("a.ply", scan, np.zeros(499, int), "has 500 points, and there are 499 labels"),
        ("a.ply", scan, np.zeros(500), "labels must be (P,) integers; got float64"),
    ):
        with pytest.raises(ValueError) as error:
            io.write_labelled(tmp_path / path, tmp_path / source, labels)
        assert said in str(error.value)
        assert not (tmp_path / path).exists()
    with pytest.raises(ValueError, match="confidence must have the shape"):
        labels = np.zeros(500, int)
        io.write_labelled(tmp_path / "a.las", scan, labels, np.zeros(3))
    content = scan.read_bytes()
    (tmp_path / "cut.las").write_bytes(content[:-400])
    with pytest.raises(io.PointFileError):
        io.write_labelled(tmp_path / "a.las", tmp_path / "cut.las", labels)
    assert not (tmp_path / "a.las").exists()

"""NPZ files that unpack to more than they may, and entries that are not points."""

import io
import struct
import tracemalloc
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
from point_files import XYZ

from mlx_lattice.io import PointFileError, read_points

ZEROS = np.zeros((9_000_000, 3), np.float32)  # 108 MB, of which a zip has 0.1


@contextmanager
def little_memory():
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def entry(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + data


def packed(tmp_path, entries: dict[str, bytes], method=zipfile.ZIP_DEFLATED):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def test_points_that_unpack_to_many_times_the_file(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, points=ZEROS)
    with little_memory(), pytest.raises(PointFileError, match="108,000,000: more than"):
        read_points(path)
    np.savez_compressed(path, **dict(zip("xyz", ZEROS.T, strict=True)))
    with little_memory(), pytest.raises(PointFileError, match="more than 64 times"):
        read_points(path)
    np.savez_compressed(path, points=ZEROS[:1_000_000])
    assert len(read_points(path)) == 1_000_000


def test_entries_that_are_not_the_points_are_not_read(tmp_path):
    path = tmp_path / "a.npz"
    beside = {"image": ZEROS, "label": np.arange(4), "about": np.array({"a": 1})}
    np.savez_compressed(path, points=XYZ, boxes=np.array([{}] * 3), **beside)
    with little_memory():
        cloud = read_points(path)
    np.testing.assert_array_equal(cloud.points, XYZ)
    assert list(cloud.attributes) == ["labels"]
    np.savez(path, points=XYZ, label=np.array([{}] * 4))
    with pytest.raises(PointFileError, match="holds Python objects"):
        read_points(path)
    columns = {name: XYZ[:, i] for i, name in enumerate("xyz")}
    np.savez(path, **columns, scale=2.0, other=np.arange(3), ring=np.arange(4))
    assert list(read_points(path).attributes) == ["ring"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    (
        (
            b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 10**8,
            "is not a readable array",
        ),
        (entry("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3)}"), "header"),
        (
            entry("{'descr': '|V0', 'fortran_order': False, 'shape': (9, 3)}"),
            "readable",
        ),
        (
            entry(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 80}}}")
            + bytes(8),
            "is not a readable array",
        ),
        (
            entry("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 3)}"),
            "the header promises float32",
        ),
    ),
)
def test_headers_that_lie(tmp_path, content, sentence):
    path = packed(tmp_path, {"points.npy": content})
    with little_memory(), pytest.raises(PointFileError, match=sentence):
        read_points(path)


def test_other_zips(tmp_path):
    stream = io.BytesIO()
    np.save(stream, XYZ)
    array = stream.getvalue()
    path = packed(tmp_path, {"points.npy": array}, zipfile.ZIP_LZMA)
    with pytest.raises(PointFileError, match="points is not packed as NPZ is"):
        read_points(path)
    path = packed(tmp_path, {f"{i}.npy": array for i in range(1001)})
    with pytest.raises(PointFileError, match="has 1,001 entries, expected at most"):
        read_points(path)
    names = [f"\x1b[2J{'x' * 60_000}{i}.npy" for i in range(3)]
    path = packed(tmp_path, dict.fromkeys(names, array))
    with pytest.raises(PointFileError) as caught:
        read_points(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1100


def test_no_points(tmp_path):
    np.savez(tmp_path / "a.npz", points=np.zeros((0, 3)), label=np.zeros(0, int))
    cloud = read_points(tmp_path / "a.npz")
    assert len(cloud) == 0 and cloud.attributes["labels"].shape == (0,)

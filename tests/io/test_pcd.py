"""PCD files: what is read, what is refused, and with which sentence."""

import struct
from pathlib import Path

import numpy as np
import pytest
from point_files import RGB, XYZ, lzf_compress, pcd, write

from mlx_lattice.io import PointFileError, point_formats, read_points


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


@pytest.mark.parametrize("seed", range(6))
def test_lzf_gives_back_what_went_in(seed):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 1 + seed**2, 3000).astype(np.uint8).tobytes()
    data += bytes(700) + data[:500]  # long runs overlap with what they write
    packed = lzf_compress(data)
    assert (
        point_formats._lzf_decompress(memoryview(packed), len(data), Path("a")) == data
    )


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
        ("SIZE 4 4", "SIZE 4", "must have as many entries"),
        ("DATA ascii", "DATA zip", "DATA must be ascii, binary or binary_compressed"),
        ("TYPE F", "TYPE Q", "bad PCD header"),
        ("3.5", "three", "could not convert string 'three' to float32"),
        ("3.5 ", "", "row 1 has 7 columns, expected 8"),
        ("TYPE F", "TYPE U", "to uint32"),
    ),
)
def test_pcd_errors_are_sentences(tmp_path, old, new, sentence):
    content = pcd("ascii").decode().replace(old, new, 1).encode()
    with pytest.raises(PointFileError, match=sentence):
        read_points(write(tmp_path, "a.pcd", content))

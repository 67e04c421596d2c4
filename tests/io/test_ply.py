"""PLY files against plyfile, which writes them and reads them again."""

import io

import numpy as np
import pytest
from numpy.lib.recfunctions import repack_fields
from point_files import write

from mlx_lattice.io import PointFileError, read_points
from mlx_lattice.io.points import read_ply, write_ply

plyfile = pytest.importorskip("plyfile", reason="plyfile writes the files")
TYPES = ("f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4")
FORMS = {
    "text": {"text": True},
    "little": {"byte_order": "<"},
    "big": {"byte_order": ">"},
}


def vertices(n=50):
    rng = np.random.default_rng(0)
    table = np.zeros(
        n, [(axis, "f8") for axis in "xyz"] + [(f"a_{t}", t) for t in TYPES]
    )
    for name, (dtype, _) in table.dtype.fields.items():
        wide = rng.uniform(-1e4, 1e4, n)
        if dtype.kind != "f":
            limits = np.iinfo(dtype)
            wide = rng.integers(limits.min, limits.max, n, endpoint=True)
        table[name] = wide
    return table


def faces(mixed):
    lengths = [3, 4, 0, 5] if mixed else [3] * 4
    made = np.zeros(4, [("flags", "u1"), ("vertex_indices", object), ("area", "f4")])
    made["vertex_indices"] = [np.arange(n, dtype="i4") for n in lengths]
    return repack_fields(made[["vertex_indices"]]) if mixed is None else made


def content(elements, comments=(), **form):
    described = [plyfile.PlyElement.describe(data, name) for name, data in elements]
    stream = io.BytesIO()
    plyfile.PlyData(described, comments=list(comments), **form).write(stream)
    return stream.getvalue()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("mixed", (None, False, True), ids=("plain", "same", "mixed"))
@pytest.mark.parametrize("place", (0, 1), ids=("first", "after the edges"))
def test_as_plyfile_reads_it(form, mixed, place, tmp_path):
    elements = [("edge", repack_fields(vertices(7)[["x", "a_u1"]]))]
    elements.insert(place, ("vertex", vertices()))
    data = content(elements, **form).partition(b"end_header\n")[2]
    elements.append(("face", faces(mixed)))
    whole = content(elements, ["element of surprise", "from tests"], **form)
    read = read_ply(write(tmp_path, "a.ply", whole))
    theirs = plyfile.PlyData.read(io.BytesIO(whole))["vertex"].data
    assert list(read) == list(theirs.dtype.names)
    for name, column in read.items():
        assert column.dtype == theirs[name].dtype.newbyteorder("=")
        np.testing.assert_array_equal(column, theirs[name])
        # Text has the shortest digits that give the same number.
        np.testing.assert_array_equal(column, vertices()[name])
    # What follows the vertices is not read, nor digits at the end of a text.
    end = whole.index(b"end_header\n") + 11 + len(data)
    end -= 7 * 9 * (1 - place) + 300 if "text" in form else 7 * 9 * (1 - place)
    for length in range(0, end, 37):
        with pytest.raises(PointFileError):
            read_ply(write(tmp_path, "a.ply", whole[:length]))


@pytest.mark.parametrize("end", (b"\n", b"\r\n", b"\r"))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ends_of_lines(form, end, tmp_path):
    whole = content([("vertex", vertices())], **form)
    head, _, body = whole.partition(b"end_header\n")
    body = body.replace(b"\n", end) if "text" in form else body
    whole = head.replace(b"\n", end) + b"end_header" + end + body
    read = read_ply(write(tmp_path, "a.ply", whole))
    for name, column in read.items():
        np.testing.assert_array_equal(column, vertices()[name])


@pytest.mark.parametrize("count", (0, 1))
def test_few_points(count, tmp_path):
    for form in FORMS.values():
        whole = content([("vertex", vertices(count))], **form)
        assert len(read_points(write(tmp_path, "a.ply", whole))) == count


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    (
        ("ply\n", "PLY\n", "is not a PLY file: it does not begin with ply"),
        ("format ascii", "format utf", "bad line in its PLY header: format utf 1.0"),
        ("format ascii 1.0\n", "", "has no format line in its PLY header"),
        ("vertex 50", "vertex many", "bad line in its PLY header: element vertex many"),
        ("vertex 50", "vertex -1", "the header promises -1 rows"),
        ("double x", "half x", "bad line in its PLY header: property half x"),
        ("double x", "list uchar double x", "x of vertex is a list; expected numbers"),
        ("double x", "list float double x", "bad line in its PLY header"),
        ("double x", "double y", "bad PLY header: field 'y' occurs more than once"),
        ("element vertex 50\n", "", "bad line in its PLY header: property double x"),
        ("end_header", "end_heads", "has no end_header in its first 1 MiB"),
    ),
)
def test_headers_that_are_refused(old, new, sentence, tmp_path):
    whole = content([("vertex", vertices())], text=True)
    whole = whole.replace(old.encode(), new.encode(), 1)
    with pytest.raises(PointFileError, match=sentence):
        read_ply(write(tmp_path, "a.ply", whole))


def test_rows_that_are_refused(tmp_path):
    whole = content([("vertex", vertices())], text=True)
    head, mark, body = whole.partition(b"end_header\n")
    lines = body.splitlines()
    for row, sentence in (
        (b"1 2 3", "requires 11 columns but 3 were found"),
        (lines[1].replace(b" ", b" x", 1), "could not convert string 'x"),
        (lines[1] + b"9" * 30, "could not convert string '.*' to uint32"),
    ):
        changed = head + mark + b"\n".join([lines[0], row, *lines[2:]])
        with pytest.raises(PointFileError, match=sentence):
            read_ply(write(tmp_path, "a.ply", changed))
    short = b"\n".join(lines[:-1])
    with pytest.raises(PointFileError, match="promises 50 points.*has 49 rows"):
        read_ply(write(tmp_path, "a.ply", head + mark + short + b"\n" * 50))


def test_plyfile_reads_what_is_written(tmp_path):
    table = vertices()
    write_ply(tmp_path / "a.ply", {name: table[name] for name in table.dtype.names})
    theirs = plyfile.PlyData.read(tmp_path / "a.ply")["vertex"].data
    for name in table.dtype.names:
        np.testing.assert_array_equal(theirs[name], table[name])
    with pytest.raises(TypeError, match="must be a dict of arrays by name"):
        write_ply(tmp_path / "b.ply", np.zeros((5, 3)))

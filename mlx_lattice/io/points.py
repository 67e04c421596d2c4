"""Readers of point-cloud files: PLY, PCD, LAS, NPY, NPZ, BIN, VTK, and tables.

Headers are not trusted: every size in one is checked against the length of the file
before anything is allocated.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

try:
    import numpy as np
except ImportError as error:
    raise ImportError(
        "mlx_lattice.io needs NumPy for points: pip install numpy"
    ) from error

from .bin_columns import read_bin
from .errors import check_file, listed
from .pcd import PointFileError, read_pcd, short
from .ply import read_ply
from .table import named_columns, read_table
from .vtk import read_vtk

# Names of attributes in files, and the names here.
_NAMES = {
    "scalar_intensity": "intensity",
    "reflectance": "intensity",
    "scalar_label": "labels",
    "scalar_classification": "labels",
    "label": "labels",
    "class": "labels",
    "classification": "labels",
    "colors": "colours",
    "color": "colours",
    "rgb": "colours",
}
_TRIPLES = (
    (("red", "green", "blue"), "colours"),
    (("r", "g", "b"), "colours"),
    (("diffuse_red", "diffuse_green", "diffuse_blue"), "colours"),
    (("nx", "ny", "nz"), "normals"),
    (("normal_x", "normal_y", "normal_z"), "normals"),
)

# At 16 384 m float32 has steps of 1 mm: doubles beyond are shifted to their corner.
_FAR = 16384.0

# Arrays of an NPZ file may be so many times larger than the file, or so large; the
# entries and the bytes of a header that are looked at.
_EXPANSION, _NPZ_BYTES = 64, 2**26
_NPZ_ENTRIES, _NPY_HEADER = 1000, 2**16

# What `zipfile` raises where a zip is truncated, corrupt, or encrypted.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
)


@dataclass(frozen=True)
class PointCloud:
    """Points and what is known of each.

    Attributes:
        points: (N, 3) float32, all finite, in the order of the file.
        attributes: name to array with N rows, in the file's own dtype. Common names
            are made equal: "intensity" (N,), "colours" (N, 3), "normals" (N, 3),
            "labels" (N,); any other keeps its own.
        dropped: number of points left out because a coordinate or an attribute is
            not finite in float32 (depth cameras write NaN where they saw nothing).
        origin: (3,) float64 to add to ``points`` for the file's coordinates: zero,
            except for doubles so large (map projections) that float32 would round
            them by a millimetre or more.
    """

    points: np.ndarray
    attributes: dict[str, np.ndarray] = field(default_factory=dict)
    dropped: int = 0
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.points)


def read_points(path: str | Path, columns: str | Sequence[str] = ()) -> PointCloud:
    """Read a point cloud; the suffix of the file says how.

    ``.ply`` (ASCII or binary), ``.pcd`` (ASCII, binary or compressed), ``.las`` and
    ``.laz``, ``.npy`` and ``.npz`` (an array of at least three columns, a structured
    array with x, y, z, or an entry "points" and others beside it), ``.bin``
    (float32 x, y, z, intensity, as KITTI stores them), ``.pcd.bin`` (nuScenes': the
    ring of each point too), ``.vtk`` (legacy; the points alone), ``.csv``, ``.txt``,
    ``.xyz`` and ``.asc`` (a point a line; names of columns in the first or in a comment
    before it, or x, y, z).

    Args:
        path: the file.
        columns: the names of the columns of ``.bin``, ``.npy``, ``.npz`` and tables,
            in their order, as a list or as in "x,y,z,intensity,_,ring". Columns named
            _ are left out. A ``.bin`` of other columns than KITTI's needs them; whether
            it holds float32 or float64 is told by its size and values.

    Returns:
        A ``PointCloud``.

    Raises:
        PointFileError: the file is truncated, has no x, y, z, or is no such file; or a
            ``.bin`` does not look like KITTI's, and no columns are named.
        ValueError: ``columns`` lacks x, y or z, repeats a name, or is given for a file
            that names its own.
        ImportError: the format needs a package that is not installed; the text says
            how to install it.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise PointFileError(
            f"{path.name}: no reader for {path.suffix or 'a file without a suffix'}; "
            f"expected one of {', '.join(_READERS)}"
        )
    binary = path.suffix.lower() in (".las", ".laz", ".npy", ".npz")
    check_file(path, PointFileError, binary=binary)
    if not columns:
        return _cloud(reader(path), path)
    names = columns.split(",") if isinstance(columns, str) else columns
    names = [str(name).strip().lower() for name in names]
    used = [name for name in names if name != "_"]
    if not {"x", "y", "z"} <= set(used) or len(set(used)) < len(used):
        raise ValueError(
            f"columns must name x, y and z, and no column twice; got {', '.join(names)}"
        )
    if reader not in (read_bin, _read_npy, _read_npz, read_table):
        raise ValueError(
            f"columns= is for .bin, .npy, .npz and tables; {path.suffix} files name "
            "their columns"
        )
    # Unused columns get names of their own, so that none is lost in a dictionary.
    names = [f"_{i}" if name == "_" else name for i, name in enumerate(names)]
    found = reader(path, names)
    return _cloud({k: v for k, v in found.items() if k not in names or k in used}, path)


def _cloud(columns: dict[str, np.ndarray], path: Path) -> PointCloud:
    """Make a cloud of named columns: x, y, z and any others."""
    columns = dict(columns)
    missing = [name for name in "xyz" if name not in columns]
    if missing:
        raise PointFileError(
            f"{path.name} has no {' and no '.join(missing)}: expected x, y and z, "
            f"found {listed(columns)}"
        )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise PointFileError(
            f"{path.name}: every column must have as many rows, got {lengths}"
        )
    points = np.stack([_numbers(columns.pop(name), path) for name in "xyz"], axis=1)

    attributes = {}
    for names, joint in _TRIPLES:
        if all(name in columns for name in names) and joint not in columns:
            attributes[joint] = np.stack([columns.pop(n) for n in names], axis=1)
    for name, column in columns.items():
        known = _NAMES.get(name.lower(), name)
        attributes[name if known in attributes else known] = column

    keep = _finite(points)
    for column in attributes.values():
        if column.dtype.kind == "f":
            keep &= _finite(column)
    if not keep.all():
        points = points[keep]
        attributes = {name: column[keep] for name, column in attributes.items()}
    origin = np.zeros(3)
    if points.dtype == np.float64 and len(points) and np.abs(points).max() > _FAR:
        origin = np.floor(points.min(axis=0))
    lost = len(keep) - int(keep.sum())
    single = np.ascontiguousarray(points - origin, dtype=np.float32)
    return PointCloud(single, attributes, lost, origin)


def _finite(values: np.ndarray) -> np.ndarray:
    """Return (N,) bool: whether all values of a row are finite in float32."""
    finite = np.abs(values) <= np.finfo(np.float32).max  # False for NaN
    return finite.all(axis=tuple(range(1, values.ndim)))


def _numbers(column: np.ndarray, path: Path) -> np.ndarray:
    """Return a coordinate as floats, doubles where float32 would lose something."""
    if column.ndim != 1 or column.dtype.kind not in "fiu":
        raise PointFileError(
            f"{path.name}: a coordinate must be one number per point, got "
            f"{column.dtype} of shape {column.shape}"
        )
    narrow = column.dtype.kind == "f" and column.dtype.itemsize <= 4
    return column.astype(np.float32 if narrow else np.float64)


def _native(column: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("="))


# NumPy's files, and raw ones


def _read_npy(path: Path, names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    with path.open("rb") as stream:
        head = _npy_head(stream, path.stat().st_size, path)
        stream.seek(0)
        return _columns(_npy_array(stream, head, path), path, names)


def _read_npz(path: Path, names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {
                entry.filename.removesuffix(".npy"): entry
                for entry in archive.infolist()
            }
            if len(entries) > _NPZ_ENTRIES:
                raise PointFileError(
                    f"{path.name} has {len(entries):,} entries, expected at most "
                    f"{_NPZ_ENTRIES:,}"
                )
            heads = {}
            for name, entry in entries.items():
                if entry.compress_type not in (
                    zipfile.ZIP_STORED,
                    zipfile.ZIP_DEFLATED,
                ):
                    raise PointFileError(f"{path.name}: {name} is not packed as NPZ is")
                with archive.open(entry) as stream:
                    heads[name] = _npy_head(stream, entry.file_size, path)
            key, wanted = _npz_entries(heads, path)
            size, total = path.stat().st_size, sum(heads[k].nbytes for k in wanted)
            if total > max(_EXPANSION * size, _NPZ_BYTES):
                raise PointFileError(
                    f"{path.name} has {size:,} bytes, and its points have {total:,}: "
                    f"more than {_EXPANSION} times the file is not read"
                )
            arrays = {}
            for name in wanted:
                with archive.open(entries[name]) as stream:
                    arrays[name] = _npy_array(stream, heads[name], path)
    except _ZIP_ERRORS as error:
        raise PointFileError(f"{path.name} is no whole NPZ file: {error}") from error
    if key is None and names:
        raise ValueError(f"columns= is given, and {path.name} names its own columns")
    columns = {} if key is None else _columns(arrays.pop(key), path, names)
    if twice := [name for name in "xyz" if name in arrays and name in columns]:
        raise PointFileError(
            f"{path.name} has an entry {twice[0]} beside {key}, which has that column: "
            "give one of the two another name"
        )
    return columns | arrays


def _npz_entries(heads: dict[str, _NpyHead], path: Path) -> tuple[str | None, list]:
    """Return the entry of the points, None if it is x, y and z, and what to read."""
    key = next((k for k in ("points", "xyz", "pos") if k in heads), None)
    if key is None and len(heads) == 1:
        key = next(iter(heads))
    if key is None and not heads.keys() >= {*"xyz"}:
        raise PointFileError(
            f"{path.name} has no entry points, xyz or pos; "
            f"its entries are: {listed(heads, 'none')}"
        )
    points = heads["x" if key is None else key]
    n = prod(points.shape) if points.dtype.names else next(iter(points.shape), -1)
    wanted = [key] if key else [*"xyz"]
    return key, wanted + [
        name
        for name, head in heads.items()
        if head.shape[:1] == (n,) and name not in wanted
    ]


class _NpyHead(NamedTuple):
    """The header of an array in NumPy's format, and the bytes before its numbers."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _npy_head(stream: BinaryIO, size: int, path: Path) -> _NpyHead:
    """Read a header, and check what it promises against the size of the entry."""
    formats = np.lib.format
    readers = {
        (1, 0): formats.read_array_header_1_0,
        (2, 0): formats.read_array_header_2_0,
    }
    # No more: a header's own length may be any number.
    start = io.BytesIO(stream.read(_NPY_HEADER))
    try:
        version = formats.read_magic(start)
        if version not in readers:
            raise ValueError(f"version {version} of the format")
        head = _NpyHead(*readers[version](start), start.tell())
    except Exception as error:  # NumPy's parser lets tokenizer errors through
        raise PointFileError(f"{path.name} is no readable array: {error}") from error
    if min(head.shape, default=0) < 0 or head.nbytes > size - head.start:
        raise short(path, f"{head.dtype} of shape {head.shape}", f"{size} bytes")
    return head


def _npy_array(stream: BinaryIO, head: _NpyHead, path: Path) -> np.ndarray:
    if head.dtype.hasobject:
        raise PointFileError(f"{path.name} holds Python objects, expected numbers")
    stream.read(head.start)
    data = stream.read(head.nbytes)
    if len(data) < head.nbytes:
        raise short(path, f"{head.nbytes} bytes", len(data))
    try:
        flat = np.frombuffer(data, head.dtype, prod(head.shape))
        return _native(flat.reshape(head.shape, order="F" if head.fortran else "C"))
    except ValueError as error:
        raise PointFileError(f"{path.name} is no readable array: {error}") from None


def _columns(
    array: np.ndarray, path: Path, names: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Name the columns of an array: x, y, z, and intensity where there are four."""
    if array.dtype.names and names:
        raise ValueError(f"columns= is given, and {path.name} names its own columns")
    if array.dtype.names:
        flat = array.reshape(-1)  # of whose fields some may be arrays
        return {name: flat[name] for name in array.dtype.names}
    if array.ndim != 2 or array.shape[1] < 3:
        raise PointFileError(
            f"{path.name}: expected an array (N, 3) or wider, got {array.shape}"
        )
    if array.shape[0] <= 8 and array.shape[1] > 16:
        raise PointFileError(
            f"{path.name}: an array of shape {array.shape} looks transposed; expected "
            "a row for each point"
        )
    return named_columns(array, names, path)


# LAS


def _read_las(path: Path) -> dict[str, np.ndarray]:
    try:
        import laspy
    except ImportError as error:
        raise ImportError("LAS files need laspy: pip install 'laspy[lazrs]'") from error
    _check_las_header(path)
    try:
        with laspy.open(path, read_evlrs=False) as reader:
            if reader.header.are_points_compressed and not (
                laspy.LazBackend.detect_available()
            ):
                raise ImportError(
                    "LAZ files need a decompressor: pip install 'laspy[lazrs]'"
                )
            skipped = {"X", "Y", "Z"}
            names = [*reader.header.point_format.dimension_names, *"xyz"]
            # In pieces: only decompression shows how many points a LAZ file has.
            pieces = [
                {name: np.array(piece[name]) for name in names if name not in skipped}
                for piece in reader.chunk_iterator(1_000_000)
            ]
            promised = reader.header.point_count
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # each decompressor raises errors of its own
        raise PointFileError(f"{path.name} is no readable LAS file: {error}") from error
    found = sum(len(piece["x"]) for piece in pieces)
    if found != promised:
        raise short(path, f"{promised} points", found)
    if not pieces:
        return {name: np.zeros(0) for name in "xyz"}
    return {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}


def _check_las_header(path: Path) -> None:
    """Check the sizes of the public header block, at its fixed places."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        block = stream.read(255)
    if block[:4] != b"LASF" or len(block) < 227:
        raise PointFileError(f"{path.name} is no LAS file: it does not begin as one")
    length, start, records = struct.unpack_from("<HII", block, 94)
    kind, width, n = struct.unpack_from("<BHI", block, 104)
    if block[25] >= 4 and len(block) == 255:
        n = struct.unpack_from("<Q", block, 247)[0]
    if not length <= start <= size or records * 54 > start - length:
        raise short(path, f"{records} records before byte {start}", f"{size} bytes")
    if not kind & 128 and start + n * width > size:
        raise short(path, f"{n} points of {width} bytes", f"{size} bytes")


_READERS = {
    ".ply": read_ply,
    ".pcd": read_pcd,
    ".las": _read_las,
    ".laz": _read_las,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".bin": read_bin,
    ".vtk": read_vtk,
    **dict.fromkeys((".csv", ".txt", ".xyz", ".asc"), read_table),
}

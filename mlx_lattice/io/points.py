"""Point clouds from files: PLY, PCD, LAS, NPY, NPZ, BIN, VTK, and tables.

Headers are not trusted: every size in one is checked against the length of the file
before anything is allocated.
"""

from __future__ import annotations

import io
import struct
import warnings
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

from .point_formats import Columns, read_pcd, read_ply, read_vtk
from .safetensors import PointFileError, check_file, listed, short

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
# Most times that the arrays of an NPZ file may be larger than the file, or most bytes
# of them; most entries, and most bytes of a header.
_EXPANSION, _NPZ_BYTES = 64, 2**26
_NPZ_ENTRIES, _NPY_HEADER = 1000, 2**16
_NPZ_PACKINGS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
# What `zipfile` raises if a zip is truncated, corrupt, or encrypted.
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
    """Points and their attributes.

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
    """Read a point cloud; the suffix of the file says the format.

    ``.ply`` and ``.pcd`` (ASCII, binary or compressed), ``.las`` and ``.laz``, ``.npy``
    and ``.npz`` (an array of at least three columns, a structured array with x, y, z,
    or an entry "points" and others beside it), ``.bin`` (float32 x, y, z, intensity, as
    in KITTI), ``.pcd.bin`` (nuScenes': also the ring), ``.vtk`` (legacy; points alone),
    ``.csv``, ``.txt``, ``.xyz`` and ``.asc`` (a point a line; names of columns in the
    first line or in a comment before it, or x, y, z).

    Args:
        path: the file.
        columns: the names of the columns of ``.bin``, ``.npy``, ``.npz`` and tables,
            in their order, as a list or as in "x,y,z,intensity,_,ring". Columns named
            _ are left out. A ``.bin`` with other columns than KITTI's needs them; its
            size and values say whether it holds float32 or float64.

    Raises:
        PointFileError: the file is truncated, has no x, y, z, or another format; or a
            ``.bin`` does not look like KITTI's, and no columns are named.
        ValueError: ``columns`` lacks x, y or z, repeats a name, or is given for a file
            that names its own.
        ImportError: the format needs a package that is not installed.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise PointFileError(
            f"{path.name}: no reader for {path.suffix or 'a file without a suffix'}; "
            f"expected one of {', '.join(READERS)}"
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
    table = reader(path, names)
    return _cloud({k: v for k, v in table.items() if k not in names or k in used}, path)


def _cloud(columns: Columns, path: Path) -> PointCloud:
    """Make a cloud of named columns: x, y, z and any others."""
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
    """Return a coordinate as float32, or as float64 if float32 would round it."""
    if column.ndim != 1 or column.dtype.kind not in "fiu":
        raise PointFileError(
            f"{path.name}: a coordinate must be one number per point, got "
            f"{column.dtype} of shape {column.shape}"
        )
    narrow = column.dtype.kind == "f" and column.dtype.itemsize <= 4
    return column.astype(np.float32 if narrow else np.float64)


# NumPy's files


def _read_npy(path: Path, names: Sequence[str] = ()) -> Columns:
    with path.open("rb") as stream:
        head = _npy_head(stream, path.stat().st_size, path)
        stream.seek(0)
        return _array_columns(_npy_array(stream, head, path), path, names)


def _read_npz(path: Path, names: Sequence[str] = ()) -> Columns:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            entries = {each.filename.removesuffix(".npy"): each for each in members}
            if len(entries) > _NPZ_ENTRIES:
                raise PointFileError(
                    f"{path.name} has {len(entries):,} entries, expected at most "
                    f"{_NPZ_ENTRIES:,}"
                )
            heads = {}
            for name, entry in entries.items():
                if entry.compress_type not in _NPZ_PACKINGS:
                    raise PointFileError(f"{path.name}: {name} is not packed as NPZ is")
                with archive.open(entry) as stream:
                    heads[name] = _npy_head(stream, entry.file_size, path)
            key, chosen = _npz_entries(heads, path)
            size, total = path.stat().st_size, sum(heads[k].nbytes for k in chosen)
            if total > max(_EXPANSION * size, _NPZ_BYTES):
                raise PointFileError(
                    f"{path.name} has {size:,} bytes, and its points have {total:,}: "
                    f"more than {_EXPANSION} times the file is not read"
                )
            arrays = {}
            for name in chosen:
                with archive.open(entries[name]) as stream:
                    arrays[name] = _npy_array(stream, heads[name], path)
    except _ZIP_ERRORS as error:
        raise PointFileError(
            f"{path.name} is not a complete NPZ file: {error}"
        ) from error
    if key is None and names:
        raise ValueError(f"columns= is given, and {path.name} names its own columns")
    columns = {} if key is None else _array_columns(arrays.pop(key), path, names)
    if twice := [name for name in "xyz" if name in arrays and name in columns]:
        raise PointFileError(
            f"{path.name} has an entry {twice[0]} beside {key}, which has that column: "
            "give one of the two another name"
        )
    return columns | arrays


def _npz_entries(heads: dict[str, _NpyHead], path: Path) -> tuple[str | None, list]:
    """Return the entry of the points (None for x, y and z) and the entries to read."""
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
    entries = [key] if key else [*"xyz"]
    return key, entries + [
        name
        for name, head in heads.items()
        if head.shape[:1] == (n,) and name not in entries
    ]


class _NpyHead(NamedTuple):
    """The header of an array in NumPy's format, and the bytes before its numbers."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers."""
        return prod(self.shape) * self.dtype.itemsize


def _npy_head(stream: BinaryIO, size: int, path: Path) -> _NpyHead:
    """Read a header, and check its shape against the size of the entry."""
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
        if not head.dtype.itemsize:
            raise ValueError(f"its numbers are {head.dtype}, of no bytes")
    except Exception as error:  # NumPy's parser lets tokenizer errors through
        raise PointFileError(f"{path.name} is not a readable array: {error}") from error
    if min(head.shape, default=0) < 0 or head.nbytes > size - head.start:
        raise short(path, f"{head.dtype} of shape {head.shape}", f"{size} bytes")
    return head


def _npy_array(stream: BinaryIO, head: _NpyHead, path: Path) -> np.ndarray:
    if head.dtype.hasobject:
        raise PointFileError(f"{path.name} holds Python objects, expected numbers")
    try:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    except ValueError as error:
        raise PointFileError(f"{path.name} is not a readable array: {error}") from None


def _array_columns(array: np.ndarray, path: Path, names: Sequence[str] = ()) -> Columns:
    """Name the columns of an array: x, y, z, and intensity if there are four."""
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


def named_columns(table: np.ndarray, names: Sequence[str], path: Path) -> Columns:
    """Return the columns of a (N, 3 or more) table by name."""
    width = table.shape[1]
    if names and len(names) != width:
        raise ValueError(
            f"columns= names {len(names)} columns, {', '.join(names)}, and {path.name} "
            f"has {width}"
        )
    if names:
        return dict(zip(names, table.T, strict=True))
    columns = dict(zip("xyz", table.T, strict=False))
    if width == 4:
        columns["intensity"] = table[:, 3]
    elif width > 4:
        columns["columns"] = table[:, 3:]
    return columns


# Tables of text

_COMMENTS = ("#", "//")


def read_table(path: Path, columns: Sequence[str] = ()) -> Columns:
    """Return the columns of a table by name, by ``columns`` if they are given.

    Values stand between commas, semicolons or spaces. A first line of words names the
    columns, and so may a comment before it, after # or //; without one they are x, y,
    z, then intensity if there is a fourth, and "columns" if there are more.
    """
    stream = io.StringIO(path.read_text(encoding="utf-8-sig", errors="replace"))
    comments, first, start = [], "", 0
    while line := stream.readline():
        first = line.strip()
        if first and not first.startswith(_COMMENTS):
            break
        comments += [first] if first else []
        first, start = "", stream.tell()
    names, mark = _words(first), _mark(first)
    names = [] if not first or _is_number(names[0]) else names
    if not names:
        stream.seek(start)
    table = _table_numbers(stream, mark, path)
    if columns:
        return named_columns(table, columns, path)
    candidates = [names, *(_words(line.lstrip("#/")) for line in comments)]
    candidates = [words for words in candidates if {"x", "y", "z"} <= set(words)]
    if candidates:
        named = next((w for w in candidates if len(w) == table.shape[1]), candidates[0])
        if not table.size:
            table = np.zeros((0, len(named)))
        if table.shape[1] != len(named):
            raise PointFileError(
                f"{path.name} names {len(named)} columns, {listed(named)}, and has "
                f"{table.shape[1]} numbers a line"
            )
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise PointFileError(f"{path.name} names two columns {twice}")
        return dict(zip(named, table.T, strict=True))
    if not table.size:
        raise PointFileError(f"{path.name} holds no numbers; expected a point a line")
    names = names or (_words(comments[-1].lstrip("#/")) if comments else [])
    if len(names) == table.shape[1] and not _is_number(names[0]):
        raise PointFileError(
            f"{path.name} has columns {listed(names)}; expected x, y and z among them"
        )
    if table.shape[1] < 3:
        raise PointFileError(
            f"{path.name}: expected x, y, z a line, got {table.shape[1]} numbers"
        )
    return named_columns(table, (), path)


def _table_numbers(stream: io.StringIO, mark: str | None, path: Path) -> np.ndarray:
    """Return the rest of a stream as a (rows, columns) table."""
    start = stream.tell()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a table without rows
        try:
            return np.loadtxt(stream, np.float64, delimiter=mark, ndmin=2)
        except ValueError:
            stream.seek(start)
        # Again without lines of spaces and comments after //, which takes longer.
        lines = [line for line in map(str.strip, stream) if line]
        lines = [line for line in lines if not line.startswith(_COMMENTS)]
        try:
            return np.loadtxt(lines, np.float64, delimiter=mark, ndmin=2)
        except ValueError as error:
            raise PointFileError(
                f"{path.name} is not a table of numbers: {str(error)[:200]}; expected "
                "a point a line"
            ) from None


def _mark(line: str) -> str | None:
    """Return the separator of the values of a line; None for spaces."""
    return next((m for m in (",", ";") if m in line), None)


def _words(line: str) -> list[str]:
    words = line.strip().split(_mark(line))
    return [word.strip().strip('"').lower() for word in words]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# Raw numbers: .bin files say neither their columns nor their type. KITTI's have four
# columns of float32, nuScenes' .pcd.bin five. Read with other columns, places would
# stand in the column of intensities.

KITTI = ("x", "y", "z", "intensity")
NUSCENES = (*KITTI, "ring")


def read_bin(path: Path, columns: Sequence[str] = ()) -> Columns:
    """Return the columns of a file of numbers by name."""
    sweep = path.name.lower().endswith(".pcd.bin")
    names = tuple(columns) or (NUSCENES if sweep else KITTI)
    content, width = path.read_bytes(), len(names)
    is_double = len(content) % (8 * width) == 0 and _is_double(content)
    dtype = np.dtype("<f8" if columns and is_double else "<f4")
    if len(content) % (dtype.itemsize * width):
        why = (
            f"{len(content):,} bytes are not a whole number of points of {width} "
            f"columns ({', '.join(names)}) in float32" + " or float64" * bool(columns)
        )
    else:
        table = np.frombuffer(content, dtype).reshape(-1, width)
        if columns or not (is_double or _has_places(table[:, 3:])):
            return dict(zip(names, table.T, strict=True))
        why = (
            f"it does not look like float32 {', '.join(names)}: beside x, y and z its "
            "values are neither from 0 to 1 nor whole numbers from 0 to 255"
        )
    raise PointFileError(
        f"{path.name}: {why}. Name its columns by columns= (--columns of segment and "
        "detect), such as x,y,z,intensity,ring"
    )


def _has_places(values: np.ndarray) -> bool:
    """Return whether values other than places of points look like places."""
    values = values[np.isfinite(values)]
    small = (values >= 0) & (values <= 1)
    whole = (values >= 0) & (values <= 255) & (values == np.round(values))
    return not (small | whole).all()


def _is_double(content: bytes) -> bool:
    """Return whether numbers are float64: their low halves are noise, or zero."""
    low = np.abs(np.frombuffer(content, "<f4")[::2])
    noise = (low > 0) & ~((low > 1e-10) & (low < 1e10)) & ~np.isnan(low)
    return bool(len(low)) and (noise.mean() > 0.03 or not low.any())


# LAS


def _read_las(path: Path) -> Columns:
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
        raise PointFileError(
            f"{path.name} is not a readable LAS file: {error}"
        ) from error
    count = sum(len(piece["x"]) for piece in pieces)
    if count != promised:
        raise short(path, f"{promised} points", count)
    if not pieces:
        return {name: np.zeros(0) for name in "xyz"}
    return {k: np.concatenate([piece[k] for piece in pieces]) for k in pieces[0]}


def _check_las_header(path: Path) -> None:
    """Check the sizes of the public header block, at its fixed places."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        block = stream.read(255)
    if block[:4] != b"LASF" or len(block) < 227:
        raise PointFileError(f"{path.name} is not a LAS file: its signature is missing")
    length, start, records = struct.unpack_from("<HII", block, 94)
    kind, width, n = struct.unpack_from("<BHI", block, 104)
    if block[25] >= 4 and len(block) == 255:
        n = struct.unpack_from("<Q", block, 247)[0]
    if not length <= start <= size or records * 54 > start - length:
        raise short(path, f"{records} records before byte {start}", f"{size} bytes")
    if not kind & 128 and start + n * width > size:
        raise short(path, f"{n} points of {width} bytes", f"{size} bytes")


READERS = {
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

"""Point clouds: PLY, PCD, LAS, NPY, NPZ, BIN and tables are read, PLY is written.

Headers are not trusted: sizes in them are checked against the length of the file.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO, TextIOWrapper
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np
except ImportError as error:
    raise ImportError(
        "mlx_lattice.io needs NumPy for points: pip install numpy"
    ) from error

from ..cache_files import atomic_write
from .safetensors import PointFileError, check_file, listed, short

Columns = dict[str, np.ndarray]

# Names of attributes in files, and the names here.
NAMES = {
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


@dataclass(frozen=True)
class PointCloud:
    """Hold points and their attributes.

    Attributes:
        points: (N, 3) float32, all finite, in the order of the file.
        attributes: arrays with N rows by name, in the dtype of the file. Common names
            are unified: "intensity" (N,), "colours" (N, 3), "normals" (N, 3), "labels"
            (N,). Other names are kept.
        dropped: number of points left out because a coordinate or an attribute is
            not finite in float32 (depth cameras write NaN where they saw nothing).
        origin: (3,) float64; the file's coordinates are ``points + origin``. It is zero
            unless the file has large doubles (map projections) that float32 would round
            by a millimetre or more.
        rows: (N,) int64, the place of each point in the file, or None if no point was
            left out.

    Examples:
        >>> cloud = io.PointCloud(np.zeros((5, 3)), {"intensity": np.ones(5)})
        >>> ml.SparseTensor.from_points(cloud.points, voxel_size=0.1).shape
        (1, 1)
    """

    points: np.ndarray
    attributes: dict[str, np.ndarray] = field(default_factory=dict)
    dropped: int = 0
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.points)


def read_points(
    path: str | Path,
    columns: str | Sequence[str] = (),
    *,
    attributes: Collection[str] | None = None,
) -> PointCloud:
    """Read a point cloud in the format of the file's suffix.

    ``.ply`` and ``.pcd`` (ASCII, binary or compressed), ``.las`` and ``.laz``, ``.npy``
    and ``.npz`` (an array of at least three columns, a structured array with x, y, z,
    or an entry "points" and others beside it), ``.bin`` (float32 x, y, z, intensity, as
    in KITTI), ``.pcd.bin`` (nuScenes': also the ring), ``.vtk`` (legacy; points alone),
    ``.csv``, ``.txt``, ``.xyz`` and ``.asc`` (a point a line; names of columns in the
    first line or in a comment before it, or x, y, z).

    Args:
        path: the file.
        columns: the names of the columns of ``.bin``, ``.npy``, ``.npz`` and tables, in
            order, as a list or as in "x,y,z,intensity,_,ring". Columns named _ are left
            out. A ``.bin`` with other columns than KITTI's needs them; its size and
            values tell float32 from float64.
        attributes: the names of the attributes to keep, if the file has them; by
            default all. Other attributes of a LAS file are not read.

    Raises:
        PointFileError: the file is truncated, has no x, y, z, or has another format; or
            a ``.bin`` does not look like KITTI's, and no columns are named.
        ValueError: ``columns`` lacks x, y or z, repeats a name, or is given for a file
            that names its own.
        ImportError: the format needs a package that is not installed.
        FileNotFoundError: there is no such file.

    Examples:
        >>> columns = {name: np.arange(100.0) for name in ("x", "y", "z", "intensity")}
        >>> io.write_ply("scan.ply", columns)
        >>> cloud = io.read_points("scan.ply")
        >>> cloud.points.shape, sorted(cloud.attributes)
        ((100, 3), ['intensity'])
    """
    path = Path(path)
    if columns or path.suffix.lower() not in LAS:
        return _cloud(read_columns(path, columns), path, attributes)
    clouds: list[PointCloud] = []
    with open_las(path) as reader:
        far = float(
            np.nan_to_num(np.abs([reader.header.mins, reader.header.maxs])).max()
        )
        names = reader.header.point_format.dimension_names
        names = [name for name in names if _is_wanted(name, attributes)]
        origin = None
        for chunk in las_chunks(reader, path):
            piece = {name: np.array(chunk[name]) for name in [*names, *"xyz"]}
            clouds.append(_cloud(piece, path, attributes, far, origin))
            origin = clouds[0].origin
    if not clouds:
        return _cloud({name: np.zeros(0) for name in "xyz"}, path)
    return _joined(clouds)


def read_columns(path: Path, columns: str | Sequence[str] = ()) -> Columns:
    """Return every column of a file, by the file's own names and in its order.

    Arguments and errors are those of ``read_points``.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        kind = path.suffix or "a file without a suffix"
        raise PointFileError(
            f"{path}: no reader for {'a folder' if path.is_dir() else kind}; "
            f"expected one of {', '.join(READERS)}"
        )
    binary = path.suffix.lower() in (".las", ".laz", ".npy", ".npz")
    check_file(path, PointFileError, binary=binary)
    if not columns:
        return reader(path)
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
    return {k: v for k, v in table.items() if k not in names or k in used}


def _cloud(
    columns: Columns,
    path: Path,
    wanted: Collection[str] | None = None,
    far: float = 0.0,
    origin: np.ndarray | None = None,
) -> PointCloud:
    """Make a cloud of named columns: x, y, z and any others.

    ``far`` is a coordinate that other points of the file have, and ``origin`` theirs.
    """
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
        known = NAMES.get(name.lower(), name)
        attributes[name if known in attributes else known] = column
    if wanted is not None:
        attributes = {name: attributes[name] for name in wanted if name in attributes}

    keep = _finite(points)
    for column in attributes.values():
        if column.dtype.kind == "f":
            keep &= _finite(column)
    if not keep.all():
        points = points[keep]
        attributes = {name: column[keep] for name, column in attributes.items()}
    if origin is None:
        origin = np.zeros(3)
        double = points.dtype == np.float64 and len(points) > 0
        if double and max(far, np.abs(points).max()) > _FAR:
            origin = np.floor(points.min(axis=0))
    lost = len(keep) - int(keep.sum())
    single = np.ascontiguousarray(points - origin, dtype=np.float32)
    rows = np.flatnonzero(keep) if lost else None
    return PointCloud(single, attributes, lost, origin, rows)


def _joined(clouds: list[PointCloud]) -> PointCloud:
    """Return pieces of a file, which share their origin, as one; empties them."""
    if len(clouds) == 1:
        return clouds[0]
    points = np.concatenate([cloud.points for cloud in clouds])
    attributes = {
        name: np.concatenate([cloud.attributes.pop(name) for cloud in clouds])
        for name in list(clouds[0].attributes)
    }
    dropped = sum(cloud.dropped for cloud in clouds)
    rows, start = None, 0
    if dropped:
        rows = []
        for cloud in clouds:
            own = np.arange(len(cloud)) if cloud.rows is None else cloud.rows
            rows.append(own + start)
            start += len(cloud) + cloud.dropped
        rows = np.concatenate(rows)
    return PointCloud(points, attributes, dropped, clouds[0].origin, rows)


def _is_wanted(name: str, wanted: Collection[str] | None) -> bool:
    """Return whether a dimension of a LAS file belongs to an attribute to keep."""
    if name in ("X", "Y", "Z"):
        return False
    joint = {joint for names, joint in _TRIPLES if name in names}
    known = {name, NAMES.get(name.lower(), name), *joint}
    return wanted is None or not known.isdisjoint(wanted)


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
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # NumPy's parser lets tokenizer errors through
        raise PointFileError(f"{path.name} is not a readable array: {error}") from None
    return _array_columns(array, path, names)


def _read_npz(path: Path, names: Sequence[str] = ()) -> Columns:
    arrays = {}
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                try:
                    arrays[name] = archive[name]
                except ValueError as error:
                    if "allow_pickle" not in str(error):  # objects are left out
                        raise
    except Exception as error:  # those of zipfile, zlib and NumPy's parser
        raise PointFileError(
            f"{path.name} is not a complete NPZ file: {error}"
        ) from error
    key = next((k for k in ("points", "xyz", "pos") if k in arrays), None)
    if key is None and len(arrays) == 1:
        (key,) = arrays
    if key is None and not arrays.keys() >= {*"xyz"}:
        raise PointFileError(
            f"{path.name} has no entry points, xyz or pos; its entries are: "
            f"{listed(arrays, 'none')}"
        )
    if key is None and names:
        raise ValueError(f"columns= is given, and {path.name} names its own columns")
    columns = {name: arrays.pop(name) for name in ("xyz" if key is None else ())}
    if key is not None:
        columns = _array_columns(arrays.pop(key), path, names)
    count = len(next(iter(columns.values())))
    beside = {k: array for k, array in arrays.items() if array.shape[:1] == (count,)}
    if twice := [name for name in beside if name in columns]:
        raise PointFileError(
            f"{path.name} has an entry {twice[0]} beside {key}, which has that column: "
            "give one of the two another name"
        )
    return columns | beside


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
    """Return the columns of a table by name, by ``columns`` if they are given."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    comments = takewhile(lambda line: line.startswith(_COMMENTS), lines)
    candidates = [_words(line.lstrip("#/")) for line in comments]
    rows = [line for line in lines if not line.startswith(_COMMENTS)]
    mark = _mark(rows[0]) if rows else None
    if rows and not _is_number(_words(rows[0])[0]):
        candidates.insert(0, _words(rows.pop(0)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a table without rows
            table = np.loadtxt(rows, np.float64, delimiter=mark, ndmin=2)
    except ValueError as error:
        raise PointFileError(
            f"{path.name} is not a table of numbers: {str(error)[:200]}; expected a "
            "point a line"
        ) from None
    if columns:
        return named_columns(table, columns, path)
    known = [words for words in candidates if {"x", "y", "z"} <= set(words)]
    if known:
        named = next((w for w in known if len(w) == table.shape[1]), known[0])
        if not table.size:
            table = np.zeros((0, len(named)))
        if table.shape[1] != len(named) or len(set(named)) < len(named):
            raise PointFileError(
                f"{path.name} names {len(named)} columns, {listed(named)}, and has "
                f"{table.shape[1]} numbers a line; expected a name for each, once"
            )
        return dict(zip(named, table.T, strict=True))
    if table.shape[1] < 3 or not table.size:
        raise PointFileError(
            f"{path.name}: expected x, y, z a line, got {table.shape[1]} numbers"
        )
    if candidates and len(candidates[0]) == table.shape[1]:
        raise PointFileError(
            f"{path.name} has columns {listed(candidates[0])}; expected x, y and z "
            "among them"
        )
    return named_columns(table, (), path)


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


def text_rows(body: bytes, dtype: np.dtype, n: int, path: Path) -> np.ndarray:
    """Return the first n lines of numbers as a structured array."""
    width = sum(prod(dtype[name].shape) for name in dtype.names)
    if 2 * n * width - 1 > len(body):  # a number and its separator take two bytes
        raise short(path, f"{n} points", f"{len(body)} bytes after the header")
    if not n:
        return np.zeros(0, dtype)
    try:
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("ignore", UserWarning)  # about blank lines
            # Fractions in a column of integers.
            warnings.simplefilter("error", DeprecationWarning)
            text = TextIOWrapper(BytesIO(body), "latin-1")
            rows = np.loadtxt(text, dtype, comments=None, max_rows=n, ndmin=1)
    except (ValueError, OverflowError, DeprecationWarning) as error:
        raise PointFileError(f"{path.name}: {str(error)[:200]}") from None
    if len(rows) < n:
        raise short(path, f"{n} points", f"{len(rows)} rows")
    return rows


# PCD


def read_pcd(path: Path) -> Columns:
    """Return the columns of a PCD file by name: ASCII, binary or compressed."""
    content = path.read_bytes()
    header, body = _pcd_header(content, path)
    dtype, n = _pcd_dtype(header, path)
    kind = header["DATA"][0]
    if kind == "binary_compressed":
        columns = _pcd_compressed(body, dtype, n, path)
    elif kind in ("ascii", "binary"):
        if kind == "ascii":
            table = text_rows(body, dtype, n, path)
        elif len(body) < n * dtype.itemsize:
            raise short(path, f"{n * dtype.itemsize} bytes of points", len(body))
        else:
            table = np.frombuffer(body, dtype, n)
        columns = {name: table[name] for name in dtype.names}
    else:
        raise PointFileError(
            f"{path.name}: DATA must be ascii, binary or binary_compressed, got {kind}"
        )
    columns = {k: v for k, v in columns.items() if not k.startswith("_")}
    for name in ("rgba", "rgb"):  # 32 bits, often declared as a float
        if name in columns and columns[name].dtype.itemsize == 4:
            packed = np.ascontiguousarray(columns.pop(name)).view(np.uint32)
            shifted = [(packed >> shift & 255).astype(np.uint8) for shift in (16, 8, 0)]
            columns["colours"] = np.stack(shifted, axis=1)
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


def _pcd_header(content: bytes, path: Path) -> tuple[dict[str, list[str]], bytes]:
    header, start = {}, 0
    while "DATA" not in header:
        end = content.find(b"\n", start)
        if end < 0 or end - start > 65536:
            raise PointFileError(f"{path.name} is not a PCD file: it has no DATA line")
        words = content[start:end].decode("ascii", "replace").split()
        start = end + 1
        if words and not words[0].startswith("#"):
            header[words[0].upper()] = words[1:] or [""]
    return header, content[start:]


def _pcd_dtype(header: dict[str, list[str]], path: Path) -> tuple[np.dtype, int]:
    """Return the dtype of a point and the number of points."""
    names = header.get("FIELDS", [])
    counts = header.get("COUNT", ["1"] * len(names))
    columns = (header.get("SIZE", []), header.get("TYPE", []), counts)
    if not names or any(len(column) != len(names) for column in columns):
        raise PointFileError(
            f"{path.name}: FIELDS, SIZE, TYPE and COUNT must have as many entries"
        )
    fields = []
    try:
        for i, (name, size, kind, count) in enumerate(
            zip(names, *columns, strict=True)
        ):
            if kind not in ("F", "I", "U"):
                raise ValueError(f"TYPE must be F, I or U, got {kind}")
            code = np.dtype(f"<{kind.lower()}{int(size)}")
            shape = () if count == "1" else (int(count),)
            fields.append((f"_{i}" if name == "_" else name.lower(), code, shape))
        dtype = np.dtype(fields)
        if "POINTS" in header:
            n = int(header["POINTS"][0])
        else:
            n = int(header["WIDTH"][0]) * int(header["HEIGHT"][0])
    except (ValueError, TypeError, KeyError) as error:
        raise PointFileError(f"{path.name}: bad PCD header: {error}") from error
    if n < 0 or not dtype.itemsize:
        raise PointFileError(f"{path.name}: {n} points of {dtype.itemsize} bytes")
    return dtype, n


def _pcd_compressed(body: bytes, dtype: np.dtype, n: int, path: Path) -> Columns:
    if len(body) < 8:
        raise short(path, "two sizes of 4 bytes", f"{len(body)} bytes")
    packed, size = struct.unpack_from("<II", body)
    if len(body) - 8 < packed:
        raise short(path, f"{packed} compressed bytes", len(body) - 8)
    if size != n * dtype.itemsize:
        raise short(path, f"{n * dtype.itemsize} bytes of points", f"{size} bytes")
    raw = _lzf_decompress(memoryview(body)[8 : 8 + packed], size, path)
    columns, at = {}, 0
    for name in dtype.names:  # field after field, not point after point
        count = n * int(np.prod(dtype[name].shape, dtype=int))
        column = np.frombuffer(raw, dtype[name].base, count, at)
        columns[name] = column.reshape(n, *dtype[name].shape)
        at += column.nbytes
    return columns


def _lzf_decompress(data: memoryview, size: int, path: Path) -> bytes:
    """Undo LZF: literal bytes, and references of 3 bytes to up to 264 earlier ones."""
    if size > 88 * len(data):
        raise short(path, f"{size} bytes", f"at most {88 * len(data)}")
    out, at, end = bytearray(), 0, len(data)
    try:
        while at < end:
            control = data[at]
            at += 1
            if control < 32:
                if at + control + 1 > end:
                    raise IndexError
                out += data[at : at + control + 1]
                at += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += data[at]
                at += 1
            start = len(out) - ((control & 31) << 8) - data[at] - 1
            at += 1
            length += 2
            if start < 0 or len(out) + length > size:
                raise IndexError
            piece = out[start : start + length]
            while len(piece) < length:  # a reference may overlap its own output
                piece += piece[: length - len(piece)]
            out += piece
    except IndexError:
        raise PointFileError(f"{path.name}: its compressed data is corrupt") from None
    if len(out) != size:
        raise short(path, f"{size} bytes of points", f"{len(out)} bytes")
    return bytes(out)


# PLY

# Names of NumPy's types in PLY headers: those of the format, then NumPy's own.
_PLY_NAMES = {
    "f4": "float",
    "f8": "double",
    "u1": "uchar",
    "u2": "ushort",
    "u4": "uint",
    "i1": "char",
    "i2": "short",
    "i4": "int",
}
_PLY_CODES = {name: code for code, name in _PLY_NAMES.items()} | {
    np.dtype(code).name: code for code in _PLY_NAMES
}
_PLY_ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}
_PLY_HEADER = 2**20  # bytes


class _Element(NamedTuple):
    """An element of a PLY header: name, rows, and (name, codes) for each property."""

    name: str
    count: int
    properties: list[tuple[str, tuple[str, ...]]]


def read_ply(path: Path) -> Columns:
    """Return the vertex properties of a PLY file by name, text or binary."""
    content = path.read_bytes()
    elements, order, at = _ply_header(content, path)
    names = [element.name for element in elements]
    if "vertex" not in names:
        raise PointFileError(
            f"{path.name} has no vertex element; its elements are: "
            f"{listed(names, 'none')}"
        )
    dtypes = []
    for element in elements[: names.index("vertex") + 1]:
        codes = [(name, code) for name, (code, *_) in element.properties]
        lists = [name for name, kinds in element.properties if len(kinds) == 2]
        if lists and (element.count or element.name == "vertex"):
            raise PointFileError(
                f"{path.name}: {lists[0]} of {element.name} is a list; expected "
                "numbers up to the vertices"
            )
        try:
            dtypes.append(np.dtype([(name, order + code) for name, code in codes]))
        except ValueError as error:
            raise PointFileError(f"{path.name}: bad PLY header: {error}") from None
    counts = [element.count for element in elements[: len(dtypes)]]
    dtype, count = dtypes[-1], counts[-1]
    if order == "=":
        body = content[at:]
        if skipped := sum(counts[:-1]):
            lines = [line for line in body.splitlines() if line.strip()]
            body = b"\n".join(lines[skipped:])
        rows = text_rows(body, dtype, count, path)
    else:
        at += sum(n * d.itemsize for n, d in zip(counts[:-1], dtypes, strict=False))
        if at + count * dtype.itemsize > len(content):
            raise short(path, f"{count} vertices", f"{len(content)} bytes")
        rows = np.frombuffer(content, dtype, count, at)
    native = {name: dtype[name].newbyteorder("=") for name in dtype.names or ()}
    return {
        name: np.ascontiguousarray(rows[name], kind) for name, kind in native.items()
    }


def _ply_header(content: bytes, path: Path) -> tuple[list[_Element], str, int]:
    """Return the elements, the byte order ("=" for text) and the start of the data."""
    if content[:3] != b"ply" or content[3:4] not in (b"\n", b"\r"):
        raise PointFileError(
            f"{path.name} is not a PLY file: it does not begin with ply"
        )
    mark = b"\r\n" if content[3:5] == b"\r\n" else content[3:4]
    end = content.find(mark + b"end_header" + mark, 0, _PLY_HEADER)
    if end < 0:
        raise PointFileError(f"{path.name} has no end_header in its first 1 MiB")
    order, elements = None, []
    for line in content[3:end].decode("ascii", "replace").splitlines():
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = _PLY_ORDERS[words[1]]
            elif words[:1] == ["element"]:
                _, name, count = words
                elements.append(_Element(name, int(count), []))
            elif words[:1] == ["property"]:
                *kinds, name = words[1:]
                codes = [_PLY_CODES[kind] for kind in kinds if kind != "list"]
                is_list = kinds[0] == "list"
                if len(codes) != 1 + is_list or (is_list and codes[0][0] == "f"):
                    raise ValueError
                elements[-1].properties.append((name, tuple(codes)))
        except (ValueError, KeyError, IndexError):
            raise PointFileError(
                f"{path.name}: bad line in its PLY header: {line.strip()[:80]}"
            ) from None
    if order is None:
        raise PointFileError(f"{path.name} has no format line in its PLY header")
    for element in elements:
        if not 0 <= element.count <= len(content):  # a row takes at least a byte
            raise short(path, f"{element.count} rows", f"{len(content)} bytes")
    return elements, order, end + len(b"end_header") + 2 * len(mark)


def write_ply(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write a point cloud as binary PLY.

    Args:
        path: the file.
        columns: (P,) numbers by name: x, y, z and any others. PLY has no 64-bit
            integers.

    Raises:
        TypeError: columns are not a dict.
        ValueError: columns have different lengths, or a type that PLY does not have.

    Examples:
        >>> xyz = np.random.default_rng(0).random((100, 3))
        >>> io.write_ply("scan.ply", {"x": xyz[:, 0], "y": xyz[:, 1], "z": xyz[:, 2]})
        >>> io.read_points("scan.ply").points.shape
        (100, 3)
    """
    if not isinstance(columns, Mapping):
        raise TypeError(
            "columns must be a dict of arrays by name, x, y, z and others; got "
            f"{type(columns).__name__}"
        )
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"columns must be (P,) with one P; got {sorted(shapes)}")
    kinds = {name: array.dtype.str[1:] for name, array in arrays.items()}
    if unknown := [name for name, kind in kinds.items() if kind not in _PLY_NAMES]:
        raise ValueError(
            f"{unknown[0]} is {arrays[unknown[0]].dtype}, which PLY does not have; "
            f"expected one of {', '.join(_PLY_NAMES.values())}"
        )
    (count,) = next(iter(shapes))
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    header += [f"property {_PLY_NAMES[kind]} {name}" for name, kind in kinds.items()]
    table = np.empty(count, [(name, "<" + kind) for name, kind in kinds.items()])
    for name, array in arrays.items():
        table[name] = array
    with atomic_write(path) as draft, draft.open("wb") as stream:
        stream.write("\n".join([*header, "end_header", ""]).encode("ascii"))
        stream.write(table.tobytes())


# LAS


LAS = (".las", ".laz")
CHUNK = 1_000_000  # points of a LAS file that are in memory at a time


@contextmanager
def open_las(path: Path, *, evlrs: bool = False) -> Iterator[Any]:
    """Open a LAS or LAZ file by laspy inside the block, with its extended records."""
    try:
        import laspy
    except ImportError as error:
        raise ImportError("LAS files need laspy: pip install 'laspy[lazrs]'") from error
    check_file(path, PointFileError, binary=True)
    _check_las_header(path)
    with _las_errors(path):
        reader = laspy.open(path, read_evlrs=evlrs)
    with reader:
        if reader.header.are_points_compressed and not (
            laspy.LazBackend.detect_available()
        ):
            raise ImportError(
                "LAZ files need a decompressor: pip install 'laspy[lazrs]'"
            )
        yield reader


@contextmanager
def _las_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # each decompressor raises errors of its own
        raise PointFileError(
            f"{path.name} is not a readable LAS file: {error}"
        ) from error


def las_chunks(reader: Any, path: Path) -> Iterator[Any]:
    """Yield a LAS file's points in pieces; check that they are as many as promised.

    Only decompression shows how many points a LAZ file has.
    """
    count, chunks = 0, reader.chunk_iterator(CHUNK)
    while True:
        with _las_errors(path):
            chunk = next(chunks, None)
        if chunk is None:
            break
        count += len(chunk)
        yield chunk
    if count != reader.header.point_count:
        raise short(path, f"{reader.header.point_count} points", count)


def _read_las(path: Path) -> Columns:
    with open_las(path) as reader:
        names = [*reader.header.point_format.dimension_names, *"xyz"]
        names = [name for name in names if _is_wanted(name, None)]
        pieces = [
            {name: np.array(chunk[name]) for name in names}
            for chunk in las_chunks(reader, path)
        ]
    if not pieces:
        return {name: np.zeros(0) for name in "xyz"}
    return {k: np.concatenate([piece.pop(k) for piece in pieces]) for k in names}


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


_VTK_TYPES = {"float": ">f4", "double": ">f8", "int": ">i4", "short": ">i2"}


def read_vtk(path: Path) -> Columns:
    """Return x, y and z of the POINTS of a legacy VTK file, ASCII or binary."""
    content = path.read_bytes()
    if not content.startswith(b"# vtk DataFile"):
        raise PointFileError(
            f"{path.name} is not a legacy VTK file: its first line differs"
        )
    # Version, title, ASCII or BINARY; then DATASET, POINTS and the rest.
    head = content[:4096].split(b"\n", 3)
    kind = head[2].strip().upper() if len(head) == 4 else b""
    start = content.find(b"\nPOINTS ")
    end = content.find(b"\n", start + 1)
    words = content[start:end].split() if 0 <= start < end else []
    is_count = len(words) == 3 and words[1].isdigit() and len(words[1]) < 20
    if kind not in (b"ASCII", b"BINARY") or not is_count:
        raise PointFileError(
            f"{path.name}: expected ASCII or BINARY in the third line, and a line "
            "POINTS with their number and type"
        )
    n, name = int(words[1]), words[2].decode("ascii", "replace").lower()
    if name not in _VTK_TYPES:
        raise PointFileError(
            f"{path.name}: points must be {', '.join(_VTK_TYPES)}; got {name}"
        )
    dtype, body = np.dtype(_VTK_TYPES[name]), content[end + 1 :]
    # In text a number and its separator take two bytes.
    least = 3 * n * dtype.itemsize if kind == b"BINARY" else 6 * n - 1
    if len(body) < least:
        raise short(path, f"{n} points", f"{len(body)} bytes after them")
    native = dtype.newbyteorder("=")
    if kind == b"BINARY":
        numbers = np.frombuffer(body, dtype, 3 * n).astype(native)
    else:
        parts = body.split(None, 3 * n)[: 3 * n]
        if len(parts) < 3 * n:
            raise short(path, f"{3 * n} numbers", len(parts))
        try:
            with np.errstate(over="ignore"):
                numbers = np.array(parts, native)
        except (ValueError, OverflowError) as error:
            raise PointFileError(
                f"{path.name}: not a number of {native}: {error}"
            ) from None
    return dict(zip("xyz", numbers.reshape(n, 3).T, strict=True))


READERS: dict[str, Callable[[Path], PointCloud]] = {
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

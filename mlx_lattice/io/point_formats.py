"""Readers of PCD, PLY and legacy VTK files, and the writer of PLY files."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping
from io import BytesIO, TextIOWrapper
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..kept_files import atomic_write
from .safetensors import PointFileError, listed, short

Columns = dict[str, np.ndarray]


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
        widths = [len(line.split()) for line in body.splitlines() if line.strip()]
        if len(widths) < n:
            raise short(path, f"{n} points", f"{len(widths)} rows") from None
        wrong = next((i for i, count in enumerate(widths[:n]) if count != width), None)
        why = str(error)[:200]
        if wrong is not None:
            why = f"row {wrong} has {widths[wrong]} columns, expected {width}"
        raise PointFileError(f"{path.name}: {why}") from None
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
    """An element of a PLY header: name, rows, and (name, codes) for each property.

    A list has two codes: the type of its length and the type of its entries.
    """

    name: str
    count: int
    properties: list[tuple[str, tuple[str, ...]]]

    @property
    def lists(self) -> list[str]:
        return [name for name, codes in self.properties if len(codes) == 2]


def read_ply(path: Path) -> Columns:
    """Return the vertex properties of a PLY file by name, text or binary.

    The sizes of other elements are checked; their values are skipped.
    """
    content = path.read_bytes()
    elements, order, at = _ply_header(content, path)
    names = [element.name for element in elements]
    if "vertex" not in names:
        raise PointFileError(
            f"{path.name} has no vertex element; its elements are: "
            f"{listed(names, 'none')}"
        )
    place = names.index("vertex")
    vertex = elements[place]
    if vertex.lists:
        raise PointFileError(
            f"{path.name}: the vertex property {vertex.lists[0]} is a list; expected "
            "one number a vertex"
        )
    try:
        dtype = np.dtype(
            [(name, order + codes[0]) for name, codes in vertex.properties]
        )
    except ValueError as error:
        raise PointFileError(f"{path.name}: bad PLY header: {error}") from None
    if order == "=":
        rows = _ply_text(content[at:], elements, place, dtype, path)
    else:
        for i, element in enumerate(elements):
            start, at = at, _ply_end(content, at, element, order, path)
            if i == place:
                rows = np.frombuffer(content, dtype, vertex.count, start)
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


def _ply_text(body: bytes, elements, place: int, dtype, path: Path) -> np.ndarray:
    """Return the rows of the vertices in the text after the header."""
    count = elements[place].count
    before = sum(element.count for element in elements[:place])
    after = sum(element.count for element in elements[place + 1 :])
    if before or after:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < before + count + after:
            raise short(path, f"{before + count + after} rows", f"{len(lines)} rows")
        body = b"\n".join(lines[before : before + count])
    return text_rows(body, dtype, count, path)


def _ply_end(content: bytes, at: int, element: _Element, order: str, path: Path) -> int:
    """Return where the rows of a binary element end."""
    count = element.count
    kinds = [
        [np.dtype(order + code) for code in codes] for _, codes in element.properties
    ]
    if not element.lists:
        at += count * sum(kind.itemsize for (kind,) in kinds)
    elif count:
        if len(kinds) == 1 and len(content) > at + kinds[0][0].itemsize:
            # Nearly always all triangles or all quads: lists of one length.
            first = max(int(np.frombuffer(content, kinds[0][0], 1, at)[0]), 0)
            row = np.dtype([("n", kinds[0][0]), ("v", kinds[0][1], first)])
            if at + count * row.itemsize <= len(content):
                rows = np.frombuffer(content, row, count, at)
                if (rows["n"] == first).all():
                    return at + count * row.itemsize
        try:
            for _ in range(count):
                for kind, *entry in kinds:
                    length = struct.unpack_from(order + kind.char, content, at)[0]
                    at += kind.itemsize
                    if entry:
                        at += entry[0].itemsize * max(length, 0)
        except struct.error:
            at = len(content) + 1
    if at > len(content):
        raise short(path, f"{count} rows of {element.name}", f"{len(content)} bytes")
    return at


def write_ply(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write a point cloud as binary PLY.

    Args:
        path: the file.
        columns: name to (P,) numbers: x, y, z and any others. PLY has no 64-bit
            integers.

    Raises:
        ValueError: columns have different lengths, or a type that PLY does not have.
    """
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


# VTK

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

"""Read and write the vertices of PLY files with NumPy."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..atomic_write import atomic_write
from .errors import listed
from .pcd import PointFileError, short, text_rows

# The format's names of NumPy's types.
_TYPES = {
    "f4": "float",
    "f8": "double",
    "u1": "uchar",
    "u2": "ushort",
    "u4": "uint",
    "i1": "char",
    "i2": "short",
    "i4": "int",
}


# Both sets of names that programs write, and NumPy's types.
_CODES = {name: code for code, name in _TYPES.items()}
_CODES |= {
    f"{kind}{8 * n}": f"{kind[0]}{n}" for kind in ("int", "uint") for n in (1, 2, 4)
}
_CODES |= {"float32": "f4", "float64": "f8"}
_ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}
# Most bytes of a header.
_HEADER = 2**20


class _Element(NamedTuple):
    """An element of a header: its rows, and a (name, codes) pair a property.

    A list has two codes: of its length and of its entries.
    """

    name: str
    count: int
    properties: list[tuple[str, tuple[str, ...]]]

    @property
    def lists(self) -> list[str]:
        return [name for name, codes in self.properties if len(codes) == 2]


def read_ply(path: Path) -> dict[str, np.ndarray]:
    """Return the vertex properties of a PLY file by name, text or binary.

    Other elements are checked for their size and skipped.
    """
    content = path.read_bytes()
    elements, order, at = _header(content, path)
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
        rows = _text(content[at:], elements, place, dtype, path)
    else:
        for element in elements[:place]:
            at = _skipped(content, at, element, order, path)
        end = _skipped(content, at, vertex, order, path)
        rows = np.frombuffer(content, dtype, vertex.count, at)
        for element in elements[place + 1 :]:
            end = _skipped(content, end, element, order, path)
    native = {name: dtype[name].newbyteorder("=") for name in dtype.names or ()}
    return {
        name: np.ascontiguousarray(rows[name], kind) for name, kind in native.items()
    }


def _header(content: bytes, path: Path) -> tuple[list[_Element], str, int]:
    """Return the elements, the byte order ("=" for text) and where the data begins."""
    if content[:3] != b"ply" or content[3:4] not in (b"\n", b"\r"):
        raise PointFileError(f"{path.name} is no PLY file: it does not begin with ply")
    mark = b"\r\n" if content[3:5] == b"\r\n" else content[3:4]
    end = content.find(mark + b"end_header" + mark, 0, _HEADER)
    if end < 0:
        raise PointFileError(f"{path.name} has no end_header in its first 1 MiB")
    order, elements = None, []
    for line in content[3:end].decode("ascii", "replace").splitlines():
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = _ORDERS[words[1]]
            elif words[:1] == ["element"]:
                _, name, count = words
                elements.append(_Element(name, int(count), []))
            elif words[:1] == ["property"]:
                *kinds, name = words[1:]
                codes = [_CODES[kind] for kind in kinds if kind != "list"]
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
        # A row takes a byte at least.
        if not 0 <= element.count <= len(content):
            raise short(path, f"{element.count} rows", f"{len(content)} bytes")
    return elements, order, end + len(b"end_header") + 2 * len(mark)


def _text(body: bytes, elements, place: int, dtype, path: Path) -> np.ndarray:
    """Return the rows of the vertices in the text after the header."""
    before = sum(element.count for element in elements[:place])
    after = sum(element.count for element in elements[place + 1 :])
    if before or after:
        lines = [line for line in body.splitlines() if line.strip()]
        count = elements[place].count
        if len(lines) < before + count + after:
            raise short(path, f"{before + count + after} rows", f"{len(lines)} rows")
        body = b"\n".join(lines[before : before + count])
    return text_rows(body, dtype, elements[place].count, path)


def _skipped(content: bytes, at: int, element: _Element, order: str, path: Path) -> int:
    """Return where the rows of a binary element end."""
    sizes = [
        [np.dtype(code).itemsize for code in codes] for _, codes in element.properties
    ]
    count = element.count
    if not element.lists:
        at += count * sum(size for (size,) in sizes)
    elif count:
        codes = [[order + code for code in codes] for _, codes in element.properties]
        if len(codes) == 1 and len(content) > at + sizes[0][0]:
            # Nearly always triangles, or all quads: lists of one length.
            first = int(np.frombuffer(content, codes[0][0], 1, at)[0])
            row = np.dtype([("n", codes[0][0]), ("v", codes[0][1], max(first, 0))])
            if at + count * row.itemsize <= len(content):
                rows = np.frombuffer(content, row, count, at)
                if (rows["n"] == first).all():
                    return at + count * row.itemsize
        lengths = [
            struct.Struct(order + np.dtype(code[0]).char) if len(code) == 2 else None
            for code in codes
        ]
        try:
            for _ in range(count):
                for length, size in zip(lengths, sizes, strict=True):
                    at += size[0]
                    if length is not None:
                        at += size[1] * max(
                            length.unpack_from(content, at - size[0])[0], 0
                        )
        except struct.error:
            at = len(content) + 1
    if at > len(content):
        raise short(path, f"{count} rows of {element.name}", f"{len(content)} bytes")
    return at


def write_ply(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write the columns of a cloud: x, y, z and any others, each of shape (P,).

    Args:
        path: of the file.
        columns: name to numbers; 64-bit integers are none of the format's.

    Raises:
        ValueError: columns have different lengths, or a type that PLY does not have.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"columns must be (P,) with one P; got {sorted(shapes)}")
    kinds = {name: array.dtype.str[1:] for name, array in arrays.items()}
    if unknown := [name for name, kind in kinds.items() if kind not in _TYPES]:
        raise ValueError(
            f"{unknown[0]} is {arrays[unknown[0]].dtype}, which PLY does not have; "
            f"expected one of {', '.join(_TYPES.values())}"
        )
    (count,) = next(iter(shapes))
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    header += [f"property {_TYPES[kind]} {name}" for name, kind in kinds.items()]
    table = np.empty(count, [(name, "<" + kind) for name, kind in kinds.items()])
    for name, array in arrays.items():
        table[name] = array
    with atomic_write(path) as draft, draft.open("wb") as stream:
        stream.write("\n".join([*header, "end_header", ""]).encode("ascii"))
        stream.write(table.tobytes())

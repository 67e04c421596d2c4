"""PCD files, the Point Cloud Library's own, and the error of every point reader."""

from __future__ import annotations

import struct
import warnings
from io import BytesIO, TextIOWrapper
from math import prod
from pathlib import Path

import numpy as np

from .errors import FileError


class PointFileError(FileError):
    """A file that does not hold what its format or its header says."""

    def __init__(self, message: str):
        longest = 1000  # names in a file may have any length
        more = f"... ({len(message):,} letters)" * (len(message) > longest)
        super().__init__(message[:longest] + more)


def short(path: Path, promised: object, found: object) -> PointFileError:
    """Return the error of a file that holds less than its header promises."""
    return PointFileError(
        f"{path.name} is truncated or its header is wrong: the header promises "
        f"{promised}, the file has {found}"
    )


def read_pcd(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a PCD file by name: ASCII, binary or compressed."""
    content = path.read_bytes()
    header, body = _pcd_header(content, path)
    dtype, n = _pcd_dtype(header, path)
    kind = header["DATA"][0]
    if kind == "ascii":
        table = text_rows(body, dtype, n, path)
        columns = {name: table[name] for name in dtype.names}
    elif kind == "binary":
        if len(body) < n * dtype.itemsize:
            raise short(path, f"{n * dtype.itemsize} bytes of points", len(body))
        table = np.frombuffer(body, dtype, n)
        columns = {name: table[name] for name in dtype.names}
    elif kind == "binary_compressed":
        columns = _pcd_compressed(body, dtype, n, path)
    else:
        raise PointFileError(
            f"{path.name}: DATA must be ascii, binary or binary_compressed, got {kind}"
        )
    columns = {k: v for k, v in columns.items() if not k.startswith("_")}
    for name in ("rgba", "rgb"):  # packed into 32 bits, often under the name of a float
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
            raise PointFileError(f"{path.name} is no PCD file: no DATA line in it")
        words = content[start:end].decode("ascii", "replace").split()
        start = end + 1
        if words and not words[0].startswith("#"):
            header[words[0].upper()] = words[1:] or [""]
    return header, content[start:]


def _pcd_dtype(header: dict[str, list[str]], path: Path) -> tuple[np.dtype, int]:
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


def text_rows(body: bytes, dtype: np.dtype, n: int, path: Path) -> np.ndarray:
    """Return the first n lines of numbers as a structured array."""
    width = sum(prod(dtype[name].shape) for name in dtype.names)
    if 2 * n * width - 1 > len(body):  # a number and what ends it take two bytes
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
        found = [len(line.split()) for line in body.splitlines() if line.strip()]
        if len(found) < n:
            raise short(path, f"{n} points", f"{len(found)} rows") from None
        wrong = next((i for i, count in enumerate(found[:n]) if count != width), None)
        why = str(error)[:200]
        if wrong is not None:
            why = f"row {wrong} has {found[wrong]} columns, expected {width}"
        raise PointFileError(f"{path.name}: {why}") from None
    if len(rows) < n:
        raise short(path, f"{n} points", f"{len(rows)} rows")
    return rows


def _pcd_compressed(body: bytes, dtype: np.dtype, n: int, path: Path) -> dict:
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

"""PCD files, the Point Cloud Library's own, and the error of every point reader."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from .errors import FileError


class PointFileError(FileError):
    """A file that does not hold what its format or its header says."""


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
        columns = _pcd_ascii(body, dtype, n, path)
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


def _pcd_ascii(body: bytes, dtype: np.dtype, n: int, path: Path) -> dict:
    rows = [line.split() for line in body.splitlines() if line.strip()]
    width = sum(int(np.prod(dtype[name].shape, dtype=int)) for name in dtype.names)
    if len(rows) < n:
        raise short(path, f"{n} points", f"{len(rows)} rows")
    wrong = next((i for i, row in enumerate(rows[:n]) if len(row) != width), None)
    if wrong is not None:
        raise PointFileError(
            f"{path.name}: row {wrong} has {len(rows[wrong])} columns, expected {width}"
        )
    words = words_of([word for row in rows[:n] for word in row], path)
    text = words.reshape(n, width)
    columns, at = {}, 0
    for name in dtype.names:
        shape = dtype[name].shape
        span = int(np.prod(shape, dtype=int))
        part = numbers_of(text[:, at : at + span], dtype[name].base, path)
        columns[name], at = part if shape else part[:, 0], at + span
    return columns


def words_of(words: list[bytes], path: Path) -> np.ndarray:
    """Return words as an array, in which each takes as much as the longest."""
    if max(map(len, words), default=0) > 64:
        raise PointFileError(f"{path.name}: a number of more than 64 characters")
    return np.array(words, dtype=np.bytes_)


def numbers_of(text: np.ndarray, dtype: np.dtype, path: Path) -> np.ndarray:
    """Return the numbers that words say, or raise if ``dtype`` does not hold one."""
    try:
        return text.astype(dtype)
    except (ValueError, OverflowError) as error:
        raise PointFileError(f"{path.name}: no number of {dtype}: {error}") from error


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

"""The points of legacy VTK files, ASCII and binary."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .pcd import PointFileError, short

_DTYPES = {"float": ">f4", "double": ">f8", "int": ">i4", "short": ">i2"}


def _is_count(word: bytes) -> bool:
    return word.isdigit() and len(word) < 20


def read_vtk(path: Path) -> dict[str, np.ndarray]:
    """Return x, y and z of a legacy VTK file's POINTS; other sections are left out."""
    content = path.read_bytes()
    if not content.startswith(b"# vtk DataFile"):
        raise PointFileError(f"{path.name} is no legacy VTK file: it begins otherwise")
    # Version, title, ASCII or BINARY; then DATASET, POINTS and the rest.
    head = content[:4096].split(b"\n", 3)
    kind = head[2].strip().upper() if len(head) == 4 else b""
    start = content.find(b"\nPOINTS ")
    end = content.find(b"\n", start + 1)
    words = content[start:end].split() if 0 <= start < end else []
    if kind not in (b"ASCII", b"BINARY") or len(words) != 3 or not _is_count(words[1]):
        raise PointFileError(
            f"{path.name}: expected ASCII or BINARY in the third line, and a line "
            "POINTS with their number and type"
        )
    n, name = int(words[1]), words[2].decode("ascii", "replace").lower()
    if name not in _DTYPES:
        raise PointFileError(
            f"{path.name}: points must be {', '.join(_DTYPES)}; got {name}"
        )
    dtype, body = np.dtype(_DTYPES[name]), content[end + 1 :]
    # A number in text takes a byte and one between it and the next.
    least = 3 * n * dtype.itemsize if kind == b"BINARY" else 6 * n - 1
    if len(body) < least:
        raise short(path, f"{n} points", f"{len(body)} bytes after them")
    native = dtype.newbyteorder("=")
    if kind == b"BINARY":
        numbers = np.frombuffer(body, dtype, 3 * n).astype(native)
    else:
        # Three words a point, and what follows them, unsplit.
        found = body.split(None, 3 * n)[: 3 * n]
        if len(found) < 3 * n:
            raise short(path, f"{3 * n} numbers", len(found))
        try:
            with np.errstate(over="ignore"):
                numbers = np.array(found, native)
        except (ValueError, OverflowError) as error:
            raise PointFileError(
                f"{path.name}: no number of {native}: {error}"
            ) from None
    return dict(zip("xyz", numbers.reshape(n, 3).T, strict=True))

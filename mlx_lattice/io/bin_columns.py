"""Points in .bin files, which say neither their columns nor their type.

KITTI's files have four columns of float32 a point and nuScenes' .pcd.bin five. Other
programs write three to eight columns, and doubles, under the same suffix. The values
show it: in the right number of columns, each column has a distribution of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .pcd import PointFileError

KITTI = ("x", "y", "z", "intensity")
NUSCENES = (*KITTI, "ring")
_EXAMPLES = {
    3: "x,y,z",
    4: "x,y,z,intensity",
    5: "x,y,z,intensity,ring",
    6: "x,y,z,r,g,b",
}
_WIDTHS = range(3, 9)
# Numbers that are looked at, a multiple of every width.
_LOOKED_AT = 840 * 280
# Share of explained variance below which columns are alike, or no better than others.
_ALIKE, _BETTER = 0.05, 0.02


def read_bin(path: Path, columns: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the columns of a file of numbers by name.

    Args:
        path: the file.
        columns: their names, in order; by default KITTI's, or nuScenes' for .pcd.bin.

    Raises:
        PointFileError: the size or the values are not those of the columns.
    """
    sweep = path.name.lower().endswith(".pcd.bin")
    names = tuple(columns) or (NUSCENES if sweep else KITTI)
    content, width = path.read_bytes(), len(names)
    dtype = _dtype(content)
    fits = not len(content) % (4 * width)
    if columns:
        wide = not len(content) % (8 * width)
        dtype = "<f8" if wide and (dtype == "<f8" or not fits) else "<f4"
        if not (fits or wide):
            raise PointFileError(
                f"{path.name}: {len(content):,} bytes are no whole number of points of "
                f"{width} columns ({', '.join(names)}) in float32 or float64"
            )
    else:
        why, best = _doubt(content, dtype, width, sure=sweep)
        if not fits:
            why = (
                f"{len(content)} bytes are no whole number of points of {4 * width} "
                f"bytes (float32 {', '.join(names)})" + (f", and {why}" if why else "")
            )
        if why:
            raise PointFileError(
                f"{path.name}: {why}. Name its columns by columns= (--columns of "
                f"segment and detect), such as {_EXAMPLES.get(best, _EXAMPLES[5])}"
            )
    table = np.frombuffer(content, dtype).reshape(-1, width)
    return dict(zip(names, table.T, strict=True))


def _doubt(
    content: bytes, dtype: str, width: int, *, sure: bool
) -> tuple[str, int | None]:
    """Return why a file is not float32 of that many columns, or "", and its columns.

    Args:
        content: the file.
        dtype: "<f4", "<f8" or "" as of ``_dtype``.
        width: columns that are expected.
        sure: whether the file's name promises them.
    """
    if not content or len(content) % 4:
        return "", None
    if not dtype:
        return "its values are neither float32 nor float64 of points", None
    item = np.dtype(dtype).itemsize
    fitting = [w for w in _WIDTHS if not len(content) % (item * w)]
    values = np.frombuffer(content, dtype, min(_LOOKED_AT, len(content) // item))
    shares = {w: _explained(values, w) for w in fitting}
    best = max(shares, key=shares.get, default=None)
    # A scanner's beams may alternate: twice the columns explain a little more.
    if best in (6, 8) and shares.get(best // 2, 0) > 0.55 * shares[best] > 0:
        best //= 2
    looks = f"its values look like {'float64' if item == 8 else 'float32'}"
    points = len(values) / (best or width)
    clear = best is not None and shares[best] > _ALIKE + 2 / points
    if clear:
        looks += f" in {best} columns, not float32 in {width}"
    if item == 8:
        return looks, best
    own = shares.get(width, 0.0)
    if clear and best != width and shares[best] > own + _BETTER + 4 / points:
        return looks, best
    if sure or width not in fitting or own > _ALIKE + 2 / points:
        return "", None
    others = [str(w) for w in fitting if w % width]
    last = values[: len(values) // width * width][width - 1 :: width]
    if others or (last < 0).any():
        return (
            f"it may have {' or '.join([*others, str(width)])} columns, and its values "
            "do not show which"
        ), None
    return "", None


def _dtype(content: bytes) -> str:
    """Return "<f4" or "<f8", whichever gives magnitudes of points, or ""."""
    found = ""
    for dtype in ("<f8", "<f4"):
        item = np.dtype(dtype).itemsize
        if len(content) % item:
            continue
        values = np.frombuffer(content, dtype, min(_LOOKED_AT, len(content) // item))
        size = np.abs(values[np.isfinite(values)].astype(np.float64))
        size = size if len(size) else np.zeros(1)
        good = ((size == 0) | ((size > 1e-10) & (size < 1e10))).mean()
        # Every second float32 of whole numbers in doubles is zero.
        halves = dtype == "<f4" and found and (values[::2] == 0).all() and size.any()
        if good > 0.97 and not halves:
            found = dtype
    return found


def _explained(values: np.ndarray, width: int) -> float:
    """Return the share of variance between columns, of four facts about the values."""
    table = values[: len(values) // width * width].astype(np.float64)
    table = np.where(np.isfinite(table), table, 0).reshape(-1, width)
    rows, shares = len(table), []
    if rows < 2:
        return 0.0
    size = np.abs(table)
    for fact in (np.log(size + 1e-3), table < 0, table == np.round(table), table == 0):
        whole = np.var(fact)
        if whole > 1e-12:
            within = np.var(fact, axis=0).mean() / whole
            # Adjusted for the columns' means, which explain noise, too.
            shares.append(1 - within * (table.size - 1) / (table.size - width))
    return float(np.mean(shares)) if shares else 0.0

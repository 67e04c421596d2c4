"""Points as lines of text: CSV, TXT, XYZ and ASC."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from .pcd import PointFileError


def read_table(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a table by name.

    Values stand between commas, semicolons or spaces. A first line of words names the
    columns; without one they are x, y, z, then intensity where there is a fourth, and
    "columns" where there are more. Lines that begin with # or // are left out.
    """
    with path.open(encoding="utf-8", errors="replace") as stream:
        lines = (line.strip() for line in stream)
        kept = [line for line in lines if line and not line.startswith("//")]
    # The names may stand in a comment.
    first = next((line.lstrip("#").strip() for line in kept), "")
    mark = next((m for m in (",", ";") if m in first), None)
    names = [word.strip().strip('"').lower() for word in first.split(mark)]
    is_named = bool(names) and {"x", "y", "z"} <= set(names)
    if not is_named and (not names or _is_number(names[0])):
        names = []
    rows = kept[1:] if names and not kept[0].startswith("#") else kept
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a table without rows
            table = np.loadtxt(rows, np.float64, delimiter=mark, ndmin=2)
    except ValueError as error:
        raise PointFileError(
            f"{path.name} is no table of numbers: {error}; expected a point a line"
        ) from error
    if is_named:
        if not table.size:
            table = np.zeros((0, len(names)))
        if table.shape[1] != len(names):
            raise PointFileError(
                f"{path.name} names {len(names)} columns, {', '.join(names)}, and has "
                f"{table.shape[1]} numbers a line"
            )
        return dict(zip(names, table.T, strict=True))
    if not table.size:
        raise PointFileError(f"{path.name} holds no numbers; expected a point a line")
    if names and table.shape[1] == len(names):
        raise PointFileError(
            f"{path.name} has columns {', '.join(names)}; "
            "expected x, y and z among them"
        )
    if table.shape[1] < 3:
        raise PointFileError(
            f"{path.name}: expected x, y, z a line, got {table.shape[1]} numbers"
        )
    columns = dict(zip("xyz", table.T, strict=False))
    if table.shape[1] == 4:
        columns["intensity"] = table[:, 3]
    elif table.shape[1] > 4:
        columns["columns"] = table[:, 3:]
    return columns


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

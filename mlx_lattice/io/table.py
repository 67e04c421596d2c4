"""Points as lines of text: CSV, TXT, XYZ and ASC."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from .errors import listed
from .pcd import PointFileError

_COMMENTS = ("#", "//")


def named_columns(
    table: np.ndarray, names: Sequence[str], path: Path
) -> dict[str, np.ndarray]:
    """Return the columns of a (N, 3 or more) table by name.

    Without names they are x, y, z, intensity if there are four, and "columns" for all
    after z if there are more.
    """
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


def read_table(path: Path, columns: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the columns of a table by name, by ``columns`` if they are given.

    Values stand between commas, semicolons or spaces. A first line of words names the
    columns, and so may a comment before it, after # or //; without one they are x, y,
    z, then intensity where there is a fourth, and "columns" where there are more.
    """
    stream = StringIO(path.read_text(encoding="utf-8-sig", errors="replace"))
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
    table = _numbers(stream, mark, path)
    if columns:
        return named_columns(table, columns, path)
    told = [names, *(_words(line.lstrip("#/")) for line in comments)]
    told = [words for words in told if {"x", "y", "z"} <= set(words)]
    if told:
        named = next((w for w in told if len(w) == table.shape[1]), told[0])
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


def _numbers(stream: StringIO, mark: str | None, path: Path) -> np.ndarray:
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
                f"{path.name} is no table of numbers: {str(error)[:200]}; expected a "
                "point a line"
            ) from None


def _mark(line: str) -> str | None:
    """Return what stands between the values of a line; None for spaces."""
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

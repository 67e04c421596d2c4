"""Whether files can be written, found out before the work that they are of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory


def check_writable(*paths: str | Path, read: Iterable[str | Path] = ()) -> None:
    """Check that files can be written, in folders that need not exist yet.

    Nothing is left behind.

    Args:
        paths: the files.
        read: files of the user's, which none of them may be.

    Raises:
        OSError: one cannot; the sentence says why.
    """
    kept = [path for path in map(Path, read) if path.exists()]
    for path in map(Path, paths):
        if path.exists() and any(map(path.samefile, kept)):
            raise OSError(f"cannot write {path}: it is read, too; choose another place")
        if path.is_dir():
            raise OSError(f"cannot write {path}: it is a folder; choose another place")
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(f"cannot write {path}: the file may not be changed")
    for folder in {Path(path).parent for path in paths}:
        _check_folder(folder)


def _check_folder(folder: Path) -> None:
    held = folder
    while not os.path.lexists(held) and held != held.parent:
        held = held.parent
    if not held.is_dir():
        raise OSError(
            f"cannot write to {folder}: {held} is not a folder; choose another place"
        )
    try:  # rights alone do not say it: nobody makes files in /proc
        with TemporaryDirectory(dir=held):
            pass
    except OSError as error:
        raise OSError(
            f"cannot write to {folder}: {held} takes no new files "
            f"({error.strerror}); choose another place"
        ) from None

"""Write files atomically: a failed write leaves the old file and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a draft of ``path``, which replaces ``path`` when the block ends.

    The draft has the same name and is in a temporary folder beside ``path``, whose own
    folder must exist. Other files that the block writes there replace their namesakes
    too, before ``path`` itself. The block must close them. If it raises, the old files
    stay. A symbolic link is replaced, not followed.

    Raises:
        OSError: a file cannot be written; the error names ``path``.
    """
    path = Path(path)
    _check(path)
    folder = str(path.parent)
    try:
        with TemporaryDirectory(
            dir=path.parent, prefix=".part-", ignore_cleanup_errors=True
        ) as made:
            draft = Path(made) / path.name
            folder = str(draft.parent)
            yield draft
            drafts = sorted(draft.parent.iterdir(), key=draft.__eq__)  # it is the last
            targets = [path.with_name(each.name) for each in drafts]
            for each, target in zip(drafts, targets, strict=True):
                _check(target)
                with each.open("r+b") as file:
                    os.fsync(file.fileno())  # reports what the disk could not keep
                if target.exists():
                    shutil.copymode(target, each)
            for each, target in zip(drafts, targets, strict=True):
                os.replace(each, target)
    except OSError as error:
        named = error.filename is not None and str(error.filename).startswith(folder)
        if named or (error.filename is None and error.errno in _FULL):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _check(path: Path) -> None:
    """Raise an OSError if a path names a folder, a device, or a protected file."""
    if path.exists() and not path.is_file():
        raise OSError(f"cannot write {path}: it is not a regular file")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_writable(*paths: str | Path, read: Iterable[str | Path] = ()) -> None:
    """Check, before the work, that files can be written in folders that may not exist.

    Nothing is left behind. Files of ``read`` are inputs and must not be overwritten.
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
    try:  # permissions do not tell: no process can create files in /proc
        with TemporaryDirectory(dir=held):
            pass
    except OSError as error:
        raise OSError(
            f"cannot write to {folder}: {held} takes no new files "
            f"({error.strerror}); choose another place"
        ) from None

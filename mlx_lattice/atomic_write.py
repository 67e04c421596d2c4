"""Write files atomically: a failed write leaves the old file and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a draft of ``path``, which replaces ``path`` when the block ends.

    The draft has the same name and is in a temporary folder beside ``path``. Other
    files that the block writes to that folder replace their namesakes too, before
    ``path`` itself. The block must close them. If it raises, the drafts are removed
    and the old files stay. A symbolic link is replaced, not followed.

    Args:
        path: the file; its folder must exist.

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

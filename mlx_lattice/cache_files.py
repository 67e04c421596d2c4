"""The cache folder on disk: measured choices, results of proofs, compiled kernels."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import settings
from .checks import LatticeWarning

try:
    import fcntl
except ImportError:  # a system without it
    fcntl = None


@contextmanager
def cache(folder: str | os.PathLike) -> Iterator[None]:
    """Use another cache folder inside the block.

    The cache holds measured choices, the results of proofs and compiled CUDA kernels.
    The environment variable MLX_LATTICE_CACHE does the same for a whole process.

    Examples:
        >>> with ml.cache("kernels"):
        ...     ml.backend_info().cache
        'kernels/routes.json'
    """
    with settings.block(cache=Path(folder).expanduser()):
        yield


def is_set(name: str, default: bool = False) -> bool:
    """Return whether a variable of the environment is 1; ``default`` if it is empty."""
    text = settings.environment[name] or ""
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1; got {text!r}")
    return text == "1" if text else default


def folder() -> Path:
    """Return the cache folder: of the block, the environment or the user."""
    inside = settings.current().cache
    if inside is not None:
        return inside
    if text := settings.environment["MLX_LATTICE_CACHE"]:
        return Path(text).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-lattice"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlx-lattice"


@contextmanager
def alone(name: str = ".lock") -> Iterator[None]:
    """Lock the folder against other processes while a file is rewritten."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        lock = (folder() / name).open("ab")
    except OSError:
        lock = nullcontext()
    with lock as held:
        if fcntl is not None and held is not None:
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX)  # until it is closed
        yield


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by ``atomic_write``, in a folder that need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        draft.write_bytes(data)


class EntryFile:
    """A JSON file of entries by key. A file with another header is ignored."""

    # Entries that could not be written, by file: they last for this process.
    unwritten: dict[Path, dict[str, object]] = {}

    def __init__(
        self, path: Path, header: dict[str, Any], valid: Callable[[object], bool]
    ):
        self.path: Path = path
        self.header: dict[str, Any] = header
        self.valid: Callable[[object], bool] = valid

    def load(self) -> dict[str, object]:
        """Return the entries; warn and return none if the file is unusable."""
        found = {}
        with suppress(OSError):
            file = self.path.stat()
            stamp = file.st_mtime_ns, file.st_ino, file.st_size
            found = _entries(self.path, json.dumps(self.header), self.valid, stamp)
        return {**found, **self.unwritten.get(self.path, {})}

    def add(self, key: str, entry: object) -> None:
        """Merge one entry into the file, beside those of other processes."""
        try:
            with alone():
                entries = {**self.load(), key: entry}
                text = json.dumps({**self.header, "entries": entries}, indent=1)
                write_whole(self.path, text.encode())
        except OSError as error:
            if self.path not in self.unwritten:
                warnings.warn(
                    f"{self.path} cannot be written ({error}): its entries last for "
                    "this process only. Set MLX_LATTICE_CACHE to a folder",
                    LatticeWarning,
                    stacklevel=3,
                )
            self.unwritten.setdefault(self.path, {})[key] = entry


@lru_cache(maxsize=8)
def _entries(path: Path, header: str, valid: Callable, stamp: tuple) -> dict:
    """Return a file's entries, cached by its stamp; warn if it is unusable."""
    wanted = json.loads(header)
    try:
        held = json.loads(path.read_text())
        found = {name: held.get(name) for name in wanted}
        if found != wanted:
            raise ValueError(f"it was written by {found}, not {wanted}")
        if not all(map(valid, held["entries"].values())):
            raise ValueError("an entry has another form")
        return held["entries"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"{path} cannot be read ({error}): it is ignored and written anew",
            LatticeWarning,
            stacklevel=4,
        )
        return {}


_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a draft of ``path``, which replaces ``path`` when the block ends.

    The draft is in a temporary folder beside ``path``. Other files that the block
    writes there replace their namesakes too. If it raises, the old files stay.
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

    Files of ``read`` are inputs and must not be overwritten.
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

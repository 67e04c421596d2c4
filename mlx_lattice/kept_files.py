"""The folder of what is kept on disk (measured choices, compiled kernels)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from . import settings
from .atomic_write import atomic_write

try:
    import fcntl
except ImportError:  # a system without it
    fcntl = None

# What reading entries of JSON that have another form raises.
UNUSABLE = ValueError, KeyError, TypeError, AttributeError, RecursionError


@contextmanager
def cache(folder: str | os.PathLike) -> Iterator[None]:
    """Keep in ``folder`` what is kept on disk, inside the block.

    That is measured choices, what kernels proved to be, and compiled CUDA kernels.

    The environment variable MLX_LATTICE_CACHE does the same for a whole process.
    """
    token = settings.cache.set(Path(folder).expanduser())
    try:
        yield
    finally:
        settings.cache.reset(token)


def cache_block() -> Path | None:
    """Return the folder that a block names, or None."""
    return settings.cache.get()


def is_set(name: str, default: bool = False) -> bool:
    """Return whether a variable of the environment is 1; it must be 0, 1 or empty.

    Empty or absent it is ``default``.
    """
    text = settings.reader(name)() or ""
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1; got {text!r}")
    return text == "1" if text else default


def folder() -> Path:
    """Return the folder: a block's, else the environment's, else the user's."""
    inside = settings.cache.get()
    if inside is not None:
        return inside
    if text := os.environ.get("MLX_LATTICE_CACHE"):
        return Path(text).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-lattice"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlx-lattice"


@contextmanager
def alone() -> Iterator[None]:
    """Keep other processes out while a file of the folder is read and written anew.

    Where it has no locks, or cannot be written to, nobody is kept out.
    """
    try:
        folder().mkdir(parents=True, exist_ok=True)
        lock = (folder() / ".lock").open("ab")
    except OSError:
        lock = nullcontext()
    with lock as held:
        if fcntl is not None and held is not None:
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX)  # until it is closed
        yield


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by ``atomic_write``, in a folder that need not exist.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        draft.write_bytes(data)

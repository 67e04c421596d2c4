"""Processes that ended while a kernel was tried: on Metal a GPU's fault ends them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import kept_files


@contextmanager
def of(results: Path, key: str) -> Iterator[int]:
    """Say on disk, inside the block, that this process tries a kernel.

    Args:
        results: the file of what kernels of the machine proved to be.
        key: the kernel's.

    Yields:
        How many processes, one after another, ended inside such a block before. One may
        have been killed for another reason; two were not.
    """
    path = results.with_suffix(".trying.json")
    host, pid, ended = _read(path).get(key, (platform.node(), None, 0))
    ended += pid is not None and host == platform.node() and not _runs(pid)
    _write(path, {**_read(path), key: (platform.node(), os.getpid(), ended)})
    try:
        yield ended
    finally:
        _write(path, {k: v for k, v in _read(path).items() if k != key})


def _runs(pid: int) -> bool:
    """Whether a process of this machine is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def _read(path: Path) -> dict[str, tuple[str, int | None, int]]:
    """Return (host, process, how many ended before) by key; none of a broken file."""
    try:
        held = json.loads(path.read_text())
        return {key: (str(h), int(pid), int(n)) for key, (h, pid, n) in held.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, tried: dict[str, tuple[str, int | None, int]]) -> None:
    """Write the file, or remove it where nothing is tried; the results warn instead."""
    with suppress(OSError):
        if tried:
            kept_files.write_whole(path, json.dumps(tried).encode())
        else:
            path.unlink(missing_ok=True)

"""Errors of files, names from files in messages, and checks before reading."""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHOWN = 120

# How HTML pages and a server's XML errors begin, and text that no binary format is.
_PAGE = re.compile(
    rb"(?i)<(!--|[!?]?(doctype|xml|html|head|body|title|script|error)\b)"
)
_TEXT = re.compile(rb"[\t\n\r -~]+")


class FileError(ValueError):
    """A file that does not have the format that its reader expects.

    The message shows no control characters: a name in a file cannot steer a terminal.
    """

    def __init__(self, message: str):
        super().__init__(
            "".join(
                c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message
            )
        )


class PointFileError(FileError):
    """A point-cloud file that contradicts its format or its header."""

    def __init__(self, message: str):
        longest = 1000  # names in a file may have any length
        more = f"... ({len(message):,} letters)" * (len(message) > longest)
        super().__init__(message[:longest] + more)


def short(path: Path, promised: object, found: object) -> PointFileError:
    """Return the error of a file that holds less than its header promises."""
    return PointFileError(
        f"{path.name} is truncated or its header is wrong: the header promises "
        f"{promised}, the file has {found}"
    )


class CheckpointError(FileError):
    """A checkpoint that is broken, refused, or not of the library that was named."""


def shown(name: str) -> str:
    """Return a name from a file without control characters, shortened if it is long."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= SHOWN else f"{name[:SHOWN]}... ({len(name):,} letters)"


def listed(names: Iterable[str], none: str = "nothing") -> str:
    """Return names from a file as a list in a sentence: at most eight of them."""
    names = list(names)
    more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    return ", ".join(map(shown, names[:8])) + more or none


def check_file(path: Path, error: type[FileError], *, binary: bool = False) -> None:
    """Raise unless a path names a regular file that is not a failed download."""
    try:
        mode = path.stat().st_mode
    except OSError as reason:
        if reason.errno != errno.ENAMETOOLONG:
            raise
        raise error(
            f"{shown(path.name)}: the path has {len(str(path)):,} characters, more "
            "than the file system allows"
        ) from None
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or a device"
        raise error(f"{path.name} is a {kind}, expected a regular file")
    with path.open("rb") as stream:
        start = stream.read(1024)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"version ") and b"\noid sha256:" in text:
        raise error(
            f"{path.name} is a Git LFS pointer, not the file that it stands for: fetch "
            "the file with git lfs pull, or download it from its own page"
        )
    begins = repr(shown(text[:SHOWN].decode("utf-8", "replace")))
    if _PAGE.match(text):
        raise error(
            f"{path.name} is a web page (HTML or XML), as servers send in place of a "
            f"file: it begins with {begins}. Download the file again"
        )
    if not binary:
        return
    if not start:
        raise error(f"{path.name} is empty (0 bytes): copy or download it again")
    if _TEXT.fullmatch(start):
        raise error(
            f"{path.name} holds text, and its format is binary: it begins with "
            f"{begins}. Download the file again"
        )


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise a CheckpointError if there is none."""
    path = Path(path)
    check_file(path, CheckpointError)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content

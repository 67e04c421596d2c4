"""Safetensors files; and what all files share: errors, names in messages, checks."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache_files import atomic_write

SHOWN = 120

# How HTML pages and a server's XML errors begin, and text that no binary format is.
_PAGE = re.compile(
    rb"(?i)<(!--|[!?]?(doctype|xml|html|head|body|title|script|error)\b)"
)
_TEXT = re.compile(rb"[\t\n\r -~]+")


class FileError(ValueError):
    """A file that does not have the format that its reader expects."""

    def __init__(self, message: str):
        super().__init__(
            "".join(
                c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message
            )
        )


class PointFileError(FileError):
    """Raised if a point-cloud file contradicts its format or its header."""

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
    """Raised if a checkpoint is broken, refused, or of another library."""


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
    mode = path.stat().st_mode
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


_NAMED = {"BOOL": mx.bool_, "C64": mx.complex64, "BF16": mx.bfloat16}
_NAMED |= {f"F{n}": getattr(mx, f"float{n}") for n in (64, 32, 16)}
_NAMED |= {f"I{n}": getattr(mx, f"int{n}") for n in (64, 32, 16, 8)}
_NAMED |= {f"U{n}": getattr(mx, f"uint{n}") for n in (64, 32, 16, 8)}
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
HEADER_BYTES = 2**24
LIMIT = 2**31  # extents of MLX's arrays are 32-bit


def elements(data: bytes, dtype: mx.Dtype) -> mx.array:
    """Return little-endian elements as an array of one axis; doubles as float32."""
    if not data:
        return mx.zeros((0,), _without_doubles(dtype))
    flat = mx.array(memoryview(data).cast(_UNSIGNED[dtype.size]))
    if dtype == mx.bool_:
        return flat != 0
    # On the CPU: no other device has float64.
    flat = mx.view(flat, dtype, stream=mx.cpu)
    return flat.astype(_without_doubles(dtype), stream=mx.cpu)


def _without_doubles(dtype: mx.Dtype) -> mx.Dtype:
    return mx.float32 if dtype == mx.float64 else dtype


class State:
    """The tensors of a checkpoint by name."""

    from_file: bool = True
    library: str | None = None
    note: str = ""
    tensors: dict[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def sketch(self, name: str) -> mx.array:
        """Return a lazy array of the tensor's shape and dtype, not its values."""
        tensor = self.tensors[name]
        return mx.zeros(tensor.shape, _without_doubles(tensor.dtype))

    def read(self, name: str) -> mx.array:
        """Return a tensor; call this once for each tensor. Doubles become float32."""
        raise NotImplementedError


class ArrayState(State):
    """A state of arrays that are in memory."""

    from_file = False

    def __init__(self, arrays: Mapping[str, mx.array]):
        self.tensors: dict[str, Any] = dict(arrays)
        for name, array in self.tensors.items():
            if not isinstance(array, mx.array):
                raise TypeError(
                    f"{shown(str(name))} must be an mlx array; got "
                    f"{type(array).__name__}"
                )

    def sketch(self, name: str) -> mx.array:
        """Return the array."""
        return self.tensors[name]

    read = sketch


class SafetensorsState(State):
    """The arrays of a safetensors file, each read when it is used."""

    metadata: dict[str, str]

    def __init__(self, path: Path):
        self.metadata, self.tensors = _check(path)
        if all(entry.dtype != mx.float64 for entry in self.tensors.values()):
            try:
                self.tensors = mx.load(str(path))
            except (RuntimeError, ValueError) as error:
                raise _broken(path, str(error)) from None
        self.library: str | None = self.metadata.get("library")

    def read(self, name: str) -> mx.array:
        """Return an array and drop it here, so that its memory is the caller's."""
        array, self.tensors[name] = self.tensors[name], self.sketch(name)
        return array.read() if isinstance(array, _Entry) else array


class _Entry(NamedTuple):
    """A tensor of a file."""

    path: Path
    at: int
    dtype: mx.Dtype
    shape: tuple[int, ...]

    def read(self) -> mx.array:
        size = prod(self.shape) * self.dtype.size
        with self.path.open("rb") as stream:
            stream.seek(self.at)
            data = stream.read(size)
        if len(data) < size:
            raise _broken(self.path, "it became shorter since its header was read")
        return elements(data, self.dtype).reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, mx.array]:
    """Return the arrays of a safetensors file by name; doubles become float32."""
    state = SafetensorsState(path)
    return {name: state.read(name) for name in state}


def write_safetensors(
    path: Path,
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically; if that fails, the old one stays."""
    with atomic_write(path) as draft:
        try:
            mx.save_safetensors(str(draft), dict(arrays), dict(metadata or {}))
        except RuntimeError as error:
            raise OSError(f"{path}: {error}") from None
        mx.clear_cache()


def _check(path: Path) -> tuple[dict[str, str], dict[str, _Entry]]:
    """Return the metadata and the tensors of a file."""
    check_file(path, CheckpointError, binary=True)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = stream.seek(0, 2) - 8 - length
        if size < 0:
            raise _broken(path, "it ends within its header")
        if length > HEADER_BYTES:
            raise _broken(
                path, f"its header has {length:,} bytes, at most 16 MiB is read"
            )
        stream.seek(8)
        try:
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object of names, each once")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise _broken(path, "its __metadata__ is not an object of strings")
    ranges = sorted((*_range(path, *each, size), each[0]) for each in header.items())
    for (_, end, name), (start, _, other) in zip(ranges, ranges[1:], strict=False):
        if start < end:
            raise _broken(path, f"{shown(name)} and {shown(other)} overlap")
    entries = {}
    for start, _, name in ranges:
        dtype, shape = _NAMED[header[name]["dtype"]], tuple(header[name]["shape"])
        entries[name] = _Entry(path, 8 + length + start, dtype, shape)
    return metadata, entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a dict; refuse repeated names, which MLX might read differently."""
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name stands twice")
    return names


def _range(path: Path, name: str, entry: object, size: int) -> tuple[int, int]:
    """Return the bytes of a tensor, from the end of the header on."""
    what = entry if isinstance(entry, dict) else {}
    shape, offsets = what.get("shape"), what.get("data_offsets")
    dtype = what.get("dtype")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise _broken(path, f"{shown(name)} has no shape or no data_offsets")
    if not isinstance(dtype, str) or dtype not in _NAMED:
        raise CheckpointError(
            f"{path.name}: {shown(name)} is {shown(str(dtype))}, which MLX does not "
            f"have; expected one of {', '.join(_NAMED)}"
        )
    if len(shape) > 32 or not all(0 <= n < LIMIT for n in shape):
        raise _broken(path, f"{shown(name)} has the shape {shown(str(shape))}")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size:
        raise _broken(
            path, f"{shown(name)} stands at {shown(str(offsets))} of {size:,} bytes"
        )
    start, end = offsets
    if prod(shape) * _NAMED[dtype].size != end - start:
        actual = f"{end - start:,} bytes"
        raise _broken(path, f"{shown(name)} of {shape} {dtype} has {actual}")
    return start, end


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is not a safetensors file: {why}")

"""Safetensors files: the header is checked before anything is read; written in parts.

MLX reads the arrays, but of files with doubles, which it refuses. This check refuses
what MLX accepts: two tensors on the same bytes, extents below zero, float8 as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ..atomic_write import atomic_write
from .errors import CheckpointError, check_file, shown
from .raw import elements, kept

# Bytes of an element, for the dtypes that MLX has.
ITEM = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
DTYPES = {
    mx.float64: "F64",
    mx.complex64: "C64",
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int64: "I64",
    mx.int32: "I32",
    mx.int16: "I16",
    mx.int8: "I8",
    mx.uint64: "U64",
    mx.uint32: "U32",
    mx.uint16: "U16",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}
_NAMED = {name: dtype for dtype, name in DTYPES.items()}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
HEADER_BYTES = 2**24
LIMIT = 2**31  # extents of MLX's arrays are 32-bit


class SafetensorsState:
    """The arrays of a safetensors file, each read when it is used; doubles as float32.

    Attributes:
        metadata: what the file's header says of it.

    Raises:
        CheckpointError: the header is broken, or does not fit the file.
    """

    from_file, note = True, ""

    def __init__(self, path: Path):
        self.metadata, entries = _check(path)
        self._arrays: dict[str, mx.array | _Entry] = entries
        if all(entry.dtype != mx.float64 for entry in entries.values()):
            try:
                self._arrays = mx.load(str(path))
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{path.name} is no safetensors file: {error}"
                ) from None
        self.library = self.metadata.get("library")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def sketch(self, name: str) -> mx.array:
        """Return an array of the tensor's shape and dtype, which is not to be read."""
        array = self._arrays[name]
        return mx.zeros(array.shape, kept(array.dtype))

    def read(self, name: str) -> mx.array:
        """Return an array, and let go of it here: its memory is the caller's."""
        array, self._arrays[name] = self._arrays[name], self.sketch(name)
        return array.read() if isinstance(array, _Entry) else array


class _Entry(NamedTuple):
    """A tensor of a file: what it is, and where its bytes stand."""

    path: Path
    at: int
    dtype: mx.Dtype
    shape: tuple[int, ...]

    def read(self) -> mx.array:
        """Return the tensor."""
        size = prod(self.shape) * self.dtype.size
        with self.path.open("rb") as stream:
            stream.seek(self.at)
            data = stream.read(size)
        if len(data) < size:
            raise _broken(self.path, "it became shorter since its header was read")
        return elements(data, self.dtype).reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, mx.array]:
    """Return the arrays of a safetensors file by name, as ``SafetensorsState`` does."""
    state = SafetensorsState(path)
    return {name: state.read(name) for name in state}


def write_safetensors(
    path: Path,
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
    values: Iterable[tuple[str, mx.array]] | None = None,
) -> None:
    """Write a safetensors file atomically, evaluating one array at a time.

    Args:
        path: the file.
        arrays: names and arrays.
        metadata: what the header says; by default only that MLX can read the file.
        values: computes the arrays in the order of ``arrays``, which then gives only
            names, shapes and dtypes. By default ``arrays`` itself.

    Raises:
        OSError: the file cannot be written; the old one stays.
        ValueError: ``values`` and ``arrays`` differ.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    due = [(name, array.shape, array.dtype) for name, array in arrays.items()][::-1]
    with atomic_write(path) as draft, draft.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays.items() if values is None else values:
            expected = due.pop()
            if expected != (name, array.shape, array.dtype):
                raise ValueError(
                    f"{expected} was due; got {name}, {array.shape}, {array.dtype}"
                )
            if array.size:
                # As integers: Python's buffers have no bfloat16.
                bits = _BITS[array.dtype.size]
                flat = mx.contiguous(array, stream=mx.cpu).reshape(-1, stream=mx.cpu)
                file.write(memoryview(mx.view(flat, bits, stream=mx.cpu)))
            mx.clear_cache()
        if due:
            raise ValueError(f"{len(due)} arrays were not written")


def _check(path: Path) -> tuple[dict[str, str], dict[str, _Entry]]:
    """Return the metadata and the tensors of a file.

    Raises:
        CheckpointError: a tensor has not its own bytes, as many as its shape needs.
    """
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
        raise _broken(path, "its header is no JSON object of names, each once")
    ranges = sorted(
        (*_range(path, name, entry, size), name)
        for name, entry in header.items()
        if name != "__metadata__"
    )
    for (_, end, name), (start, _, other) in zip(ranges, ranges[1:], strict=False):
        if start < end:
            raise _broken(path, f"{shown(name)} and {shown(other)} overlap")
    metadata = header.get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise _broken(path, "its __metadata__ is no object of strings")
    return metadata, {
        name: _Entry(
            path,
            8 + length + start,
            _NAMED[header[name]["dtype"]],
            tuple(header[name]["shape"]),
        )
        for start, _, name in ranges
    }


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a dict; refuse repeated names, which MLX might read differently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _range(path: Path, name: str, entry: object, size: int) -> tuple[int, int]:
    """Return the bytes of a tensor, from the end of the header on."""
    what = entry if isinstance(entry, dict) else {}
    shape, offsets = what.get("shape"), what.get("data_offsets")
    dtype = what.get("dtype")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise _broken(path, f"{shown(name)} has no shape or no data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM:
        raise CheckpointError(
            f"{path.name}: {shown(name)} is {shown(str(dtype))}, which MLX does not "
            f"have; expected one of {', '.join(ITEM)}"
        )
    if len(shape) > 32 or not all(0 <= n < LIMIT for n in shape):
        raise _broken(path, f"{shown(name)} has the shape {shown(str(shape))}")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size:
        raise _broken(
            path,
            f"{shown(name)} stands at {shown(str(offsets))} of {size:,} bytes",
        )
    start, end = offsets
    if prod(shape) * ITEM[dtype] != end - start:
        raise _broken(
            path,
            f"{shown(name)} of {shape} {dtype} has {end - start:,} bytes",
        )
    return start, end


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is no safetensors file: {why}")

"""Safetensors files, and the base of the readers of checkpoints.

A header is checked before any array is read. MLX reads the arrays, except in files
with doubles, which MLX refuses. MLX would accept two tensors on the same bytes, extents
below zero and float8 as bytes; the check here refuses them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ..kept_files import atomic_write
from .errors import CheckpointError, check_file, shown

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
    """The tensors of a checkpoint by name.

    Attributes:
        tensors: name to array, or to a description with ``shape`` and ``dtype``.
        from_file: whether reading takes memory.
        library: the library that the file names, or None.
        note: which entry of the file holds the tensors, or "".
    """

    from_file, library, note = True, None, ""
    tensors: dict

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
        self.tensors = dict(arrays)
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
    """The arrays of a safetensors file, each read when it is used.

    Attributes:
        metadata: the strings in the file's header.

    Raises:
        CheckpointError: the header is broken, or does not fit the file.
    """

    def __init__(self, path: Path):
        self.metadata, self.tensors = _check(path)
        if all(entry.dtype != mx.float64 for entry in self.tensors.values()):
            try:
                self.tensors = mx.load(str(path))
            except (RuntimeError, ValueError) as error:
                raise _broken(path, str(error)) from None
        self.library = self.metadata.get("library")

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
        raise _broken(path, "its __metadata__ is not an object of strings")
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

"""The header of a safetensors file, checked before anything is read.

MLX reads the arrays. This check refuses what MLX accepts: two tensors on the same
bytes, extents below zero, float8 as bytes.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import mlx.core as mx

from .errors import CheckpointError, shown

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
HEADER_BYTES = 2**24
LIMIT = 2**31  # extents of MLX's arrays are 32-bit


def read_safetensors(path: Path) -> dict[str, mx.array]:
    """Return the arrays of a safetensors file by name; doubles become float32.

    Raises:
        CheckpointError: the header is broken, or does not fit the file.
    """
    _check(path)
    try:
        state = mx.load(str(path))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error}") from None
    single = {name for name, array in state.items() if array.dtype == mx.float64}
    return {
        name: array.astype(mx.float32, stream=mx.cpu) if name in single else array
        for name, array in state.items()
    }


def _check(path: Path) -> None:
    """Raise unless each tensor has its own bytes, as many as its shape needs."""
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

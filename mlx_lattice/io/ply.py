"""Write points as PLY, binary and little-endian; NumPy alone is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..atomic_write import atomic_write

# The format's names of NumPy's types.
_TYPES = {
    "f4": "float",
    "f8": "double",
    "u1": "uchar",
    "u2": "ushort",
    "u4": "uint",
    "i1": "char",
    "i2": "short",
    "i4": "int",
}


def write_ply(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write the columns of a cloud: x, y, z and any others, each of shape (P,).

    Args:
        path: of the file.
        columns: name to numbers; 64-bit integers are none of the format's.

    Raises:
        ValueError: columns have different lengths, or a type that PLY does not have.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"columns must be (P,) with one P; got {sorted(shapes)}")
    kinds = {name: array.dtype.str[1:] for name, array in arrays.items()}
    if unknown := [name for name, kind in kinds.items() if kind not in _TYPES]:
        raise ValueError(
            f"{unknown[0]} is {arrays[unknown[0]].dtype}, which PLY does not have; "
            f"expected one of {', '.join(_TYPES.values())}"
        )
    (count,) = next(iter(shapes))
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    header += [f"property {_TYPES[kind]} {name}" for name, kind in kinds.items()]
    table = np.empty(count, [(name, "<" + kind) for name, kind in kinds.items()])
    for name, array in arrays.items():
        table[name] = array
    with atomic_write(path) as draft, draft.open("wb") as stream:
        stream.write("\n".join([*header, "end_header", ""]).encode("ascii"))
        stream.write(table.tobytes())

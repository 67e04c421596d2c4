"""An assembler of pickles and of PyTorch's zips, for files that lie."""

import io
import pickle
import struct
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_lattice.io import CheckpointError, load_state


class Name(str):
    """A global of the pickle: "module name"."""


class Call(tuple):
    """(callable, argument, ...)."""


class Storage(tuple):
    """(class, key, length)."""


REBUILD, DICT = Name("torch._utils _rebuild_tensor_v2"), Name("collections OrderedDict")
FLOATS = np.arange(12, dtype="<f4").tobytes()


def code(value) -> bytes:
    """The pickle instructions that push a value; bytes are instructions already."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Name):
        return b"c" + value.replace(" ", "\n").encode() + b"\n"
    if isinstance(value, Call):
        return code(value[0]) + code(tuple(value[1:])) + b"R"
    if isinstance(value, Storage):
        kind, key, length = value
        return code(("storage", Name(f"torch {kind}"), key, "cpu", length)) + b"Q"
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        digits = pickle.encode_long(value)
        return b"\x8a" + bytes([len(digits)]) + digits
    if isinstance(value, tuple):
        return b"(" + b"".join(code(item) for item in value) + b"t"
    assert isinstance(value, dict)
    items = b"".join(code(key) + code(item) for key, item in value.items())
    return b"}(" + items + b"u"


def tensor(shape, strides, offset=0, *, kind="FloatStorage", key="0", length=12):
    storage = Storage((kind, key, length))
    return Call((REBUILD, storage, offset, shape, strides, False, Call((DICT,))))


def program(value) -> bytes:
    return b"\x80\x02" + code(value) + b"."


def archive(records: dict[str, bytes], compression=zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as written:
        for name, content in records.items():
            written.writestr(name, content)
    return stream.getvalue()


def checkpoint(value, **data: bytes) -> bytes:
    """A file of a pickled value, and records data/0 and so on: ``_0=bytes``."""
    records = {f"a/data/{key[1:]}": content for key, content in data.items()}
    content = value if isinstance(value, bytes) else program(value)
    return archive({"a/data.pkl": content} | (records or {"a/data/0": FLOATS}))


def old_format(value, keys=("0",), data: bytes = FLOATS) -> bytes:
    """A file as PyTorch wrote before 1.6: four pickles, keys, then storages."""
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    content = value if isinstance(value, bytes) else program(value)
    storages = struct.pack("<q", len(data) // 4) + data
    return magic + program({}) + content + pickle.dumps(list(keys), 2) + storages


def load(folder: Path, content: bytes, key=None) -> dict[str, mx.array]:
    path = folder / "a.pt"
    path.write_bytes(content)
    return load_state(path, key)


def refuse(folder: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(folder, content)

"""PyTorch's checkpoints, read without PyTorch and without executing their code.

A ``.pt`` file is a zip: a pickle says which tensors there are, and one record of raw
bytes holds each storage. A pickle is a program. This one is interpreted by a machine
whose instructions build dicts, lists, tuples, numbers, strings and descriptions of
tensors; it has none that imports or calls. Sizes are not trusted: each is checked
against the records of the zip before anything is allocated.
"""

from __future__ import annotations

import pickletools
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from .archive import Archive
from .errors import CheckpointError, shown
from .raw import elements, kept

# The only names that a pickle may mention, and the dtypes of storages.
_STORAGES = {
    "torch.DoubleStorage": mx.float64,
    "torch.FloatStorage": mx.float32,
    "torch.HalfStorage": mx.float16,
    "torch.BFloat16Storage": mx.bfloat16,
    "torch.ComplexFloatStorage": mx.complex64,
    "torch.LongStorage": mx.int64,
    "torch.IntStorage": mx.int32,
    "torch.ShortStorage": mx.int16,
    "torch.CharStorage": mx.int8,
    "torch.ByteStorage": mx.uint8,
    "torch.BoolStorage": mx.bool_,
}
_DICT = "collections.OrderedDict"
_REBUILD = "torch._utils._rebuild_tensor_v2"
_KNOWN = {*_STORAGES, _DICT, _REBUILD}

# Entries in which training scripts save the weights, beside epoch and optimiser.
_ENTRIES = ("state_dict", "model_state_dict", "model_state", "model", "net", "network")

_LIMIT = 2**31  # extents and lengths of MLX's arrays are 32-bit
# A million instructions take seconds: enough for tens of thousands of tensors.
_PICKLE_BYTES = 2**24
# Tensors may share storage, as tied weights do: at most to this multiple of the file.
_EXPANSION = 64


class PyTorchState:
    """The tensors of a file that ``torch.save`` wrote, read one at a time.

    Doubles become float32, as no GPU of MLX has them.

    Args:
        stream: the file, which stays open as long as tensors are read.
        path: its name.
        key: the entry that holds the state dict, where the file holds several.

    Raises:
        CheckpointError: the file is no such zip, is broken, names anything but
            tensors, or has no entry ``key``.
    """

    from_file, library = True, None

    def __init__(self, stream: BinaryIO, path: Path, key: str | None = None):
        self._archive = archive = Archive(stream, path)
        program = archive.read(f"{archive.root}/data.pkl", _PICKLE_BYTES)
        self._tensors = _state_dict(_Machine(archive).run(program), key, path)
        tensors = self._tensors.values()
        total = sum(prod(t.shape) * t.storage.dtype.size for t in tensors)
        if total > _EXPANSION * archive.length:
            raise archive.error(
                f"is {archive.length:,} bytes and holds tensors of {total:,}, which "
                "share storage; more than 64 times the file is not read"
            )
        # Tensors that share a storage follow one another: the last one is kept.
        self._held: tuple[_Storage, mx.array] | None = None
        self._left = Counter(t.storage for t in tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def sketch(self, name: str) -> mx.array:
        """Return an array of the tensor's shape and dtype, which is not to be read."""
        tensor = self._tensors[name]
        return mx.zeros(tensor.shape, kept(tensor.storage.dtype))

    def read(self, name: str) -> mx.array:
        """Return a tensor, read from the file."""
        tensor = self._tensors[name]
        storage = tensor.storage
        if 0 in tensor.shape:
            return mx.zeros(tensor.shape, kept(storage.dtype))
        if self._held is None or self._held[0] != storage:
            self._held = None  # first, so that two are never there
            self._held = (
                storage,
                elements(self._archive.read(storage.record), storage.dtype),
            )
        flat = self._held[1]
        self._left[storage] -= 1
        if not self._left[storage]:
            self._held = None
        # The stride of an extent of 1 is never used, so any value is legal in a file.
        strides = [
            1 if n == 1 else s
            for n, s in zip(tensor.shape, tensor.strides, strict=True)
        ]
        return mx.as_strided(flat, tensor.shape, strides, tensor.offset)


@dataclass(frozen=True)
class _Name:
    """A name that the pickle mentions; one of ``_KNOWN``."""

    name: str


@dataclass(frozen=True)
class _Storage:
    record: str
    dtype: mx.Dtype
    length: int


@dataclass(frozen=True, eq=False)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Machine:
    """Interprets the pickle of a state dict, and refuses any other."""

    def __init__(self, archive: Archive):
        self.archive = archive
        self.error = archive.error
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self, program: bytes) -> object:
        """Return what the program builds."""
        try:
            for code, argument, _ in pickletools.genops(program):
                self.step(code.name, argument)
            (result,) = self.stack
        except CheckpointError:
            raise
        except (ValueError, TypeError, LookupError, OverflowError, struct.error) as e:
            raise self.error(f"has a corrupt data.pkl: {e}") from None
        return result

    def step(self, code: str, argument) -> None:
        """Carry out one instruction."""
        stack = self.stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _LITERALS:
            stack.append(argument)
        elif code in _CONTAINERS:
            stack.append(_CONTAINERS[code]())
        elif code == "MARK":
            self.marks.append(len(stack))
        elif code in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(reversed([stack.pop() for _ in range(int(code[-1]))])))
        elif code == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif code in ("SETITEM", "SETITEMS"):
            if code == "SETITEM":
                self.marks.append(len(stack) - 2)
            self.set_items(self.since_mark())
        elif code in ("APPEND", "APPENDS"):
            if code == "APPEND":
                self.marks.append(len(stack) - 1)
            items = self.since_mark()
            self.of(list, stack[-1]).extend(items)
        elif code in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif code == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif code == "GLOBAL":
            stack.append(self.name(argument.replace(" ", ".", 1)))
        elif code == "STACK_GLOBAL":
            name, module = self.of(str, stack.pop()), self.of(str, stack.pop())
            stack.append(self.name(f"{module}.{name}"))
        elif code == "BINPERSID":
            stack.append(self.storage(stack.pop()))
        elif code == "REDUCE":
            arguments = self.of(tuple, stack.pop())
            stack.append(self.build(self.of(_Name, stack.pop()).name, arguments))
        elif code == "BUILD":
            stack.pop()  # a state dict's _metadata: versions of modules
            self.of(dict, stack[-1])
        elif code not in ("PROTO", "FRAME", "STOP"):
            raise self.error(
                f"uses the pickle instruction {code}, which no state dict needs"
            )

    def since_mark(self) -> list:
        """Pop all that was pushed since the last mark."""
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def of(self, kind: type, value):
        """Return ``value``, which must be of ``kind``."""
        if type(value) is not kind:
            raise ValueError(f"a {kind.__name__} was due, not {_kind(value)}")
        return value

    def set_items(self, flat: list) -> None:
        """Add keys and values, which alternate, to the dict on top."""
        target = self.of(dict, self.stack[-1])
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # Large integers can be chosen to collide in the dict's hash.
            small = type(key) is int and -_LIMIT <= key < _LIMIT
            if type(key) is not str and not small:
                raise ValueError(f"a key must be str or int32, not {_kind(key)}")
            target[key] = value

    def name(self, name: str) -> _Name:
        """Return a name of the pickle, or raise unless it is one of ``_KNOWN``."""
        if name not in _KNOWN:
            raise self.error(
                f"is refused: it asks for {shown(name)!r}, and only tensors in dicts, "
                "lists and tuples are read, since anything else can run code. Save "
                "the state_dict alone, or as safetensors"
            )
        return _Name(name)

    def build(self, name: str, arguments: tuple) -> object:
        """Return what a call of a known name builds from its arguments."""
        if name == _REBUILD:
            return self.tensor(*arguments)
        if name == _DICT and not arguments:
            return {}
        raise self.error(f"calls {name!r} with arguments, which no state dict does")

    def storage(self, description: object) -> _Storage:
        """Check a storage against its record."""
        kind, name, key, _, length = self.of(tuple, description)
        name, key = self.of(_Name, name).name, self.of(str, key)
        length = self.of(int, length)
        if kind != "storage" or name not in _STORAGES:
            raise ValueError("a storage was due")
        record, dtype = f"{self.archive.root}/data/{key}", _STORAGES[name]
        if not (key.isascii() and key.isdigit()) or record not in self.archive.records:
            raise self.error(f"has no record for its storage {shown(key)!r}")
        size = self.archive.records[record][1].file_size
        if not 0 <= length < _LIMIT or length * dtype.size != size:
            raise self.error(
                f"promises {length} elements of {dtype} in storage {key}, whose record "
                f"has {size} bytes"
            )
        return _Storage(record, dtype, length)

    def tensor(self, storage, offset, shape, strides, *more) -> _Tensor:
        """Check a view of a storage against the storage's length."""
        if any(more[2:]):  # after requires_grad and hooks
            raise self.error(
                "has a conjugate or negated view of a tensor, which is not read; save "
                "it after .resolve_conj().resolve_neg()"
            )
        storage, offset = self.of(_Storage, storage), self.of(int, offset)
        shape, strides = self.of(tuple, shape), self.of(tuple, strides)
        for value in (*shape, *strides):
            self.of(int, value)
        sound = len(shape) == len(strides) <= 32
        sound = sound and all(0 <= n < _LIMIT for n in shape)
        sound = sound and min(offset, *strides, 0) >= 0
        count = prod(shape) if sound else 0
        if sound and count:
            steps = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            # More elements than the storage has would take memory without bound.
            sound = count <= storage.length and offset + steps < storage.length
        if not sound:
            raise self.error(
                f"has a tensor of shape {shown(str(shape))}, strides "
                f"{shown(str(strides))} and offset {offset} in a storage of "
                f"{storage.length} elements: it does not fit"
            )
        return _Tensor(storage, offset, shape, strides)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"} | {
    "SHORT_BINUNICODE"
}


def _kind(value: object) -> str:
    """Return the name of a value's type, for messages."""
    return type(value).__name__.removeprefix("_").lower()


def _state_dict(tree: object, key: str | None, path: Path) -> dict[str, _Tensor]:
    """Find the dict of tensors in what the file holds."""
    if type(tree) is not dict:
        raise CheckpointError(
            f"{path.name} holds a {type(tree).__name__}, expected a dict of tensors"
        )
    if key is None:
        found = [tree] if _tensors(tree) else []
        found = found or [tree[name] for name in _ENTRIES if _tensors(tree.get(name))]
    else:
        found = [tree[key]] if _tensors(tree.get(key)) else []
    if len(found) != 1:
        dicts = [shown(repr(name)) for name, held in tree.items() if _tensors(held)]
        asked = f"has no tensors under {key!r}" if key else "has no single state dict"
        raise CheckpointError(
            f"{path.name} {asked}; entries that hold tensors: "
            f"{', '.join(dicts) or 'none'}"
        )
    return _tensors(found[0])


def _tensors(entry: object) -> dict[str, _Tensor]:
    """Return the tensors of a dict, without other values in it."""
    if type(entry) is not dict:
        return {}
    return {str(name): t for name, t in entry.items() if isinstance(t, _Tensor)}

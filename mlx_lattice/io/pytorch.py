"""PyTorch's checkpoints, read without PyTorch and without executing their code.

A file is a pickle, which says which tensors there are, and the bytes of each storage:
a zip, or pickles and storages one after another, as PyTorch wrote before 1.6 and some
trainers still do. A pickle is a program. This one is interpreted by a machine whose
instructions build dicts, lists, tuples, numbers, strings and descriptions of tensors;
none of them imports or calls. Whatever else a pickle would build stays a name.
Sizes are not trusted: each is checked against the file before anything is allocated.
"""

from __future__ import annotations

import io
import mmap
import pickletools
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from .safetensors import CheckpointError, State, elements, listed, shown

# The dtypes of storages; tensors of any other stay names.
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
_OTHER_SIZES = {"torch.ComplexDoubleStorage": 16, "torch.QInt32Storage": 4}  # else 1
_ORDERED = "collections.OrderedDict"
_TENSORS = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"

# Entries in which training scripts save the weights, beside epoch and optimiser.
_ENTRIES = {"state_dict", "model_state_dict", "model_state", "model", "net", "network"}
_ENTRIES |= {"base_model", "module", "params", "weights"}
_DEPTH = 6  # of dicts and lists in which dicts of tensors are looked for

_LIMIT = 2**31  # extents and lengths of MLX's arrays are 32-bit
# Tensors may share storage, as tied weights do: at most to this multiple of the file.
_EXPANSION = 64
# The first pickle of the format before PyTorch 1.6: a number.
_LEGACY = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL
)
# What `zipfile` raises if a zip is truncated, corrupt, or of a newer format.
_ZIP_ERRORS = (zipfile.BadZipFile, ValueError, OSError, RuntimeError, struct.error)


class Archive:
    """A file of ``torch.save``: its pickle, and a record of bytes for each storage."""

    def __init__(self, stream: BinaryIO, path: Path):
        self.path: Path = path
        self.stream: BinaryIO = stream
        self.data: mmap.mmap = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.length: int = len(self.data)
        self.records: dict[str, tuple[int, int, int]] = {}
        start = self.data[:512]
        self.legacy: bool = bool(_LEGACY.match(start))
        self.prefix: str = ""
        if self.legacy:
            return
        if not start.startswith(b"PK\x03\x04"):
            raise self.error(
                "is not a PyTorch checkpoint, which is a zip (or two pickles before "
                "1.6); other pickles can run code, and are not read"
            )
        try:
            entries = zipfile.ZipFile(self.data).infolist()
        except _ZIP_ERRORS as error:
            raise self.error(f"is not a complete zip: {error}") from None
        names = [entry.filename for entry in entries]
        if any(name.endswith("/constants.pkl") for name in names):
            raise self.error("is a TorchScript program; save its state_dict instead")
        roots = [n[:-8] for n in names if n.endswith("/data.pkl") and n.count("/") == 1]
        if len(roots) != 1:
            raise self.error("has no record data.pkl: it is a zip, but not PyTorch's")
        last = 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            name, start = entry.filename, self._place(entry)
            if entry.header_offset < last:
                raise self.error(f"has overlapping records, {shown(name)!r} one")
            if name in self.records:
                raise self.error(f"has two records {shown(name)!r}")
            self.records[name] = start, entry.file_size, entry.CRC
            last = start + entry.file_size
        self.prefix = f"{roots[0]}data/"
        order = f"{roots[0]}byteorder"
        if order in self.records and self.read(order) != b"little":
            raise self.error("was saved on a big-endian machine, which is not read")

    def program(self) -> BinaryIO:
        """Return a stream of the file's pickles."""
        if self.legacy:
            self.data.seek(0)
            return self.data
        return io.BytesIO(self.read(f"{self.prefix[:-5]}data.pkl"))

    def add_storages(self, at: int, sizes: dict[str, tuple[int, int]]) -> None:
        """Find the records of the old format's storages, which begin at byte ``at``."""
        for key, (length, size) in sizes.items():
            count = int.from_bytes(self.data[at : at + 8], "little")
            at += 8 + length * size
            if count != length or at > self.length:
                raise self.error(f"is truncated or corrupt at its storage {shown(key)}")
            self.records[key] = at - length * size, length * size, 0

    def _place(self, entry: zipfile.ZipInfo) -> int:
        """Return where a record's bytes begin."""
        name, at = entry.filename, entry.header_offset
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise self.error(f"has a compressed or encrypted record {shown(name)!r}")
        header = self.data[at : at + 30] if at >= 0 else b""
        extra = sum(struct.unpack_from("<HH", header.ljust(30), 26))
        start = at + 30 + extra
        if header[:4] != b"PK\x03\x04" or start + entry.file_size > self.length:
            raise self.error(f"is truncated or corrupt at its record {shown(name)!r}")
        return start

    def read(self, name: str) -> bytes:
        """Return the bytes of a record; raise if its checksum is another."""
        start, size, checksum = self.records[name]
        self.stream.seek(start)
        data = self.stream.read(size)
        # PyTorch writes 0 if its checksums are disabled.
        if checksum and zlib.crc32(data) != checksum:
            raise self.error(
                f"is corrupt: its record {shown(name)!r} fails its checksum"
            )
        return data

    def error(self, what: str) -> CheckpointError:
        """Return the error of this file, as a sentence after its name."""
        return CheckpointError(f"{self.path.name} {what}")


class PyTorchState(State):
    """The tensors of a file that ``torch.save`` wrote, read one at a time."""

    others: list[str]

    def __init__(self, stream: BinaryIO, path: Path, key: str | None = None):
        self._archive = archive = Archive(stream, path)
        program, machine = archive.program(), _Machine(archive)
        tree = machine.interpret(program)
        if archive.legacy:  # after its magic number, a version and facts of the machine
            tree = [machine.interpret(program) for _ in range(3)][-1]
            machine.find_storages(machine.interpret(program), program.tell())
        machine.check_storages()
        self.tensors, entry, self.others = _state_dict(tree, key, archive)
        self.note = f"weights from the entry {shown(repr(entry))}" if entry else ""
        if self.others:
            rest = listed(map(repr, self.others))
            self.note += f"; --entry (key= of io.load_state) can choose {rest} instead"
        tensors = self.tensors.values()
        total = sum(prod(t.shape) * t.dtype.size for t in tensors)
        if total > _EXPANSION * archive.length:
            raise archive.error(
                f"is {archive.length:,} bytes and holds tensors of {total:,}, which "
                "share storage; more than 64 times the file is not read"
            )
        # Tensors that share a storage follow one another: the last storage is cached.
        self._cached: tuple[_Storage, mx.array] | None = None

    def read(self, name: str) -> mx.array:
        """Return a tensor, read from the file."""
        tensor = self.tensors[name]
        storage = tensor.storage
        if 0 in tensor.shape:
            return self.sketch(name)
        if self._cached is None or self._cached[0] != storage:
            self._cached = None  # frees its memory before the next one is read
            data = self._archive.read(storage.record)
            self._cached = storage, elements(data, storage.dtype)
        flat = self._cached[1]
        # The stride of an extent of 1 is never used, so any value is legal in a file.
        sizes = zip(tensor.shape, tensor.strides, strict=True)
        strides = [1 if n == 1 else stride for n, stride in sizes]
        return mx.as_strided(flat, tensor.shape, strides, tensor.offset)


@dataclass(frozen=True, eq=False, slots=True)
class _Name:
    """A global of the pickle, or an object that only a call of it would build."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    kind: str
    length: int

    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of the elements, or None if MLX has no such dtype."""
        return _STORAGES.get(self.kind)

    @property
    def item(self) -> int:
        """The bytes of an element."""
        return self.dtype.size if self.dtype else _OTHER_SIZES.get(self.kind, 1)


@dataclass(frozen=True, eq=False, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the elements."""
        return self.storage.dtype


class _Machine:
    """Interprets the pickles of a file; objects other than tensors stay names."""

    def __init__(self, archive: Archive):
        self.archive = archive
        self.error = archive.error
        self.storages: dict[_Storage, None] = {}

    def interpret(self, program: BinaryIO) -> object:
        """Return the object that the next pickle builds."""
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        try:
            for code, argument, _ in pickletools.genops(program):
                self.step(code.name, argument)
            (result,) = self.stack
        except CheckpointError:
            raise
        except _CORRUPT as e:
            raise self.error(f"has a corrupt pickle: {shown(str(e))}") from None
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
            items = self.since_mark()
            self.set_items(self.of((dict, _Name), stack[-1]), items)
        elif code in ("APPEND", "APPENDS", "ADDITEMS"):
            if code == "APPEND":
                self.marks.append(len(stack) - 1)
            items = self.since_mark()
            if type(self.of((list, _Name), stack[-1])) is list:
                stack[-1].extend(items)
        elif code in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif code == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif code == "GLOBAL":
            stack.append(_Name(argument.replace(" ", ".", 1)))
        elif code == "STACK_GLOBAL":
            name, module = self.of(str, stack.pop()), self.of(str, stack.pop())
            stack.append(_Name(f"{module}.{name}"))
        elif code == "BINPERSID":
            stack.append(self.storage(stack.pop()))
        elif code == "REDUCE":
            arguments = self.of(tuple, stack.pop())
            stack.append(self.build(self.of(_Name, stack.pop()).name, arguments))
        elif code in ("NEWOBJ", "NEWOBJ_EX"):
            del stack[-1 if code == "NEWOBJ" else -2 :]  # the arguments
            self.of(_Name, stack[-1])
        elif code == "BUILD":
            stack.pop()  # attributes, as a state dict's _metadata: versions of modules
            self.of((dict, _Name), stack[-1])
        elif code == "POP":  # in pickles of tuples that hold themselves
            stack.pop()
        elif code in ("FROZENSET", "POP_MARK"):
            self.since_mark()
            stack += [_Name("frozenset")] * (code == "FROZENSET")
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

    def of(self, kinds: type | tuple[type, ...], value):
        """Return ``value``, which must be of one of ``kinds``."""
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value) not in kinds:
            name = kinds[0].__name__.removeprefix("_").lower()
            raise ValueError(f"expected a {name}, got {_kind(value)}")
        return value

    def set_items(self, target: dict | _Name, flat: list) -> dict | _Name:
        """Add keys and values, which alternate, to a dict."""
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # Hashing other keys could take for ever, or as deep as a tuple is nested.
            small = type(key) is int and -_LIMIT <= key < _LIMIT
            if type(key) is not str and not small:
                key = _Name(f"a key that is {_kind(key)}")
            if type(target) is dict:
                target[key] = value
        return target

    def build(self, name: str, arguments: tuple) -> object:
        """Return the dict or the tensor that a call builds, or the call's name."""
        if name in _TENSORS:
            return self.tensor(*arguments)
        if name in _PARAMETERS:
            return self.of((_Tensor, _Name), arguments[0])
        if name == _WITH_ATTRIBUTES:
            call, _, arguments, _ = arguments
            return self.build(self.of(_Name, call).name, self.of(tuple, arguments))
        if name == _ORDERED:  # in pickles of Python 2 with all pairs
            pairs = [self.of(list, pair) for pair in arguments[0]] if arguments else []
            return self.set_items({}, [part for pair in pairs for part in pair])
        if name == "collections.defaultdict":
            return {}
        return _Name(name)

    def storage(self, description: object) -> object:
        """Return a storage, or the class of a module, which may stand here too."""
        what, kind, *rest = self.of(tuple, description)
        self.of(_Name, kind)
        if what == "module":
            return kind
        key, _, length, *view = rest
        self.of(str, key)
        if what != "storage" or view not in ([], [None]):
            raise ValueError("expected a storage that is not a view of another")
        if not 0 <= self.of(int, length) < _LIMIT:
            raise self.error(f"promises {length} elements in storage {shown(key)}")
        storage = _Storage(self.archive.prefix + key, kind.name, length)
        self.storages[storage] = None
        return storage

    def find_storages(self, keys: object, at: int) -> None:
        """Find the old format's storages, in the order of ``keys``, from ``at`` on."""
        known = {s.record: (s.length, s.item) for s in reversed(self.storages)}
        if any(type(key) is not str or key not in known for key in self.of(list, keys)):
            raise self.error("is corrupt: it lists storages that no tensor has")
        self.archive.add_storages(at, {key: known[key] for key in keys})

    def check_storages(self) -> None:
        """Check the storages against their records."""
        for storage in self.storages:
            if storage.dtype is None:
                continue
            key = shown(storage.record.removeprefix(self.archive.prefix))
            if storage.record not in self.archive.records:
                raise self.error(f"has no record for its storage {key!r}")
            size = self.archive.records[storage.record][1]
            if storage.length * storage.item != size:
                raise self.error(
                    f"promises {storage.length} elements of {storage.dtype} in storage "
                    f"{key}, whose record has {size} bytes"
                )

    def tensor(self, storage, offset, shape, strides, *more) -> _Tensor | _Name:
        """Check a view of a storage against the storage's length."""
        if any(more[2:]):  # after requires_grad and hooks
            return _Name("a conjugate or negated view of a tensor")
        storage, offset = self.of(_Storage, storage), self.of(int, offset)
        shape, strides = self.of(tuple, shape), self.of(tuple, strides)
        for value in (*shape, *strides):
            self.of(int, value)
        if storage.dtype is None:
            return _Name(f"a tensor of {storage.kind}")
        sound = len(shape) == len(strides) <= 32
        sound = sound and all(0 <= n < _LIMIT for n in shape)
        sound = sound and min(offset, *strides, 0) >= 0
        count = prod(shape) if sound else 0
        if sound and count:
            steps = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            sound = offset + steps < storage.length
        if not sound:
            raise self.error(
                f"has a tensor of shape {shown(str(shape))}, strides "
                f"{shown(str(strides))} and offset {offset} in a storage of "
                f"{storage.length} elements: it does not fit"
            )
        return _Tensor(storage, offset, shape, strides)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONTAINERS["EMPTY_SET"] = lambda: _Name("set")
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"}
_LITERALS |= {"SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"}
_LITERALS |= {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_CORRUPT = ValueError, TypeError, LookupError, OverflowError, RecursionError
_CORRUPT += (struct.error,)


def _kind(value: object) -> str:
    """Return a value's kind in words, for messages."""
    if type(value) is _Name:
        return repr(shown(value.name))
    name = type(value).__name__.removeprefix("_").lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _state_dict(
    tree: object, key: str | None, archive: Archive
) -> tuple[dict[str, _Tensor], str, list[str]]:
    """Return the state dict, its entry, and other entries with tensors."""
    if type(tree) is not dict:
        raise archive.error(
            f"holds {_kind(tree)}, expected a dict of tensors; save the state_dict"
        )
    places = _places(tree)
    names = {".".join(path): path for path in places if path}
    others = [name for name, path in names.items() if "optim" not in path[0]]
    under = others if key is None else [n for n in names if n.startswith(f"{key}.")]
    known = [names[name] for name in under if names[name][-1] in _ENTRIES]
    parents = {path[:n] for path in known for n in range(len(path))}
    known = [path for path in known if path not in parents]
    known = [path for path in known if len(path) == len(known[0])]
    known = [names[key]] if key in names else known
    kinds = {name: type(tree[name]) for name in sorted({key, *_ENTRIES} & tree.keys())}
    if not (known or others or key or {dict, list, _Name} & {*kinds.values()}):
        known = [()]
    if len(known) != 1 or known[0] not in places:
        what = f"has no tensors under {key!r}" if key else "has no single state dict"
        entries = listed(map(repr, names), "none")
        objects = [
            f"; {shown(repr(name))} is {_kind(value)}, which only code could build"
            for name, value in tree.items()
            if type(value) is _Name and (name in kinds or not kinds)
        ]
        raise archive.error(
            f"{what}; entries that hold tensors: {entries}{''.join(objects[:3])}. Name "
            "an entry by --entry (key= of io.load_state), or save the state_dict alone"
        )
    path = known[0]
    for name, value in places[path].items():
        wrong = next((v for v in (name, value) if type(v) in (_Name, _Storage)), None)
        if wrong is not None:
            under = "" if wrong is name else f", under {shown(repr(name))}"
            raise archive.error(
                f"has {_kind(wrong)} in its state dict{under}: only tensors are read, "
                "since anything else can run code. Save them alone, or as safetensors"
            )
    tensors = {str(n): t for n, t in places[path].items() if type(t) is _Tensor}
    rest = [name for name in others if names[name] != path]
    return tensors, ".".join(path), rest


def _places(tree: dict) -> dict[tuple[str, ...], dict]:
    """Return the dicts that hold tensors by their paths, the shallowest first."""
    places, level, seen = {}, {(): tree}, {id(tree)}
    for _ in range(_DEPTH):
        below = {}
        for path, entry in level.items():
            items = entry.items() if type(entry) is dict else enumerate(entry)
            for name, value in items:
                if type(value) is _Tensor and type(entry) is dict:
                    places[path] = entry
                elif type(value) in (dict, list) and id(value) not in seen:
                    seen.add(id(value))
                    below[(*path, str(name))] = value
        level = below
    return places

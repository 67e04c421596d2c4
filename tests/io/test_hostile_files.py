"""Random files: whatever they hold, a reader returns arrays or says why it does not.

Programs are put together from instructions and values that mean something to the
reader, so that most get past its first check; archives are real ones with fields of
their structures overwritten.
"""

import json
import random
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from pickles import DICT, FLOATS, REBUILD, Name, checkpoint, code, load, tensor

from mlx_lattice import nn
from mlx_lattice.io import CheckpointError, import_checkpoint, load_state

DATA = Path(__file__).parent / "data"
NUMBERS = (0, 1, 2, -1, 4, 12, 13, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**70, True)
WORDS = (
    "w",
    "0",
    "1",
    "cpu",
    "storage",
    "state_dict",
    "",
    "\u0660",
    "\x1b[2J",
    "a" * 300,
)
NAMES = (REBUILD, DICT, Name("torch FloatStorage"), Name("torch BoolStorage"))
KINDS = ("FloatStorage", "BoolStorage", "DoubleStorage", "HalfStorage")
CODES = (
    *(b"t", b"\x85", b"\x86", b"\x87", b"s", b"u", b"a", b"e", b"R", b"b", b"Q", b"0"),
    *(b"1", b"2", b"\x93", b"o", b"\x81", b".", b"N", b"}", b"]", b")", b"(", b"\x94"),
    *(b"q\x00", b"h\x00", b"g0\n", b"p0\n", b"I1\n", b"L5L\n", b'S"a"\n', b"Va\n"),
    *(b"\x8f", b"\x90", b"c\xff\nb\n", b"X\xff\xff\xff\x7f", b"B\xff\xff\xff\xff"),
    *(
        b"\x8b\xff\xff\xff\xff",
        b"C\x05abcde",
        b"G\x7f\xf8\0\0\0\0\0\0",
        b"cos\nmkdir\n",
    ),
)
SIGNATURES = (b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04")


def attempt(folder: Path, content: bytes) -> bool:
    """Whether it loads; anything but arrays or a CheckpointError fails the test."""
    try:
        state = load(folder, content)
    except CheckpointError as error:
        assert len(str(error)) < 2000 and str(error).isprintable(), str(error)
        return False
    mx.eval(state)
    return True


def value(source: random.Random) -> bytes:
    kind = source.randrange(7)
    if kind == 0:
        return code(source.choice((*NUMBERS, *WORDS)))
    if kind == 1:
        return code(source.choice(NAMES))
    if kind == 2:
        return source.choice(CODES)

    def few() -> tuple:
        lie = source.random() < 0.1
        count = source.randint(0, 3)
        return tuple(
            source.choice(NUMBERS) if lie else source.randint(0, 4)
            for _ in range(count)
        )

    length = source.choice((12, 12, 12, 6, 48, 24, 2**40))
    offset = source.choice((0, 0, 0, 1, -1, 12))
    shape = few()
    strides = few() if source.random() < 0.3 else (1,) * len(shape)
    return code(
        tensor(shape, strides, offset, kind=source.choice(KINDS), length=length)
    )


@pytest.mark.parametrize("seed", range(2))
def test_random_programs(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    source, loaded = random.Random(seed), 0
    for _ in range(500):
        count = source.randint(1, 8)
        if source.random() < 0.5:
            body = b"".join(value(source) for _ in range(count))
        else:  # a dict whose keys at least are sound
            items = (code(f"w{i}") + value(source) for i in range(count // 4 + 1))
            body = b"}(" + b"".join(items) + b"u"
        loaded += attempt(tmp_path, checkpoint(b"\x80\x02" + body + b"."))
    assert 5 < loaded < 400
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def archives() -> list[bytes]:
    return [
        checkpoint({"w": tensor((12,), (1,))}),
        *((DATA / f"torch_{name}.pt").read_bytes() for name in ("state", "training")),
    ]


@pytest.mark.parametrize("seed", range(2))
def test_random_changes_of_an_archive(tmp_path, seed):
    """Anywhere, and most of all where the zip says what is where."""
    source, loaded = random.Random(seed), 0
    for _ in range(250):
        content = bytearray(source.choice(archives()))
        places = [
            at
            for mark in SIGNATURES
            for at in range(len(content))
            if content.startswith(mark, at)
        ]
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(content))
            if source.random() < 0.7:
                at = source.choice(places) + source.randint(4, 46)
            width = source.choice((1, 2, 4, 8))
            number = source.choice((0, 1, 255, 2**31, 2**63, 2**64 - 1))
            bits = number or source.getrandbits(64)
            content[at : at + width] = (bits % 256**width).to_bytes(width, "little")
        loaded += attempt(tmp_path, bytes(content))
    assert 5 < loaded < 245


def test_a_name_of_a_million_modules(tmp_path):
    """Looking for its prefixes takes no longer than reading it."""
    name = "a." * 10**6 + "w"
    state = load(tmp_path, checkpoint({name: tensor((12,), (1,))}))
    with pytest.raises(
        CheckpointError, match="left over   a.a.*2,000,001 letters"
    ) as e:
        import_checkpoint(state, nn.Linear(2, 2), "minkowski", {"b": "a", "a.a": "c"})
    assert len(str(e.value)) < 1000


# Safetensors


def written(folder: Path, header, data: bytes) -> Path:
    path = folder / "a.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, offsets, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "sentence"),
    (
        ({"a": entry([4], [0, 16]), "b": entry([4], [8, 24])}, "a and b overlap"),
        ({"a": entry([-2, -2], [0, 16])}, r"a has the shape \[-2, -2\]"),
        ({"a": entry([2**31], [0, 2**33])}, r"a has the shape \[2147483648\]"),
        ({"a": entry([4], [40, 56])}, r"a stands at \[40, 56\] of 48 bytes"),
        ({"a": entry([4], [0.0, 16.0])}, "a has no shape or no data_offsets"),
        ({"a": entry([8], [0, 16])}, r"a of \[8\] F32 has 16 bytes"),
        ({"a": entry([0], [0, 16])}, r"a of \[0\] F32 has 16 bytes"),
        ({"a": entry([4], [16])}, r"a stands at \[16\] of 48 bytes"),
        ({"a": entry([2**30, 2**30, 16], [0, 0])}, "F32 has 0 bytes"),
        ({"a": entry([16], [0, 16], "F8_E4M3")}, "a is F8_E4M3, which MLX does not"),
        ({"a": 3}, "a has no shape or no data_offsets"),
        ({"\x1b[2J" + "x" * 999: 3}, r"'\\x1b\[2Jx+\.\.\. \(1,0"),
        (b'{"a": 1, "a": 2}', "its header is not a JSON object of names, each once"),
        (b'{"\xff": 1}', "its header is not a JSON object"),
        (
            b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
            "its header is not a JSON object",
        ),
        (b" " * (2**24 + 1), "its header has 16,777,217 bytes"),
    ),
)
def test_safetensors_that_lie(tmp_path, header, sentence):
    path = written(tmp_path, header, bytes(48))
    with pytest.raises(CheckpointError, match=f"^a.safetensors.*{sentence}"):
        load_state(path)


@pytest.mark.parametrize("seed", range(2))
def test_random_changes_of_a_header(tmp_path, seed):
    source, loaded = random.Random(seed), 0
    header = {"a": entry([4], [0, 16]), "b": entry([2, 4], [16, 48], "I32")}
    good = written(tmp_path, header, FLOATS).read_bytes()
    for _ in range(400):
        content = bytearray(good)
        for _ in range(source.randint(1, 3)):
            content[source.randrange(len(good))] = source.choice(b'0123456789",[]{}-\0')
        path = tmp_path / "b.safetensors"
        path.write_bytes(content)
        try:
            mx.eval(load_state(path))
            loaded += 1
        except CheckpointError as error:
            assert len(str(error)) < 2000
    assert 5 < loaded < 395

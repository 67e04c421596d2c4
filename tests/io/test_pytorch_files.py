"""PyTorch's files: real ones that load, and every way in which one can lie.

`data/torch_1_*.pt` were written by PyTorch 1.13 and NumPy 1.26, the other files of
`data` by PyTorch 2.13 and NumPy 2; all else is assembled here.
"""

import os
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pickles import (
    DICT,
    FLOATS,
    REBUILD,
    Call,
    Name,
    Storage,
    archive,
    checkpoint,
    code,
    load,
    old_format,
    program,
    refuse,
    tensor,
)

from mlx_lattice import nn
from mlx_lattice.cli import main
from mlx_lattice.io import CheckpointError, import_checkpoint, load_state

DATA = Path(__file__).parent / "data"


# What loads


@pytest.mark.parametrize("name", ("state", "legacy"))
def test_a_file_of_pytorch(name):
    state = load_state(DATA / f"torch_{name}.pt")
    expected = {
        "single": (mx.float32, [[0, 1, 2], [3, 4, 5]]),
        "half": (mx.float16, [[0, 3], [1, 4], [2, 5]]),
        "brain": (mx.bfloat16, [1.5, -2, 3]),
        "double": (mx.float32, [0.5, float(np.float32(1e-3))]),
        "count": (mx.int64, 7),
        "empty": (mx.float32, []),
        "mask": (mx.bool_, [True, False, True]),
        "byte": (mx.uint8, [0, 255]),
        "rows": (mx.float32, [[4, 5, 6, 7], [8, 9, 10, 11]]),
        "column": (mx.float32, [2, 6, 10]),
        "every": (mx.float32, [1, 4, 7, 10]),
    }
    assert {k: (v.dtype, v.tolist()) for k, v in state.items()} == expected
    assert state["empty"].shape == (0, 4)


def test_a_training_script_s_file_in_protocol_4():
    state = load_state(DATA / "torch_training.pt")
    assert state["0.weight"].shape == (3, 2)
    assert state["1.running_var"].shape == (3,) and state["1.running_var"].min() > 0.9
    assert state["1.num_batches_tracked"].item() == 1
    same = load_state(DATA / "torch_training.pt", key="state_dict")
    assert same.keys() == state.keys()
    with pytest.raises(CheckpointError, match="no tensors under 'model'.*'state_dict'"):
        load_state(DATA / "torch_training.pt", key="model")


TRAINERS = [f"torch_{n}_trainer{old}.pt" for n in "12" for old in ("", "_old")]


@pytest.mark.parametrize("name", TRAINERS)
def test_what_trainers_save_beside_the_weights(name):
    """NumPy scalars, schedulers, sets, namespaces, Parameters, tensors of all kinds."""
    with pytest.warns(
        UserWarning, match="'model_state'.*--entry .* choose 'keys', 'ema"
    ):
        state = load_state(DATA / name)
    a = np.arange(24, dtype=np.float32)
    expected = {
        "conv.weight": a.reshape(4, 6),
        "conv.turned": a.reshape(4, 6).T,
        "conv.part": a[20:],
        "conv.half": a,
        "conv.brain": a,
        "norm.parameter": a[:3] * 2,
        "norm.expanded": a[[1, 1, 1, 1, 1]],
        "norm.count": np.int64(7),
    }
    assert list(state) == list(expected)
    for key, values in expected.items():
        assert state[key].tolist() == values.tolist(), key
    assert state["conv.half"].dtype == mx.float16
    assert state["conv.brain"].dtype == mx.bfloat16
    assert load_state(DATA / name, "ema")["w"].tolist() == [1, 1, 1]
    for entry, sentence in (
        ("scheduler", "no tensors under 'scheduler'; .* is 'torch.optim.lr_schedul"),
        ("keys", "has 'a key that is a tuple' in its state dict: only tensors are"),
        ("loss", "no tensors under 'loss'"),
        ("absent", "no tensors under 'absent'"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            load_state(DATA / name, entry)


def test_the_old_format_truncated(tmp_path):
    content = old_format({"w": tensor((12,), (1,))})
    assert load(tmp_path, content)["w"].tolist() == np.arange(12.0).tolist()
    for length in range(len(content)):
        refuse(tmp_path, content[:length], "a.pt ")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    (
        ((4, 3), (1, 4), 0),
        ((2, 2), (6, 2), 3),
        ((3,), (4,), 3),
        ((), (), 11),
        ((1, 12), (10**18, 1), 0),
        ((2, 0), (1, 1), 0),
        ((12,), (1,), 0),
        ((2, 1, 3), (3, 7, 1), 5),
    ),
)
def test_views_of_a_storage(tmp_path, shape, strides, offset):
    state = load(tmp_path, checkpoint({"w": tensor(shape, strides, offset)}))
    index = offset + sum(
        np.arange(n).reshape(-1, *(1,) * (len(shape) - 1 - i)) * (s if n > 1 else 0)
        for i, (n, s) in enumerate(zip(shape, strides, strict=True))
    )
    expected = np.arange(12.0)[np.broadcast_to(index, shape)]
    assert state["w"].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "content", "dtype", "values"),
    (
        ("HalfStorage", np.array([1.5, -2], "<f2"), mx.float16, [1.5, -2]),
        ("BFloat16Storage", np.array([0x3FC0, 0xC000], "<u2"), mx.bfloat16, [1.5, -2]),
        ("DoubleStorage", np.array([1.5, -2], "<f8"), mx.float32, [1.5, -2]),
        ("CharStorage", np.array([1, -2], "i1"), mx.int8, [1, -2]),
        ("ShortStorage", np.array([1, -2], "<i2"), mx.int16, [1, -2]),
        ("IntStorage", np.array([1, -2], "<i4"), mx.int32, [1, -2]),
        ("LongStorage", np.array([1, -2], "<i8"), mx.int64, [1, -2]),
        ("BoolStorage", np.array([2, 0], "u1"), mx.bool_, [True, False]),
        ("ComplexFloatStorage", np.array([1j, 2], "<c8"), mx.complex64, [1j, 2]),
    ),
)
def test_dtypes(tmp_path, kind, content, dtype, values):
    given = tensor((2,), (1,), kind=kind, length=2)
    array = load(tmp_path, checkpoint({"w": given}, _0=content.tobytes()))["w"]
    assert array.dtype == dtype and array.tolist() == values


def test_entries(tmp_path):
    weights = {"w": tensor((12,), (1,))}
    for name in ("state_dict", "model", "net"):
        assert list(load(tmp_path, checkpoint({name: weights, "epoch": 1}))) == ["w"]
    content = checkpoint({"student": weights, "teacher": weights})
    refuse(tmp_path, content, "no single state dict; .*: 'student', 'teacher'")
    assert list(load(tmp_path, content, key="teacher")) == ["w"]
    two = {"model": weights, "net": {"v": tensor((3,), (1,))}}
    refuse(
        tmp_path, checkpoint(two), "single .*'model', 'net'. Name an entry by --entry"
    )
    refuse(tmp_path, checkpoint((1, 2)), "holds a tuple, expected a dict")
    refuse(tmp_path, checkpoint({"epoch": 3}), "entries that hold tensors: none")


def test_a_known_name_comes_before_tensors_beside_it(tmp_path):
    weights, one = {"w": tensor((12,), (1,)), "n": 3}, tensor((1,), (1,))
    for tree in (
        {"loss": one, "model_state": weights, "global_step": one},
        {"loss": one, "model": {"state_dict": weights, "step": one}},
        {"loss": one, "checkpoint": {"model": weights}},
        {"model": weights, "ema": {"model": {"v": one}}},
        {**weights, "optimizer": {"state": {0: {"exp_avg": one}}}},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert list(load(tmp_path, checkpoint(tree))) == ["w"], tree
    listed = checkpoint({"loss": one, "nets": b"]" + code(weights) + b"a"})
    refuse(tmp_path, listed, "entries that hold tensors: 'nets.0'")
    assert list(load(tmp_path, listed, "nets.0")) == ["w"]
    nested = checkpoint({"a": {"b.c": weights}, "d": {"model": {"v": one}}})
    assert list(load(tmp_path, nested, "a.b.c")) == ["w"]
    assert list(load(tmp_path, nested, "d")) == ["v"]
    below = checkpoint({"model": {**weights, "part": {"v": one}}})
    with pytest.warns(UserWarning, match="entry 'model'; .* choose 'model.part' inst"):
        assert list(load(tmp_path, below)) == ["w"]
    for tree in (
        {"loss": one, "student": weights},
        {"loss": one, "model_state": {}},
        {"loss": one, "model": Call((Name("nets Net"),))},
        {"encoder": weights, "decoder": {"v": one}},
        {"loss": one, "a": {"b": {"c": {"d": weights}}}},
    ):
        refuse(tmp_path, checkpoint(tree), "has no single state dict.*by --entry")


def test_the_choice_is_printed(tmp_path, capsys):
    tree = {"model": {"w": tensor((12,), (1,))}, "ema": {"w": tensor((12,), (1,))}}
    path = tmp_path / "a.pt"
    path.write_bytes(checkpoint(tree))
    said = "entry 'model'; --entry (key= of io.load_state) can choose 'ema' instead"
    report = import_checkpoint(path, nn.Linear(2, 2), "spconv", strict=False)
    assert said in str(report)
    command = ["convert", str(path), str(tmp_path / "b.safetensors")]
    command += ["--library", "spconv", "--model", "spunet", "--channels", "4", "5"]
    assert main(command) == 1
    assert said in capsys.readouterr().err
    assert main([*command, "--entry", "none"]) == 1
    assert "no tensors under 'none'" in capsys.readouterr().err


# Programs


class Runs:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def attacks() -> dict[str, bytes]:
    """Pickles that would leave a folder `ran` behind them."""
    system, make = Runs(os.system, "mkdir ran"), "__import__('os').mkdir('ran')"
    mkdir = Name("os mkdir")
    found = {
        f"{name}, protocol {protocol}": pickle.dumps(value, protocol)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        for name, value in (
            ("system", system),
            ("eval", Runs(eval, make)),
            ("exec", Runs(exec, make)),
            ("nested", {"state_dict": {"w": [1, {2: (system, 3)}]}}),
            ("key", {"a": 1, Runs(str, "b"): 2}),
        )
    }
    plain = tensor((12,), (1,))
    assembled = {
        "argument of a tensor": Call((REBUILD, *plain[1:6], Call((mkdir, "ran")))),
        "state": code(Call((DICT,))) + code({"_metadata": Call((mkdir, "ran"))}) + b"b",
        "storage": code((Call((mkdir, "ran")), 1)) + b"Q",
        "inst": b"(" + code("ran") + b"ios\nmkdir\n",
        "obj": b"(" + code(mkdir) + code("ran") + b"o",
        "newobj": code(mkdir) + code(("ran",)) + b"\x81",
        "newobj_ex": code(mkdir) + code(("ran",)) + code({}) + b"\x92",
        "stack_global": code("os") + code("mkdir") + b"\x93" + code(("ran",)) + b"R",
        "dotted": code("collections") + code("OrderedDict.__init__") + b"\x93",
        "extension": b"\x82\x01" + code(("ran",)) + b"R",
        "persid": b"Pos\n",
        "buffer": b"\x97",
        "call of a storage": Call((Name("torch FloatStorage"), 10**9)),
        "call of a dict": Call((DICT, ("a", 1))),
        "call of a call": Call((Call((DICT,)), "ran")),
        "build of a name": code(DICT) + code({"__call__": 1}) + b"b",
        "build of a tensor": code(plain) + code({"offset": 99}) + b"b",
        "numpy": Call((Name("numpy.core.multiarray _reconstruct"), 1)),
        "other tensor": Call((Name("torch._utils _rebuild_parameter"), plain)),
        "lookalike": Name("torch FloatStorage.__class__"),
        "codecs": Call((Name("_codecs encode"), "a", "latin1")),
    }
    return found | {name: program(value) for name, value in assembled.items()}


@pytest.mark.parametrize("name", attacks())
def test_nothing_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content = attacks()[name]
    with pytest.raises(CheckpointError, match=r"^a\.pt "):
        load(tmp_path, checkpoint(content))
    with pytest.raises(CheckpointError, match=r"^a\.pt "):
        load(tmp_path, old_format(content))
    if content.endswith(b"."):  # and as a value beside a tensor and a state dict
        inner = content[2:-1] if content[:1] == b"\x80" else content[:-1]
        weights = {"w": tensor((12,), (1,))}
        for tree in ({**weights, "x": inner}, {"state_dict": weights, "x": inner}):
            with suppress(CheckpointError):
                assert set(load(tmp_path, checkpoint(tree))) <= {"w", *tree}
    assert not (tmp_path / "ran").exists()


def test_the_name_that_was_asked_for_is_said(tmp_path):
    content = checkpoint(pickle.dumps(Runs(os.system, "true"), 2))
    refuse(tmp_path, content, f"holds '{os.name}.system', expected a dict of tensors")
    inner = {"w": tensor((12,), (1,)), "x": Call((Name("os system"), "true"))}
    sentence = "'os.system' in its state dict, under 'x': .*can run code.*safetensors"
    refuse(tmp_path, checkpoint(inner), sentence)


@pytest.mark.parametrize(
    "content",
    (
        b"",
        b"}",
        b"u.",
        b"(u.",
        b"}" + code((1,)) + code(2) + b"s.",
        b"h\x05.",
        b"R.",
        b"]" + code(1) + b"e.",
        b"}}.",
        b"(((.",
        b"}r\xff\xff\xff\x7f.",  # a memo of 2^31 entries, in C's unpickler
        b"\x96" + struct.pack("<Q", 2**40) + b".",  # a bytearray of 1 TB
        b"\x8d" + struct.pack("<Q", 2**62) + b".",
        b"\x95" + struct.pack("<Q", 2**62) + b"}.",
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b"]" + b"]\x94a" * 50_000 + b".",
    ),
)
def test_broken_pickles(tmp_path, content):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load(tmp_path, checkpoint(b"\x80\x04" + content))
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


# Sizes


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    (
        ((13,), (1,), 0),
        ((3, 4), (5, 1), 0),
        ((2,), (-1,), 1),
        ((-2,), (1,), 0),
        ((3,), (1,), -1),
        ((2**40,), (0,), 0),
        ((2**62, 4), (0, 0), 0),
        ((0, 2**31), (1, 1), 0),
        ((), (1,), 0),
        ((1,) * 33, (1,) * 33, 0),
        ((1,), (1,), 12),
        ((), (), 12),
        ((2,), (2**70,), 0),
    ),
)
def test_a_tensor_that_does_not_fit_its_storage(tmp_path, shape, strides, offset):
    content = checkpoint({"w": tensor(shape, strides, offset)})
    refuse(tmp_path, content, "has a tensor of shape .*12 elements: it does not fit")


@pytest.mark.parametrize("bit", ("neg", "conj"))
def test_a_negated_view_is_not_read_as_another(tmp_path, bit):
    held, none = tensor((2,), (1,)), dict.fromkeys([bit], True)
    refuse(
        tmp_path, checkpoint({"w": Call((*held, none))}), "conjugate or negated view"
    )
    path = tmp_path / "b.pt"
    path.write_bytes(checkpoint({"w": Call((*held, {}))}))
    assert load_state(path)["w"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"length": 13}, "promises 13 elements of mlx.core.float32 in storage 0"),
        ({"length": 11}, "promises 11 elements"),
        ({"length": 2**40}, "promises 1099511627776 elements"),
        ({"length": -12}, "promises -12 elements"),
        ({"kind": "DoubleStorage"}, "promises 12 elements of mlx.core.float64"),
        ({"key": "1"}, "has no record for its storage '1'"),
        ({"key": "../data.pkl"}, "no record for its storage '../data.pkl'"),
        ({"key": "/etc/passwd"}, "no record for its storage '/etc/passwd'"),
        ({"key": "٠"}, "no record for its storage"),
        ({"key": ""}, "no record for its storage ''"),
    ),
)
def test_a_storage_that_is_not_its_record(tmp_path, change, sentence):
    refuse(tmp_path, checkpoint({"w": tensor((2,), (1,), **change)}), sentence)


@pytest.mark.parametrize(
    "call",
    (
        Call((REBUILD,)),
        Call((REBUILD, 1, 0, (1,), (1,), False)),
        Call((REBUILD, Storage(("FloatStorage", "0", 12)), 0, 1, 1, False)),
        Call((REBUILD, Storage(("FloatStorage", "0", 12)), True, (1,), (1,), False)),
        Call((REBUILD, Storage(("FloatStorage", "0", 12)), 0, (True,), (1,), False)),
        Call((REBUILD, Storage(("FloatStorage", 0, 12)), 0, (1,), (1,), False)),
        Call((REBUILD, Storage(("FloatStorage", "0", "12")), 0, (1,), (1,), False)),
    ),
)
def test_arguments_of_other_types(tmp_path, call):
    refuse(tmp_path, checkpoint({"w": call}), "has a corrupt pickle")


# Bounds


def test_tensors_that_share_storage_without_end(tmp_path):
    """Names are cheap: each of these asks for the whole storage."""
    held = np.arange(2000, dtype="<f4").tobytes()
    tied = tensor((2000,), (1,), length=2000)
    few = {f"w{i}": tied for i in range(24)}
    assert len(load(tmp_path, checkpoint(few, _0=held))) == 24
    once = code(tied) + b"q\x01"
    names = (code(f"w{i}") + b"h\x01" for i in range(1, 200))
    many = b"\x80\x02}(" + code("w0") + once + b"".join(names) + b"u."
    refuse(tmp_path, checkpoint(many, _0=held), "tensors of 1,600,000, which share")
    expanded = checkpoint({"w": tensor((2**20, 2**20), (0, 0))})
    refuse(tmp_path, expanded, "tensors of 4,398,046,511,104, which share")


def test_keys_that_share_a_hash(tmp_path):
    """A dict of integers that all hash alike would take for ever to build."""
    keys = (code(k * (2**61 - 1)) + code(1) for k in range(1, 40_000))
    tree = {"model": {"w": tensor((1,), (1,))}, "x": b"}(" + b"".join(keys) + b"u"}
    assert list(load(tmp_path, checkpoint(tree))) == ["w"]
    refuse(tmp_path, checkpoint({2**31: tensor((1,), (1,))}), "a key that is an int")
    assert load(tmp_path, checkpoint({2**31 - 1: 1, "w": tensor((1,), (1,))}))


def test_a_string_without_end(tmp_path):
    for push in (
        b"X" + struct.pack("<I", 2**32 - 1),
        b"\x8e" + struct.pack("<Q", 2**62),
    ):
        content = old_format(b"\x80\x04" + push + b"abc")
        refuse(tmp_path, content, "a corrupt pickle: ")


def test_objects_within_objects_without_end(tmp_path):
    deep = b")" + b"\x85" * 50_000
    weights = {"w": tensor((12,), (1,))}
    for inner in (deep, b"}" + deep + b"Ns", code(Name("a b")) + b")R" + deep + b"b"):
        assert load(tmp_path, checkpoint({"model": weights, "x": inner}))
    call = Name("torch._tensor _rebuild_from_type_v2")
    inner = code(tensor((1,), (1,))[1:])
    for _ in range(5000):
        inner = b"(" + code(call) + b"N" + inner + b"Nt"
    refuse(tmp_path, checkpoint({"w": code(call) + inner + b"R"}), "a corrupt pickle")


def good() -> bytes:
    return checkpoint({"w": tensor((12,), (1,))})


def test_truncated_at_every_length(tmp_path):
    for content in (good(), (DATA / "torch_state.pt").read_bytes()):
        for length in range(0, len(content), 7):
            refuse(tmp_path, content[:length], "a.pt ")


def test_overlapping_records(tmp_path):
    """Two names for the same bytes: how a small zip unpacks to a large one."""
    content = good()
    entry = content.index(b"PK\x01\x02")
    second = content.index(b"PK\x01\x02", entry + 1)
    end = content.index(b"PK\x05\x06")
    copy = content[second:end].replace(b"a/data/0", b"a/data/1")
    tail = bytearray(content[end:])
    struct.pack_into("<HHI", tail, 8, 3, 3, end - entry + len(copy))
    refuse(tmp_path, content[:end] + copy + bytes(tail), "overlapping records")


def test_two_records_of_one_name(tmp_path):
    content = archive({"a/data.pkl": b"", "a/data/0": FLOATS, "a/data/1": b""})
    content = content.replace(b"a/data/1", b"a/data/0")
    refuse(tmp_path, content, "has two records 'a/data/0'")


def test_compressed_records(tmp_path):
    bomb = {"a/data.pkl": program({}), "a/data/0": bytes(10**6)}
    content = archive(bomb, zipfile.ZIP_DEFLATED)
    refuse(tmp_path, content, "has a compressed or encrypted record")


def test_a_wrong_checksum_and_none(tmp_path):
    content = good()
    changed = content.replace(FLOATS, FLOATS[::-1])
    refuse(tmp_path, changed, "its record 'a/data/0' fails its checksum")
    at = content.rindex(b"PK\x01\x02") + 16
    unchecked = content[:at] + bytes(4) + content[at + 4 :]
    assert load(tmp_path, unchecked)["w"].shape == (12,)


@pytest.mark.parametrize(
    ("records", "sentence"),
    (
        ({"a/data.txt": b""}, "no record data.pkl: it is a zip, but not PyTorch's"),
        ({"data.pkl": b""}, "no record data.pkl"),
        ({"a/data.pkl": b"", "b/data.pkl": b""}, "no record data.pkl"),
        ({"a/data.pkl": b"", "a/constants.pkl": b""}, "is a TorchScript program"),
        ({"a/data.pkl": b"", "a/byteorder": b"big"}, "big-endian machine"),
    ),
)
def test_other_zips(tmp_path, records, sentence):
    refuse(tmp_path, archive(records), sentence)


def test_other_files(tmp_path):
    tar = b"storages".ljust(257, b"\0") + b"ustar\0" + bytes(300)
    refuse(tmp_path, tar, "is not a PyTorch checkpoint, which is a zip")
    refuse(tmp_path, pickle.dumps({}), "other pickles can run code")
    refuse(tmp_path, b"hello\0", "is not a PyTorch checkpoint, which is a zip")
    refuse(tmp_path, b"", "is empty")


def test_a_directory_without_end(tmp_path):
    """Its size is a claim too: nothing is allocated for it."""
    content = bytearray(good())
    struct.pack_into("<I", content, content.rindex(b"PK\x05\x06") + 12, 2**31)
    refuse(tmp_path, bytes(content), "is not a complete zip")

"""PyTorch's zips: records that overlap or lie, and other files."""

import pickle
import struct
import zipfile
from pathlib import Path

import pytest
from pickles import FLOATS, archive, checkpoint, load, program, refuse, tensor

DATA = Path(__file__).parent / "data"


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
    refuse(tmp_path, tar, "is a tar archive: unpack it")
    refuse(tmp_path, pickle.dumps({}), "is a bare pickle, which is not read")
    refuse(tmp_path, b"hello\0", "is not a PyTorch checkpoint: it is not a zip")
    refuse(tmp_path, b"", "is empty")


def test_a_directory_without_end(tmp_path):
    """Its size is a claim too: nothing is allocated for it."""
    content = bytearray(good())
    struct.pack_into("<I", content, content.rindex(b"PK\x05\x06") + 12, 2**31)
    refuse(tmp_path, bytes(content), "is not a complete zip")

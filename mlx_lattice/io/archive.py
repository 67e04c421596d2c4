"""The two files that ``torch.save`` writes: where the bytes of each storage are."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError, shown

# The first pickle of the format that PyTorch wrote before 1.6: a number.
_LEGACY = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL
)
# What `zipfile` raises where a zip is truncated, corrupt, or of a newer format.
ZIP_ERRORS = (zipfile.BadZipFile, ValueError, OSError, RuntimeError, struct.error)

# Most bytes of one read: a zip's directory of half a million records, or a string.
READ_BYTES = 2**26


class Archive:
    """A file of ``torch.save``: its pickle, and a record of bytes for each storage.

    Attributes:
        legacy: whether the file has the format before PyTorch 1.6: pickles, then
            storages one after another. ``add_storages`` finds their records.
        prefix: what precedes a storage's key in the name of its record.
        records: name to (start, size, checksum); a checksum of 0 is not checked.
    """

    def __init__(self, stream: BinaryIO, path: Path):
        self.stream, self.path = stream, path
        self.length = stream.seek(0, 2)
        stream.seek(0)
        start = stream.read(512)
        self.records: dict[str, tuple[int, int, int]] = {}
        self.legacy, self.prefix = bool(_LEGACY.match(start)), ""
        if self.legacy:
            return
        if not start.startswith(b"PK\x03\x04"):
            raise self.error(_why_no_zip(start))
        try:
            entries = zipfile.ZipFile(_Bounded(stream)).infolist()
        except ZIP_ERRORS as error:
            raise self.error(f"is no whole zip: {error}") from None
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise self.error("is a TorchScript program; save its state_dict instead")
        last = 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            name, start = entry.filename, self._place(entry)
            if entry.header_offset < last:
                raise self.error(f"has overlapping records, {shown(name)!r} one")
            if name in self.records:
                raise self.error(f"has two records {shown(name)!r}")
            self.records[name] = start, entry.file_size, entry.CRC
            last = start + entry.file_size
        roots = [
            name.removesuffix("data.pkl")
            for name in self.records
            if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(roots) != 1:
            raise self.error("has no record data.pkl: it is a zip, but not PyTorch's")
        self.prefix = f"{roots[0]}data/"
        order = f"{roots[0]}byteorder"
        if order in self.records and self.read(order) != b"little":
            raise self.error("was saved on a big-endian machine, which is not read")

    def program(self, most: int) -> BinaryIO:
        """Return a stream of the file's pickles; a zip has at most ``most`` bytes."""
        if not self.legacy:
            return io.BytesIO(self.read(f"{self.prefix[:-5]}data.pkl", most))
        self.stream.seek(0)
        return _Bounded(self.stream)

    def add_storages(self, at: int, sizes: dict[str, tuple[int, int]]) -> None:
        """Find the records of the old format's storages, which begin at byte ``at``.

        Args:
            at: the end of the pickles.
            sizes: key to (elements, bytes of an element), in the order of the file.
        """
        for key, (length, size) in sizes.items():
            self.stream.seek(at)
            count = int.from_bytes(self.stream.read(8), "little")
            at += 8 + length * size
            if count != length or at > self.length:
                raise self.error(f"is truncated or corrupt at its storage {shown(key)}")
            self.records[key] = at - length * size, length * size, 0

    def _place(self, entry: zipfile.ZipInfo) -> int:
        """Return where a record's bytes begin."""
        name = entry.filename
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ":" in name or ".." in parts:
            raise self.error(
                f"has a record {shown(name)!r}, which is no name inside it"
            )
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise self.error(f"has a compressed or encrypted record {shown(name)!r}")
        if entry.compress_size != entry.file_size:
            raise self.error(f"says two sizes of its record {shown(name)!r}")
        if not 0 <= entry.header_offset <= self.length - 30:
            raise self.error(f"is truncated: its record {shown(name)!r} lies outside")
        self.stream.seek(entry.header_offset)
        header = self.stream.read(30)
        extra = sum(struct.unpack("<HH", header[26:30]))
        start = entry.header_offset + 30 + extra
        if header[:4] != b"PK\x03\x04" or start + entry.file_size > self.length:
            raise self.error(f"is truncated or corrupt at its record {shown(name)!r}")
        return start

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a record, checked by their checksum where it has one."""
        start, size, checksum = self.records[name]
        if most is not None and size > most:
            raise self.error(
                f"has a record {shown(name)!r} of {size:,} bytes; at most {most:,} are "
                "read of it"
            )
        self.stream.seek(start)
        data = self.stream.read(size)
        # PyTorch writes 0 where its checksums are disabled.
        if checksum and zlib.crc32(data) != checksum:
            raise self.error(
                f"is corrupt: its record {shown(name)!r} fails its checksum"
            )
        return data

    def error(self, what: str) -> CheckpointError:
        """Return the error of this file, as a sentence after its name."""
        return CheckpointError(f"{self.path.name} {what}")


class _Bounded:
    """A stream that refuses to read more than READ_BYTES at once."""

    def __init__(self, stream: BinaryIO):
        self.seek, self.tell, self._stream = stream.seek, stream.tell, stream

    def read(self, count: int = -1) -> bytes:
        """Return the stream's next bytes."""
        if count > READ_BYTES:
            raise ValueError(f"{count:,} bytes are asked for at once")
        return self._stream.read(count)

    def readline(self) -> bytes:
        """Return the stream's next line."""
        return self._stream.readline(READ_BYTES)


def _why_no_zip(start: bytes) -> str:
    if start[257:262] == b"ustar":
        return (
            "is a tar archive: unpack it; or, if PyTorch 0.1 wrote it, load it with "
            "PyTorch and save it again"
        )
    if start[:1] == b"\x80":
        return "is a bare pickle, which is not read: pickles can run code"
    return "is no PyTorch checkpoint: it is not a zip"

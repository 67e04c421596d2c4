"""A versioned file of what was measured on this machine, an entry a key."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from .. import kept_files

# Entries of files that cannot be written.
_unwritten: dict[Path, dict[str, dict]] = {}


@dataclass(frozen=True)
class KeptEntries:
    """A file of the cache folder. Another version of it, or of MLX, is ignored.

    Attributes:
        name: of the file.
        version: of its format, and of the kernels that it is about.
        valid: whether an entry has the form that is expected.
        form: what that is, in words.
    """

    name: str
    version: int
    valid: Callable[[object], bool]
    form: str

    @property
    def path(self) -> Path:
        """Where the file is, now."""
        return kept_files.folder() / self.name

    def load(self) -> dict[str, dict]:
        """Return the entries; none, with a warning, of a file that is unusable."""
        path = self.path
        try:
            file = path.stat()
        except OSError:
            return _unwritten.get(path, {})
        entries = _read(self, path, (file.st_mtime_ns, file.st_ino, file.st_size))
        return {**entries, **_unwritten.get(path, {})}

    def store(self, key: str, entry: dict) -> None:
        """Merge one entry into the file and put it in place in one step."""
        path = self.path
        try:
            with kept_files.alone():
                held = {**self._header(), "entries": {**self.load(), key: entry}}
                text = json.dumps(held, indent=1, sort_keys=True)
                kept_files.write_whole(path, text.encode())
        except OSError as error:
            warnings.warn(
                f"the tuning cache {path} cannot be written ({error}); measured "
                "choices last for this process only. Set MLX_LATTICE_CACHE to a folder",
                stacklevel=3,
            )
            _unwritten.setdefault(path, {})[key] = entry

    def _header(self) -> dict:
        return {"version": self.version, "mlx": mx.__version__}


@lru_cache(maxsize=8)
def _read(file: KeptEntries, path: Path, stamp: tuple[int, ...]) -> dict[str, dict]:
    try:
        held, wanted = json.loads(path.read_text()), file._header()
        entries, header = held["entries"], {k: held.get(k) for k in wanted}
        if not all(file.valid(e) for e in entries.values()):
            raise ValueError(f"an entry is not {file.form}")
    except (OSError, *kept_files.UNUSABLE) as error:
        warnings.warn(
            f"the tuning cache {path} cannot be read ({error}); it is ignored and "
            "written anew",
            stacklevel=3,
        )
        return {}
    if header != wanted:
        warnings.warn(
            f"the tuning cache {path} was written by {header}, not {wanted}; it is "
            "ignored and written anew",
            stacklevel=3,
        )
        return {}
    return entries

"""States: a checkpoint's tensors by name, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from .errors import CheckpointError, check_file, shown
from .pytorch import PyTorchState
from .safetensors import SafetensorsState


class State(Protocol):
    """Tensors by name; ``read`` may be called once for each.

    Attributes:
        from_file: whether reading takes memory.
        library: the library that the file says it is of, or None.
        note: which entry of the file holds the tensors, or "".
    """

    from_file: bool
    library: str | None
    note: str

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def sketch(self, name: str) -> mx.array:
        """Return an array of the tensor's shape and dtype, which is not to be read."""

    def read(self, name: str) -> mx.array:
        """Return the tensor."""


class Arrays:
    """A state of arrays that are there already."""

    from_file, library, note = False, None, ""

    def __init__(self, arrays: Mapping[str, mx.array]):
        self.arrays = dict(arrays)
        for name, array in self.arrays.items():
            if not isinstance(array, mx.array):
                raise TypeError(
                    f"{shown(str(name))} must be an mlx array; got "
                    f"{type(array).__name__}"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def sketch(self, name: str) -> mx.array:
        """Return the array."""
        return self.arrays[name]

    read = sketch


@contextmanager
def opened(
    source: str | Path | Mapping[str, mx.array], key: str | None = None
) -> Iterator[State]:
    """Open a checkpoint, or take the arrays of one.

    Raises:
        CheckpointError: the file is broken, or asks for more than tensors.
        FileNotFoundError: there is no such file.
    """
    if not isinstance(source, str | Path):
        yield Arrays(source)
        return
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth", ".ckpt", ".bin", ".tar"):
        check_file(path, CheckpointError, binary=True)
        with path.open("rb") as stream:
            yield PyTorchState(stream, path, key)
        return
    if suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name}: no reader for {suffix or 'a file without a suffix'}; "
            "expected .safetensors, .pt, .pth, .ckpt, .bin or .tar"
        )
    state = SafetensorsState(path)
    if key is not None:
        raise CheckpointError(f"{path.name} has no entries, so none called {key!r}")
    yield state

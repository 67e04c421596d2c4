"""Steps: how one tensor of a checkpoint becomes one of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from .errors import CheckpointError
from .layouts import LIBRARIES, OURS
from .states import State


class Step(NamedTuple):
    """One tensor's way into a model: its name, the parameter, how it is converted."""

    source: str
    target: str
    convert: Callable[[mx.array], mx.array]

    def of(self, state: State) -> mx.array:
        """Return the converted tensor, in the dtype that it has in the state."""
        return self.convert(state.read(self.source))


def check_library(state: State, library: str) -> None:
    """Raise if a file says that it is of another library than the one named."""
    if state.library == OURS != library:
        raise CheckpointError(
            f"the file was written by mlx-lattice convert: its library is {OURS!r}, "
            f"not {library!r}, whose layout was taken out of it"
        )


def habits(name: str, library: str) -> list[str]:
    """Return a name, and the name without what the library adds to PyTorch's."""
    layout = LIBRARIES[library]
    *path, leaf = name.split(".")
    if path and path[-1] in layout.wrappers:
        path = path[:-1]
    leaf = "weight" if leaf == layout.leaf else dict(layout.leaves).get(leaf, leaf)
    return [name, ".".join([*path, leaf])]


def counter(name: str) -> bool:
    """Return whether a tensor counts calls or rows in training, and is no parameter."""
    return name.endswith(("num_batches_tracked", "max_num_voxels_during_training"))

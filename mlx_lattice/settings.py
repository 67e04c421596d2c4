"""Settings from ``with`` blocks and environment variables, and their version.

A relation caches its plans by ``version()``. So everything that may change the choice
of a route, except the call and the device, is set here or passed to ``note_change``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

VARIABLES = (
    "MLX_LATTICE_ROUTE",
    "MLX_LATTICE_TUNE",
    "MLX_LATTICE_METAL",
    "MLX_LATTICE_PRECISION",
    "MLX_LATTICE_PROOF",
    "MLX_LATTICE_CACHE",
    "MLX_LATTICE_CUDA_CACHE",
    "MLX_LATTICE_THREADS",
    "MLX_LATTICE_CPU_ISA",
)
# The environment, read once, when the package is imported.
environment: dict[str, str | None] = {name: os.environ.get(name) for name in VARIABLES}


@dataclass(frozen=True)
class Settings:
    """The settings of the ``with`` blocks around a call."""

    forced: tuple[tuple[str, str], ...] = ()  # (pass, route)
    tuned: bool | None = None  # whether routes are chosen by measurement
    proved: bool | None = None  # whether kernels are verified before use
    deterministic: bool = True
    portable: bool = False  # whether compiled kernels are left out
    metal: str | None = None  # "host" if Metal's kernels run on the CPU
    precision: str | None = None  # of float32 products
    cache: Path | None = None  # the cache folder


# A number for each distinct settings, used by ``version`` in the whole process.
_numbers = {Settings(): 0}
_current: ContextVar[tuple[Settings, int]] = ContextVar(
    "settings", default=(Settings(), 0)
)
_changes = 0

# Called with the arrays that end a stage of a net; ``ml.memory_limit`` sets it.
stage_end: ContextVar[Callable[..., None] | None] = ContextVar(
    "stage_end", default=None
)


def current() -> Settings:
    """Return the settings of the blocks around this call."""
    return _current.get()[0]


@contextmanager
def block(**changes: object) -> Iterator[None]:
    """Change settings, by name, inside the block."""
    changed = replace(current(), **changes)
    number = _numbers.setdefault(changed, len(_numbers))
    token = _current.set((changed, number))
    try:
        yield
    finally:
        _current.reset(token)


def version() -> tuple[int, int]:
    """Return a key that differs if a choice of route may differ."""
    return _current.get()[1], _changes


def note_change() -> None:
    """Invalidate cached choices, after a kernel is refused or times are measured."""
    global _changes
    _changes += 1


def boundary(*arrays: object) -> None:
    """End a stage of a net: under ``ml.memory_limit`` the arrays are evaluated.

    Pass every result that later stages read.
    """
    end_stage = stage_end.get()
    if end_stage is not None:
        end_stage(*arrays)


FLOAT32, TF32 = PRECISIONS = ("float32", "tf32")
VARIABLE = "MLX_LATTICE_PRECISION"


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Set the precision in which float32 convolutions inside the block multiply.

    With "tf32", CUDA's matrix tiles multiply 11 bits of features, weights and
    gradients, which is faster; sums are float32. The error is 5e-4 to 8e-4 relative to
    the norm, and results are on average up to 0.07% too near to zero. On other devices
    nothing changes, and ``explain`` says why. Gradients have the precision of their
    forward pass. The environment variable MLX_LATTICE_PRECISION does the same for a
    whole process.

    Args:
        name: "tf32", or "float32" for products of full accuracy: the default.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.precision("tf32"):
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.dtype
        mlx.core.float32
    """
    with block(precision=_known(name, "precision")):
        yield


def requested_precision() -> str:
    """Return the precision that is set by a block or the environment."""
    inside = current().precision
    if inside is not None:
        return inside
    text = environment[VARIABLE]
    return _known(text, VARIABLE) if text else FLOAT32


def _known(name: str, where: str) -> str:
    if name not in PRECISIONS:
        raise ValueError(
            f"{where} must be {' or '.join(map(repr, PRECISIONS))}; got {name!r}"
        )
    return name

"""What blocks and environment variables say now, in a form that is quick to compare.

Every launch compares it with what its plan was chosen under; so all that may change a
choice, beside the device, is set here, or noted here where it is found out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache as kept
from functools import partial
from pathlib import Path

# Routes by pass, as pairs; whether choices are measured, or None; whether kernels prove
# themselves, or None; the folder of what is kept on disk; the others as named.
forced: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("forced", default=())
tuned: ContextVar[bool | None] = ContextVar("tune", default=None)
proved: ContextVar[bool | None] = ContextVar("proof", default=None)
deterministic: ContextVar[bool] = ContextVar("deterministic", default=True)
portable: ContextVar[bool] = ContextVar("portable", default=False)
metal: ContextVar[str | None] = ContextVar("metal", default=None)
precision: ContextVar[str | None] = ContextVar("precision", default=None)
cache: ContextVar[Path | None] = ContextVar("cache", default=None)

# Called with the arrays that end a stage of a net; ``ml.memory_limit`` sets it.
stage_end: ContextVar[Callable[..., None] | None] = ContextVar(
    "stage_end", default=None
)

VARIABLES = (
    "MLX_LATTICE_ROUTE",
    "MLX_LATTICE_TUNE",
    "MLX_LATTICE_METAL",
    "MLX_LATTICE_PRECISION",
    "MLX_LATTICE_PROOF",
    "MLX_LATTICE_CACHE",
)


class Findings:
    """How often this process found out what choices depend on, and makes them again.

    A kernel was refused, times were kept, or the table of routes is another one.
    """

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def note(self) -> None:
        """Have every choice made again."""
        self.count += 1


findings = Findings()


@kept
def reader(name: str) -> Callable[[], str | None]:
    """Return a function that reads a variable: its value now, None where it is unset.

    ``os.environ.get`` encodes the name and raises inside for an absent one, which takes
    a microsecond; the dict behind it, which every change goes through, a tenth of that.
    """
    if not hasattr(os.environ, "_data"):
        return partial(os.environ.get, name)
    key = os.environ.encodekey(name)

    def read() -> str | None:
        value = os.environ._data.get(key)
        return None if value is None else os.environ.decodevalue(value)

    return read


_ROUTE, _TUNE, _METAL, _PRECISION, _PROOF, _CACHE = map(
    getattr(os.environ, "encodekey", str), VARIABLES
)  # as the dict behind os.environ has them


def boundary(*arrays: object) -> None:
    """End a stage of a net: under ``ml.memory_limit`` the arrays are evaluated.

    Pass every result that later stages read: a lazy one keeps its inputs alive.
    """
    end_stage = stage_end.get()
    if end_stage is not None:
        end_stage(*arrays)


def said() -> tuple:
    """Return all that is said now, to compare by ``==``; it can be hashed."""
    variables = getattr(os.environ, "_data", os.environ).get
    return (
        forced.get(),
        tuned.get(),
        proved.get(),
        deterministic.get(),
        portable.get(),
        metal.get(),
        precision.get(),
        cache.get(),
        variables(_ROUTE),
        variables(_TUNE),
        variables(_METAL),
        variables(_PRECISION),
        variables(_PROOF),
        variables(_CACHE),
    )

"""precision(): in what float32 is multiplied, where a backend has a choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import settings

FLOAT32, TF32 = PRECISIONS = ("float32", "tf32")
VARIABLE = "MLX_LATTICE_PRECISION"


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Say in what float32 convolutions inside the block may multiply.

    With "tf32", CUDA's matrix tiles multiply 11 bits of features, weights and
    gradients; sums are float32 as ever: an error of 5e-4 to 8e-4 relative to the norm,
    for a fraction of the time. The other bits are cut off, not rounded, so that results
    are up to 0.07% too near to zero in the mean; values of 11 bits stay exact. Where a
    backend, dtype or route has no such product, nothing changes, and ``explain`` says
    why. Gradients inherit what their forward pass was asked for.

    The environment variable MLX_LATTICE_PRECISION does the same for a whole process.

    Args:
        name: "tf32", or "float32" for products of full accuracy: the default.

    Raises:
        ValueError: the name is another one.
    """
    with settings.block(precision=_known(name, "precision")):
        yield


def asked_precision() -> str:
    """Return what a block or the environment asks for: "float32" or "tf32"."""
    inside = settings.current().precision
    if inside is not None:
        return inside
    text = settings.environment[VARIABLE]
    return _known(text, VARIABLE) if text else FLOAT32


def _known(name: str, where: str) -> str:
    if name not in PRECISIONS:
        raise ValueError(
            f"{where} must be {' or '.join(map(repr, PRECISIONS))}; got {name!r}"
        )
    return name

"""What norms ran and what was fused into them: every one is told to observers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import mlx.core as mx

from ..backends import registry
from ..epilogue import Epilogue
from ..observers import Observers
from ..routes import launch


@dataclass(frozen=True)
class Fused:
    """One norm as it ran, with what was fused into it.

    Attributes:
        scope: the layer that asked for it, or None.
        pass_: "forward" or "backward".
        parts: ("BatchNorm", "residual", "ReLU"): what it computes, in order.
        backend: whose kernels ran; "mlx" for MLX operations.
        launches: of kernels; None where MLX operations ran, 0 where the layer before
            has it for an epilogue.
        rows, channels: of the features.
        dtype: of the features.
    """

    scope: object
    pass_: str
    parts: tuple[str, ...]
    backend: str
    launches: int | None
    rows: int
    channels: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        """As "BatchNorm + residual + ReLU, one launch"."""
        counts = {None: "MLX operations", 0: "with the layer before", 1: "one launch"}
        count = counts.get(self.launches, f"{self.launches} launches")
        return f"{' + '.join(self.parts)}, {count}"


_observers: Observers[Fused] = Observers("fusions")
observe = _observers.observe


# Those who are told here.
observed = _observers.now


def inside(layer: object) -> AbstractContextManager:
    """Return a block whose norms belong to a layer, where anybody observes them."""
    return launch.scope(layer) if _observers else nullcontext()


Tell = Callable[[str, int | None], None]


def teller(parts: Callable[[], tuple[str, ...]], kernels: bool, x: mx.array) -> Tell:
    """Return what tells observers of a norm's passes: their name, and launches.

    The layer is that of now.

    Args:
        parts: called for what the norm computes, in order.
        kernels: whether kernels run it, and not MLX operations.
        x: its features.
    """
    if not _observers:
        return untold
    scope, named = launch.current_scope(), parts()
    backend = registry.serving() if kernels else registry.MLX
    rows, channels, dtype = *x.shape, x.dtype  # MLX may hold what is returned

    def tell(pass_: str, launches: int | None) -> None:
        _observers.tell(
            Fused(scope, pass_, named, backend, launches, rows, channels, dtype)
        )

    return tell


def tell_epilogue(layer: object, after: Epilogue, feats: mx.array) -> None:
    """Tell what a convolution computed for a layer whose result is ``feats``."""
    with inside(layer):
        teller(lambda: after.facts.parts, True, feats)("forward", 0)


def untold(pass_: str, launches: int | None) -> None:
    """Tell nobody."""

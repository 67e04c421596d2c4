"""What norms ran and what was fused into them: every one is told to observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import mlx.core as mx

from ..routes import launch


@dataclass(frozen=True)
class Fused:
    """One norm as it ran, with what was fused into it.

    Attributes:
        scope: the layer that asked for it, or None.
        pass_: "forward" or "backward".
        parts: ("BatchNorm", "residual", "ReLU"): what it computes, in order.
        backend: whose kernels ran; "mlx" for MLX operations.
        launches: of kernels; None where MLX operations ran.
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
        counts = {None: "MLX operations", 1: "one launch"}
        count = counts.get(self.launches, f"{self.launches} launches")
        return f"{' + '.join(self.parts)}, {count}"


_observers: ContextVar[tuple[Callable[[Fused], None], ...]] = ContextVar(
    "fusions", default=()
)


@contextmanager
def observe(observer: Callable[[Fused], None]) -> Iterator[None]:
    """Call ``observer`` with every norm inside the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def inside(layer: object) -> AbstractContextManager:
    """Return a block whose norms belong to a layer, where anybody observes them."""
    return launch.scope(layer) if _observers.get() else nullcontext()


class Teller:
    """Tells observers of one norm's passes; the layer is that of its making.

    Args:
        parts: what it computes, in order.
        backend: whose kernels run.
        x: its features.
    """

    def __init__(self, parts: tuple[str, ...], backend: str, x: mx.array):
        self.facts = parts, backend, x.shape, x.dtype
        self.scope = launch.current_scope()

    def __call__(self, pass_: str, launches: int | None) -> None:
        """Tell of a pass."""
        parts, backend, (rows, channels), dtype = self.facts
        for observer in _observers.get():
            observer(
                Fused(
                    self.scope, pass_, parts, backend, launches, rows, channels, dtype
                )
            )

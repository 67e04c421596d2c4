"""What attention ran: every call is told to observers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import mlx.core as mx

from ..observers import Observers
from ..routes import launch

SDPA, COMPOSED = "scaled_dot_product_attention", "composed"

Tell = Callable[..., None]


@dataclass(frozen=True)
class Attended:
    """One attention as it ran.

    Attributes:
        scope: the layer that asked for it, or None.
        pass_: "forward" or "backward".
        rule: "full", "window", "patches" or "cross".
        backend: whose kernel ran; "mlx" for MLX's operations.
        kernel: its name; "composed" where scores have a bias.
        calls: of it.
        fused: those of them that are one kernel: the CPU's, or MLX's where it takes
            such heads, on Metal outside of training only; the others MLX composes.
        width: channels of a head that are computed, padding too.
        forms: of calls of MLX's attention, (how many, one of them) for each form.
        rows: of the features.
        groups: of rows that attend to each other.
        heads, channels: the number of heads of queries, and channels of each.
        pairs: of queries and keys, in one head.
        padded_pairs: with those that padding of groups adds, which are computed and
            dropped. Queries that fill tiles for a gradient on CUDA are not counted.
        dtype: of the features.
    """

    scope: object
    pass_: str
    rule: str
    backend: str
    kernel: str
    calls: int
    rows: int
    groups: int
    heads: int
    channels: int
    pairs: int
    padded_pairs: int
    dtype: mx.Dtype
    fused: int = 0
    width: int = 0
    forms: tuple = field(default=(), repr=False)

    @property
    def padding(self) -> float:
        """Pairs that are computed over useful ones."""
        return self.padded_pairs / max(1, self.pairs)

    def __str__(self) -> str:
        """As "window: 40 groups, 3 calls of KERNEL, 1.04 times the useful pairs"."""
        groups = "1 group" if self.groups == 1 else f"{self.groups:,} groups"
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return (
            f"{self.rule}: {groups}, {calls} of {self.kernel}{self.form}, "
            f"{self.padding:.3g} times the useful pairs"
        )

    @property
    def form(self) -> str:
        """How MLX computes its calls, after a comma; "" of another's kernel."""
        if self.kernel != SDPA:
            return ""
        if not self.fused:
            return ", composed by MLX"
        some = "" if self.fused == self.calls else f" in {self.fused}"
        wide = self.width > self.channels
        padded = f", heads of {self.channels} padded to {self.width}" if wide else ""
        return f", fused{some}{padded}"


observers: Observers[Attended] = Observers("attended")


def inside(layer: object) -> AbstractContextManager:
    """Return a block whose attention belongs to a layer, where anybody observes it."""
    return launch.scope(layer) if observers else nullcontext()


def teller(
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    rule: str,
    groups: int,
    pairs: tuple[int, int],
    backend: str,
    kernel: str,
) -> Tell:
    """Return what tells observers of a pass, and the kernel's calls in it.

    Args:
        shape: (N, heads, D) of queries.
        dtype: their dtype.
        rule, groups, backend, kernel: as of ``Attended``. What is returned takes the
            pass and its calls, and of MLX's attention how many are fused, and how wide.
        pairs: of queries and keys, without and with padding.
    """
    if not observers:
        return lambda *facts: None
    scope = launch.current_scope()
    rows, *heads = shape

    def tell(pass_: str, calls: int, fused=0, width=0, forms=()) -> None:
        facts = scope, pass_, rule, backend, kernel, calls, rows, groups
        form = fused, width or heads[1], forms
        observers.tell(Attended(*facts, *heads, *pairs, dtype, *form))

    return tell

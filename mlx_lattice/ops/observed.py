"""Observer lists for norms and attention: what ran, and by whose kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import mlx.core as mx

from .. import registry
from ..channel_kernels import untold
from ..epilogue import Epilogue
from ..routes import launch

SDPA, COMPOSED = "scaled_dot_product_attention", "composed"
Fact = TypeVar("Fact")
Tell = Callable[..., None]


class Observers(Generic[Fact]):
    """The callbacks for one kind of fact; true if there are any."""

    def __init__(self, name: str):
        self._now: ContextVar[tuple[Callable[[Fact], None], ...]] = ContextVar(
            name, default=()
        )
        self.now = self._now.get  # every layer asks

    def __bool__(self) -> bool:
        return bool(self._now.get())

    @contextmanager
    def observe(self, observer: Callable[[Fact], None]) -> Iterator[None]:
        """Call ``observer`` with every fact inside the block."""
        token = self._now.set((*self._now.get(), observer))
        try:
            yield
        finally:
            self._now.reset(token)

    def tell(self, fact: Fact) -> None:
        """Call each observer with a fact."""
        for observer in self._now.get():
            observer(fact)


@dataclass(frozen=True)
class Fused:
    """One norm as it ran, with what was fused into it."""

    scope: object  # the layer that called it, or None
    pass_: str
    parts: tuple[str, ...]  # ("BatchNorm", "residual", "ReLU"), in order
    backend: str
    launches: int | None  # None: MLX operations; 0: with the layer before
    rows: int
    channels: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        """As "BatchNorm + residual + ReLU, one launch"."""
        counts = {None: "MLX operations", 0: "with the layer before", 1: "one launch"}
        count = counts.get(self.launches, f"{self.launches} launches")
        return f"{' + '.join(self.parts)}, {count}"


@dataclass(frozen=True)
class Attended:
    """One attention as it ran."""

    scope: object  # the layer that called it, or None
    pass_: str
    rule: str  # "full", "window", "patches" or "cross"
    backend: str
    kernel: str  # "composed" if scores have a bias
    calls: int
    rows: int
    groups: int  # of rows that attend to each other
    heads: int
    channels: int  # of a head
    pairs: int  # of queries and keys, in one head
    padded_pairs: int  # those that are computed; not queries that fill CUDA's tiles
    dtype: mx.Dtype
    fused: int = 0  # calls that are one kernel
    forms: tuple = field(default=(), repr=False)  # (count, Call) of MLX's attention

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
        """How MLX computes its calls, after a comma; "" for another kernel."""
        if self.kernel != SDPA:
            return ""
        if not self.fused:
            return ", composed by MLX"
        some = "" if self.fused == self.calls else f" in {self.fused}"
        return f", fused{some}"


norms: Observers[Fused] = Observers("norms")
attention: Observers[Attended] = Observers("attention")


def inside(layer: object) -> AbstractContextManager:
    """Return a block whose norms and attention are reported with this layer."""
    return launch.scope(layer) if norms or attention else nullcontext()


def norm_teller(parts: Sequence[str], kernels: bool, x: mx.array) -> Tell:
    """Return a function of (pass, launches) that reports a norm over ``x``."""
    if not norms:
        return untold
    scope, named = launch.current_scope(), tuple(filter(None, parts))
    backend = registry.serving() if kernels else registry.MLX
    rows, channels, dtype = *x.shape, x.dtype  # MLX may keep the returned function

    def tell(pass_: str, launches: int | None) -> None:
        norms.tell(Fused(scope, pass_, named, backend, launches, rows, channels, dtype))

    return tell


def tell_epilogue(layer: object, after: Epilogue, feats: mx.array) -> None:
    """Report an epilogue that a convolution computed for a layer."""
    with inside(layer):
        norm_teller(after.facts.parts, True, feats)("forward", 0)


def attention_record(
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    rule: str,
    groups: int,
    pairs: tuple[int, int],
    backend: str,
    kernel: str,
) -> Attended | None:
    """Return the record of a forward pass in one call; None without observers.

    ``shape``: of queries. ``pairs``: without and with padding.
    """
    if not attention:
        return None
    rows, *heads = shape
    facts = rule, backend, kernel, 1, rows, groups, *heads, *pairs, dtype, 1
    return Attended(launch.current_scope(), "forward", *facts)

"""Form: what a relation shares with those of other scans."""

from __future__ import annotations

from functools import lru_cache

from .kernel_spec import KernelSpec

KINDS = ("forward", "target", "submanifold", "transposed", "generative", "general")
# Of as many kinds of calls a form keeps what they share; then the oldest goes.
KEPT = 256


class Form:
    """All facts of a relation but its rows; ``form`` returns one for equal facts.

    Attributes:
        kind, spec, volume, mirrored: as of ``Relation``.
        pointwise: whether every row is fed by itself alone, through one offset.
        is_transposed: whether it is that of a transpose.
        known: what contractions keep for all relations of it, by ``keep``.
    """

    __slots__ = (
        "is_transposed", "kind", "known", "mirrored", "pointwise", "spec", "volume",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        spec: KernelSpec | None,
        volume: int,
        pointwise: bool,
        mirrored: bool,
        is_transposed: bool,
    ):
        self.kind, self.spec, self.volume = kind, spec, volume
        self.pointwise, self.mirrored = pointwise, mirrored
        self.is_transposed = is_transposed
        self.known: dict[tuple, object] = {}

    def keep(self, key: tuple, value: object) -> None:
        """Keep a value under a key for all relations of this form."""
        if len(self.known) >= KEPT:
            self.known.pop(next(iter(self.known)), None)
        self.known[key] = value


@lru_cache(maxsize=1024)
def form(*facts: object) -> Form:
    """Return the form of some facts, in the order in which ``Form`` takes them."""
    return Form(*facts)

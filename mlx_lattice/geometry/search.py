"""Search: what the neighbour table of a relation is searched by."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..kernel_spec import KernelSpec
from . import lattice
from .keys import Offsets
from .protocol import Keep, SearchedRows


class Search(NamedTuple):
    """What makes the neighbour table of a relation between two sets.

    Attributes:
        source, target: the sets; or places among several that are given beside it, so
            that scans share it.
        transposed: whether ``out = in * stride + offset_k``, not
            ``in = out * stride + offset_k``.
        spec: the kernel.
        mirrored: whether the edge (i, o, k) implies (o, i, K - 1 - k).
        identity: whether each row is fed by itself alone.
    """

    source: SearchedRows | int
    target: SearchedRows | int
    transposed: bool
    spec: KernelSpec
    mirrored: bool = False
    identity: bool = False

    @classmethod
    def of(cls, kind: str, source, target, spec: KernelSpec) -> Search:
        """Return that of a relation of a kind (see ``Relation``)."""
        identity = spec.is_pointwise and source == target
        mirrored = identity or (kind == "submanifold" and spec.is_symmetric)
        transposed = kind in ("transposed", "generative")
        return cls(source, target, transposed, spec, mirrored, identity)

    @property
    def offsets(self) -> Offsets:
        """The K offsets."""
        return self.spec.offsets

    @property
    def stride(self) -> tuple[int, ...]:
        """Lattice step."""
        return self.spec.stride

    def turned(self) -> Search:
        """Return what makes the table of the transpose, where it is not mirrored."""
        ends = self.target, self.source
        return Search(*ends, not self.transposed, *self[3:])

    def cells(self) -> mx.array:
        """Return (N, 1) int32: the cell of each of the finer rows, or -1.

        Of a kernel that fills its cell.
        """
        ends = self.source, self.target
        coarse, fine = ends if self.transposed else ends[::-1]
        return coarse.lookup.find(lattice.cells(fine.coords, self.stride))[:, None]

    def __call__(self, keep: Keep, wanted: str | None) -> mx.array:
        """Return the table, searched for between sets."""
        rows = len(self.source.coords)
        if self.identity and rows:  # of no rows nothing is launched
            return mx.arange(rows, dtype=mx.int32)[:, None]
        return self.source.lookup.table(
            self.target,
            self.offsets,
            self.stride,
            transposed=self.transposed,
            mirrored=self.mirrored,
            keep=keep,
            wanted=wanted,
        )

"""Coordinate rows as geometry takes them, and what finds them by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from .keys import Bounds, Offsets

# Called with the name and the value of what a backend makes beside a table.
Keep = Callable[[str, object], None]


class Rows(Protocol):
    """Coordinate rows and a box that holds them, which may be read when asked for."""

    @property
    def coords(self) -> mx.array:
        """(N, 1 + D) int32."""

    @property
    def box(self) -> Bounds:
        """Bounds of a box that holds all rows."""


class BoxedRows(NamedTuple):
    """Coordinate rows whose box is known, or None: who asks for it finds it then."""

    coords: mx.array
    box: Bounds | None


@runtime_checkable
class RowIndex(Protocol):
    """Finds the rows of one coordinate set by value; of equal rows the first.

    Attributes:
        is_sorted: whether the rows are known to be in order, once it is settled.
    """

    is_sorted: bool

    @property
    def arrays(self) -> Sequence[mx.array]:
        """The arrays that ``find`` and ``table`` read."""

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``, launched but not waited for."""

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1.

        Args:
            rows: rows to look for.
            bounds: their bounds, where they are known.
        """

    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 where there is no edge.

        Args:
            out: the output rows.
            offsets: the K offsets.
            stride: lattice step.
            transposed: whether ``out = in * stride + offset_k``, not
                ``in = out * stride + offset_k``.
            mirrored: whether the output rows are the set itself and the offsets
                point-symmetric, so that half of them need no search.
            keep: takes what a backend makes beside the table.
            wanted: the name of a view that a backend may make beside it.
        """


class SearchedRows(Rows, Protocol):
    """A set of rows with its look-up, which is made when it is asked for."""

    has_lookup: bool
    lookup: RowIndex

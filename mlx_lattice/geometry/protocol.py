"""Coordinate rows as geometry takes them, and what finds them by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from .curves import Curve
from .keys import Bounds, Offsets
from .output_rows import Rule
from .unique import KeptRows, UniqueRows

# Called with the name and the value of what a backend makes beside a table.
Keep = Callable[[str, object], None]


# Classes that are imported after geometry: a ``CoordinateSet`` has (N, 1 + D) int32
# ``coords``, a ``box`` that holds them and a ``lookup``; ``BoxedRows`` are Rows too.
Rows = SearchedRows = Any
RelationViews = Any  # a ``Relation``


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


class StartedLevels(Protocol):
    """Levels of a set that were launched, and whose sizes are not read."""

    @property
    def counts(self) -> Sequence[mx.array]:
        """Small arrays to read."""

    def rows(self, counts: list, boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level.

        Args:
            counts: the values of ``counts``.
            boxes: int32 bounds of the rows of each level.

        Returns:
            None where it was launched without knowing these, and for smaller ones.
        """


class StartedRows(Protocol):
    """Rows that a mask keeps, which were launched, and whose number is not read.

    Attributes:
        count: (1,) integer: that number.
    """

    count: mx.array

    def kept(self, count: int) -> KeptRows:
        """Return them, of the value of ``count``."""


@runtime_checkable
class Geometry(Protocol):
    """What a backend builds of coordinate rows and of neighbour tables.

    In its methods ``coords`` are (N, 1 + D) int32 rows, ``offsets`` the K kernel
    offsets, ``stride`` is the lattice step, and ``table`` a (N, K) int32 neighbour
    table.

    Attributes:
        counts_edges: whether edges are counted with every table, so that those of a
            transposed one are listed from its own table, without a sort.
    """

    counts_edges: bool

    def bounds(self, coords: mx.array) -> Bounds:
        """Return the least and greatest value of each column of (N, 1 + D) int32.

        Zeros for no rows. Reads them.
        """

    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows of (N, 1 + D) int32, and where each went.

        Reads their number, on some backends the bounds too, but for what is given.

        Args:
            box: bounds of a box that holds them, where it is known.
            count: how many unique rows there are, where that is known.
        """

    def made_rows(
        self,
        rule: Rule,
        coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        box: Bounds,
        is_cut: bool,
        count: int | None = None,
    ) -> mx.array:
        """Return the sorted unique int32 rows that a rule makes. Reads their number.

        Args:
            rule: which rows are made.
            box: int32 bounds of the rows that are kept.
            is_cut: whether the rule makes rows outside the box.
            count: their number, which need not be read where it is known.
        """

    def start_kept(self, mask: mx.array, coords: mx.array) -> StartedRows:
        """Launch the rows of a set that a mask keeps.

        Args:
            mask: (N,) bool, N at least 1.
        """

    def best_rows(
        self, scores: mx.array, coords: mx.array, batches: tuple[int, int], k: int
    ) -> mx.array:
        """Return (N,) bool: which rows are among the k of greatest score of an element.

        Of equal scores the earlier row is better, of NaNs too, which are the least.

        Args:
            scores: (N,) of any dtype that float32 holds.
            coords: (N, 1 + D) int32, more than k rows.
            batches: the least and the greatest batch index, or a wider range.
            k: at least 1.
        """

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch for each stride the sorted unique int32 rows ``floor(in / stride)``.

        Args:
            strides: lattice steps, each a multiple of the one before it.
            boxes: int32 bounds of the rows of each, None of a set whose bounds nobody
                has read.

        Returns:
            None where they are to be made one by one.
        """

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowIndex:
        """Return the look-up of (N, 1 + D) int32 rows, launched but not waited for.

        Args:
            box: a box that holds them, where it is known. An index without one is to
                be settled before it is searched, but for the compiled ones.
        """

    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) int32: the row of ``table`` that holds each entry, or -1."""

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o).

        Args:
            relation: whose table it is: its edges may have been counted already.
        """

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) int32 order of rows by the Gray-code rank of their mask.

        Ties keep the rows' own order.

        Args:
            region: rows that are ordered among themselves, one region after another;
                by default all of them.
        """

    def curve_order(self, coords: mx.array, curve: Curve) -> mx.array:
        """Return the (N,) int32 order of rows by batch, then along a curve.

        Args:
            coords: (N, 1 + D) int32, unique, at least one.
            curve: through them.
        """

    def edge_count(self, relation: RelationViews) -> mx.array | None:
        """Return the (1,) number of edges, unread; None if listing them needs none."""

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build the views that the backend will want of a new relation, unevaluated.

        So they are evaluated together with what Python waits for.

        Returns:
            The number of edges, still on the device, where the backend counts them.
        """


class OneByOne:
    """Nothing is made ahead, or together with others; see ``Geometry``."""

    counts_edges = False

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch nothing: levels are made one of the other."""
        return None

    def edge_count(self, relation: RelationViews) -> mx.array | None:
        """Return the (1,) number of edges, unread."""
        return (relation.out_in >= 0).sum().reshape(1)

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build nothing ahead of its first use."""
        return None

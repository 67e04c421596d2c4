"""What a backend builds of rows and neighbour tables, and what finds rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from . import lattice
from .lattice import Bounds, Curve, MaskedRows, Offsets, Rule, UniqueRows

# Called with the name and the value of a view that a backend makes beside a table.
Keep = Callable[[str, object], None]

# Classes that are imported after geometry. A ``CoordinateSet`` has (N, 1 + D) int32
# ``coords``, a ``box`` that holds them and a ``lookup``; ``BoxedRows`` are Rows too.
Rows = SearchedRows = Any
RelationViews = Any  # a ``Relation``


class BoxedRows(NamedTuple):
    """Coordinate rows, and the box that holds them if it is known."""

    coords: mx.array
    box: Bounds | None


class RowIndex(ABC):
    """Finds the rows of one coordinate set by value; of equal rows the first."""

    is_sorted = False

    @property
    @abstractmethod
    def arrays(self) -> Sequence[mx.array]:
        """The arrays that ``find`` and ``table`` read."""

    @abstractmethod
    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``, launched but not waited for."""

    @abstractmethod
    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        out = BoxedRows(rows, bounds)
        return self.table(out, [(0,) * dims], (1,) * dims)[:, 0]

    @abstractmethod
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
        """Return the (N_out, K) int32 neighbour table, -1 if there is no edge.

        ``transposed``: ``out = in * stride + offset_k``, not ``in = out * stride +
        offset_k``. ``mirrored``: the output rows are the set itself and the offsets
        point-symmetric, so half of them need no search. ``keep`` takes views that a
        backend makes beside the table, such as the ``wanted`` one.
        """


class StartedLevels(Protocol):
    """Levels of a set that were launched, and whose sizes are not read."""

    @property
    def counts(self) -> Sequence[mx.array]:
        """Small arrays to read."""

    def rows(self, counts: list, boxes: Sequence[Bounds]) -> list[mx.array] | None:
        """Return the rows of each level; None if the launched keys were too narrow."""


class Geometry(ABC):
    """What a backend builds of coordinate rows and of neighbour tables.

    ``coords`` are (N, 1 + D) int32 rows, ``offsets`` the K kernel offsets, ``stride``
    is the lattice step, ``table`` a (N, K) int32 neighbour table, ``box`` int32 bounds
    that hold the rows. What is None is not known yet, and is read.
    """

    @abstractmethod
    def bounds(self, coords: mx.array) -> Bounds:
        """Return the least and greatest value of each column; zeros for no rows."""

    @abstractmethod
    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows, and the place of each row among them."""

    @abstractmethod
    def made_rows(
        self,
        rule: Rule,
        coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        box: Bounds,
        count: int | None = None,
    ) -> mx.array:
        """Return the sorted unique int32 rows within a box that a rule makes."""

    def start_kept(self, mask: mx.array, coords: mx.array) -> MaskedRows:
        """Launch the rows of a set that a mask, (N,) bool, keeps. N is at least 1."""
        return MaskedRows(mask, coords)

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch for each stride the sorted unique int32 rows ``floor(in / stride)``.

        Each stride is a multiple of the one before it. None: make one after another.
        """
        return None

    def levels(
        self,
        coords: mx.array,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds],
    ) -> list[mx.array]:
        """Return the cells of each stride, each level made of the one before."""
        before = (1,) * (coords.shape[1] - 1)
        made, still = [], [(0,) * len(before)]
        for stride, box in zip(strides, boxes, strict=True):
            step = tuple(s // b for s, b in zip(stride, before, strict=True))
            coords, before = self.made_rows(Rule.CELL, coords, still, step, box), stride
            made.append(coords)
        return made

    @abstractmethod
    def index(self, coords: mx.array, box: Bounds | None = None) -> RowIndex:
        """Return the look-up of rows, launched; without a box settle it first."""

    @abstractmethod
    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) int32: the row of ``table`` that holds each entry, or -1."""

    @abstractmethod
    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o)."""

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) int32 order of rows by the Gray-code rank of their mask."""
        return lattice.by_region(lattice.gray_order(table >= 0), region)

    @abstractmethod
    def curve_order(self, coords: mx.array, curve: Curve) -> mx.array:
        """Return the (N,) int32 order of unique rows, at least one, along a curve."""

    def edge_count(self, relation: RelationViews) -> mx.array | None:
        """Return the (1,) number of edges, unread; None if listing them needs none."""
        return (relation.out_in >= 0).sum().reshape(1)

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build the views that the backend will read of a new relation, unevaluated.

        Returns the number of edges, still on the device, if the backend counts them.
        """
        return None

"""Geometry on the CPU, by the C++ extension: hash look-ups, bitmaps, radix sorts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..geometry import curves, sync
from ..geometry.curves import Curve, by_region
from ..geometry.keys import INT32_LIMIT, Bounds, Offsets
from ..geometry.output_rows import Rule, box_of
from ..geometry.output_rows import made_rows as rows_within
from ..geometry.protocol import Keep, OneByOne, RelationViews, Rows
from ..geometry.unique import KeptRows, UniqueRows, best_rows, true_positions
from .cpu_extension import extension


class RowIndex:
    """Finds the rows of one coordinate set; each table hashes them again.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    is_sorted = False  # nobody looks

    def __init__(self, coords: mx.array):
        self.coords = coords

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that ``find`` and ``table`` read."""
        return (self.coords,)

    def facts(self) -> list[mx.array]:
        """Return nothing: the extension reads rows where they are."""
        return []

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows."""
        return _bounds(self.coords), extension.first_duplicate(self.coords)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        zero, ones = [(0,) * dims], (1,) * dims
        return extension.neighbour_table(self.coords, rows, zero, ones, False)[:, 0]

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
        """Return the (N_out, K) int32 neighbour table, -1 where there is no edge."""
        return extension.neighbour_table(
            self.coords, out.coords, offsets, stride, transposed
        )


class StartedRows:
    """Rows that a mask keeps; see ``geometry.protocol.StartedRows``.

    They are found at once: the extension reads the mask where it is.
    """

    def __init__(self, mask: mx.array, coords: mx.array):
        with sync.values():
            mx.eval(mask)
        self._kept = KeptRows(*extension.kept_rows(mask, coords))
        self.count = mx.array([len(self._kept.rows)])

    def kept(self, count: int) -> KeptRows:
        """Return them."""
        return self._kept


def _bounds(coords: mx.array) -> Bounds:
    with sync.values():
        low, high = extension.bounds(coords)
    return tuple(low), tuple(high)


def _within(rows: mx.array, box: Bounds) -> mx.array:
    low, high = (mx.array(list(end)) for end in box)
    return rows[true_positions(mx.all((rows >= low) & (rows <= high), axis=1))]


class CpuGeometry(OneByOne):
    """The geometry of the CPU's extension; see ``Geometry``."""

    bounds = staticmethod(_bounds)
    start_kept = staticmethod(StartedRows)
    best_rows = staticmethod(best_rows)

    def unique_rows(
        self, coords: mx.array, box: Bounds | None = None, count: int | None = None
    ) -> UniqueRows:
        """Return the sorted unique rows, and where each given row went."""
        with sync.values():
            rows, inverse, _ = extension.unique_rows(coords)
        return UniqueRows(rows, inverse)

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
        """Return the sorted unique int32 rows that a rule makes."""
        if rule == Rule.ITSELF:
            rows = self.unique_rows(coords).rows
        elif rule == Rule.CELL:
            rows = extension.cells(coords, stride)
        elif rule == Rule.REACH:
            low, high = box_of(rule, _bounds(coords), offsets, stride)
            # The extension takes a box beyond int32 for rows there, which a stride
            # may have left out; its own box is up to a cell wider.
            if min(low) <= -INT32_LIMIT or max(high) >= INT32_LIMIT - 1:
                return rows_within(rule, coords, offsets, stride, box, count)
            rows = extension.reach(coords, offsets, stride)
        else:
            rows = extension.expand(coords, offsets, stride)
        return _within(rows, box) if is_cut else rows

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowIndex:
        """Return the look-up of (N, 1 + D) int32 rows."""
        return RowIndex(coords)

    def transpose_table(self, table: mx.array, n_in: int) -> mx.array:
        """Return (n_in, K) int32: the row of ``table`` that holds each entry, or -1."""
        return extension.transpose_table(table, n_in)

    def edge_count(self, relation: RelationViews) -> None:
        """Return None: the extension lists edges without a count."""

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k) of a table, sorted by (k, o)."""
        return extension.edges(table)[0]

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) order of rows by the Gray-code rank of their mask."""
        return by_region(extension.gray_order(table), region)

    def curve_order(self, coords: mx.array, curve: Curve) -> mx.array:
        """Return the (N,) int32 order of rows by batch, then along a curve."""
        if not curve.is_numbered:
            return curves.curve_order(coords, curve)
        low, bits, _, is_hilbert, is_swapped = curve
        return extension.curve_order(coords, low, bits, is_hilbert, is_swapped)

"""Geometry in MLX operations: it runs on every device, and is the floor of the others.

It sorts and searches 64-bit keys, so the rows are the same on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..geometry import curves, output_rows, sorted_index
from ..geometry.keys import Bounds, Offsets, bounds_of
from ..geometry.output_rows import Rule
from ..geometry.protocol import Keep, OneByOne, RelationViews, Rows
from ..geometry.sorted_index import SortedIndex
from ..geometry.unique import StartedRows, best_rows, unique_rows


class RowIndex(SortedIndex):
    """Finds rows by a binary search; to be settled first, unless its box was given."""

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
        if mirrored:
            return sorted_index.submanifold_table(self, out.coords, offsets)
        tables = sorted_index
        build = tables.transposed_table if transposed else tables.forward_table
        box = out.box or bounds_of(out.coords)
        return build(self, out.coords, box, offsets, stride)


class MlxGeometry(OneByOne):
    """The geometry in MLX operations; see ``Geometry``."""

    bounds = staticmethod(bounds_of)
    unique_rows = staticmethod(unique_rows)
    start_kept = staticmethod(StartedRows)
    best_rows = staticmethod(best_rows)
    index = staticmethod(RowIndex.of)
    transpose_table = staticmethod(sorted_index.transpose_table)
    curve_order = staticmethod(curves.curve_order)

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
        """Return the sorted unique int32 rows that a rule makes. Reads their number."""
        return output_rows.made_rows(rule, coords, offsets, stride, box, count)

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k), sorted by (k, o). Reads one size."""
        return sorted_index.table_edges(table)

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) order of rows by the Gray-code rank of their mask."""
        return curves.by_region(curves.gray_order(table >= 0), region)

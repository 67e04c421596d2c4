"""Geometry on Metal: look-ups and tables, rows of new sets, views, as one object."""

from __future__ import annotations

import mlx.core as mx

from ..geometry.keys import Bounds, bounds_of
from ..geometry.protocol import OneByOne, RelationViews
from . import metal_curves, metal_rows, metal_views
from .metal_best import best_rows
from .metal_kept import StartedRows
from .metal_lookups import RowTable
from .metal_unique import unique_rows


class MetalGeometry(OneByOne):
    """The geometry of Metal's kernels; see ``Geometry``."""

    bounds = staticmethod(bounds_of)
    unique_rows = staticmethod(unique_rows)
    made_rows = staticmethod(metal_rows.made_rows)
    start_kept = staticmethod(StartedRows)
    best_rows = staticmethod(best_rows)
    start_levels = staticmethod(metal_rows.start_levels)
    transpose_table = staticmethod(metal_views.transpose_table)
    gray_order = staticmethod(metal_views.gray_order)
    curve_order = staticmethod(metal_curves.curve_order)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords)

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k), sorted by (k, o). Reads one size."""
        return metal_views.edges(table, relation and relation.n_edges)

"""Geometry on CUDA: look-ups and tables, sorted unique rows, views, as one object."""

from __future__ import annotations

import mlx.core as mx

from ..geometry.curves import by_region
from ..geometry.keys import Bounds
from ..geometry.output_rows import Rule
from ..geometry.protocol import BoxedRows
from ..kernel_spec import KernelSpec
from . import (
    cuda_best,
    cuda_curves,
    cuda_kept,
    cuda_levels,
    cuda_lookups,
    cuda_tables,
    cuda_unique,
    cuda_views,
)
from .cuda_compile import rehearsal

# Size and stride of kernels, and whether they are transposed.
_COMMON = (5, 1, False), (3, 1, False), (2, 2, False), (2, 2, True)
_LEVELS = 4  # that are made at once


class CudaGeometry:
    """The geometry of CUDA's kernels; see ``Geometry``."""

    counts_edges = True

    bounds = staticmethod(cuda_lookups.bounds)
    unique_rows = staticmethod(cuda_unique.unique_rows)
    made_rows = staticmethod(cuda_unique.made_rows)
    transpose_table = staticmethod(cuda_views.transpose_table)
    edges = staticmethod(cuda_views.edges)
    start = edge_count = staticmethod(cuda_views.start)
    curve_order = staticmethod(cuda_curves.curve_order)
    start_kept = staticmethod(cuda_kept.start_kept)
    best_rows = staticmethod(cuda_best.best_rows)
    start_levels = staticmethod(cuda_levels.start_levels)

    def gray_order(self, table: mx.array, region: int | None = None) -> mx.array:
        """Return the (N,) order of rows by the Gray-code rank of their mask."""
        return by_region(cuda_views.gray_order(table), region)

    def index(
        self, coords: mx.array, box: Bounds | None = None
    ) -> cuda_lookups.RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return cuda_lookups.RowTable(coords, box is not None)


def rehearse(dims: int) -> None:
    """Have the kernels of common relations compiled, side by side, before their use.

    Those of sets in ``dims`` dimensions: kernels of size 3 and 5, and of size and
    stride 2 both ways, with the views that matrix routes and gradients read.
    """
    # Sizes are nominal: rows are not computed.
    rows = BoxedRows(mx.zeros((64, 1 + dims), dtype=mx.int32), None)
    with rehearsal("all"):
        found = cuda_lookups.RowTable(rows.coords)
        cuda_tables.identity_tiles(rows.coords)
        for size, stride, transposed in _COMMON:
            spec = KernelSpec.of(dims, kernel_size=size, stride=stride)
            table = found.table(
                rows,
                spec.offsets,
                spec.stride,
                transposed=transposed,
                keep=lambda name, view: None,
                wanted=cuda_tables.TILES if size < 5 else None,
            )
            if size == 5:  # a stem's, of which a net has one: see cuda_views.start
                cuda_tables.relation_tiles(cuda_tables.table_source(table))
        for extent in (1 << 4, 1 << 14):  # keys of one word and of two
            box = (0,) * (1 + dims), (extent,) * (1 + dims)
            cuda_unique.made_rows(
                Rule.CELL, rows.coords, [(0,) * dims], spec.stride, box, False
            )
            strides = [(2**k,) * dims for k in range(1, 1 + _LEVELS)]
            cuda_levels.start_levels(
                BoxedRows(rows.coords, box), strides, [box] * _LEVELS
            )
        swapped = cuda_views.transpose_table(table, len(rows.coords))
        cuda_tables.relation_tiles(cuda_tables.table_source(swapped))
        counts = cuda_views.band_counts_of(swapped)
        cuda_views.listed(swapped, counts, 2, swapped.shape[1], 1)

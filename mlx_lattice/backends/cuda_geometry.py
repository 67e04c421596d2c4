"""Geometry on CUDA: look-ups and tables, sorted unique rows, views, as one object."""

from __future__ import annotations

import mlx.core as mx

from ..geometry.keys import Bounds
from . import cuda_tables, cuda_unique, cuda_views


class CudaGeometry:
    """The geometry of CUDA's kernels; see ``Geometry``."""

    counts_edges = True

    bounds = staticmethod(cuda_tables.bounds)
    unique_rows = staticmethod(cuda_unique.unique_rows)
    made_rows = staticmethod(cuda_unique.made_rows)
    transpose_table = staticmethod(cuda_views.transpose_table)
    edges = staticmethod(cuda_views.edges)
    gray_order = staticmethod(cuda_views.gray_order)
    start = staticmethod(cuda_views.start)

    def index(
        self, coords: mx.array, box: Bounds | None = None
    ) -> cuda_tables.RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return cuda_tables.RowTable(coords)

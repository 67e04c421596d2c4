"""The Metal backend: kernels of ``metal/``, compiled by MLX when they first run.

The names are those of every backend (see the package); ``RowTable`` and the views come
on top. ``metal_kernels`` says how a kernel is found and launched.
"""

from . import metal_conv as conv
from .metal_conv import CONV, WEIGHT_GRAD
from .metal_geometry import (
    RowTable,
    cell_rows,
    expanded_rows,
    first_duplicate,
    neighbour_table,
    reached_rows,
    unique_rows,
)
from .metal_quantized import QUANTIZED
from .metal_reductions import (
    gather_max,
    gather_sum,
    row_products,
    scatter_max,
    scatter_sum,
    segment_max,
    segment_sum,
    spread_max,
)
from .metal_views import (
    edges,
    gray_order,
    occupancy_masks,
    output_csr,
    sorted_rows,
    transpose_table,
)

__all__ = [
    "CONV",
    "QUANTIZED",
    "RowTable",
    "WEIGHT_GRAD",
    "cell_rows",
    "conv",
    "edges",
    "expanded_rows",
    "first_duplicate",
    "gather_max",
    "gather_sum",
    "gray_order",
    "neighbour_table",
    "occupancy_masks",
    "output_csr",
    "reached_rows",
    "row_products",
    "scatter_max",
    "scatter_sum",
    "segment_max",
    "segment_sum",
    "sorted_rows",
    "spread_max",
    "transpose_table",
    "unique_rows",
]

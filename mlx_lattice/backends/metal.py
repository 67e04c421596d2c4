"""The Metal backend: kernels of ``metal/``, compiled by MLX when they first run.

The names are those of every backend (see the package); ``RowTable`` and the views come
on top. ``metal_kernels`` says how a kernel is found and launched.
"""

from . import metal_conv, metal_matrix, metal_quantized
from .metal_geometry import (
    RowTable,
    cell_rows,
    expanded_rows,
    first_duplicate,
    neighbour_table,
    reached_rows,
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
from .metal_unique import unique_rows
from .metal_views import (
    edges,
    gray_order,
    occupancy_masks,
    output_csr,
    sorted_rows,
    transpose_table,
)

# Routes whose functions take ``bias``, (C_out,), and add it to their sums.
FUSED_BIAS = metal_matrix.FUSED_BIAS | metal_quantized.FUSED_BIAS
CONV = {**metal_conv.CONV, **metal_matrix.CONV}
WEIGHT_GRAD = {**metal_conv.WEIGHT_GRAD, **metal_matrix.WEIGHT_GRAD}

__all__ = [
    "CONV",
    "QUANTIZED",
    "RowTable",
    "WEIGHT_GRAD",
    "cell_rows",
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

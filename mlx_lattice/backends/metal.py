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
from .metal_pooling import (
    Segments,
    interpolate,
    interpolate_input_grad,
    interpolate_weight_grad,
    max_pool,
    reduce_segments,
    select_winners,
    spread_segments,
    spread_winners,
    sum_pool,
)
from .metal_quantized import QUANTIZED
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
    "WEIGHT_GRAD",
    "RowTable",
    "Segments",
    "cell_rows",
    "conv",
    "edges",
    "expanded_rows",
    "first_duplicate",
    "gray_order",
    "interpolate",
    "interpolate_input_grad",
    "interpolate_weight_grad",
    "max_pool",
    "neighbour_table",
    "occupancy_masks",
    "output_csr",
    "reached_rows",
    "reduce_segments",
    "select_winners",
    "sorted_rows",
    "spread_segments",
    "spread_winners",
    "sum_pool",
    "transpose_table",
    "unique_rows",
]

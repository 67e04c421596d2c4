"""The Metal backend: kernels of ``metal/``, compiled by MLX when they first run.

The names are those of every backend (see the package); ``RowTable`` and the views come
on top. ``metal_kernels`` says how a kernel is found and launched.
"""

from . import metal_conv as conv
from .metal_conv import CONV, WEIGHT_GRAD
from .metal_geometry import (
    RowTable,
    cell_rows,
    edges,
    expanded_rows,
    first_duplicate,
    gray_order,
    neighbour_table,
    occupancy_masks,
    output_csr,
    reached_rows,
    sorted_rows,
    transpose_table,
    unique_rows,
)

__all__ = [
    "CONV",
    "WEIGHT_GRAD",
    "RowTable",
    "cell_rows",
    "conv",
    "edges",
    "expanded_rows",
    "first_duplicate",
    "gray_order",
    "neighbour_table",
    "occupancy_masks",
    "output_csr",
    "reached_rows",
    "sorted_rows",
    "transpose_table",
    "unique_rows",
]

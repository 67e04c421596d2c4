"""The interfaces of contraction kernels, on Metal and CUDA alike.

Each stands here once: inputs, outputs and their shapes, and sizes by name. What calls
them is in ``runners``; a backend's planner says symbol, grid, tile and files.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..epilogue import ARRAYS
from ..problem import MLX_LAYOUT, Problem
from ..routes.plan import COPIED, Plan
from .gpu_kernel import GpuKernel, Interface

# Where a float weight stands, in elements: from an offset to the next, from a row of
# the array to the next, and from a channel group to the next.
# Zero for packed ones. Kernels get TRANSPOSED where rows run along summed channels.
W_OFFSET, W_ROW, W_GROUP = "w_offset_stride", "w_row_stride", "w_group_stride"
# The arrays of an epilogue; a bias is its shift, or is alone.
AFTER = "bias", *ARRAYS[1:]
# Statistics of the rows of y, (lines, 3, C_y): see ``Moments`` of epilogue.py.
LINES = "lines"
# y[o] = sum over the edges (i, o, k) of x[i] @ W[k] + bias, row by row. A dispatch
# covers `rows` rows from `first` on; y has just those. Channels are those of a group.
PER_ROW = Interface(
    "PerRow",
    ("x", "w", "table", "bias"),
    ("y",),
    (
        ("first", "0"),
        ("rows", "table_shape[0]"),
        ("volume", "table_shape[1]"),
        ("groups", "1"),
        ("c_x", "x_shape[1]"),
        ("c_y", "w_shape[2]"),
        (W_OFFSET, "0"),
        (W_ROW, "0"),
        (W_GROUP, "0"),
    ),
)
# The same over edges by output row: starts has one entry more than rows.
PER_ROW_OF_EDGES = Interface(
    PER_ROW.name,
    ("x", "w", "starts", "edges", "bias"),
    ("y",),
    (
        ("first", "0"),
        ("rows", "starts_shape[0] - 1"),
        ("volume", "w_shape[0]"),
        *PER_ROW.sizes[3:],
    ),
)
# y by tiles over sorted rows: `table` is in sorted order, `rows` says which row each
# is, `masks` which offsets a block of rows uses. A dispatch covers the tiles from
# `first` on, up to the sorted row `rows`. With splits, y is (splits, rows, C_y).
# `together` tiles pass one column of tiles before the next column.
SORTED_TILES = Interface(
    "SortedTiles",
    ("x", "w", "table", "rows", "masks", "bias"),
    ("y",),
    (
        ("first", "0"),
        ("rows", "rows_shape[0]"),
        ("volume", "table_shape[0]"),
        ("c_x", "x_shape[1]"),
        ("c_y", "w_shape[2]"),
        ("splits", "gridDim.y"),
        ("together", "1"),
        (W_OFFSET, "0"),
        (W_ROW, "0"),
    ),
)
# dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o], edges by offset. Splits are
# (splits, K, C_in, C_out); a dispatch covers `rows` lines of C_out from `first` on.
# Channels are those of a group, `n_out` the rows of dy.
WEIGHT_GRAD = Interface(
    "WeightGrad",
    ("x", "dy", "starts", "edges"),
    ("dw",),
    (
        ("first", "0"),
        ("splits", "1"),
        ("n_out", "dy_shape[0]"),
        ("volume", "starts_shape[0] - 1"),
        ("groups", "1"),
        ("c_in", "x_shape[1]"),
        ("c_out", "dy_shape[1]"),
    ),
)
# y = before + partial[0] + partial[1] + ... + bias, in that order, each of `rows` lines
# of `channels`. Where `rows` is given, line n is written to rows[first + n] - first.
ADD_SPLITS = Interface(
    "AddSplits",
    ("partial", "rows", "bias", "before"),
    ("y",),
    (
        ("first", "0"),
        ("lines", "partial_shape[1]"),
        ("channels", "partial_shape[2]"),
        ("splits", "partial_shape[0]"),
    ),
)
PACKED = ("words", "scales", "biases")


def computes_after(plan: Plan) -> bool:
    """Whether the plan's kernels compute an epilogue."""
    return plan.problem.epilogue is not None and plan.then is None


def finishing(interface: Interface) -> Interface:
    """Return the interface of kernels that compute an epilogue: all of ``AFTER``."""
    at, given = interface.inputs.index("bias"), interface.inputs
    inputs = given[:at] + AFTER + given[at + 1 :]
    return Interface(interface.name, inputs, interface.outputs, interface.sizes)


def with_moments(interface: Interface) -> Interface:
    """Return the interface of kernels that write statistics of the rows of y, too."""
    return replace(interface, outputs=(*interface.outputs, LINES))


def packed(interface: Interface) -> Interface:
    """Return the interface with packed weights in the place of ``w``."""
    at = interface.inputs.index("w")
    inputs = interface.inputs[:at] + PACKED + interface.inputs[at + 1 :]
    return replace(interface, inputs=inputs)


def copied(p: Problem) -> str:
    """Return what a Plan says of weights whose kernel reads one layout."""
    return COPIED if p.layout == MLX_LAYOUT else ""


@cache
def kept(kernel: GpuKernel) -> GpuKernel:
    """Return one kernel for all equal ones: MLX builds each once."""
    return kernel


def rounded_up(count: int, multiple: int) -> int:
    """Return the count, up to a multiple."""
    return -(-count // multiple) * multiple

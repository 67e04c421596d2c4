"""What the planners of Metal's contractions share: kernels and dispatches."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..devices import METAL
from ..dtypes import DTYPES, dtype_name
from ..problem import Problem
from ..relation import Relation
from ..routes.plan import Dispatch
from .dispatch_bounds import cuts
from .gpu_kernel import GpuKernel, Interface, Value
from .signatures import (
    ADD_SPLITS,
    PER_ROW,
    SORTED_TILES,
    W_GROUP,
    W_OFFSET,
    W_ROW,
    WEIGHT_GRAD,
    finishing,
    kept,
    weight_strides,
)

# A contraction over edges, each added to its row of y: a dispatch has the edges from
# `first` on.
PER_EDGE = Interface(
    "PerEdge",
    ("x", "w", "edges"),
    ("y",),
    tuple((name, "0") for name in ("first", "c_x", "c_y", W_OFFSET, W_ROW)),
)
# Structs of sizes: a file's functions may name those of another interface.
_STRUCTS = PER_ROW, SORTED_TILES, WEIGHT_GRAD, ADD_SPLITS, PER_EDGE
# Where a thread is, and one of a kernel with threadgroup memory.
_THREAD = "thread_position_in_grid.xy"
TILE_PLACE = (
    "threadgroup_position_in_grid, int(simdgroup_index_in_threadgroup), "
    "int(thread_index_in_simdgroup)"
)


def kernel(
    symbol: str,
    files: tuple[str, ...],
    interface: Interface,
    memory: str = "",
    place: str = "",
    **template: Value,
) -> GpuKernel:
    """Return a kernel of ``metal/``.

    Args:
        symbol: the function.
        files: those that hold it, in the order in which they need each other.
        interface: how it is called.
        memory: C++ of its floats of threadgroup memory, if it has any.
        place: its last arguments; by default as kernels with such memory take them, or
            a thread's place.
        **template: its template arguments, in order.
    """
    return kept(
        GpuKernel(
            METAL,
            symbol,
            files,
            interface,
            tuple(template.items()),
            place=place or (TILE_PLACE if memory else _THREAD),
            memory=memory,
            also=_STRUCTS,
            atomic=interface is PER_EDGE,
        )
    )


def adding(dtype, **after: Value) -> GpuKernel:
    """Return the kernel that adds splits, in order, to a result of a dtype.

    Args:
        dtype: of the result.
        **after: the template arguments of an epilogue.
    """
    files = "matrix_tiles", "epilogue", "add_splits"
    return kernel("add_splits", files, finishing(ADD_SPLITS), T=dtype, **after)


def dispatched(
    count: int,
    work: int,
    limit: int,
    grid: Callable[[int], tuple[int, ...]],
    most: int | None = None,
) -> tuple[Dispatch, ...]:
    """Return the dispatches of ``count`` units, none above ``limit`` of work.

    Args:
        count: units.
        work: what all of them cost, in the terms of ``limit``.
        limit: the most that a dispatch may cost.
        grid: returns the threads for so many units.
        most: what a single unit may cost; by default all cost the same.
    """
    slices = cuts(count, work, limit, most)
    return tuple(Dispatch(first, units, grid(units)) for first, units in slices)


def strides(p: Problem, layout: str, interface: Interface) -> dict[str, int]:
    """Return where a weight of a layout stands, as the interface names it.

    Packed weights have a kernel's own layout: zeros.
    """
    places = W_OFFSET, W_ROW, W_GROUP
    names = [name for name, _ in interface.sizes if name in places]
    c_in = p.c_in // p.groups
    given = weight_strides(layout, p.volume, c_in, p.c_out, p.groups)
    packed = "w" not in interface.inputs
    return {name: 0 if packed else given[name] for name in names}


def products(p: Problem, matrices: mx.Dtype) -> str:
    """Return what is said of matrices of another type than the features'."""
    if matrices == DTYPES[p.dtype]:
        return ""
    return f"{p.dtype} as {dtype_name(matrices)}"


def table(relation: Relation) -> tuple:
    """Return what a kernel reads of a relation's neighbour table."""
    return (relation.out_in,)

"""Contractions by row on CUDA: a thread an output row and its channels.

Compute capability 8.0 and later, any channels; packed weights are read where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..problem import KERNEL_MAJOR, MLX_LAYOUT, WEIGHT_GRAD, Problem
from ..relation import Relation
from ..routes.plan import IN_KERNEL, IN_TILES, Dispatch, Plan
from . import cuda_epilogue, cuda_weight_grad
from .cuda_epilogue import finishing_kernel
from .gpu_kernel import GpuKernel
from .kernel_launches import THREADS, blocks_for
from .runners import per_row
from .signatures import PER_ROW, PER_ROW_OF_EDGES, copied, packed, weight_strides

SCALES = ("scale_groups", "scales_shape[2]")
PACKED_ROWS = replace(packed(PER_ROW), name="PackedRow", sizes=(*PER_ROW.sizes, SCALES))
PACKED_ROWS_OF_EDGES = replace(
    PACKED_ROWS,
    inputs=packed(PER_ROW_OF_EDGES).inputs,
    sizes=tuple(
        {
            **dict(PACKED_ROWS.sizes),
            "rows": "starts_shape[0] - 1",
            "volume": "words_shape[0]",
        }.items()
    ),
)
# Which axis of the weight's array is which.
WEIGHT_AXES = {
    KERNEL_MAJOR: {"volume": "w_shape[0]", "c_in": "w_shape[1]", "c_out": "w_shape[2]"},
    MLX_LAYOUT: {"c_out": "w_shape[0]", "volume": "w_shape[1]", "c_in": "w_shape[2]"},
}


@lru_cache(maxsize=64)
def _layout_strides(layout: str, groups: int) -> dict[str, str]:
    return weight_strides(layout, groups=groups, **WEIGHT_AXES[layout])


def strides_of(p: Problem) -> dict[str, str]:
    """Return where a float weight stands, as C++ over its shape."""
    return _layout_strides(p.layout, p.groups)


def _csr(relation: Relation) -> tuple[mx.array, ...]:
    return relation.output_csr.indptr, relation.output_csr.edges


def _table(relation: Relation) -> tuple[mx.array, ...]:
    return (relation.held_table(),)


def _rows(
    p: Problem,
    route: str,
    view: str,
    read: Callable[[Relation], tuple[mx.array, ...]],
    kernel: GpuKernel,
    threads: int | None = None,
    **more,
) -> Plan:
    """Plan so many threads an output row, by default one a channel."""
    blocks = blocks_for(p.rows_written * (threads or p.channels[1]))
    return Plan(
        p,
        CUDA,
        route,
        view,
        per_row,
        read=read,
        epilogue=IN_KERNEL if p.epilogue else "",
        gpu=kernel,
        threadgroup=(THREADS,),
        dispatches=(Dispatch(0, p.rows_written, (blocks * THREADS,)),),
        **more,
    )


def relation_traversal(p: Problem, device: Device) -> Plan:
    """Plan a thread an output row and channel, which walks the row's edges."""
    if p.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.relation_traversal(p, device)
    axes = WEIGHT_AXES[p.layout]
    each = axes["c_in"], f"{axes['c_out']} / {p.groups}"
    c_x, c_y = reversed(each) if p.transposed else each
    sizes = {"groups": p.groups, "c_x": c_x, "c_y": c_y, **strides_of(p)}
    kernel = finishing_kernel(
        "relation_traversal",
        cuda_weight_grad.TRAVERSAL_FILES,
        PER_ROW_OF_EDGES,
        (("T", DTYPES[p.dtype]), ("TRANSPOSED", p.rows_are_summed)),
        p.epilogue,
        also=(cuda_weight_grad.OF_EDGES,),
        sizes=tuple(sizes.items()),
    )
    return _rows(p, "relation_traversal", "output_csr", _csr, kernel, reads_stored=True)


def quantized_traversal(p: Problem, device: Device) -> Plan:
    """Plan a thread an output row and channel, with packed weights."""
    kernel = finishing_kernel(
        "quantized_traversal" if p.table else "quantized_traversal_of_edges",
        (*cuda_epilogue.FILES, "quantized_traversal.cu"),
        PACKED_ROWS if p.table else PACKED_ROWS_OF_EDGES,
        (("T", DTYPES[p.dtype]), ("BITS", p.bits), ("GROUP_SIZE", p.group_size)),
        p.epilogue,
        sizes=(
            ("groups", p.groups),
            ("c_x", f"x_shape[1] / {p.groups}"),
            ("c_y", f"words_shape[1] / {p.groups}"),
        ),
    )
    view, read = ("out_in", _table) if p.table else ("output_csr", _csr)
    return _rows(p, "quantized_traversal", view, read, kernel, weights=IN_TILES)


def depthwise(p: Problem, device: Device) -> Plan:
    """Plan a group a channel: a warp some output rows, a lane 16 bytes of channels."""
    if p.pass_ == WEIGHT_GRAD:
        return cuda_weight_grad.depthwise(p, device)
    multiplier, channels = p.c_out // p.groups, p.channels[1]
    each = cuda_weight_grad.channels_each(p)
    lanes = cuda_weight_grad.lanes_of(channels, each)
    kernel = finishing_kernel(
        "depthwise_transposed" if p.transposed else "depthwise",
        (*cuda_epilogue.FILES, "depthwise.cu"),
        PER_ROW,
        (("T", DTYPES[p.dtype]), ("EACH", each), ("GROUP", lanes)),
        p.epilogue,
        sizes=(
            ("groups", f"w_shape[2] / {multiplier}"),
            ("c_x", multiplier if p.transposed else 1),
            ("c_y", 1 if p.transposed else multiplier),
        ),
    )
    threads = lanes * -(-channels // (lanes * each))
    return _rows(p, "depthwise", "out_in", _table, kernel, threads, weights=copied(p))

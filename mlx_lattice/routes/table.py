"""THE TABLE of routes: a row for each way to run a pass, in order of preference.

A row names what plans it on each backend: its own kernels first, else MLX operations.
"""

from __future__ import annotations

from ..backends import cpu
from ..backends import mlx as mlx_backend
from ..backends.cuda import contraction as cuda_contraction
from ..backends.cuda import weight_grad as cuda_weight_grad
from ..backends.metal import contraction as metal_contraction
from ..backends.metal import weight_grad as metal_weight_grad
from ..devices import CPU, METAL
from ..problem import FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD
from .choice import Route, RouteError
from .needs import (
    c_out_is,
    c_out_multiple_of,
    channels_in,
    dense_weight,
    depthwise_groups,
    determinism_waived,
    dtype_is,
    expands_edges,
    expands_groups,
    expands_on_cpu,
    few_channels,
    half_types,
    im2col_fits,
    int8_features,
    many_edges,
    many_offsets,
    neighbour_table,
    neural_accelerators,
    no_tiles,
    one_group,
    one_scale,
    packed_or_integers,
    packed_weight,
    pointwise_kernel,
    reference_blas,
    rows_at_least,
    simdgroup_matrices,
    volume_at_least,
    weight_grad_of_sorted_rows,
)

# All routes: the first admissible row of a pass wins; the last row of every pass always
# is admissible.
TABLE: tuple[Route, ...] = (
    Route(
        "native_pointwise",
        PASSES,
        needs=(pointwise_kernel, dense_weight, one_group),
        idea="one matmul by the extension, because MLX's uses a slow BLAS on Linux",
        pays=(reference_blas,),
        cpu=cpu.native_pointwise,
        expands=expands_groups,
    ),
    Route(
        "pointwise",
        PASSES,
        needs=(pointwise_kernel, dense_weight),
        idea="one matmul over the rows, same coordinates",
        pays=(no_tiles,),
        mlx=mlx_backend.pointwise,
        expands=expands_groups,
    ),
    Route(
        "quantized_pointwise",
        (FORWARD,),
        needs=(packed_weight, pointwise_kernel, one_group),
        idea="one matmul with packed weights, same coordinates",
        cpu=cpu.quantized_pointwise,
        mlx=mlx_backend.quantized_pointwise,
    ),
    Route(
        "quantized_tensor_ops",
        (FORWARD,),
        needs=(
            packed_weight,
            one_group,
            neural_accelerators,
            half_types,
            neighbour_table,
        ),
        idea="packed weights dequantised into TensorOps tiles",
        pays=(rows_at_least("quantized_tensor_ops"),),
        metal=metal_contraction.quantized_tensor_ops,
    ),
    Route(
        "int8_sorted",
        (FORWARD,),
        needs=(int8_features, one_scale, one_group, neighbour_table),
        idea="int8 features in mask-sorted tiles of integer matrix products",
        cuda=cuda_contraction.int8_sorted,
    ),
    Route(
        "quantized_sorted",
        (FORWARD,),
        needs=(
            packed_or_integers,
            one_group,
            simdgroup_matrices,
            neighbour_table,
        ),
        idea="packed weights dequantised into mask-sorted tiles; int8 on M1 to M4",
        pays=(rows_at_least("quantized_sorted"),),
        metal=metal_contraction.quantized_sorted,
        cuda=cuda_contraction.quantized_sorted,
        cpu=cpu.quantized_sorted,
    ),
    Route(
        "quantized_traversal",
        (FORWARD,),
        needs=(packed_weight,),
        idea="packed weights, a thread for each row and channel group",
        metal=metal_contraction.quantized_traversal,
        cuda=cuda_contraction.quantized_traversal,
        cpu=cpu.quantized_traversal,
    ),
    Route(
        "int8_blocked",
        (FORWARD,),
        needs=(int8_features, neighbour_table),
        idea="blocked_gather_gemm with integers, int32 sums over all offsets",
        cpu=cpu.int8_blocked,
    ),
    Route(
        "int8_tensor_ops",
        (FORWARD,),
        needs=(
            int8_features,
            one_scale,
            one_group,
            neural_accelerators,
            neighbour_table,
        ),
        idea="tensor_ops with integers, int32 sums over all offsets",
        metal=metal_contraction.int8_tensor_ops,
    ),
    Route(
        "tensor_ops",
        PASSES,
        needs=(
            dense_weight,
            neural_accelerators,
            half_types,
            one_group,
            neighbour_table,
        ),
        idea="mask-sorted tiles through Metal 4 TensorOps",
        pays=(rows_at_least("tensor_ops"),),
        metal=metal_contraction.tensor_ops,
        expands=expands_groups,
    ),
    Route(
        "blocked_gather_gemm",
        PASSES,
        needs=(dense_weight, neighbour_table),
        idea="output-stationary tiles, edges compacted for each offset, SIMD kernel",
        cpu=cpu.blocked_gather_gemm,
        expands=expands_groups,
    ),
    Route(
        "sorted_implicit_gemm",
        PASSES,
        needs=(
            dense_weight,
            one_group,
            simdgroup_matrices,
            neighbour_table,
            weight_grad_of_sorted_rows,
        ),
        idea="matrix tiles over mask-sorted rows, float32 accumulation",
        pays=(rows_at_least("sorted_implicit_gemm"), many_edges),
        metal=(
            (FORWARD, metal_contraction.sorted_implicit_gemm),
            (INPUT_GRAD, metal_contraction.sorted_implicit_gemm),
        ),
        cuda=cuda_contraction.sorted_implicit_gemm,
        expands=expands_groups,
    ),
    Route(
        "cout16",
        (FORWARD,),
        needs=(
            dense_weight,
            one_group,
            simdgroup_matrices,
            neighbour_table,
            c_out_is(16),
        ),
        idea="16 output channels held in registers",
        pays=(
            volume_at_least(16),
            rows_at_least("cout16"),
        ),
        metal=metal_contraction.cout16,
        expands=expands_groups,
    ),
    Route(
        "dense_channel",
        (FORWARD, INPUT_GRAD),
        needs=(
            dense_weight,
            one_group,
            simdgroup_matrices,
            neighbour_table,
            channels_in(16, 32, 64),
        ),
        idea="channel counts fixed at compile time, weights in threadgroup memory",
        pays=(
            volume_at_least(16),
            rows_at_least("dense_channel"),
        ),
        metal=metal_contraction.dense_channel,
        expands=expands_groups,
    ),
    Route(
        "vec4",
        (FORWARD,),
        needs=(
            dense_weight,
            dtype_is("float32"),
            one_group,
            neighbour_table,
            c_out_multiple_of(4),
        ),
        idea="float4 accumulators",
        metal=metal_contraction.vec4,
    ),
    Route(
        "fp16_gather",
        (FORWARD, INPUT_GRAD),
        needs=(dense_weight, dtype_is("float16"), one_group, neighbour_table),
        idea="half features gathered, no atomics",
        metal=metal_contraction.fp16_gather,
    ),
    Route(
        "fp32_atomic",
        (FORWARD, INPUT_GRAD),
        needs=(dense_weight, dtype_is("float32"), one_group, determinism_waived),
        idea="a thread for each edge, float atomics",
        metal=metal_contraction.fp32_atomic,
    ),
    Route(
        "depthwise",
        PASSES,
        needs=(dense_weight, depthwise_groups, neighbour_table),
        idea="a group for each channel: no sum over channels, memory-bound",
        metal=metal_contraction.depthwise,
        cuda=cuda_contraction.depthwise,
    ),
    Route(
        "explicit_gemm",
        PASSES,
        needs=(dense_weight, one_group, neighbour_table, im2col_fits),
        idea="im2col: one gather, one matmul",
        pays=(few_channels,),
        mlx=mlx_backend.explicit_gemm,
    ),
    # Not in MLX operations on CUDA: relation_traversal takes one launch there, these
    # dozens.
    Route(
        "grouped_gemm",
        (WEIGHT_GRAD, FORWARD, INPUT_GRAD),
        needs=(dense_weight, one_group, simdgroup_matrices),
        idea="all offsets in one launch over the kernel-major edges",
        pays=(many_offsets, rows_at_least("grouped_gemm")),
        metal=((WEIGHT_GRAD, metal_weight_grad.grouped_gemm),),
        cuda=((WEIGHT_GRAD, cuda_weight_grad.grouped_gemm),),
        cpu=cpu.grouped_gemm,
        mlx=mlx_backend.grouped_gemm,
        mlx_on=(METAL, CPU),
        expands=expands_edges,
    ),
    Route(
        "relation_traversal",
        PASSES,
        needs=(dense_weight,),
        idea="a thread for each row and channel group walks edges; the native fallback",
        metal=metal_contraction.relation_traversal,
        cuda=cuda_contraction.relation_traversal,
        cpu=cpu.relation_traversal,
        expands=expands_on_cpu,
    ),
    Route(
        "gather_gemm_scatter",
        PASSES,
        needs=(),
        idea="gather, matmul, add for each offset, in MLX operations; the floor route",
        mlx=mlx_backend.gather_gemm_scatter,
    ),
)

# The names of all routes, in the order of the table.
NAMES = tuple(route.name for route in TABLE)
FLOOR = "gather_gemm_scatter"


def named(name: str) -> Route:
    """Return the route of a name, or raise an error that lists the names."""
    for route in TABLE:
        if route.name == name:
            return route
    raise RouteError(f"no route is named {name!r}; there are {', '.join(NAMES)}")

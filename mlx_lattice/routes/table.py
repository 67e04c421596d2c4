"""THE TABLE of routes: a row for each way to run a pass, in order of preference.

A row names what plans it on each backend: its own kernels first, else MLX operations.
"""

from __future__ import annotations

from ..backends import (
    cpu_conv,
    cuda_conv,
    metal_conv,
    metal_matrix,
    metal_weight_grad,
    mlx_ops,
)
from ..devices import CPU, METAL
from ..problem import FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD
from .choice import Route
from .needs import (
    c_out_is,
    c_out_multiple_of,
    channels_in,
    dense_weight,
    depthwise_groups,
    determinism_waived,
    few_channels,
    float16_only,
    float32_only,
    half_types,
    im2col_fits,
    many_offsets,
    neighbour_table,
    neural_accelerators,
    one_group,
    packed_weight,
    pointwise_kernel,
    reference_blas,
    rows_at_least,
    volume_at_least,
)

# The first admissible row of a pass wins; the last one of every pass always is.
TABLE: tuple[Route, ...] = (
    Route(
        "native_pointwise",
        PASSES,
        needs=(pointwise_kernel, dense_weight, one_group),
        idea="one matmul by the extension; MLX's own takes a reference BLAS on Linux",
        pays=(reference_blas,),
        cpu=cpu_conv.native_pointwise,
    ),
    Route(
        "pointwise",
        PASSES,
        needs=(pointwise_kernel, dense_weight),
        idea="one matmul over the rows, coordinates kept",
        mlx=mlx_ops.pointwise,
    ),
    Route(
        "quantized_pointwise",
        (FORWARD,),
        needs=(packed_weight, pointwise_kernel, one_group),
        idea="one matmul with packed weights, coordinates kept",
        cpu=cpu_conv.quantized_pointwise,
        mlx=mlx_ops.quantized_pointwise,
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
        metal=metal_matrix.quantized_tensor_ops,
    ),
    Route(
        "quantized_sorted",
        (FORWARD,),
        needs=(
            packed_weight,
            one_group,
            neighbour_table,
        ),
        idea="packed weights dequantised into mask-sorted tiles",
        pays=(rows_at_least("quantized_sorted"),),
        metal=metal_matrix.quantized_sorted,
        cuda=cuda_conv.quantized_sorted,
        cpu=cpu_conv.quantized_sorted,
    ),
    Route(
        "quantized_traversal",
        (FORWARD,),
        needs=(packed_weight,),
        idea="packed weights, one thread a row and channel group",
        metal=metal_conv.quantized_traversal,
        cuda=cuda_conv.quantized_traversal,
        cpu=cpu_conv.quantized_traversal,
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
        metal=metal_matrix.tensor_ops,
    ),
    Route(
        "blocked_gather_gemm",
        PASSES,
        needs=(dense_weight, neighbour_table),
        idea="output-stationary tiles, edges compacted an offset, SIMD kernel",
        cpu=cpu_conv.blocked_gather_gemm,
    ),
    Route(
        "sorted_implicit_gemm",
        PASSES,
        needs=(
            dense_weight,
            one_group,
            neighbour_table,
        ),
        idea="matrix tiles over mask-sorted rows, float32 accumulation",
        pays=(rows_at_least("sorted_implicit_gemm"),),
        metal=metal_matrix.sorted_implicit_gemm,
        cuda=cuda_conv.sorted_implicit_gemm,
    ),
    Route(
        "cout16",
        (FORWARD, WEIGHT_GRAD),
        needs=(
            dense_weight,
            one_group,
            neighbour_table,
            c_out_is(16),
        ),
        idea="16 output channels held in registers",
        pays=(
            volume_at_least(16),
            rows_at_least("cout16"),
        ),
        metal=metal_conv.cout16,
    ),
    Route(
        "dense_channel",
        PASSES,
        needs=(
            dense_weight,
            one_group,
            neighbour_table,
            channels_in(16, 32, 64),
        ),
        idea="channel counts fixed at compile time, weights in threadgroup memory",
        pays=(
            volume_at_least(16),
            rows_at_least("dense_channel"),
        ),
        metal=metal_conv.dense_channel,
    ),
    Route(
        "vec4",
        (FORWARD,),
        needs=(
            dense_weight,
            float32_only,
            one_group,
            neighbour_table,
            c_out_multiple_of(4),
        ),
        idea="float4 accumulators",
        metal=metal_conv.vec4,
    ),
    Route(
        "fp16_gather",
        (FORWARD, INPUT_GRAD),
        needs=(dense_weight, float16_only, one_group, neighbour_table),
        idea="half features gathered, no atomics",
        metal=metal_conv.fp16_gather,
    ),
    Route(
        "fp32_atomic",
        (FORWARD, INPUT_GRAD),
        needs=(dense_weight, float32_only, one_group, determinism_waived),
        idea="one thread an edge, float atomics",
        metal=metal_conv.fp32_atomic,
    ),
    Route(
        "depthwise",
        PASSES,
        needs=(dense_weight, depthwise_groups, neighbour_table),
        idea="a group a channel: no sum over channels, memory-bound",
        metal=metal_conv.depthwise,
        cuda=cuda_conv.depthwise,
    ),
    Route(
        "explicit_gemm",
        PASSES,
        needs=(dense_weight, one_group, neighbour_table, im2col_fits),
        idea="im2col: one gather, one matmul",
        pays=(few_channels,),
        mlx=mlx_ops.explicit_gemm,
    ),
    # Not in MLX operations on CUDA: relation_traversal takes one launch there, these
    # dozens.
    Route(
        "grouped_gemm",
        (WEIGHT_GRAD, FORWARD, INPUT_GRAD),
        needs=(dense_weight, one_group),
        idea="all offsets in one launch over the kernel-major edges",
        pays=(many_offsets,),
        metal=((WEIGHT_GRAD, metal_weight_grad.grouped_gemm),),
        cuda=((WEIGHT_GRAD, cuda_conv.grouped_gemm),),
        cpu=cpu_conv.grouped_gemm,
        mlx=mlx_ops.grouped_gemm,
        mlx_on=(METAL, CPU),
    ),
    Route(
        "relation_traversal",
        PASSES,
        needs=(dense_weight,),
        idea="one thread a row and channel group walks its edges; the native floor",
        metal=metal_conv.relation_traversal,
        cuda=cuda_conv.relation_traversal,
        cpu=cpu_conv.relation_traversal,
    ),
    Route(
        "gather_gemm_scatter",
        PASSES,
        needs=(),
        idea="gather, matmul and add an offset, in MLX operations; the portable floor",
        mlx=mlx_ops.gather_gemm_scatter,
    ),
)

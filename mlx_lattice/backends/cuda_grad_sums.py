"""What adds up the partial sums of weight gradients on CUDA, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..devices import CUDA, Device
from ..dtypes import DTYPES
from ..problem import MLX_LAYOUT, Problem
from ..routes import thresholds
from . import cuda_epilogue, cuda_splits
from .gpu_kernel import GpuKernel
from .signatures import ADD_SPLITS

ADD_PARTIALS = {
    name: replace(
        ADD_SPLITS,
        inputs=("partial", name),
        sizes=(*ADD_SPLITS.sizes, ("volume", f"{name}_shape[0] - 1")),
    )
    for name in ("starts", "firsts")
}
# A block has 32 x 32 entries of them, or fewer whose sums its warps share.
SUM_FILES = *cuda_epilogue.FILES[:2], "edge_walk.cuh"
TRANSPOSED_FILES, TRANSPOSED_SIDE = (*SUM_FILES, "transposed_sums.cu"), 32
WARPS = 8
# Splits of whole gradients, which are written in MLX's layout.
ADD_TRANSPOSED = replace(
    ADD_PARTIALS["firsts"],
    inputs=("partial",),
    sizes=tuple(
        {
            **dict(ADD_SPLITS.sizes),
            "lines": "partial_shape[2]",
            "channels": "partial_shape[3]",
            "volume": "partial_shape[1]",
        }.items()
    ),
)


def add_partials(p: Problem, by: str, shares: int) -> GpuKernel:
    """Return what adds partial sums of splits that are cut by offset: slot s + k."""
    transposes, template = p.layout == MLX_LAYOUT, (("T", DTYPES[p.dtype]),)
    if transposes:
        template += (("SHARES", shares),)
    return GpuKernel(
        CUDA,
        "add_partials_transposed" if transposes else "add_partials",
        TRANSPOSED_FILES if transposes else SUM_FILES,
        ADD_PARTIALS[by],
        template,
        sizes=(("splits", f"partial_shape[0] - {by}_shape[0] + 1"),),
    )


def add_splits(p: Problem, shares: int) -> GpuKernel:
    """Return what adds partial sums (splits, K, C_in, C_out)."""
    if p.layout != MLX_LAYOUT:
        return cuda_splits.add_splits(DTYPES[p.dtype], axes=4)
    template = ("T", DTYPES[p.dtype]), ("SHARES", shares)
    return GpuKernel(
        CUDA, "add_splits_transposed", TRANSPOSED_FILES, ADD_TRANSPOSED, template
    )


def shares(p: Problem, device: Device, sides: Sequence[int], count: float) -> int:
    """Return into how many shares a block's warps cut so many partial sums.

    Of a small dW, blocks with fewer of its entries fill more of the GPU. One where dW
    is not written in MLX's layout.
    """
    table, found = thresholds.SHARED_SUMS, 1
    while found < WARPS and p.layout == MLX_LAYOUT:
        fills = blocks(p, sides, found) >= table["blocks"] * device.cores
        if count <= found * table["most" if fills else "least"]:
            break
        found *= 2
    return found


def blocks(p: Problem, sides: Sequence[int], shares: int) -> int:
    """Return how many blocks add up dW in MLX's layout, of dW[k] with such sides."""
    down, across = sides
    rows = TRANSPOSED_SIDE // shares
    return p.volume * -(-down // rows) * -(-across // TRANSPOSED_SIDE)

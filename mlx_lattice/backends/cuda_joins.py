"""Rows side by side on CUDA, and arrays filled up with zeros: one launch each.

MLX takes several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, prod

import mlx.core as mx

from ..devices import CUDA
from ..problem import FLOATS
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface
from .kernel_launches import THREADS, blocks_for

FILES = "alignment.cuh", "channels.cuh", "join_channels.cu"
DTYPES = *FLOATS, mx.int8
BLOCK_BYTES = 32768  # of the result
FACE = Interface(
    "JoinChannels",
    ("a", "b"),
    ("y",),
    (("rows", "a_shape[0]"), ("c_a", "a_shape[1]"), ("c_b", "b_shape[1]")),
)

FILL_FACE = Interface(
    "FillLines",
    ("a",),
    ("y",),
    tuple(
        (name, f"a_shape[{i}]") for i, name in enumerate(("outer", "lines", "inner"))
    ),
)


class CudaJoins:
    """Two arrays of rows, joined along their channels."""

    def takes(self, parts: Sequence[mx.array]) -> bool:
        """Whether these (N, C) arrays are joined in a launch: two of one dtype."""
        dtype = parts[0].dtype
        return (
            len(parts) == 2
            and dtype in DTYPES
            and all([a.ndim == 2 and a.size and a.dtype == dtype for a in parts])
        )

    def join(self, a: mx.array, b: mx.array) -> mx.array:
        """Return (N, C_a + C_b) of what ``takes``."""
        return _launcher(a.shape, b.shape[1], a.dtype, True)([a, b])[0]


def beside_zeros(a: mx.array, missing: int) -> mx.array:
    """Return (N, C) rows, not empty and of one of ``DTYPES``, and so many zeros."""
    return _launcher(a.shape, missing, a.dtype, False)([a])[0]


def filled_lines(a: mx.array, axis: int, multiple: int) -> mx.array:
    """Return an array, not empty and of one of ``DTYPES``, with zeros after an axis.

    That is then as long as a multiple.
    """
    shape = a.shape
    lines = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    (y,) = _filling(lines, a.dtype, multiple)([a.reshape(lines)])
    return y.reshape(*shape[:axis], y.shape[1], *shape[axis + 1 :])


@lru_cache(maxsize=1024)
def _filling(
    shape: tuple[int, int, int], dtype: mx.Dtype, multiple: int
) -> Callable[[list[mx.array]], list[mx.array]]:
    outer, lines, inner = shape
    each, whole = gcd(inner, 16 // dtype.size), ceil_div(lines, multiple) * multiple
    kernel = _filling_kernel((("T", dtype), ("EACH", each), ("MULTIPLE", multiple)))
    grid = (blocks_for(outer * whole * inner // each) * THREADS,)
    made = ((outer, whole, inner), dtype)
    return kernel.launcher((True,), [made], grid, (THREADS,))


@lru_cache(maxsize=256)
def _filling_kernel(template: tuple) -> GpuKernel:
    return GpuKernel(CUDA, "fill_lines", FILES, FILL_FACE, template, also=(FACE,))


@lru_cache(maxsize=1024)
def _launcher(
    shape: tuple[int, int], c_b: int, dtype: mx.Dtype, has_b: bool
) -> Callable[[list[mx.array]], list[mx.array]]:
    rows, c_a = shape
    each, channels = gcd(c_a, c_b, 16 // dtype.size), c_a + c_b
    # A power of two, so that there are few kernels.
    fitting = max(1, BLOCK_BYTES // (channels * dtype.size))
    block = 1 << fitting.bit_length() - 1
    template = ("T", dtype), ("EACH", each), ("BLOCK_ROWS", block)
    kernel = _kernel(template, () if has_b else (("c_b", c_b),))
    grid, whole = (ceil_div(rows, block) * THREADS,), ((rows, channels), dtype)
    return kernel.launcher((True, has_b), [whole], grid, (THREADS,))


@lru_cache(maxsize=256)
def _kernel(template: tuple, sizes: tuple) -> GpuKernel:
    return GpuKernel(
        CUDA, "join_channels", FILES, FACE, template, also=(FILL_FACE,), sizes=sizes
    )

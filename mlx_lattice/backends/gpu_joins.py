"""Rows of two arrays side by side on GPUs, and apart again: one launch each.

MLX copies each array by itself, and a part of rows once for every kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd

import mlx.core as mx

from ..devices import CUDA, METAL
from ..problem import FLOATS
from .dispatch_bounds import ceil_div, dispatch_limit
from .gpu_kernel import GpuKernel, Interface
from .gpu_reductions import GATHER_SUM
from .kernel_launches import THREADS

DTYPES = *FLOATS, mx.int8
CUDA_FILES = "alignment.cuh", "channels.cuh", "join_channels.cu"
_BLOCK_BYTES = 32768  # of the joined rows, in a block on CUDA
JOIN = Interface(
    "JoinChannels",
    ("a", "b"),
    ("y",),
    (("rows", "a_shape[0]"), ("c_a", "a_shape[1]"), ("c_b", "b_shape[1]")),
)
_SPLIT_SIZES = (
    ("rows", "y_shape[0]"),
    ("c_a", "cut_shape[1]"),
    ("c_b", "y_shape[1] - cut_shape[1]"),
)
SPLIT = Interface("SplitChannels", ("y",), ("a", "b"), _SPLIT_SIZES)
# On CUDA the shape of an input, of which nothing is read, says where rows are cut.
CUDA_SPLIT = Interface("SplitChannels", ("y", "cut"), ("a", "b"), _SPLIT_SIZES)
FILL = Interface(
    "FillLines",
    ("a",),
    ("y",),
    tuple(
        (name, f"a_shape[{i}]") for i, name in enumerate(("outer", "lines", "inner"))
    ),
)


class GpuJoins:
    """Two arrays of rows, joined along their channels, by a GPU's kernels.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def takes(self, parts: Sequence[mx.array]) -> bool:
        """Whether these (N, C) arrays are joined in a launch: two of one dtype."""
        dtype = parts[0].dtype
        return (
            len(parts) == 2
            and dtype in DTYPES
            and all([a.ndim == 2 and a.size and a.dtype == dtype for a in parts])
            and (
                self.backend != METAL
                or sum([a.size for a in parts]) <= dispatch_limit("elements")
            )
        )

    def join(self, a: mx.array, b: mx.array) -> mx.array:
        """Return (N, C_a + C_b) of what ``takes``."""
        sizes = len(a), a.shape[1], b.shape[1]
        return _launcher(self.backend, True, sizes, a.dtype)([a, b])[0]

    def split(self, y: mx.array, c_a: int) -> list[mx.array]:
        """Return (N, c_a) and (N, C - c_a) of rows that were joined."""
        sizes = len(y), c_a, y.shape[1] - c_a
        given = [y] if self.backend == METAL else [y, _cut(c_a)]
        return _launcher(self.backend, False, sizes, y.dtype)(given)


@lru_cache(maxsize=256)
def _cut(c_a: int) -> mx.array:
    return mx.array([[0] * c_a], dtype=mx.int8)


@lru_cache(maxsize=1024)
def _launcher(
    backend: str, joins: bool, sizes: tuple[int, int, int], dtype: mx.Dtype
) -> Callable[[list[mx.array]], list[mx.array]]:
    if backend != METAL:
        return cuda_launcher(joins, sizes, dtype)
    rows, c_a, c_b = sizes
    wide, kernel = 16 // dtype.size, _metal_kernel(joins, dtype)
    given = (True,) * len(kernel.interface.inputs)
    outputs = [(shape, dtype) for shape in _made(joins, sizes)]
    grid = ceil_div(c_a, wide) + ceil_div(c_b, wide), rows
    return kernel.launcher(given, outputs, grid, rows=rows, c_a=c_a, c_b=c_b)


def cuda_launcher(
    joins: bool, sizes: tuple[int, int, int], dtype: mx.Dtype, *, has_b: bool = True
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what launches a kernel on CUDA.

    Args:
        joins: whether parts are joined; else the whole is split.
        sizes: rows, and channels of both parts.
        dtype: of all of them.
        has_b: whether the second part is an input, and not zeros.
    """
    rows, c_a, c_b = sizes
    each, channels = gcd(c_a, c_b, 16 // dtype.size), c_a + c_b
    # A power of two, so that there are few kernels.
    fitting = max(1, _BLOCK_BYTES // (channels * dtype.size))
    block = 1 << fitting.bit_length() - 1
    template = ("T", dtype), ("EACH", each), ("BLOCK_ROWS", block)
    kernel = _cuda_kernel(joins, template, () if has_b else (("c_b", c_b),))
    outputs = [(shape, dtype) for shape in _made(joins, sizes)]
    grid = (ceil_div(rows, block) * THREADS,)
    return kernel.launcher((True, has_b), outputs, grid, (THREADS,))


def _made(joins: bool, sizes: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Return the shapes of what a kernel makes."""
    rows, c_a, c_b = sizes
    return [(rows, c_a + c_b)] if joins else [(rows, c_a), (rows, c_b)]


@lru_cache(maxsize=16)
def _metal_kernel(joins: bool, dtype: mx.Dtype) -> GpuKernel:
    return GpuKernel(
        METAL,
        "join_channels" if joins else "split_channels",
        ("table_reductions", "join_channels"),
        JOIN if joins else SPLIT,
        (("T", dtype),),
        place="thread_position_in_grid.xy",
        also=(GATHER_SUM, SPLIT if joins else JOIN),
    )


@lru_cache(maxsize=256)
def _cuda_kernel(joins: bool, template: tuple, sizes: tuple) -> GpuKernel:
    return GpuKernel(
        CUDA,
        "join_channels" if joins else "split_channels",
        CUDA_FILES,
        JOIN if joins else CUDA_SPLIT,
        template,
        also=(CUDA_SPLIT if joins else JOIN, FILL),
        sizes=sizes,
        arguments=() if joins else (("cut", ""),),
    )

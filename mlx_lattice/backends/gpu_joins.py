"""Rows of two arrays side by side on GPUs, and apart again: one launch each.

MLX copies each array by itself, and a part of rows once for every kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import mlx.core as mx

from ..devices import CUDA, METAL
from ..dtypes import FLOATS
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


@dataclass(frozen=True, eq=False)  # one object each: a key of caches
class Moves:
    """What a launch does: two parts become a whole, or the whole two parts.

    Attributes:
        symbol: of its kernels.
        metal, cuda: how they are called.
        joins: whether parts become a whole.
    """

    symbol: str
    metal: Interface
    cuda: Interface
    joins: bool

    def shapes(self, sizes: tuple[int, int, int]) -> list[tuple[int, int]]:
        """Return those of what is made, of rows and the channels of both parts."""
        rows, c_a, c_b = sizes
        return [(rows, c_a + c_b)] if self.joins else [(rows, c_a), (rows, c_b)]


JOINS = Moves("join_channels", JOIN, JOIN, joins=True)
SPLITS = Moves("split_channels", SPLIT, CUDA_SPLIT, joins=False)
_BOTH = JOINS, SPLITS


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
        return _launcher(self.backend, JOINS, sizes, a.dtype)([a, b])[0]

    def split(self, y: mx.array, c_a: int) -> list[mx.array]:
        """Return (N, c_a) and (N, C - c_a) of rows that were joined."""
        sizes = len(y), c_a, y.shape[1] - c_a
        given = [y] if self.backend == METAL else [y, _cut(c_a)]
        return _launcher(self.backend, SPLITS, sizes, y.dtype)(given)


@lru_cache(maxsize=256)
def _cut(c_a: int) -> mx.array:
    return mx.array([[0] * c_a], dtype=mx.int8)


@lru_cache(maxsize=1024)
def _launcher(
    backend: str, moves: Moves, sizes: tuple[int, int, int], dtype: mx.Dtype
) -> Callable[[list[mx.array]], list[mx.array]]:
    if backend != METAL:
        return cuda_launcher(moves, sizes, dtype)
    rows, c_a, c_b = sizes
    wide, kernel = 16 // dtype.size, _metal_kernel(moves, dtype)
    given = (True,) * len(kernel.interface.inputs)
    outputs = [(shape, dtype) for shape in moves.shapes(sizes)]
    grid = ceil_div(c_a, wide) + ceil_div(c_b, wide), rows
    return kernel.launcher(given, outputs, grid, rows=rows, c_a=c_a, c_b=c_b)


def cuda_launcher(
    moves: Moves, sizes: tuple[int, int, int], dtype: mx.Dtype, *, has_b: bool = True
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what launches a kernel on CUDA.

    Args:
        moves: ``JOINS`` or ``SPLITS``.
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
    kernel = _cuda_kernel(moves, template, () if has_b else (("c_b", c_b),))
    outputs = [(shape, dtype) for shape in moves.shapes(sizes)]
    grid = (ceil_div(rows, block) * THREADS,)
    return kernel.launcher((True, has_b), outputs, grid, (THREADS,))


@lru_cache(maxsize=16)
def _metal_kernel(moves: Moves, dtype: mx.Dtype) -> GpuKernel:
    return GpuKernel(
        METAL,
        moves.symbol,
        ("table_reductions", "join_channels"),
        moves.metal,
        (("T", dtype),),
        place="thread_position_in_grid.xy",
        also=(GATHER_SUM, *(each.metal for each in _BOTH if each is not moves)),
    )


@lru_cache(maxsize=256)
def _cuda_kernel(moves: Moves, template: tuple, sizes: tuple) -> GpuKernel:
    return GpuKernel(
        CUDA,
        moves.symbol,
        CUDA_FILES,
        moves.cuda,
        template,
        also=(*(each.cuda for each in _BOTH if each is not moves), FILL),
        sizes=sizes,
        arguments=tuple((name, "") for name in moves.cuda.inputs if name == "cut"),
    )

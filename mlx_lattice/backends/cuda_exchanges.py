"""What processes send each other, put together and taken apart by CUDA kernels.

MLX would launch a copy for each array that it joins, and each term of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..devices import CUDA
from ..dtypes import FLOATS
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface
from .kernel_launches import THREADS
from .norm_interfaces import numbers

FILES = ("exchanges.cu",)
MOST_ARRAYS = 256  # of a launch: CUDA's arguments fit into 4 KB
ELEMENTS = 8192  # of a block

_MERGE = Interface(
    "Merge",
    ("every", "running_mean", "running_var", "norm_numbers"),
    ("mean", "var", "moved_mean", "moved_var"),
    (("processes", "every_shape[0]"), ("channels", "every_shape[1] / 2")),
)
_MEAN = Interface(
    "Mean", ("sums", "weight"), ("terms",), (("channels", "sums_shape[0] / 2"),)
)
_MERGING = GpuKernel(CUDA, "merge_moments", FILES, _MERGE, also=(_MEAN,))


class CudaExchanges:
    """Rows of floats for exchanges, and the norms' arithmetic on what comes back."""

    def takes(self, arrays: Sequence[mx.array]) -> bool:
        """Whether arrays may be joined in a launch: of one dtype, and not too many."""
        dtype = arrays[0].dtype
        return (
            dtype in FLOATS
            and len(arrays) <= MOST_ARRAYS
            and sum([a.size for a in arrays]) < 2**31
            and all([a.dtype == dtype and a.size for a in arrays])
        )

    def join(
        self,
        arrays: Sequence[mx.array],
        factor: float = 1.0,
        after: mx.array | None = None,
    ) -> mx.array:
        """Return the elements of all arrays, one after another, times a factor.

        Args:
            arrays: what ``takes``.
            factor: in float32.
            after: what must be there before. A graph of CUDA launches orders them by
                their arrays alone: ``mx.depends`` says nothing to it.
        """
        count = len(arrays)
        slots = 1 << (count - 1).bit_length()  # so that there are few kernels
        awaited = mx.float32 if after is None else after.dtype
        kernel = _joining(arrays[0].dtype, slots, awaited)
        work = _work(tuple([a.size for a in arrays]))
        inputs = [work, *arrays, *[_filler(arrays[0].dtype)] * (slots - count)]
        inputs += [None if factor == 1 else _factor(factor), after]
        size = sum([a.size for a in arrays])
        grid = (work.shape[0] * THREADS,)
        return kernel(inputs, [((size,), arrays[0].dtype)], grid, (THREADS,))[0]

    def merge(
        self,
        every: mx.array,
        running: tuple[mx.array, mx.array] | None,
        momentum: float,
    ) -> list[mx.array]:
        """Return the (1, C) mean and variance of all rows, and the moved ones.

        Args:
            every: (P, 2 C + 1) float32: mean, variance and number of rows of each
                process.
            running: (C,) float32 mean and variance, or None.
            momentum: how far they move.
        """
        channels = every.shape[1] // 2
        inputs = [every, *(running or (None, None)), numbers(0.0, momentum, 0.0)]
        grid = (ceil_div(channels, THREADS) * THREADS,)
        outputs = [((1, channels), mx.float32)] * 4
        return _MERGING(inputs, outputs, grid, (THREADS,))

    def mean_terms(self, sums: mx.array, weight: mx.array | None) -> mx.array:
        """Return (2, 1, C) float32 means, times the weight.

        Args:
            sums: (2 C + 1,) float32: two lines of sums, and the number of rows.
            weight: (C,) or None.
        """
        channels = sums.shape[0] // 2
        kernel = _averaging(mx.float32 if weight is None else weight.dtype)
        grid = (ceil_div(2 * channels, THREADS) * THREADS,)
        outputs = [((2, 1, channels), mx.float32)]
        return kernel([sums, weight], outputs, grid, (THREADS,))[0]


@lru_cache(maxsize=64)
def _joining(dtype: mx.Dtype, count: int, awaited: mx.Dtype) -> GpuKernel:
    arrays = [f"array_{i}" for i in range(count)]
    face = Interface("Join", ("work", *arrays, "factor", "after"), ("joined",))
    passed = dict.fromkeys(arrays, "") | {arrays[0]: "array"}
    cases = "".join(f" case {i}: array = {a}; break;" for i, a in enumerate(arrays))
    return GpuKernel(
        CUDA,
        "join_arrays",
        FILES,
        face,
        (("T", dtype), ("COUNT", count), ("AFTER", awaited)),
        arguments=tuple(passed.items()),
        also=(_MERGE, _MEAN),
        before=f"const T* array = nullptr; switch (work[4 * blockIdx.x]) {{{cases} }}",
    )


@lru_cache(maxsize=8)
def _averaging(dtype: mx.Dtype) -> GpuKernel:
    template = (("P", dtype),)
    return GpuKernel(CUDA, "mean_terms", FILES, _MEAN, template, also=(_MERGE,))


@lru_cache(maxsize=8)
def _filler(dtype: mx.Dtype) -> mx.array:
    """Return what stands in a slot without an array: MLX may copy what a slot has."""
    return mx.array([0], dtype=dtype)


@lru_cache(maxsize=64)
def _factor(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


@lru_cache(maxsize=1024)
def _work(sizes: tuple[int, ...]) -> mx.array:
    """Return (blocks, 4) int32: array, first and last + 1 of its elements, place."""
    rows, place = [], 0
    for i, size in enumerate(sizes):
        for begin in range(0, size, ELEMENTS):
            rows.append((i, begin, min(begin + ELEMENTS, size), place + begin))
        place += size
    return mx.array(rows, dtype=mx.int32)

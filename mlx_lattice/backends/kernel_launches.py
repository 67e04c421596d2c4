"""Launches of GPU kernels: in how many threads, and again and again as was settled.

``Launcher`` is what a layer calls for every launch; all that Python can know before
the arrays are there is settled by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Protocol

import mlx.core as mx

from ..devices import METAL
from .cuda_compile import Kernel

# On Metal, MLX puts an input below this size in the `constant` address space.
LEAST_DEVICE_SIZE = 8
THREADS = 256  # of a threadgroup or block where the kernel asks for none
MOST_BLOCKS = 1 << 20  # of CUDA's kernels that walk rows

Output = tuple[Sequence[int], mx.Dtype]


class Built(Protocol):
    """A kernel of a backend, "metal" or "cuda"."""

    backend: str

    def built(self, factory: Callable, given: tuple[bool, ...]) -> Callable:
        """Return what MLX built for some inputs."""


class Launcher:
    """Launches a kernel on a list of arrays, those inputs that there are.

    Args:
        kernel: that one.
        given: which of its inputs there are.
        settled: what MLX is told besides the arrays.
        numbers: Metal: the sizes, after the inputs.
    """

    __slots__ = "_factory", "_given", "_kernel", "_numbers", "_run", "_settled"

    def __init__(
        self,
        kernel: Built,
        given: tuple[bool, ...],
        settled: dict[str, object],
        numbers: mx.array | None,
    ):
        self._kernel, self._given = kernel, given
        self._settled, self._numbers = settled, numbers
        self._factory = self._run = None

    def __call__(self, arrays: list[mx.array]) -> list[mx.array]:
        """Put one launch into the graph; of one list alone, each has one shape."""
        factory = mx.fast.cuda_kernel
        if self._kernel.backend == METAL:
            factory = mx.fast.metal_kernel
            arrays = [in_device_space(array) for array in arrays]
            if self._numbers is not None:
                arrays.append(self._numbers)
        # The factory that stands in MLX now: a stand-in runs kernels without a GPU.
        if self._factory is not factory:
            run, settled = self._kernel.built(factory, self._given), self._settled
            if isinstance(run, Kernel) and not run.is_compiled:
                return run(inputs=arrays, **settled)
            if isinstance(run, Kernel):
                self._run = run.settled(arrays, **settled)
            else:
                self._run = partial(run, **settled)
            self._factory = factory
        return self._run(inputs=arrays)


def launch_facts(
    symbol: str,
    outputs: Sequence[Output],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    fill: float | None,
) -> dict[str, object]:
    """Return what MLX is told besides the arrays; arguments as of a kernel's call."""
    shapes, dtypes = zip(*outputs, strict=True)
    if 0 in chain(grid, *shapes):
        raise ValueError(
            f"{symbol} was launched for nothing: a grid of {tuple(grid)} and "
            f"outputs of {list(shapes)}; return an empty array instead"
        )
    return {
        "output_shapes": shapes,
        "output_dtypes": dtypes,
        "grid": (*grid, 1, 1)[:3],
        "init_value": fill,
        "threadgroup": (*threadgroup, 1, 1)[:3],
    }


@lru_cache(maxsize=4096)
def sizes_array(values: tuple[int, ...]) -> mx.array:
    """Return what Metal's kernels get sizes in; it is one for all equal ones."""
    return mx.array(list(values), dtype=mx.int32)


def in_device_space(array: mx.array) -> mx.array:
    """Return the array, flat and longer where MLX would bind it as a constant."""
    if array.size >= LEAST_DEVICE_SIZE:
        return array
    return mx.pad(array.flatten(), (0, LEAST_DEVICE_SIZE - array.size))


def fitting_threadgroup(grid: Sequence[int]) -> tuple[int, int, int]:
    """Return a Metal threadgroup of up to 256 threads, as wide as fits the grid."""
    width = 1
    while width < grid[0] and width < THREADS:
        width *= 2
    return width, max(1, THREADS // width) if grid[1] > 1 else 1, 1


def blocks_for(threads: int) -> int:
    """Return CUDA's blocks for so many threads; of too many, each has several rows."""
    return max(1, min(MOST_BLOCKS, -(-threads // THREADS)))

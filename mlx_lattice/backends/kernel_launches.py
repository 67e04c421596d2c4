"""In how many threads GPU kernels run, and how Metal gets small arrays."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

# On Metal, MLX puts an input below this size in the `constant` address space.
LEAST_DEVICE_SIZE = 8
THREADS = 256  # of a threadgroup or block where the kernel asks for none
MOST_BLOCKS = 1 << 20  # of CUDA's kernels that walk rows

Output = tuple[Sequence[int], mx.Dtype]


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

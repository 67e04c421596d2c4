"""How far each backend's host runs ahead of what it has launched."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import mlx.core as mx

from .. import devices

PAGE = 16384
# MLX waits for the oldest of its tasks once more than this many are under way.
TASKS = 10
# Places on the CPU stream that make up a task.
PLACES = 10


@dataclass(frozen=True)
class Flight:
    """When a backend frees what its launches read, and how it rounds sizes.

    A task is a group of launches: ten places in the queue of a CPU stream, a command
    buffer of Metal, a graph of CUDA. What its launches read is free when it is done.

    Attributes:
        backend: "cpu", "metal" or "cuda".
        launches: launches of a task.
        elements: elements read, beyond which a task ends, in units of 2**20; None
            where that does not count.
        tasks: tasks under way, beyond which the host waits.
        limit: bytes of active memory, beyond which the host waits.
    """

    backend: str
    launches: int
    elements: int | None
    tasks: int = TASKS
    limit: float = float("inf")

    def rounded(self, nbytes: int) -> int:
        """Return what the allocator counts for a buffer of that many bytes."""
        if self.backend == "cpu" or not nbytes:
            return nbytes
        if self.backend == "metal":
            return nbytes if nbytes <= PAGE else -(-nbytes // PAGE) * PAGE
        if nbytes >= PAGE:
            return -(-nbytes // PAGE) * PAGE
        return max(8, 1 << (nbytes - 1).bit_length())


def current() -> Flight:
    """Return the flight of MLX's default device, with MLX's environment variables."""
    # Setting it is the only way to read MLX's limit.
    limit = mx.set_memory_limit(2**62)
    mx.set_memory_limit(limit)
    if mx.default_device() == mx.cpu:
        return Flight("cpu", PLACES, None, limit=limit)
    if mx.metal.is_available():
        size = str(mx.device_info().get("architecture", ""))[-1:]
        backend, (launches, elements) = "metal", _METAL.get(size, (40, 40))
    else:
        backend = "cuda"
        launches, elements = _CUDA.get(devices.compute_capability(), (20, 100))
    launches = int(os.environ.get("MLX_MAX_OPS_PER_BUFFER", launches))
    elements = int(os.environ.get("MLX_MAX_MB_PER_BUFFER", elements))
    if backend == "cuda" and os.environ.get("MLX_USE_CUDA_GRAPHS") == "0":
        elements = sys.maxsize  # MLX counts what graphs read, not single launches
    return Flight(backend, launches, elements, limit=limit)


# Launches and mega-elements of a task, as MLX has them where no variable says: by the
# last letter of an Apple GPU's architecture, by CUDA's compute capability.
_METAL = {"p": (20, 40), "g": (40, 40), "s": (50, 50), "d": (50, 50)}
_CUDA = {
    (8, 0): (20, 400),
    (9, 0): (100, 1000),
    (10, 0): (100, 1000),
    (12, 0): (100, 1000),
    (12, 1): (20, 25),
}

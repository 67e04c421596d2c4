"""Points among cells on GPUs, one launch each; see ``geometry.voxelize``."""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import sync
from .dispatch_bounds import by_rows, dispatch_limit
from .gpu_kernel import (
    LEAST_DEVICE_SIZE,
    THREADS,
    GpuKernel,
    Interface,
    Value,
    blocks_for,
)

Numbers = tuple[float, ...] | None

# Dispatches of Metal cover points from `first` on.
_SIZES = (
    ("first", "0"),
    ("rows", "points_shape[0]"),
    ("columns", "points_shape[1]"),
)
_CELLS = Interface("Points", ("points", "batch", "origin", "size"), ("cells",), _SIZES)
_WEIGHTS = Interface(
    "Points", ("points", "size", "cells", "table"), ("weights",), _SIZES
)


@cache
def _kernel(
    backend: str, symbol: str, face: Interface, template: tuple[tuple[str, Value], ...]
) -> GpuKernel:
    given = symbol, ("points" if backend == METAL else "points.cu",), face, template
    place = "thread_position_in_grid.x" * (backend == METAL)
    # What they find is kept with coordinate sets: they run in rehearsals.
    return GpuKernel(backend, *given, place=place, geometry=True)


def _eight(values: Numbers) -> mx.array | None:
    """Return (8,) float32 on the device, of which the first are the values; kept."""
    return None if values is None else _kept(tuple(map(float, values)))


@lru_cache(maxsize=256)
def _kept(values: tuple[float, ...]) -> mx.array:
    # Metal has fewer in another address space, and CUDA reads the host's slowly.
    array = mx.array([*values, *(0.0,) * (LEAST_DEVICE_SIZE - len(values))]) + 0
    sync.compute([array])
    return array


class GpuPoints:
    """Cells of points, and weights of the cells around them, by a GPU's kernels.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def cells(
        self,
        points: mx.array,
        batch: mx.array | None,
        origin: Numbers,
        size: Numbers,
    ) -> mx.array:
        """Return ``geometry.voxelize.cells_of`` points of which there are some."""
        columns = points.shape[1] + (batch is not None)
        kernel = _kernel(
            self.backend, "cells_of_points", _CELLS, (("COLUMNS", columns),)
        )
        inputs = [points, batch, _eight(origin), _eight(size)]
        return self._over_points(kernel, inputs, columns, mx.int32)

    def corner_weights(
        self,
        points: mx.array,
        size: Numbers,
        cells: mx.array | None,
        table: mx.array,
        renormalise: bool,
    ) -> mx.array:
        """Return ``geometry.voxelize.corner_weights`` of points, some of them."""
        corners = table.shape[1]
        template = ("AXES", corners.bit_length() - 1), ("RENORMALISE", renormalise)
        kernel = _kernel(self.backend, "corner_weights", _WEIGHTS, template)
        inputs = [points, _eight(size), cells, table]
        return self._over_points(kernel, inputs, corners, mx.float32)

    def _over_points(
        self, kernel: GpuKernel, inputs: list, width: int, dtype: mx.Dtype
    ) -> mx.array:
        rows, columns = inputs[0].shape
        if self.backend != METAL:
            grid = (THREADS * blocks_for(rows),)
            return kernel(inputs, [((rows, width), dtype)], grid, (THREADS,))[0]

        def launch(first: int, count: int) -> list[mx.array]:
            sizes = {"first": first, "rows": count, "columns": columns}
            return kernel(inputs, [((count, width), dtype)], (count,), **sizes)

        work = rows * (columns + 2 * width)
        return by_rows(rows, work, dispatch_limit("elements"), launch)[0]

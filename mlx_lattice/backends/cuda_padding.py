"""Channels that CUDA reads in words of 16 bytes: rows are filled up with zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd, prod

import mlx.core as mx

from ..devices import CUDA
from . import signatures
from .dispatch_bounds import ceil_div
from .gpu_joins import CUDA_FILES, DTYPES, FILL, JOINS, SPLITS, cuda_launcher
from .gpu_kernel import GpuKernel
from .kernel_launches import THREADS, blocks_for


def padded(array: mx.array, axis: int, multiple: int) -> mx.array:
    """Return ``signatures.padded`` by one launch.

    MLX fills the whole first, from a zero in the host's memory, and copies then.
    """
    axis, short = axis % array.ndim, -array.shape[axis] % multiple
    if not short or not array.size or array.dtype not in DTYPES:
        return signatures.padded(array, axis, multiple)
    last, shape = array.ndim - 1, array.shape
    if axis < last or not last:
        return _filled_lines(array, axis, multiple)
    rows = _beside_zeros(array.reshape(-1, shape[last]), short)
    return rows if array.ndim == 2 else rows.reshape(*shape[:last], shape[last] + short)


def _beside_zeros(a: mx.array, missing: int) -> mx.array:
    """Return rows, and so many zeros after each."""
    return _filling_rows(a.shape, missing, a.dtype)([a])[0]


def _filled_lines(a: mx.array, axis: int, multiple: int) -> mx.array:
    """Return an array with zeros after an axis, which is then as long as a multiple."""
    shape = a.shape
    lines = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    (y,) = _filling_lines(lines, a.dtype, multiple)([a.reshape(lines)])
    return y.reshape(*shape[:axis], y.shape[1], *shape[axis + 1 :])


@lru_cache(maxsize=1024)
def _filling_rows(
    shape: tuple[int, int], missing: int, dtype: mx.Dtype
) -> Callable[[list[mx.array]], list[mx.array]]:
    return cuda_launcher(JOINS, (*shape, missing), dtype, has_b=False)


@lru_cache(maxsize=1024)
def _filling_lines(
    shape: tuple[int, int, int], dtype: mx.Dtype, multiple: int
) -> Callable[[list[mx.array]], list[mx.array]]:
    outer, lines, inner = shape
    each, whole = gcd(inner, 16 // dtype.size), ceil_div(lines, multiple) * multiple
    kernel = _kernel((("T", dtype), ("EACH", each), ("MULTIPLE", multiple)))
    grid = (blocks_for(outer * whole * inner // each) * THREADS,)
    made = ((outer, whole, inner), dtype)
    return kernel.launcher((True,), [made], grid, (THREADS,))


@lru_cache(maxsize=256)
def _kernel(template: tuple) -> GpuKernel:
    faces = JOINS.cuda, SPLITS.cuda
    return GpuKernel(CUDA, "fill_lines", CUDA_FILES, FILL, template, also=faces)

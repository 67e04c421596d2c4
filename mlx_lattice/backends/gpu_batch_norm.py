"""Norms of few rows on Metal and CUDA: one launch forward and one back.

A block has some channels of all rows, or of all of a batch element, so that none waits
for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..devices import CUDA, METAL
from ..routes import thresholds
from .dispatch_bounds import ceil_div, dispatch_limit
from .gpu_kernel import GpuKernel, Interface, Value
from .norm_interfaces import (
    BATCH_GRADIENT,
    BATCH_GRADIENTS,
    BATCH_NORM,
    COMBINE_SUMS,
    CUDA_FILES,
    MOMENTS,
    PLACE,
    SEGMENT_GRADIENT,
    SEGMENT_GRADIENTS,
    SEGMENT_NORM,
    numbers,
)
from .norms_protocol import NONE, Activation, Fit, RowSegments

FILES = {
    METAL: ("matrix_tiles", "channel_norms", "batch_norm"),
    CUDA: (*CUDA_FILES, "batch_norm.cu"),
}
# Threads along the channels of a row: of four channels each on Metal, of two or one on
# CUDA. More have a wider group, up to a warp.
ACROSS, MOST_ACROSS = 8, 32
MOST_THREADS = {METAL: 256, CUDA: 1024}
LEAST_THREADS = 256
ROWS = 4  # of a thread, at most, unless its block has the most threads
# Metal's text names the structs of norms in several launches.
_ALSO = MOMENTS, COMBINE_SUMS
SYMBOLS = {
    BATCH_NORM: "batch_norm",
    SEGMENT_NORM: "batch_norm",
    BATCH_GRADIENT: "batch_norm_gradient",
    BATCH_GRADIENTS: "batch_norm_gradient",
    SEGMENT_GRADIENT: "segment_norm_gradient",
    SEGMENT_GRADIENTS: "segment_norm_gradient",
}


class Shares(NamedTuple):
    """How rows and channels share statistics, and weight and bias.

    Attributes:
        segments: of rows.
        longest: rows of one, at most.
        width: neighbouring channels of a group.
        apart: whether each segment has a weight and a bias of its own.
    """

    segments: int
    longest: int
    width: int = 1
    apart: bool = False


@cache
def _kernel(
    backend: str,
    face: Interface,
    template: tuple[tuple[str, Value], ...],
    step: str = "",
) -> GpuKernel:
    """Return a kernel; ``step``: as of the kernels of several launches."""
    metal = backend == METAL
    return GpuKernel(
        backend,
        SYMBOLS[face],
        FILES[backend],
        face,
        template,
        place=PLACE if metal else "",
        memory=str(8 * MOST_THREADS[METAL]) if metal else "",
        also=_ALSO if metal else (),
        threads=MOST_THREADS[backend],
        sizes=(("step", step),) if step and not metal else (),
    )


def _each(backend: str, channels: int) -> int:
    """Return the channels of a thread."""
    return 4 if backend == METAL else 1 if channels % 2 else 2


@lru_cache(maxsize=4096)
def _launcher(
    backend: str,
    face: Interface,
    given: tuple[bool, ...],
    shape: tuple[int, int],
    dtype: mx.Dtype,
    kind: mx.Dtype,
    act: int,
    shares: Shares,
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what launches a kernel on (N, C); ``kind``: weight and bias are of it."""
    (rows, channels), each = shape, _each(backend, shape[1])
    template = ("T", dtype), ("P", kind), ("ACT", act), ("WIDTH", shares.width)
    if backend == CUDA:
        template = template[0], ("EACH", each), *template[1:]
    features, line = (shape, dtype), ((shares.segments, channels), mx.float32)
    parameter = (channels,), kind
    slots = {
        "y": features, "dx": features, "dresidual": features,
        "mean": line, "var": line, "moved_mean": line, "moved_var": line,
        "dweight": parameter, "dbias": parameter,
        "sums": ((2, shares.segments, channels), mx.float32),
    }  # fmt: skip
    threads = LEAST_THREADS
    across = max(ACROSS, shares.width // each)
    while threads < MOST_THREADS[backend] and shares.longest * across > ROWS * threads:
        threads *= 2
    down = threads // across
    grid = shares.segments * across, ceil_div(channels, across * each) * down
    sizes = {"rows": rows, "channels": channels, "segments": shares.segments}
    sizes["step"] = channels * shares.apart
    kernel = _kernel(backend, face, template, "x_shape[1]" * shares.apart)
    slots = [slots[name] for name in face.outputs]
    return kernel.launcher(given, slots, grid, (across, down), **sizes)


class GpuBatchNorms:
    """Norms of few rows by a GPU's kernels; see ``BatchNorms``.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def takes(
        self, x: mx.array, segments: RowSegments | None, groups: int | None
    ) -> bool:
        """Whether a block has a segment's rows, and whole groups: of a power of two."""
        (rows, channels), across = x.shape, ACROSS
        if segments is not None:
            width = channels // (groups or channels)
            many = self.backend == METAL and 3 * x.size > dispatch_limit("elements")
            if many or width & (width - 1):
                return False
            across = max(ACROSS, width // _each(self.backend, channels))
            rows = segments.longest
        rows *= across // ACROSS  # powers of two: fewer threads down have more rows
        few = thresholds.is_one_launch(rows, x.dtype.size, self.backend)
        return across <= MOST_ACROSS and few

    def normalize(
        self,
        x: mx.array,
        weight: mx.array | None = None,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        running: tuple[mx.array, mx.array] | None = None,
        momentum: float = 0.0,
        eps: float = 1e-5,
        act: Activation = NONE,
        segments: RowSegments | None = None,
        groups: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Return y, mean and biased variance, and running statistics moved by them."""
        told, face = numbers(eps, momentum, act.slope), BATCH_NORM
        if segments is not None:
            face = SEGMENT_NORM
        inputs = [x, weight, bias, residual, *(running or (None, None))]
        inputs += [*_read(segments), told]
        made = self._run(face, inputs, x, (weight, bias), act, segments, groups)
        return tuple(made) if segments is None else (*made, *made[1:])

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: mx.array | None = None,
        groups: int | None = None,
    ) -> tuple[mx.array, mx.array | None, mx.array | None, mx.array]:
        """Return the gradients of x, weight, bias and residual."""
        residual = residual if fit.act.changes else None
        told, parameters = numbers(fit.eps, 0.0, fit.act.slope), (fit.weight, fit.bias)
        inputs = [dy, x, fit.mean, fit.var, *parameters, residual]
        inputs += [*_read(fit.segments), told]
        faces = BATCH_GRADIENT, BATCH_GRADIENTS
        if fit.segments is not None:
            faces = SEGMENT_GRADIENT, SEGMENT_GRADIENTS
        face = faces[residual is not None]
        made = self._run(face, inputs, x, parameters, fit.act, fit.segments, groups)
        if fit.segments is not None:
            made[1:2] = _of_parameters(made[1], fit)
        return (*made, dy)[:4]

    def _run(
        self,
        face: Interface,
        inputs: Sequence[mx.array | None],
        x: mx.array,
        parameters: Sequence[mx.array | None],
        act: Activation,
        segments: RowSegments | None,
        groups: int | None,
    ) -> list[mx.array]:
        kind, shares = mx.float32, Shares(1, x.shape[0])
        there = [a for a in parameters if a is not None]
        if there:
            kind = there[0].dtype
        if segments is not None:
            apart = bool(there) and there[0].ndim == 2
            width = x.shape[1] // (groups or x.shape[1])
            shares = Shares(segments.size, segments.longest, width, apart)
        given = tuple([array is not None for array in inputs])
        facts = given, x.shape, x.dtype, kind, act.kind, shares
        launch = _launcher(self.backend, face, *facts)
        return launch([array for array in inputs if array is not None])


def _read(segments: RowSegments | None) -> tuple[mx.array | None, mx.array | None]:
    """Return order and starts as kernels read them."""
    return (None, None) if segments is None else (segments.read[1], segments.begins)


def _of_parameters(sums: mx.array, fit: Fit) -> list[mx.array | None]:
    """Return the gradients of weight and bias; ``sums``: (2, S, C) of g and g xhat."""
    if fit.weight is None and fit.bias is None:
        return [None, None]
    _, segments, channels = sums.shape
    if not fit.is_apart and segments > 1:
        sums = sums.sum(axis=1)
    shape = (segments, channels) if fit.is_apart else (channels,)
    dbias, dweight = mx.split(sums.astype(fit.dtype), 2)  # an index is a launch
    return [dweight.reshape(shape), dbias.reshape(shape)]

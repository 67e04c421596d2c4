"""BatchNorm of few rows on Metal and CUDA: one launch forward and one back.

A block has some channels of all rows, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import mlx.core as mx

from ..devices import CUDA, METAL
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface, Value
from .norm_interfaces import (
    BATCH_GRADIENT,
    BATCH_GRADIENTS,
    BATCH_NORM,
    COMBINE_SUMS,
    CUDA_FILES,
    MOMENTS,
    PLACE,
    numbers,
)
from .norms_protocol import NONE, Activation, Fit

FILES = {
    METAL: ("matrix_tiles", "channel_norms", "batch_norm"),
    CUDA: (*CUDA_FILES, "batch_norm.cu"),
}
# Threads along the channels of a row: of four channels each on Metal, of two or one on
# CUDA.
ACROSS = 8
MOST_THREADS = {METAL: 256, CUDA: 1024}
LEAST_THREADS = 256
ROWS = 4  # of a thread, at most, unless its block has the most threads
# Metal's text names the structs of norms in several launches.
_ALSO = MOMENTS, COMBINE_SUMS


@cache
def _kernel(
    backend: str, face: Interface, template: tuple[tuple[str, Value], ...]
) -> GpuKernel:
    metal = backend == METAL
    return GpuKernel(
        backend,
        "batch_norm" if face is BATCH_NORM else "batch_norm_gradient",
        FILES[backend],
        face,
        template,
        place=PLACE if metal else "",
        memory=str(8 * MOST_THREADS[METAL]) if metal else "",
        also=_ALSO if metal else (),
        threads=MOST_THREADS[backend],
    )


@lru_cache(maxsize=4096)
def _launcher(
    backend: str,
    face: Interface,
    given: tuple[bool, ...],
    shape: tuple[int, int],
    dtype: mx.Dtype,
    kind: mx.Dtype,
    act: int,
) -> Callable[[list[mx.array]], list[mx.array]]:
    """Return what launches a kernel on (N, C); ``kind``: weight and bias are of it."""
    (rows, channels), each = shape, 4
    template = ("T", dtype), ("P", kind), ("ACT", act)
    if backend == CUDA:
        each = 1 if channels % 2 else 2
        template = template[0], ("EACH", each), *template[1:]
    features, line = (shape, dtype), (1, channels)
    if face is BATCH_NORM:
        slots = [features, *[(line, mx.float32)] * 4]
    else:
        of_parameter = (channels,), kind
        slots = [features, of_parameter, of_parameter, features]
        slots = slots[: len(face.outputs)]
    threads = LEAST_THREADS
    while threads < MOST_THREADS[backend] and rows * ACROSS > ROWS * threads:
        threads *= 2
    down = threads // ACROSS
    grid = ACROSS, ceil_div(channels, ACROSS * each) * down
    sizes = {"rows": rows, "channels": channels}
    kernel = _kernel(backend, face, template)
    return kernel.launcher(given, slots, grid, (ACROSS, down), **sizes)


class GpuBatchNorms:
    """Norms of few rows by a GPU's kernels; see ``BatchNorms``.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

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
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Return y, mean and biased variance, and running statistics moved by them."""
        told = numbers(eps, momentum, act.slope)
        inputs = [x, weight, bias, residual, *(running or (None, None)), told]
        return tuple(self._run(BATCH_NORM, inputs, x, (weight, bias), act))

    def gradient(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return the gradients of x, weight, bias and residual."""
        residual = residual if fit.act.changes else None
        told, parameters = numbers(fit.eps, 0.0, fit.act.slope), (fit.weight, fit.bias)
        inputs = [dy, x, fit.mean, fit.var, *parameters, residual, told]
        face = BATCH_GRADIENT if residual is None else BATCH_GRADIENTS
        made = self._run(face, inputs, x, parameters, fit.act)
        return (*made, dy)[:4]

    def _run(
        self,
        face: Interface,
        inputs: Sequence[mx.array | None],
        x: mx.array,
        parameters: Sequence[mx.array | None],
        act: Activation,
    ) -> list[mx.array]:
        kind = next((a.dtype for a in parameters if a is not None), mx.float32)
        given = tuple([array is not None for array in inputs])
        facts = given, x.shape, x.dtype, kind, act.kind
        launch = _launcher(self.backend, face, *facts)
        return launch([array for array in inputs if array is not None])

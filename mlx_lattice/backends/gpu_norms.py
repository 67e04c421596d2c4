"""Norms by channel on Metal and CUDA: one interface a kernel, one way to launch them.

How rows are cut depends on sizes only, so that sums have one order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import prod

import mlx.core as mx

from ..devices import CUDA, METAL
from .dispatch_bounds import ceil_div, cuts, dispatch_limit
from .gpu_batch_norm import GpuBatchNorms
from .gpu_kernel import GpuKernel, Interface, Value
from .norm_interfaces import (
    COMBINE_SUMS,
    CUDA_FILES,
    FACES,
    GRADIENT,
    GRADIENTS,
    GROUP_MOMENTS,
    GROUP_TERMS,
    MOMENTS,
    PLACE,
    numbers,
)
from .norms_protocol import Fit, RowSegments

FILES = {
    METAL: ("matrix_tiles", "channel_norms"),
    CUDA: (*CUDA_FILES, "channel_norms.cu"),
}
GROUP_FILES = {METAL: "group_statistics", CUDA: "group_statistics.cu"}
THREADS = 256  # of a threadgroup that walks rows
ACROSS = 32  # threads along the channels of a row, at most
# Threadgroups that fill any GPU several times, and rows of one thread: so many at least
# that a line of partial sums, or the reads of a channel's scale and shift, is worth it.
THREADGROUPS, SUMMED_ROWS, WRITTEN_ROWS, MOST_WRITTEN = 1024, 4, 4, 32
# Channels of a threadgroup that adds partial sums, and its threads for each. On CUDA
# they are few: there are more blocks, with fewer lines a thread.
COMBINING = {METAL: (32, 16), CUDA: (8, 64)}
OF_GROUPS = GROUP_MOMENTS, GROUP_TERMS


@cache
def _kernel(
    backend: str,
    symbol: str,
    face: Interface,
    floats: int,
    template: tuple[tuple[str, Value], ...],
    step: str = "",
) -> GpuKernel:
    """Return a kernel.

    Args:
        floats: of threadgroup memory on Metal.
        step: CUDA: C++ of the channels from a segment's weight and bias to the next
            one's, where each has its own.
    """
    metal = backend == METAL
    combines, files = face.name == "Combine", FILES[backend]
    named = MOMENTS, COMBINE_SUMS
    if face in OF_GROUPS:
        files, named = (*files, GROUP_FILES[backend]), (*named, *OF_GROUPS)
    # As many as their registers allow without spills.
    beside = 1 if combines or face in OF_GROUPS else 2 if "gradient" in symbol else 3
    return GpuKernel(
        backend,
        symbol,
        files,
        face,
        template,
        place=PLACE if metal else "",
        memory=str(floats) if metal and floats else "",
        also=tuple(other for other in named if other is not face),
        threads=prod(COMBINING[backend]) if combines else THREADS,
        blocks_per_multiprocessor=beside,
        sizes=(("step", step),) if step and not metal else (),
    )


class _Walk:
    """How threadgroups share the rows and channels of an array.

    Args:
        backend: "metal" or "cuda".
        rows, channels: of the array.
        dtype: its dtype.
    """

    def __init__(self, backend: str, rows: int, channels: int, dtype: mx.Dtype):
        self.rows, self.channels, self.each = rows, channels, 4
        if backend == CUDA:  # 16 bytes of channels a thread, or one channel
            wide = 16 // dtype.size
            self.each = 1 if channels % wide else wide
        vectors = ceil_div(channels, self.each)
        self.tiles = ceil_div(vectors, ACROSS)
        self.across = ceil_div(vectors, self.tiles)
        self.down = THREADS // self.across

    @property
    def summed(self) -> int:
        """Rows of a block that writes a line of partial sums."""
        return max(SUMMED_ROWS * self.down, self._share)

    @property
    def written(self) -> int:
        """Rows of a block that writes rows."""
        most = MOST_WRITTEN * self.down
        return min(most, max(WRITTEN_ROWS * self.down, self._share))

    @property
    def _share(self) -> int:
        return ceil_div(self.rows, max(1, THREADGROUPS // self.tiles))


Launch = Callable[[list[mx.array]], list[mx.array]]


@lru_cache(maxsize=4096)
def _over_rows(
    backend: str,
    symbol: str,
    given: tuple[bool, ...],
    shape: tuple[int, int],
    template: tuple[tuple[str, Value], ...],
    segments: int,
    blocks: int | None,
    limit: int,
    apart: bool,
) -> Launch:
    """Return what launches a kernel over blocks of rows.

    Args:
        backend: "metal" or "cuda".
        symbol: the function.
        given: which of the inputs there are.
        shape: of the features.
        template: T first, the dtype of the features.
        segments: lines of the statistics.
        blocks: pieces of segments, or None where blocks have equal shares of all rows.
        limit: features that a dispatch of Metal may read.
        apart: whether each segment has a weight and a bias of its own.
    """
    face, dtype = FACES[symbol], template[0][1]
    if face is GRADIENT and given[face.inputs.index("residual")]:
        face = GRADIENTS
    walk = _Walk(backend, *shape, dtype)
    sums = face.outputs == ("partials",)
    length = walk.summed if sums else walk.written
    if blocks is None:
        blocks = ceil_div(walk.rows, length)
        length = ceil_div(walk.rows, blocks)
    if backend == CUDA:
        template = template[0], ("EACH", walk.each), *template[1:]
    floats, step = 8 * THREADS if sums else 0, "x_shape[1]" * apart
    kernel = _kernel(backend, symbol, face, floats, template, step)

    def part(first: int, count: int) -> Launch:
        if sums:
            slots = [((count, 3, walk.channels), mx.float32)]
        else:
            start = first * length
            rows = min(walk.rows, start + count * length) - start
            slots = [((rows, walk.channels), dtype)] * len(face.outputs)
        sizes = {"first": first, "rows": walk.rows, "channels": walk.channels}
        sizes |= {"block_rows": length, "segments": segments}
        sizes["step"] = walk.channels * apart
        grid = count * walk.across, walk.tiles * walk.down
        return kernel.launcher(given, slots, grid, (walk.across, walk.down), **sizes)

    if backend == CUDA:
        return part(0, blocks)
    work = 3 * walk.rows * walk.channels
    parts = [part(first, count) for first, count in cuts(blocks, work, limit)]
    if len(parts) == 1:
        return parts[0]

    def launch(arrays: list[mx.array]) -> list[mx.array]:
        arrays = [mx.contiguous(a) for a in arrays]  # or MLX copies them for each part
        made = [part(arrays) for part in parts]
        return [mx.concatenate(outputs) for outputs in zip(*made, strict=True)]

    return launch


@lru_cache(maxsize=4096)
def _combining(
    backend: str,
    symbol: str,
    given: tuple[bool, ...],
    shape: tuple[int, int, int],
    template: tuple[tuple[str, Value], ...],
    segments: int,
    apart: bool = False,
) -> Launch:
    """Return what launches a kernel that adds lines of partial sums, in order.

    Arguments are as of ``_over_rows``.
    """
    face, (blocks, _, channels) = FACES[symbol], shape
    across, down = COMBINING[backend]
    line, kind = (segments, channels), template[0][1] if template else mx.float32
    slots = [(line, mx.float32)] * 4
    if face is COMBINE_SUMS:
        slots = [((2, *line), mx.float32)] * 2 + [(line, kind)] * 2
    step = "partials_shape[2]" * apart
    kernel = _kernel(backend, symbol, face, across * down, template, step)
    grid = ceil_div(channels, across) * across, segments * down
    sizes = {"blocks": blocks, "channels": channels, "segments": segments}
    sizes["step"] = channels * apart
    return kernel.launcher(given, slots, grid, (across, down), **sizes)


@lru_cache(maxsize=1024)
def _of_groups(
    backend: str,
    face: Interface,
    given: tuple[bool, ...],
    shape: tuple[int, int, int],
    template: tuple[tuple[str, Value], ...],
    segments: int,
    groups: int,
    apart: bool = False,
) -> Launch:
    """Return what launches a kernel that has a threadgroup a group and segment.

    Arguments are as of ``_over_rows``; ``shape``: of the first input.
    """
    channels, terms = shape[2], face is GROUP_TERMS
    line = segments, channels
    sizes = {"channels": channels, "width": channels // groups}
    slots = [(line, mx.float32)] * 2
    if terms:
        parameters = line if apart else (channels,), template[0][1]
        slots = [((2, *line), mx.float32), parameters, parameters]
        sizes |= {"segments": segments, "step": channels * apart}
    else:
        sizes["blocks"] = shape[0]
    symbol = "combine_group_terms" if terms else "combine_group_moments"
    step = "sums_shape[2]" * apart
    kernel = _kernel(backend, symbol, face, THREADS, template, step)
    grid = groups * THREADS, segments
    return kernel.launcher(given, slots, grid, (THREADS, 1), **sizes)


class GpuNorms:
    """The norms by channel of a GPU's kernels; see ``Norms``.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend, self._few = backend, GpuBatchNorms(backend)

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: tuple[mx.array, mx.array] | None = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them."""
        starts = None
        if lines is None:
            lines, starts = self._lines(x, segments)
        inputs = [lines, starts, *(running or (None, None))]
        inputs.append(numbers(0.0, momentum, 0.0))
        size = 1 if segments is None else segments.size
        made = self._combine("combine_moments", inputs, (), size)
        return tuple(made)

    def group_moments(
        self, x: mx.array, segments: RowSegments, groups: int
    ) -> tuple[mx.array, mx.array]:
        """Return mean and biased variance of groups of channels."""
        if groups == x.shape[1]:
            return self.moments(x, segments)[:2]
        lines, starts = self._lines(x, segments)
        facts = GROUP_MOMENTS, (True, True), lines.shape, (), segments.size, groups
        return tuple(_of_groups(self.backend, *facts)([lines, starts]))

    def normalize(
        self, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> mx.array:
        """Return (N, C) in the dtype of x; ``residual`` is added before ``fit.act``."""
        inputs = [x, *_arrays(fit, residual), _of(fit), _told(fit)]
        return self._rows("normalize_channels", inputs, x, _kinds(x, fit), fit)[0]

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative."""
        order, bounds, starts, blocks = self._cut(x, fit.segments)
        inputs = [dy, x, *_arrays(fit, _needed(fit, residual)), _of(fit)]
        inputs += [order, bounds, _told(fit)]
        (partials,) = self._rows(
            "channel_gradient_sums", inputs, x, _kinds(x, fit), fit, blocks
        )
        inputs, kind = [partials, starts, fit.weight], (("P", fit.dtype),)
        facts = fit.mean.shape[0], fit.is_apart
        made = self._combine("combine_gradient_sums", inputs, kind, *facts)
        return tuple(made)

    def group_terms(
        self, fit: Fit, sums: mx.array, terms: mx.array, groups: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return terms of groups of channels, and gradients of weight and bias."""
        facts = (True, True), sums.shape, (("P", fit.dtype),), sums.shape[1], groups
        launch = _of_groups(self.backend, GROUP_TERMS, *facts, fit.is_apart)
        return tuple(launch([sums, terms]))

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: mx.array | None = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g."""
        residual = _needed(fit, residual)
        inputs = [dy, x, *_arrays(fit, residual), terms, _of(fit), _told(fit)]
        made = self._rows("channel_gradient", inputs, x, _kinds(x, fit), fit)
        return made[0], made[1] if len(made) > 1 else dy

    def of_few(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        groups: int | None = None,
    ) -> GpuBatchNorms | None:
        """Return what takes one launch each way, where rows of a segment are few."""
        return self._few if self._few.takes(x, segments, groups) else None

    def _cut(self, x: mx.array, segments: RowSegments | None):
        """Return order, bounds and starts of segments' pieces, and how many."""
        if segments is None:
            return None, None, None, None
        length = _Walk(self.backend, *x.shape, x.dtype).summed
        bounds, starts, blocks = segments.pieces(length)
        return segments.read[1], bounds, starts, blocks

    def _lines(self, x: mx.array, segments: RowSegments | None):
        """Return lines of moments, and the first of each segment."""
        order, bounds, starts, blocks = self._cut(x, segments)
        inputs, kind = [x, order, bounds], (("T", x.dtype),)
        (lines,) = self._rows("channel_moments", inputs, x, kind, None, blocks)
        return lines, starts

    def _rows(self, symbol, inputs, x, template, fit=None, blocks=None):
        given = tuple([array is not None for array in inputs])
        launch = _over_rows(
            self.backend,
            symbol,
            given,
            x.shape,
            template,
            1 if fit is None else fit.mean.shape[0],
            blocks,
            dispatch_limit("elements") if self.backend == METAL else 0,
            fit is not None and fit.is_apart,
        )
        return launch([array for array in inputs if array is not None])

    def _combine(self, symbol, inputs, template, segments, apart=False):
        given, shape = tuple([a is not None for a in inputs]), inputs[0].shape
        facts = shape, template, segments, apart
        launch = _combining(self.backend, symbol, given, *facts)
        return launch([array for array in inputs if array is not None])


def _kinds(x: mx.array, fit: Fit) -> tuple[tuple[str, Value], ...]:
    return ("T", x.dtype), ("P", fit.dtype), ("ACT", fit.act.kind)


def _told(fit: Fit) -> mx.array:
    return numbers(fit.eps, 0.0, fit.act.slope)


def _arrays(fit: Fit, residual: mx.array | None) -> list[mx.array | None]:
    return [fit.mean, fit.var, fit.weight, fit.bias, residual]


def _needed(fit: Fit, residual: mx.array | None) -> mx.array | None:
    """Return the residual where the way back depends on its values."""
    return residual if fit.act.changes else None


def _of(fit: Fit) -> mx.array | None:
    if fit.segments is None or fit.segments.size == 1:
        return None
    return fit.segments.read[0]

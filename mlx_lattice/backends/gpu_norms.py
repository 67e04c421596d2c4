"""Norms by channel on Metal and CUDA: one interface a kernel, one way to launch them.

How rows are cut depends on sizes only, so that sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx

from ..devices import CUDA, METAL
from .dispatch_bounds import by_rows, ceil_div, dispatch_limit
from .gpu_kernel import GpuKernel, Interface, Value
from .norms_protocol import Fit, RowSegments

FILES = {
    METAL: ("matrix_tiles", "channel_norms"),
    CUDA: ("alignment.cuh", "channels.cuh", "channel_norms.cu"),
}
THREADS = 256  # of a threadgroup that walks rows
ACROSS = 32  # threads along the channels of a row, at most
# Threadgroups that fill any GPU, and rows of one thread: few enough to fill it, enough
# to be worth a line of partial sums, or the reads of a channel's scale and shift.
THREADGROUPS, SUMMED_ROWS, WRITTEN_ROWS = 1024, 4, 8
COMBINING = 32, 16  # channels and threads of each, where partial sums are added


def _face(
    name: str, inputs: str, outputs: str, sizes: Sequence[tuple[str, str]]
) -> Interface:
    return Interface(name, tuple(inputs.split()), tuple(outputs.split()), tuple(sizes))


def _rows(segments: str) -> list[tuple[str, str]]:
    """Return the sizes of a kernel over rows; Metal's dispatches have some blocks."""
    sizes = [("first", "0"), ("rows", "x_shape[0]"), ("channels", "x_shape[1]")]
    return [*sizes, ("block_rows", "0"), ("segments", segments)]


_LINES = [("blocks", "partials_shape[0]"), ("channels", "partials_shape[2]")]
_LINES.append(("segments", "gridDim.y"))
_FIT = "mean var weight bias residual"
MOMENTS = _face("ChannelNorm", "x order bounds", "partials", _rows("1"))
COMBINE_MOMENTS = _face(
    "Combine",
    "partials starts running_mean running_var norm_numbers",
    "mean var moved_mean moved_var",
    _LINES,
)
NORMALIZE = _face(
    "ChannelNorm", f"x {_FIT} of norm_numbers", "y", _rows("var_shape[0]")
)
GRADIENT_SUMS = _face(
    "ChannelNorm",
    f"dy x {_FIT} of order bounds norm_numbers",
    "partials",
    _rows("var_shape[0]"),
)
COMBINE_SUMS = _face(
    "Combine", "partials starts weight", "sums terms dweight dbias", _LINES
)
_BACK = f"dy x {_FIT} terms of norm_numbers"
GRADIENT = _face("ChannelNorm", _BACK, "dx", _rows("var_shape[0]"))
GRADIENTS = _face("ChannelNorm", _BACK, "dx dresidual", _rows("var_shape[0]"))

_PLACE = (
    "threadgroup_position_in_grid, thread_position_in_threadgroup, "
    "threads_per_threadgroup"
)


@lru_cache(maxsize=1024)
def _numbers(eps: float, momentum: float, slope: float) -> mx.array:
    """Return what kernels are told; eight, so that Metal has them in device memory."""
    return mx.array([eps, momentum, slope, 0, 0, 0, 0, 0], dtype=mx.float32)


@cache
def _kernel(
    backend: str,
    symbol: str,
    face: Interface,
    floats: int,
    template: tuple[tuple[str, Value], ...],
) -> GpuKernel:
    """Return a kernel; ``floats`` of threadgroup memory on Metal."""
    metal = backend == METAL
    combines = face.name == "Combine"
    return GpuKernel(
        backend,
        symbol,
        FILES[backend],
        face,
        template,
        place=_PLACE if metal else "",
        memory=str(floats) if metal and floats else "",
        also=(COMBINE_SUMS if not combines else MOMENTS,),
        threads=COMBINING[0] * COMBINING[1] if combines else THREADS,
        blocks_per_multiprocessor=1 if combines else 2,
    )


class _Walk:
    """How threadgroups share the rows and channels of an array.

    Args:
        x: (N, C).
        each: channels of a thread.
    """

    def __init__(self, x: mx.array, each: int):
        self.rows, self.channels = x.shape
        vectors = ceil_div(self.channels, each)
        self.tiles = ceil_div(vectors, ACROSS)
        self.across = ceil_div(vectors, self.tiles)
        self.down = THREADS // self.across

    def block_rows(self, each_thread: int, most: int | None = None) -> int:
        """Return the rows of a block: some for each thread, more above ``most``."""
        length = each_thread * self.down
        if most is not None:
            length = max(length, ceil_div(self.rows, max(1, most // self.tiles)))
        return length


class GpuNorms:
    """The norms by channel of a GPU's kernels; see ``Norms``.

    Args:
        backend: "metal" or "cuda".
    """

    def __init__(self, backend: str):
        self.backend = backend

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: tuple[mx.array, mx.array] | None = None,
        momentum: float = 0.0,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them."""
        x = mx.contiguous(x)
        partials, starts = self._summed(
            "channel_moments", MOMENTS, x, segments, lambda *cut: [x, *cut], T=x.dtype
        )
        inputs = [partials, starts, *(running or (None, None))]
        inputs.append(_numbers(0.0, momentum, 0.0))
        size = 1 if segments is None else segments.size
        slots = [((size, x.shape[1]), mx.float32)] * 4
        made = self._combine("combine_moments", COMBINE_MOMENTS, inputs, slots, size)
        return tuple(made)

    def normalize(
        self, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> mx.array:
        """Return (N, C) in the dtype of x; ``residual`` is added before ``fit.act``."""
        x = mx.contiguous(x)
        inputs = [x, *_arrays(fit, residual), _of(fit), self._told(fit)]
        return self._written("normalize_channels", NORMALIZE, inputs, x, fit)[0]

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative."""
        dy, x = mx.contiguous(dy), mx.contiguous(x)
        given = [dy, x, *_arrays(fit, _needed(fit, residual)), _of(fit)]
        partials, starts = self._summed(
            "channel_gradient_sums",
            GRADIENT_SUMS,
            x,
            fit.segments,
            lambda *cut: [*given, *cut, self._told(fit)],
            T=x.dtype,
            P=fit.dtype,
            ACT=fit.act.kind,
        )
        size, channels = fit.mean.shape
        wide, thin = (2, size, channels), (size, channels)
        slots = [(wide, mx.float32)] * 2 + [(thin, fit.dtype)] * 2
        inputs = [partials, starts, fit.weight]
        made = self._combine(
            "combine_gradient_sums", COMBINE_SUMS, inputs, slots, size, P=fit.dtype
        )
        return tuple(made)

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: mx.array | None = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g."""
        dy, x = mx.contiguous(dy), mx.contiguous(x)
        residual = _needed(fit, residual)
        inputs = [dy, x, *_arrays(fit, residual), terms, _of(fit), self._told(fit)]
        both = residual is not None
        face = GRADIENTS if both else GRADIENT
        made = self._written("channel_gradient", face, inputs, x, fit)
        return (made[0], made[1]) if both else (made[0], dy)

    # Launches

    def _told(self, fit: Fit) -> mx.array:
        return _numbers(fit.eps, 0.0, fit.act.slope)

    def _each(self, x: mx.array) -> int:
        """Return the channels of a thread: on CUDA 16 bytes of them, or one."""
        if self.backend == METAL:
            return 4
        each = 16 // x.itemsize
        return 1 if x.shape[1] % each else each

    def _template(self, x: mx.array, **template: Value):
        if self.backend == CUDA:
            dtype, *rest = template.items()
            return dtype, ("EACH", self._each(x)), *rest
        return tuple(template.items())

    def _over(self, kernel, inputs, x, walk: _Walk, blocks, length, segments, shapes):
        """Launch over blocks of rows; on Metal in dispatches of bounded work.

        ``shapes(rows or blocks)`` are (shape, dtype) of the outputs.
        """
        threadgroup = walk.across, walk.down

        def launch(first: int, count: int) -> list[mx.array]:
            sizes = {"first": first, "rows": walk.rows, "channels": walk.channels}
            sizes |= {"block_rows": length, "segments": segments}
            grid = count * walk.across, walk.tiles * walk.down
            return kernel(inputs, shapes(first, count), grid, threadgroup, **sizes)

        if self.backend == CUDA:
            return launch(0, blocks)
        arrays = sum(a is not None and a.shape == x.shape for a in inputs)
        limit = dispatch_limit("elements")
        return by_rows(blocks, arrays * x.size, limit, launch)

    def _summed(self, symbol, face, x, segments, inputs, **template):
        """Return (B, 3, C) partial sums and the first of each segment, or None."""
        walk = _Walk(x, self._each(x))
        length = walk.block_rows(SUMMED_ROWS, THREADGROUPS)
        bounds = starts = order = None
        blocks = ceil_div(walk.rows, length)
        if segments is not None:
            bounds, starts, blocks = segments.pieces(length)
            order = segments.order
        else:
            length = ceil_div(walk.rows, blocks)
        kernel = _kernel(
            self.backend, symbol, face, 8 * THREADS, self._template(x, **template)
        )

        def shapes(first: int, count: int):
            return [((count, 3, walk.channels), mx.float32)]

        (partials,) = self._over(
            kernel, inputs(order, bounds), x, walk, blocks, length, 1, shapes
        )
        return partials, starts

    def _combine(self, symbol, face, inputs, slots, size, **template):
        """Add lines of partial sums, in order."""
        kernel = _kernel(
            self.backend,
            symbol,
            face,
            COMBINING[0] * COMBINING[1],
            tuple(template.items()),
        )
        blocks, _, channels = inputs[0].shape
        across, down = COMBINING
        grid = ceil_div(channels, across) * across, size * down
        sizes = {"blocks": blocks, "channels": channels, "segments": size}
        return kernel(inputs, slots, grid, COMBINING, **sizes)

    def _written(self, symbol, face, inputs, x, fit: Fit):
        """Launch what writes rows."""
        walk = _Walk(x, self._each(x))
        length = walk.block_rows(WRITTEN_ROWS)
        blocks = ceil_div(walk.rows, length)
        if self.backend == CUDA:
            length = ceil_div(walk.rows, blocks)
        template = {"T": x.dtype, "P": fit.dtype, "ACT": fit.act.kind}
        kernel = _kernel(self.backend, symbol, face, 0, self._template(x, **template))

        def shapes(first: int, count: int):
            start = first * length
            rows = min(walk.rows, start + count * length) - start
            return [((rows, walk.channels), x.dtype)] * len(face.outputs)

        segments = fit.mean.shape[0]
        return self._over(kernel, inputs, x, walk, blocks, length, segments, shapes)


def _arrays(fit: Fit, residual: mx.array | None) -> list[mx.array | None]:
    return [fit.mean, fit.var, fit.weight, fit.bias, residual]


def _needed(fit: Fit, residual: mx.array | None) -> mx.array | None:
    """Return the residual where the way back depends on its values."""
    return residual if fit.act.changes else None


def _of(fit: Fit) -> mx.array | None:
    return None if fit.segments is None else fit.segments.of

"""Norms by channel on Metal and CUDA, with the same kernel interfaces on both.

``GpuNorms`` takes several launches, for any number of rows. ``GpuBatchNorms`` takes one
launch forward and one back if one block can read all rows of a channel. How rows are
cut depends on sizes only, so sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod

import mlx.core as mx

from ...devices import CUDA, METAL
from ...registry import NONE, Activation, Fit, RowSegments
from .kernel import GpuKernel, Interface, Output, Value, ceil_div, cuts, dispatch_limit

# Sources that CUDA's kernels of norms share.
CUDA_FILES = "alignment.cuh", "channels.cuh", "epilogue.cuh", "norm_blocks.cuh"
PLACE = (
    "threadgroup_position_in_grid, thread_position_in_threadgroup, "
    "threads_per_threadgroup"
)
Template = tuple[tuple[str, Value], ...]

# Interfaces.

# Channels from a segment's weight and bias to the next segment's; 0 if segments share
# one weight and bias.
STEP = "step", "0"

# Rows from which kernels of this library sum columns, instead of MLX; and rows up to
# which CUDA sums them in one launch, timed on an H200.
COLUMN_SUM_ROWS, ONE_LAUNCH_SUMS = 256, 2048
# Bytes of a channel, over all rows, up to which a BatchNorm is one launch each way, in
# which a block has all rows. Timed on an H200; not on Metal.
ONE_LAUNCH_NORM = {METAL: 2048, CUDA: 4096}


def _face(
    name: str, inputs: str, outputs: str, sizes: Sequence[tuple[str, str]]
) -> Interface:
    return Interface(name, tuple(inputs.split()), tuple(outputs.split()), tuple(sizes))


def _row_sizes(segments: str) -> list[tuple[str, str]]:
    """Return the sizes of a kernel over rows; a dispatch of Metal has some blocks."""
    sizes = [("first", "0"), ("rows", "x_shape[0]"), ("channels", "x_shape[1]")]
    return [*sizes, ("block_rows", "0"), ("segments", segments), STEP]


def _width(channels: str) -> tuple[str, str]:
    """Return the channels of a group, for a kernel with a threadgroup per group."""
    return "width", f"{channels} / gridDim.x"


_LINES = [("blocks", "partials_shape[0]"), ("channels", "partials_shape[2]")]
_LINES += [("segments", "gridDim.y"), STEP]
_FIT = "mean var weight bias residual"
_FIT_ROWS = _row_sizes("var_shape[0]")
MOMENTS = _face("ChannelNorm", "x order bounds", "partials", _row_sizes("1"))
COMBINE_MOMENTS = _face(
    "Combine",
    "partials starts running_mean running_var norm_numbers",
    "mean var moved_mean moved_var",
    _LINES,
)
NORMALIZE = _face("ChannelNorm", f"x {_FIT} of norm_numbers", "y", _FIT_ROWS)
GRADIENT_SUMS = _face(
    "ChannelNorm", f"dy x {_FIT} of order bounds norm_numbers", "partials", _FIT_ROWS
)
COMBINE_SUMS = _face(
    "Combine", "partials starts weight", "sums terms dweight dbias", _LINES
)
_BACK = f"dy x {_FIT} terms of norm_numbers"
GRADIENT = _face("ChannelNorm", _BACK, "dx", _FIT_ROWS)
GRADIENTS = _face("ChannelNorm", _BACK, "dx dresidual", _FIT_ROWS)
# Groups of channels: one threadgroup for each group and segment.
GROUP_MOMENTS = _face(
    "GroupMoment",
    "partials starts",
    "mean var",
    [*_LINES[:2], _width("partials_shape[2]")],
)
GROUP_TERMS = _face(
    "GroupTerm",
    "sums of_channels",
    "terms dweight dbias",
    [
        ("channels", "sums_shape[2]"),
        ("segments", "gridDim.y"),
        _width("sums_shape[2]"),
        STEP,
    ],
)
# Few rows: all rows, or each segment, in one launch.
_FEW_ROWS = [("rows", "x_shape[0]"), ("channels", "x_shape[1]")]
_FEW_ROWS += [("segments", "gridDim.x"), STEP]
_OF_ROWS = "order starts norm_numbers"
_STATISTICS = f"x weight bias residual running_mean running_var {_OF_ROWS}"
BATCH_NORM = _face(
    "BatchNorm", _STATISTICS, "y mean var moved_mean moved_var", _FEW_ROWS
)
SEGMENT_NORM = _face("BatchNorm", _STATISTICS, "y mean var", _FEW_ROWS)
_FEW_BACK = f"dy x {_FIT} {_OF_ROWS}"
BATCH_GRADIENT = _face("BatchNorm", _FEW_BACK, "dx dweight dbias", _FEW_ROWS)
BATCH_GRADIENTS = _face("BatchNorm", _FEW_BACK, "dx dweight dbias dresidual", _FEW_ROWS)
SEGMENT_GRADIENT = _face("BatchNorm", _FEW_BACK, "dx sums", _FEW_ROWS)
SEGMENT_GRADIENTS = _face("BatchNorm", _FEW_BACK, "dx sums dresidual", _FEW_ROWS)


@lru_cache(maxsize=1024)
def numbers(eps: float, momentum: float, slope: float) -> mx.array:
    """Return the numbers of a norm; eight, so that Metal has them in device memory."""
    return mx.array([eps, momentum, slope, 0, 0, 0, 0, 0], dtype=mx.float32)


# Norms in several launches.

FILES = {
    METAL: ("matrix_tiles", "channel_norms"),
    CUDA: (*CUDA_FILES, "channel_norms.cu"),
}
GROUP_FILES = {METAL: "group_statistics", CUDA: "group_statistics.cu"}
THREADS = 256  # of a threadgroup that walks rows
ACROSS = 32  # threads along the channels of a row, at most
# Threadgroups that fill any GPU several times. Rows of one thread: at least as many as
# pay for a line of partial sums, or for the reads of a channel's scale and shift.
THREADGROUPS, SUMMED_ROWS, WRITTEN_ROWS, MOST_WRITTEN = 1024, 4, 4, 32
# Channels of a threadgroup that adds partial sums, and its threads for each channel.
# On CUDA blocks have few channels: more blocks, and fewer lines for each thread.
COMBINING = {METAL: (32, 16), CUDA: (8, 64)}
OF_GROUPS = GROUP_MOMENTS, GROUP_TERMS


@cache
def _kernel(
    backend: str,
    symbol: str,
    face: Interface,
    floats: int,
    template: Template,
    apart: str = "",
) -> GpuKernel:
    """Return a kernel.

    Args:
        floats: of threadgroup memory on Metal.
        apart: CUDA: C++ of ``step``, if each segment has its own weight and bias.
    """
    metal = backend == METAL
    combines, files = face.name == "Combine", FILES[backend]
    named = MOMENTS, COMBINE_SUMS
    if face in OF_GROUPS:
        files, named = (*files, GROUP_FILES[backend]), (*named, *OF_GROUPS)
    # As many blocks as registers allow without spills.
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
        sizes=(("step", apart),) if apart and not metal else (),
    )


class _Walk:
    """How threadgroups share the rows and channels of an array.

    Args:
        backend: "metal" or "cuda".
        rows, channels: of the array.
        dtype: its dtype.
    """

    def __init__(self, backend: str, rows: int, channels: int, dtype: mx.Dtype):
        self.each = 4
        if backend == CUDA:  # 16 bytes of channels a thread, or one channel
            wide = 16 // dtype.size
            self.each = 1 if channels % wide else wide
        vectors = ceil_div(channels, self.each)
        self.tiles = ceil_div(vectors, ACROSS)
        self.across = ceil_div(vectors, self.tiles)
        self.down = THREADS // self.across
        self._share = ceil_div(rows, max(1, THREADGROUPS // self.tiles))

    @property
    def summed(self) -> int:
        """Rows of a block that writes a line of partial sums."""
        return max(SUMMED_ROWS * self.down, self._share)

    @property
    def written(self) -> int:
        """Rows of a block that writes rows."""
        most = MOST_WRITTEN * self.down
        return min(most, max(WRITTEN_ROWS * self.down, self._share))


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
        line = (1 if segments is None else segments.size, lines.shape[2])
        outputs = [(line, mx.float32)] * 4
        return tuple(self._combine("combine_moments", COMBINE_MOMENTS, inputs, outputs))

    def group_moments(
        self, x: mx.array, segments: RowSegments, groups: int
    ) -> tuple[mx.array, mx.array]:
        """Return mean and biased variance of groups of channels."""
        if groups == x.shape[1]:
            return self.moments(x, segments)[:2]
        lines, starts = self._lines(x, segments)
        (blocks, _, channels), symbol = lines.shape, "combine_group_moments"
        kernel = _kernel(self.backend, symbol, GROUP_MOMENTS, THREADS, ())
        outputs = [((segments.size, channels), mx.float32)] * 2
        grid = groups * THREADS, segments.size
        sizes = {"channels": channels, "width": channels // groups, "blocks": blocks}
        return tuple(kernel([lines, starts], outputs, grid, (THREADS, 1), **sizes))

    def normalize(
        self, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> mx.array:
        """Return (N, C) in the dtype of x; ``residual`` is added before ``fit.act``."""
        inputs = [x, *_arrays(fit, residual), _of(fit), _numbers(fit)]
        return self._over_rows("normalize_channels", NORMALIZE, inputs, x, fit)[0]

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative."""
        order, bounds, starts, blocks = self._cut(x, fit.segments)
        inputs = [dy, x, *_arrays(fit, _needed(fit, residual)), _of(fit)]
        inputs += [order, bounds, _numbers(fit)]
        (partials,) = self._over_rows(
            "channel_gradient_sums", GRADIENT_SUMS, inputs, x, fit, blocks
        )
        line = fit.mean.shape[0], x.shape[1]
        outputs = [((2, *line), mx.float32)] * 2 + [(line, fit.dtype)] * 2
        inputs = [partials, starts, fit.weight]
        facts = (("P", fit.dtype),), fit.is_apart
        return tuple(
            self._combine(
                "combine_gradient_sums", COMBINE_SUMS, inputs, outputs, *facts
            )
        )

    def group_terms(
        self, fit: Fit, sums: mx.array, terms: mx.array, groups: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return terms of groups of channels, and gradients of weight and bias."""
        _, segments, channels = sums.shape
        line = segments, channels
        facts = GROUP_TERMS, THREADS, (("P", fit.dtype),)
        apart = "sums_shape[2]" * fit.is_apart
        kernel = _kernel(self.backend, "combine_group_terms", *facts, apart)
        parameter = line if fit.is_apart else (channels,), fit.dtype
        return tuple(
            kernel(
                [sums, terms],
                [((2, *line), mx.float32), parameter, parameter],
                (groups * THREADS, segments),
                (THREADS, 1),
                channels=channels,
                width=channels // groups,
                segments=segments,
                step=channels * fit.is_apart,
            )
        )

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
        face = GRADIENT if residual is None else GRADIENTS
        inputs = [dy, x, *_arrays(fit, residual), terms, _of(fit), _numbers(fit)]
        made = self._over_rows("channel_gradient", face, inputs, x, fit)
        return made[0], made[1] if len(made) > 1 else dy

    def of_few(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        groups: int | None = None,
    ) -> GpuBatchNorms | None:
        """Return the norms in one launch each way, if segments have few rows."""
        return self._few if self._few.takes(x, segments, groups) else None

    def _cut(self, x: mx.array, segments: RowSegments | None):
        """Return order, bounds and starts of segments' pieces, and their number."""
        if segments is None:
            return None, None, None, None
        length = _Walk(self.backend, *x.shape, x.dtype).summed
        bounds, starts, blocks = segments.pieces(length)
        return segments.read[1], bounds, starts, blocks

    def _lines(self, x: mx.array, segments: RowSegments | None):
        """Return lines of moments, and the first line of each segment."""
        order, bounds, starts, blocks = self._cut(x, segments)
        inputs = [x, order, bounds]
        (lines,) = self._over_rows("channel_moments", MOMENTS, inputs, x, blocks=blocks)
        return lines, starts

    def _over_rows(
        self,
        symbol: str,
        face: Interface,
        inputs: list[mx.array | None],
        x: mx.array,
        fit: Fit | None = None,
        blocks: int | None = None,
    ) -> list[mx.array]:
        """Launch a kernel over blocks of rows.

        blocks: pieces of segments; by default blocks have equal shares of all rows.
        """
        rows, channels = x.shape
        walk = _Walk(self.backend, rows, channels, x.dtype)
        sums = face.outputs == ("partials",)
        length = walk.summed if sums else walk.written
        if blocks is None:
            blocks = ceil_div(rows, length)
            length = ceil_div(rows, blocks)
        template: Template = (("T", x.dtype),)
        if self.backend == CUDA:
            template += (("EACH", walk.each),)
        segments, apart = 1, False
        if fit is not None:
            template += ("P", fit.dtype), ("ACT", fit.act.kind)
            segments, apart = fit.mean.shape[0], fit.is_apart
        step = "x_shape[1]" * apart
        floats = 8 * THREADS * sums
        kernel = _kernel(self.backend, symbol, face, floats, template, step)
        sizes = {"rows": rows, "channels": channels, "block_rows": length}
        sizes |= {"segments": segments, "step": channels * apart}

        def launch(
            arrays: list[mx.array | None], first: int, count: int
        ) -> list[mx.array]:
            output = (count, 3, channels), mx.float32
            if not sums:
                written = min(rows, (first + count) * length) - first * length
                output = (written, channels), x.dtype
            grid = count * walk.across, walk.tiles * walk.down
            group, outputs = (walk.across, walk.down), [output] * len(face.outputs)
            return kernel(arrays, outputs, grid, group, first=first, **sizes)

        if self.backend == CUDA:
            return launch(inputs, 0, blocks)
        pieces = list(cuts(blocks, 3 * rows * channels, dispatch_limit("elements")))
        if len(pieces) == 1:
            return launch(inputs, *pieces[0])
        # MLX would copy arrays that are not contiguous for each piece.
        inputs = [a if a is None else mx.contiguous(a) for a in inputs]
        made = [launch(inputs, *piece) for piece in pieces]
        return [mx.concatenate(outputs) for outputs in zip(*made, strict=True)]

    def _combine(
        self,
        symbol: str,
        face: Interface,
        inputs: list[mx.array | None],
        outputs: list[Output],
        template: Template = (),
        apart: bool = False,
    ) -> list[mx.array]:
        """Launch a kernel that adds lines of partial sums, in order."""
        blocks, _, channels = inputs[0].shape
        segments, (across, down) = outputs[-1][0][0], COMBINING[self.backend]
        step = "partials_shape[2]" * apart
        kernel = _kernel(self.backend, symbol, face, across * down, template, step)
        grid = ceil_div(channels, across) * across, segments * down
        sizes = {"blocks": blocks, "channels": channels, "segments": segments}
        sizes["step"] = channels * apart
        return kernel(inputs, outputs, grid, (across, down), **sizes)


def _numbers(fit: Fit) -> mx.array:
    return numbers(fit.eps, 0.0, fit.act.slope)


def _arrays(fit: Fit, residual: mx.array | None) -> list[mx.array | None]:
    return [fit.mean, fit.var, fit.weight, fit.bias, residual]


def _needed(fit: Fit, residual: mx.array | None) -> mx.array | None:
    """Return the residual if the gradient depends on its values."""
    return residual if fit.act.changes else None


def _of(fit: Fit) -> mx.array | None:
    """Return the segment of each row; None if there is one segment."""
    if fit.segments is None or fit.segments.size == 1:
        return None
    return fit.segments.read[0]


# Norms of few rows in one launch: a block has some channels of all rows of a segment.

FEW_FILES = {
    METAL: ("matrix_tiles", "channel_norms", "batch_norm"),
    CUDA: (*CUDA_FILES, "batch_norm.cu"),
}
# Threads along the channels of a row; each has four channels on Metal, two or one on
# CUDA. A wide group takes more threads, up to a warp.
FEW_ACROSS, MOST_ACROSS = 8, 32
MOST_THREADS = {METAL: 256, CUDA: 1024}
LEAST_THREADS = 256
ROWS = 4  # of a thread, at most, in a block with fewer than the most threads


@cache
def _few_kernel(
    backend: str, symbol: str, face: Interface, template: Template, apart: str
) -> GpuKernel:
    """Return a kernel of few rows; ``apart`` as for ``_kernel``."""
    metal = backend == METAL
    return GpuKernel(
        backend,
        symbol,
        FEW_FILES[backend],
        face,
        template,
        place=PLACE if metal else "",
        memory=str(8 * MOST_THREADS[METAL]) if metal else "",
        also=(MOMENTS, COMBINE_SUMS) if metal else (),
        threads=MOST_THREADS[backend],
        sizes=(("step", apart),) if apart and not metal else (),
    )


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
        """Whether one block can have all rows of a segment, and whole groups."""
        (rows, channels), across = x.shape, FEW_ACROSS
        if segments is not None:
            width = channels // (groups or channels)
            many = self.backend == METAL and 3 * x.size > dispatch_limit("elements")
            if many or width & (width - 1):
                return False
            across = max(FEW_ACROSS, width // self._each(channels))
            rows = segments.longest
        rows *= across // FEW_ACROSS  # wider groups leave fewer threads for the rows
        few = is_one_launch(rows, x.dtype.size, self.backend)
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
        inputs = [x, weight, bias, residual, *(running or (None, None))]
        inputs += [*_read(segments), numbers(eps, momentum, act.slope)]
        face = BATCH_NORM if segments is None else SEGMENT_NORM
        facts = (weight, bias), act, segments, groups
        made = self._launch("batch_norm", face, inputs, x, *facts)
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
        residual = _needed(fit, residual)
        inputs = [dy, x, *_arrays(fit, residual), *_read(fit.segments), _numbers(fit)]
        symbol, faces = "batch_norm_gradient", (BATCH_GRADIENT, BATCH_GRADIENTS)
        if fit.segments is not None:
            symbol = "segment_norm_gradient"
            faces = SEGMENT_GRADIENT, SEGMENT_GRADIENTS
        face, parameters = faces[residual is not None], (fit.weight, fit.bias)
        facts = parameters, fit.act, fit.segments, groups
        made = self._launch(symbol, face, inputs, x, *facts)
        if fit.segments is not None:
            made[1:2] = _parameter_gradients(made[1], fit)
        return (*made, dy)[:4]

    def _launch(
        self,
        symbol: str,
        face: Interface,
        inputs: list[mx.array | None],
        x: mx.array,
        parameters: Sequence[mx.array | None],
        act: Activation,
        segments: RowSegments | None,
        groups: int | None,
    ) -> list[mx.array]:
        """Launch a kernel; a block has some channels of all rows of a segment."""
        rows, channels = x.shape
        there = [a for a in parameters if a is not None]
        kind = there[0].dtype if there else mx.float32
        count, longest, width, apart = 1, rows, 1, False
        if segments is not None:
            count, longest = segments.size, segments.longest
            width = channels // (groups or channels)
            apart = bool(there) and there[0].ndim == 2
        each, template = self._each(channels), (("T", x.dtype),)
        if self.backend == CUDA:
            template += (("EACH", each),)
        template += ("P", kind), ("ACT", act.kind), ("WIDTH", width)
        line, parameter = ((count, channels), mx.float32), ((channels,), kind)
        outputs = dict.fromkeys(("y", "dx", "dresidual"), (x.shape, x.dtype))
        outputs |= dict.fromkeys(("mean", "var", "moved_mean", "moved_var"), line)
        outputs |= {"dweight": parameter, "dbias": parameter}
        outputs["sums"] = (2, count, channels), mx.float32
        threads = LEAST_THREADS
        across = max(FEW_ACROSS, width // each)
        while (
            threads < MOST_THREADS[self.backend] and longest * across > ROWS * threads
        ):
            threads *= 2
        down = threads // across
        kernel = _few_kernel(self.backend, symbol, face, template, "x_shape[1]" * apart)
        return kernel(
            inputs,
            [outputs[name] for name in face.outputs],
            (count * across, ceil_div(channels, across * each) * down),
            (across, down),
            rows=rows,
            channels=channels,
            segments=count,
            step=channels * apart,
        )

    def _each(self, channels: int) -> int:
        """Return the channels of a thread."""
        return 4 if self.backend == METAL else 1 if channels % 2 else 2


def _read(segments: RowSegments | None) -> tuple[mx.array | None, mx.array | None]:
    """Return order and starts as kernels read them."""
    return (None, None) if segments is None else (segments.read[1], segments.begins)


def _parameter_gradients(sums: mx.array, fit: Fit) -> list[mx.array | None]:
    """Return the gradients of weight and bias; ``sums``: (2, S, C) of g and g xhat."""
    if fit.weight is None and fit.bias is None:
        return [None, None]
    _, segments, channels = sums.shape
    if not fit.is_apart and segments > 1:
        sums = sums.sum(axis=1)
    shape = (segments, channels) if fit.is_apart else (channels,)
    dbias, dweight = mx.split(sums.astype(fit.dtype), 2)  # an index is a launch
    return [dweight.reshape(shape), dbias.reshape(shape)]


def is_one_launch(rows: int, item: int, backend: str) -> bool:
    """Return whether a BatchNorm of so many rows is one launch each way.

    It then reads them once, without a sum of statistics before it. ``rows``: those that
    a block has of each of its channels; ``item``: bytes of an element.
    """
    return rows * item <= ONE_LAUNCH_NORM[backend]

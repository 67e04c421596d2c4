"""Norms on Metal and CUDA: kernels that sum rows, and kernels that apply sums to rows.

Both backends have norms by channel, in several launches for any number of rows. CUDA
also has BatchNorm of few rows in one launch each way, layer norm, and sums of columns.
How rows are cut depends on sizes only, so sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx

from ...checks import FLOATS
from ...devices import CUDA, METAL, current
from ...registry import Fit, Norms, Residual, RowSegments, Running
from .kernel import GpuKernel, Interface, Output, Value, ceil_div, cuts, dispatch_limit

Arrays = list[mx.array | None]
Template = tuple[tuple[str, Value], ...]

# Sources that CUDA's kernels of norms share.
CUDA_FILES = "alignment.cuh", "channels.cuh", "activations.cuh", "norm_blocks.cuh"
FILES: dict[str, tuple[str, ...]] = {
    METAL: ("matrix_tiles", "activations", "channel_norms"),
    CUDA: (*CUDA_FILES, "channel_norms.cu"),
}
PLACE = (
    "threadgroup_position_in_grid, thread_position_in_threadgroup, "
    "threads_per_threadgroup"
)
THREADS, WARP = 256, 32  # threads of a threadgroup that walks rows


def _interface(
    name: str, inputs: str, outputs: str, sizes: Sequence[tuple[str, str]]
) -> Interface:
    return Interface(name, tuple(inputs.split()), tuple(outputs.split()), tuple(sizes))


_ROWS, _CHANNELS = ("rows", "x_shape[0]"), ("channels", "x_shape[1]")


def _row_sizes(segments: str) -> list[tuple[str, str]]:
    """Return the sizes of a kernel over rows; a dispatch of Metal has some blocks."""
    return [
        ("first", "0"),
        _ROWS,
        _CHANNELS,
        ("block_rows", "0"),
        ("segments", segments),
    ]


_LINES = [("blocks", "partials_shape[0]"), ("channels", "partials_shape[2]")]
_LINES += [("segments", "gridDim.y")]
_FIT = "mean var weight bias residual"
_FIT_ROWS = _row_sizes("var_shape[0]")
_BACK = f"dy x {_FIT} terms of norm_numbers"
MOMENTS = _interface("ChannelNorm", "x order bounds", "partials", _row_sizes("1"))
COMBINE_MOMENTS = _interface(
    "Combine",
    "partials starts running_mean running_var norm_numbers",
    "mean var moved_mean moved_var",
    _LINES,
)
NORMALIZE = _interface("ChannelNorm", f"x {_FIT} of norm_numbers", "y", _FIT_ROWS)
GRADIENT_SUMS = _interface(
    "ChannelNorm", f"dy x {_FIT} of order bounds norm_numbers", "partials", _FIT_ROWS
)
COMBINE_SUMS = _interface(
    "Combine", "partials starts weight", "sums terms dweight dbias", _LINES
)
GRADIENT = _interface("ChannelNorm", _BACK, "dx", _FIT_ROWS)
GRADIENTS = _interface("ChannelNorm", _BACK, "dx dresidual", _FIT_ROWS)


@lru_cache(maxsize=1024)
def numbers(eps: float, momentum: float, slope: float) -> mx.array:
    """Return the numbers of a norm; eight, so that Metal has them in device memory."""
    return mx.array([eps, momentum, slope, 0, 0, 0, 0, 0], dtype=mx.float32)


def _numbers(fit: Fit) -> mx.array:
    return numbers(fit.eps, 0.0, fit.act.slope)


def _arrays(fit: Fit, residual: mx.array | None) -> Arrays:
    return [fit.mean, fit.var, fit.weight, fit.bias, residual]


def _needed(fit: Fit, residual: mx.array | None) -> mx.array | None:
    """Return the residual if the gradient depends on its values."""
    return residual if fit.act.changes else None


def _segment_of_rows(fit: Fit) -> mx.array | None:
    """Return the segment of each row; None if there is one segment."""
    if fit.segments is None or fit.segments.size == 1:
        return None
    return fit.segments.read[0]


@cache
def _kernel(
    backend: str,
    symbol: str,
    interface: Interface,
    template: Template = (),
    files: tuple[str, ...] = (),
    *,
    floats: int = 0,
    threads: int = THREADS,
    beside: int = 1,
) -> GpuKernel:
    """Return a kernel."""
    metal, also, arguments = backend == METAL, (), ()
    if not files:
        also = tuple(each for each in (MOMENTS, COMBINE_SUMS) if each is not interface)
    if "dx" in interface.outputs and "dresidual" not in interface.outputs:
        last = interface.outputs[-1]  # the kernel has a place for dresidual after it
        arguments = ((last, f"{last}, nullptr"),)
    return GpuKernel(
        backend,
        symbol,
        files or FILES[backend],
        interface,
        template,
        place=PLACE if metal else "",
        memory=str(floats) if metal and floats else "",
        also=also,
        threads=threads,
        blocks_per_multiprocessor=beside,
        arguments=arguments,
    )


# Norms by channel.

ACROSS = 32  # threads along the channels of a row, at most
# Threadgroups that fill any GPU several times. Rows of one thread: at least as many as
# pay for a line of partial sums, or for the reads of a channel's scale and shift.
THREADGROUPS, THREAD_SUMMED_ROWS, WRITTEN_ROWS, MOST_WRITTEN = 1024, 4, 4, 32
# Channels of a threadgroup that adds partial sums, and its threads for each channel.
# On CUDA blocks have few channels: more blocks, and fewer lines for each thread.
COMBINING = {METAL: (32, 16), CUDA: (8, 64)}


class _Walk:
    """How threadgroups share the rows and channels of an array."""

    def __init__(self, backend: str, rows: int, channels: int, dtype: mx.Dtype):
        self.each = 4
        if backend == CUDA:  # 16 bytes of channels a thread, or one channel
            wide = 16 // dtype.size
            self.each = 1 if channels % wide else wide
        vectors = ceil_div(channels, self.each)
        self.tiles = ceil_div(vectors, ACROSS)
        self.across = ceil_div(vectors, self.tiles)
        self.down = THREADS // self.across
        share = ceil_div(rows, max(1, THREADGROUPS // self.tiles))
        # Rows of a block that writes a line of partial sums, or rows.
        self.summed = max(THREAD_SUMMED_ROWS * self.down, share)
        self.written = max(WRITTEN_ROWS * self.down, share)
        self.written = min(MOST_WRITTEN * self.down, self.written)


class GpuNorms(Norms):
    """The norms of a GPU's kernels; see ``Norms``."""

    def __init__(self, backend: str):
        self.backend = backend

    def moments(
        self,
        x: mx.array,
        segments: RowSegments | None = None,
        running: Running = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return mean and biased variance, and running statistics moved by them."""
        starts = None
        if lines is None:
            order, bounds, starts, blocks = self._pieces(x, segments)
            facts = MOMENTS, [x, order, bounds], x, None, blocks
            (lines,) = self._over_rows("channel_moments", *facts)
        inputs = [
            lines,
            starts,
            *(running or (None, None)),
            numbers(0.0, momentum, 0.0),
        ]
        line = (1 if segments is None else segments.size, lines.shape[2])
        outputs = [(line, mx.float32)] * 4
        return tuple(self._combine("combine_moments", COMBINE_MOMENTS, inputs, outputs))

    def normalize(self, x: mx.array, fit: Fit, residual: Residual = None) -> mx.array:
        """Return (N, C) rows; a residual is added before the activation."""
        inputs = [x, *_arrays(fit, residual), _segment_of_rows(fit), _numbers(fit)]
        return self._over_rows("normalize_channels", NORMALIZE, inputs, x, fit)[0]

    def gradient_sums(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: Residual = None
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return sums over rows of g and of g xhat; g = dy times act's derivative."""
        order, bounds, starts, blocks = self._pieces(x, fit.segments)
        inputs = [dy, x, *_arrays(fit, _needed(fit, residual)), _segment_of_rows(fit)]
        inputs += [order, bounds, _numbers(fit)]
        facts = GRADIENT_SUMS, inputs, x, fit, blocks
        (partials,) = self._over_rows("channel_gradient_sums", *facts)
        line = fit.mean.shape[0], x.shape[1]
        outputs = [((2, *line), mx.float32)] * 2 + [(line, fit.dtype)] * 2
        facts = COMBINE_SUMS, [partials, starts, fit.weight], outputs
        template = (("P", fit.dtype),)
        return tuple(self._combine("combine_gradient_sums", *facts, template))

    def gradient(
        self,
        dy: mx.array,
        x: mx.array,
        fit: Fit,
        residual: Residual = None,
        terms: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return ``rstd * (weight * g - terms[0] - xhat * terms[1])``, and g."""
        residual = _needed(fit, residual)
        interface = GRADIENT if residual is None else GRADIENTS
        inputs = [dy, x, *_arrays(fit, residual), terms, _segment_of_rows(fit)]
        inputs.append(_numbers(fit))
        found = self._over_rows("channel_gradient", interface, inputs, x, fit)
        return found[0], found[1] if len(found) > 1 else dy

    def _pieces(self, x: mx.array, segments: RowSegments | None):
        """Return order, bounds and starts of segments' pieces, and their number."""
        if segments is None:
            return None, None, None, None
        length = _Walk(self.backend, *x.shape, x.dtype).summed
        bounds, starts, blocks = segments.pieces(length)
        return segments.read[1], bounds, starts, blocks

    def _over_rows(
        self,
        symbol: str,
        interface: Interface,
        inputs: Arrays,
        x: mx.array,
        fit: Fit | None = None,
        blocks: int | None = None,
    ) -> list[mx.array]:
        """Launch a kernel over blocks of rows."""
        rows, channels = x.shape
        walk = _Walk(self.backend, rows, channels, x.dtype)
        sums = interface.outputs == ("partials",)
        length = walk.summed if sums else walk.written
        if blocks is None:
            blocks = ceil_div(rows, length)
            length = ceil_div(rows, blocks)
        template: Template = (("T", x.dtype),)
        if self.backend == CUDA:
            template += (("EACH", walk.each),)
        if fit is not None:
            template += ("P", fit.dtype), ("ACT", fit.act.kind)
        # As many blocks as registers allow without spills.
        limits = {"floats": 8 * THREADS * sums, "beside": 3 - ("gradient" in symbol)}
        kernel = _kernel(self.backend, symbol, interface, template, **limits)
        sizes = {"rows": rows, "channels": channels, "block_rows": length}
        sizes["segments"] = 1 if fit is None else fit.mean.shape[0]

        def launch(arrays: Arrays, first: int, count: int) -> list[mx.array]:
            output = (count, 3, channels), mx.float32
            if not sums:
                written = min(rows, (first + count) * length) - first * length
                output = (written, channels), x.dtype
            grid = count * walk.across, walk.tiles * walk.down
            group, outputs = (walk.across, walk.down), [output] * len(interface.outputs)
            return kernel(arrays, outputs, grid, group, first=first, **sizes)

        if self.backend == CUDA:
            return launch(inputs, 0, blocks)
        pieces = list(cuts(blocks, 3 * rows * channels, dispatch_limit("elements")))
        if len(pieces) == 1:
            return launch(inputs, *pieces[0])
        # MLX would copy arrays that are not contiguous for each piece.
        inputs = [a if a is None else mx.contiguous(a) for a in inputs]
        parts = [launch(inputs, *piece) for piece in pieces]
        return [mx.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    def _combine(
        self,
        symbol: str,
        interface: Interface,
        inputs: Arrays,
        outputs: list[Output],
        template: Template = (),
    ) -> list[mx.array]:
        """Launch a kernel that adds lines of partial sums, in order."""
        blocks, _, channels = inputs[0].shape
        segments, (across, down) = outputs[-1][0][0], COMBINING[self.backend]
        limits = {"floats": across * down, "threads": across * down}
        kernel = _kernel(self.backend, symbol, interface, template, **limits)
        grid = ceil_div(channels, across) * across, segments * down
        sizes = {"blocks": blocks, "channels": channels, "segments": segments}
        return kernel(inputs, outputs, grid, (across, down), **sizes)


# CUDA: BatchNorm of few rows. A block has some channels of all rows.

FEW_FILES = *CUDA_FILES, "batch_norm.cu"
# Bytes of a channel, over all rows, up to which a BatchNorm is one launch each way: a
# training step of MinkUNet34 with 5,000 voxels takes 2.2 ms instead of 2.6 on an H200.
ONE_LAUNCH_NORM = 4096
FEW_ACROSS = 8  # threads along the channels of a row; each has two channels, or one
LEAST_THREADS, MOST_THREADS = 256, 1024
FEW_ROWS = 4  # of a thread, at most, in a block with fewer than the most threads
_STATISTICS = "x weight bias residual running_mean running_var norm_numbers"
_FEW_BACK = f"dy x {_FIT} norm_numbers"
_SIZES = _ROWS, _CHANNELS
BATCH_NORM = _interface(
    "BatchNorm", _STATISTICS, "y mean var moved_mean moved_var", _SIZES
)
BATCH_GRADIENT = _interface("BatchNorm", _FEW_BACK, "dx dweight dbias", _SIZES)
BATCH_GRADIENTS = _interface(
    "BatchNorm", _FEW_BACK, "dx dweight dbias dresidual", _SIZES
)

# CUDA: layer norm. A row has the threads of a warp, or a part of them.

ROW_FILES = *CUDA_FILES, "row_norms.cu"
MOST_VECTORS = 4  # of a thread, in registers
# Blocks of a multiprocessor, over which rows are walked. Back, as many as registers
# hold side by side, by the vectors of a thread.
BLOCKS = 16
BLOCKS_BACK = {1: 3, 2: 2, 3: 1, 4: 1}
_ROW = "x weight bias residual norm_numbers"
LAYER_NORM = _interface("RowNorm", _ROW, "y", _SIZES)
LAYER_GRADIENT = _interface("RowNorm", f"dy {_ROW}", "dx", _SIZES)
LAYER_GRADIENTS = _interface("RowNorm", f"dy {_ROW}", "dx partials", _SIZES)
LAYER_AND_RESIDUAL_GRADIENTS = _interface(
    "RowNorm", f"dy {_ROW}", "dx partials dresidual", _SIZES
)

# CUDA: sums of columns, in one launch for few rows and two for many.

SUM_FILES = *CUDA_FILES, "column_sums.cu"
COLUMN_SUMS = _interface("ColumnSums", "x", "y", _SIZES)
ONE_LAUNCH_SUMS = 2048  # rows, timed on an H200
LINES = 1024  # that the first of two launches writes
SUM_ROWS = 4  # of a thread at least, whose reads are on their way at once
# Neighbouring bytes of a row that a block reads: fewer in one launch, for more blocks.
SUM_BYTES, FEW_SUM_BYTES = 128, 32


def is_one_launch(rows: int, item: int) -> bool:
    """Return whether CUDA's BatchNorm of so many rows is one launch each way."""
    return rows * item <= ONE_LAUNCH_NORM


class CudaNorms(GpuNorms):
    """The norms of CUDA's kernels; see ``Norms``."""

    sums_columns = True

    def __init__(self):
        super().__init__(CUDA)

    def is_one_launch(self, x: mx.array) -> bool:
        """Whether ``batch_norm`` of (N, C) is one launch, and its gradient another."""
        return is_one_launch(x.shape[0], x.dtype.size)

    def batch_norm(
        self,
        x: mx.array,
        fit: Fit,
        residual: Residual = None,
        running: Running = None,
        momentum: float = 0.0,
        lines: mx.array | None = None,
    ) -> tuple[mx.array, ...]:
        """Return rows by their statistics, and what ``moments`` returns."""
        if not self.is_one_launch(x):
            return super().batch_norm(x, fit, residual, running, momentum, lines)
        inputs = [x, fit.weight, fit.bias, residual, *(running or (None, None))]
        inputs.append(numbers(fit.eps, momentum, fit.act.slope))
        outputs = [(x.shape, x.dtype), *[((1, x.shape[1]), mx.float32)] * 4]
        return tuple(self._of_few_rows("batch_norm", BATCH_NORM, inputs, outputs, fit))

    def batch_norm_gradient(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: Residual = None
    ) -> tuple[mx.array, ...]:
        """Return the gradients of x, weight, bias and residual."""
        if not self.is_one_launch(x):
            return super().batch_norm_gradient(dy, x, fit, residual)
        residual = _needed(fit, residual)
        interface = BATCH_GRADIENT if residual is None else BATCH_GRADIENTS
        inputs = [dy, x, *_arrays(fit, residual), _numbers(fit)]
        rows, line = (x.shape, x.dtype), ((1, x.shape[1]), fit.dtype)
        outputs = [rows, line, line, rows][: len(interface.outputs)]
        facts = interface, inputs, outputs, fit
        found = self._of_few_rows("batch_norm_gradient", *facts)
        return *found[:3], found[3] if residual is not None else dy

    def _of_few_rows(
        self,
        symbol: str,
        interface: Interface,
        inputs: Arrays,
        outputs: list[Output],
        fit: Fit,
    ) -> list[mx.array]:
        """Launch a kernel whose blocks have some channels of all rows."""
        (rows, channels), dtype = outputs[0]
        each, threads = 1 if channels % 2 else 2, LEAST_THREADS
        while threads < MOST_THREADS and rows * FEW_ACROSS > FEW_ROWS * threads:
            threads *= 2
        template = ("T", dtype), ("EACH", each), ("P", fit.dtype), ("ACT", fit.act.kind)
        facts = symbol, interface, template, FEW_FILES
        kernel, down = (
            _kernel(CUDA, *facts, threads=MOST_THREADS),
            threads // FEW_ACROSS,
        )
        grid = FEW_ACROSS, ceil_div(channels, FEW_ACROSS * each) * down
        return kernel(inputs, outputs, grid, (FEW_ACROSS, down))

    def normalizes_rows(self, x: mx.array, fit: Fit) -> bool:
        """Whether the kernels of layer norm take these arrays."""
        each, channels = 16 // x.dtype.size, x.shape[-1]
        dtypes = {a.dtype for a in (fit.weight, fit.bias) if a is not None}
        fits = channels % each == 0 and channels <= MOST_VECTORS * WARP * each
        fits = fits and x.dtype in FLOATS and x.ndim == 2
        return x.size > 0 and fits and len(dtypes) < 2

    def layer_norm(self, x: mx.array, fit: Fit, residual: Residual = None) -> mx.array:
        """Return rows normalised over their channels."""
        return self._by_rows(LAYER_NORM, [], x, fit, residual)[0]

    def layer_norm_gradient(
        self, dy: mx.array, x: mx.array, fit: Fit, residual: Residual = None
    ) -> tuple[mx.array, ...]:
        """Return the gradients of x, weight, bias and residual."""
        interface, residual = LAYER_GRADIENTS, _needed(fit, residual)
        if residual is not None:
            interface = LAYER_AND_RESIDUAL_GRADIENTS
        elif fit.weight is None and fit.bias is None:
            interface = LAYER_GRADIENT
        dx, *more = self._by_rows(interface, [dy], x, fit, residual)
        dresidual = dy if residual is None else more.pop()
        if fit.weight is None and fit.bias is None:
            return dx, None, None, dresidual
        lines = more[0].reshape(more[0].shape[0], -1)
        dweight, dbias = mx.split(self.column_sums(lines, fit.dtype), 2)
        return dx, dweight, dbias, dresidual

    def _by_rows(
        self, interface: Interface, first: Arrays, x: mx.array, fit: Fit, residual
    ) -> list[mx.array]:
        """Launch a kernel whose threads have rows, or parts of them."""
        (rows, channels), each = x.shape, 16 // x.dtype.size
        lanes = min(WARP, 1 << (channels // each - 1).bit_length())
        vectors = ceil_div(channels, each * lanes)
        template = (
            ("T", x.dtype),
            ("EACH", each),
            ("LANES", lanes),
            ("VECTORS", vectors),
            ("P", fit.dtype),
            ("ACT", fit.act.kind),
        )
        symbol, most, beside = "layer_norm", BLOCKS, 1
        if interface is not LAYER_NORM:
            symbol, most = "layer_norm_gradient", BLOCKS_BACK[vectors]
            beside = most
        kernel = _kernel(CUDA, symbol, interface, template, ROW_FILES, beside=beside)
        blocks = min(ceil_div(rows * lanes, THREADS), current().cores * most)
        features, partials = (x.shape, x.dtype), ((blocks, 2, channels), mx.float32)
        outputs = [features, partials, features][: len(interface.outputs)]
        inputs = [*first, x, fit.weight, fit.bias, residual, _numbers(fit)]
        grid, group = (blocks * lanes, THREADS // lanes), (lanes, THREADS // lanes)
        return kernel(inputs, outputs, grid, group)

    def column_sums(self, x: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the (C,) sums over the rows of (N, C) in a dtype."""
        (rows, channels), wide = x.shape, 16 // x.dtype.size
        is_one, each = rows <= ONE_LAUNCH_SUMS, 1 if channels % wide else wide
        vectors = channels // each
        fitting = (FEW_SUM_BYTES if is_one else SUM_BYTES) // (each * x.dtype.size)
        across = min(fitting, WARP, 1 << (vectors - 1).bit_length())
        tiles, down = ceil_div(vectors, across), THREADS // across
        share = ceil_div(rows, max(1, LINES // tiles))
        count = 1 if is_one else ceil_div(rows, max(share, SUM_ROWS * down))
        kind = dtype if is_one else mx.float32
        template = ("T", x.dtype), ("EACH", each), ("OUT", kind)
        kernel = _kernel(CUDA, "column_sums", COLUMN_SUMS, template, SUM_FILES)
        grid, outputs = (count * across, tiles * down), [((count, channels), kind)]
        (lines,) = kernel([x], outputs, grid, (across, down))
        return lines.reshape(-1) if is_one else self.column_sums(lines, dtype)

"""Norms on CUDA alone: layer norm by threads of a warp, and sums of columns.

MLX's layer norm starts a block for each row. Sums of columns are one launch for few
rows, and two for many.
"""

from __future__ import annotations

from functools import cache
from math import prod

import mlx.core as mx

from ...checks import FLOATS
from ...devices import CUDA, current
from ...registry import Activation
from ..gpu.kernel import GpuKernel, Interface, ceil_div
from ..gpu.norms import CUDA_FILES, ONE_LAUNCH_SUMS, Template, numbers

THREADS, WARP = 256, 32

# Norms of rows.

ROW_FILES = *CUDA_FILES, "row_norms.cu"
MOST_VECTORS = 4  # of a thread, in registers
# Blocks of a multiprocessor, over which rows are walked. Back, as many as registers
# hold side by side, by the vectors of a thread.
BLOCKS = 16
BLOCKS_BACK = {1: 3, 2: 2, 3: 1, 4: 1}
# Columns of partial sums of a block that adds them, and its threads for each.
SUMMING = 32, 32
_FIT = "x", "weight", "bias", "residual", "norm_numbers"
_SIZES = ("rows", "x_shape[0]"), ("channels", "x_shape[1]")
FORWARD = Interface("RowNorm", _FIT, ("y",), _SIZES)
GRADIENT = Interface("RowNorm", ("dy", *_FIT), ("dx",), _SIZES)
GRADIENTS = Interface("RowNorm", ("dy", *_FIT), ("dx", "partials"), _SIZES)
RESIDUAL_GRADIENTS = Interface(
    "RowNorm", ("dy", *_FIT), ("dx", "partials", "dresidual"), _SIZES
)
PARTIALS = Interface(
    "RowNorm",
    ("partials",),
    ("dweight", "dbias"),
    (("rows", "partials_shape[0]"), ("channels", "partials_shape[2]")),
)


class CudaRowNorms:
    """Normalises each of (N, C) rows: one launch, and back one more for parameters."""

    def takes(
        self, x: mx.array, weight: mx.array | None, bias: mx.array | None
    ) -> bool:
        """Whether the kernels normalise these rows, with parameters of one dtype."""
        each, channels = 16 // x.dtype.size, x.shape[-1]
        kinds = {a.dtype for a in (weight, bias) if a is not None}
        fits = channels % each == 0 and channels <= MOST_VECTORS * WARP * each
        fits = fits and x.dtype in FLOATS and x.ndim == 2
        return x.size > 0 and fits and len(kinds) < 2

    def layer_norm(
        self,
        x: mx.array,
        weight: mx.array | None,
        bias: mx.array | None,
        residual: mx.array | None,
        eps: float,
        act: Activation,
    ) -> mx.array:
        """Return rows normalised over their channels, in the dtype of x.

        ``residual``, of that dtype, is added before ``act``.
        """
        return _over_rows(FORWARD, [], x, weight, bias, residual, eps, act)[0]

    def layer_norm_gradient(
        self,
        dy: mx.array,
        x: mx.array,
        weight: mx.array | None,
        bias: mx.array | None,
        residual: mx.array | None,
        eps: float,
        act: Activation,
    ) -> tuple[mx.array, mx.array | None, mx.array | None, mx.array | None]:
        """Return the gradients of x, weight, bias and residual; None if absent."""
        is_alone, dresidual = weight is None and bias is None, None
        face = GRADIENT if is_alone else GRADIENTS
        if residual is not None and act.changes:
            face = RESIDUAL_GRADIENTS
        elif residual is not None:
            residual, dresidual = None, dy
        dx, *more = _over_rows(face, [dy], x, weight, bias, residual, eps, act)
        if face is RESIDUAL_GRADIENTS:
            dresidual = more.pop()
        if is_alone:
            return dx, None, None, dresidual
        made = _added(more, _kind(weight, bias))
        there = zip((weight, bias), made, strict=True)
        return dx, *(None if a is None else total for a, total in there), dresidual


def _kind(weight: mx.array | None, bias: mx.array | None) -> mx.Dtype:
    return next((a.dtype for a in (weight, bias) if a is not None), mx.float32)


def _over_rows(
    face: Interface, first, x, weight, bias, residual, eps: float, act: Activation
) -> list[mx.array]:
    """Launch a kernel over rows."""
    (rows, channels), each = x.shape, 16 // x.dtype.size
    lanes = min(WARP, 1 << (channels // each - 1).bit_length())
    vectors = ceil_div(channels, each * lanes)
    template = (
        ("T", x.dtype),
        ("EACH", each),
        ("LANES", lanes),
        ("VECTORS", vectors),
        ("P", _kind(weight, bias)),
        ("ACT", act.kind),
    )
    symbol, most, beside = "layer_norm", BLOCKS, 1
    if face is not FORWARD:
        symbol, most = "layer_norm_gradient", BLOCKS_BACK[vectors]
        beside = most
    blocks = min(ceil_div(rows * lanes, THREADS), current().cores * most)
    features, partials = (x.shape, x.dtype), ((blocks, 2, channels), mx.float32)
    outputs = [features, partials, features][: len(face.outputs)]
    kernel, down = (
        _row_kernel(symbol, face, template, THREADS, beside),
        THREADS // lanes,
    )
    inputs = [*first, x, weight, bias, residual, numbers(eps, 0.0, act.slope)]
    return kernel(inputs, outputs, (blocks * lanes, down), (lanes, down))


def _added(partials: list[mx.array], kind: mx.Dtype) -> list[mx.array]:
    """Return the gradients of weight and bias: the partial sums of blocks, added."""
    kernel = _row_kernel("layer_norm_sums", PARTIALS, (("P", kind),), prod(SUMMING))
    (across, down), channels = SUMMING, partials[0].shape[2]
    grid = ceil_div(2 * channels, across) * across, down
    return kernel(partials, [((channels,), kind)] * 2, grid, SUMMING)


@cache
def _row_kernel(
    symbol: str, face: Interface, template: Template, threads: int, beside: int = 1
) -> GpuKernel:
    limits = {"threads": threads, "blocks_per_multiprocessor": beside}
    return GpuKernel(CUDA, symbol, ROW_FILES, face, template, **limits)


# Sums of columns.

SUM_FILES = *CUDA_FILES, "column_sums.cu"
SUMS = Interface(
    "ColumnSums", ("x",), ("y",), (("rows", "x_shape[0]"), ("channels", "x_shape[1]"))
)
LINES = 1024  # that the first of two launches writes
ROWS = 4  # of a thread at least, whose reads are on their way at once
# Neighbouring bytes of a row that a block reads: fewer in one launch, for more blocks.
BYTES, FEW_BYTES = 128, 32


class CudaColumnSums:
    """The sums over the rows of (N, C), which are not empty."""

    def sums(self, x: mx.array, kind: mx.Dtype) -> mx.array:
        """Return the (C,) sums in a dtype; float32 inside."""
        rows, channels = x.shape
        if rows > ONE_LAUNCH_SUMS:
            block = _Block(channels, x.dtype, BYTES)
            share = ceil_div(rows, max(1, LINES // block.tiles))
            count = ceil_div(rows, max(share, ROWS * block.down))
            return self.sums(block.lines(x, count, mx.float32), kind)
        return _Block(channels, x.dtype, FEW_BYTES).lines(x, 1, kind).reshape(-1)


class _Block:
    """How the threads of a block share the channels of its rows.

    Args:
        channels: of a row.
        dtype: its dtype.
        most: bytes of neighbouring channels.
    """

    def __init__(self, channels: int, dtype: mx.Dtype, most: int):
        wide = 16 // dtype.size
        self.each = 1 if channels % wide else wide
        vectors = channels // self.each
        fitting = most // (self.each * dtype.size)
        self.across = min(fitting, WARP, 1 << (vectors - 1).bit_length())
        self.tiles = ceil_div(vectors, self.across)
        self.down = THREADS // self.across

    def lines(self, x: mx.array, count: int, kind: mx.Dtype) -> mx.array:
        """Return the sums of ``count`` shares of rows, a line each."""
        kernel = _sum_kernel((("T", x.dtype), ("EACH", self.each), ("OUT", kind)))
        grid = count * self.across, self.tiles * self.down
        outputs = [((count, x.shape[1]), kind)]
        return kernel([x], outputs, grid, (self.across, self.down))[0]


@cache
def _sum_kernel(template: Template) -> GpuKernel:
    return GpuKernel(CUDA, "column_sums", SUM_FILES, SUMS, template, threads=THREADS)

"""Layer norm of rows, and sums of columns, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

import mlx.core as mx

from ..devices import CUDA, current
from ..dtypes import FLOATS
from ..routes import thresholds
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface
from .gpu_norms import CUDA_FILES, numbers
from .norms_protocol import Activation

THREADS, WARP = 256, 32
MOST_VECTORS = 4  # of a thread, in registers
# Blocks of a multiprocessor, over which rows are walked: forward, and back as many as
# registers hold side by side, by the vectors of a thread.
BLOCKS = 16
BLOCKS_BACK = {1: 3, 2: 2, 3: 1, 4: 1}
# Columns of partial sums of a block that adds them, and its threads for each.
SUMMING = 32, 32
# Lines that the first of two launches of column sums writes; rows of a thread at least,
# whose reads are on their way at once; neighbouring bytes of a row that a block reads,
# fewer in one launch, for more blocks.
LINES, ROWS = 1024, 4
BYTES, FEW_BYTES = 128, 32
_FIT = "x", "weight", "bias", "residual", "norm_numbers"
_SIZES = ("rows", "x_shape[0]"), ("channels", "x_shape[1]")
FORWARD = Interface("RowNorm", _FIT, ("y",), _SIZES)
GRADIENT = Interface("RowNorm", ("dy", *_FIT), ("dx",), _SIZES)
GRADIENTS = Interface("RowNorm", ("dy", *_FIT), ("dx", "partials"), _SIZES)
RESIDUAL_GRADIENTS = Interface(
    "RowNorm", ("dy", *_FIT), ("dx", "partials", "dresidual"), _SIZES
)
SUMS = Interface(
    "RowNorm",
    ("partials",),
    ("dweight", "dbias"),
    (("rows", "partials_shape[0]"), ("channels", "partials_shape[2]")),
)
COLUMN_SUMS = Interface("ColumnSums", ("x",), ("y",), _SIZES)
Launch = Callable[[list[mx.array]], list[mx.array]]


class CudaRowNorms:
    """Each of (N, C) rows by itself: one launch, and back one more for parameters."""

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
        """Return the gradients of x, and of those that there are of the others."""
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
        made = _adding(more[0].shape, _kind(weight, bias))(more)
        there = zip((weight, bias), made, strict=True)
        return dx, *(None if a is None else total for a, total in there), dresidual


def _kind(weight: mx.array | None, bias: mx.array | None) -> mx.Dtype:
    return next((a.dtype for a in (weight, bias) if a is not None), mx.float32)


def _over_rows(
    face: Interface, first, x, weight, bias, residual, eps: float, act: Activation
) -> list[mx.array]:
    arrays = [*first, x, weight, bias, residual, numbers(eps, 0.0, act.slope)]
    given = tuple([a is not None for a in arrays])
    facts = x.shape, x.dtype, _kind(weight, bias), act.kind
    launch = _launcher(face, given, *facts, current().cores)
    return launch([a for a in arrays if a is not None])


@lru_cache(maxsize=1024)
def _launcher(
    face: Interface,
    given: tuple[bool, ...],
    shape: tuple[int, int],
    dtype: mx.Dtype,
    kind: mx.Dtype,
    act: int,
    cores: int,
) -> Launch:
    """Return what launches a kernel over rows."""
    (rows, channels), each = shape, 16 // dtype.size
    lanes = min(WARP, 1 << (channels // each - 1).bit_length())
    vectors = ceil_div(channels, each * lanes)
    template = (
        ("T", dtype),
        ("EACH", each),
        ("LANES", lanes),
        ("VECTORS", vectors),
        ("P", kind),
        ("ACT", act),
    )
    symbol, most, beside = "layer_norm", BLOCKS, 1
    if face is not FORWARD:
        symbol, most = "layer_norm_gradient", BLOCKS_BACK[vectors]
        beside = most
    blocks = min(ceil_div(rows * lanes, THREADS), cores * most)
    features, partials = (shape, dtype), ((blocks, 2, channels), mx.float32)
    slots = [features, partials, features][: len(face.outputs)]
    kernel, down = _kernel(symbol, face, template, THREADS, beside), THREADS // lanes
    return kernel.launcher(given, slots, (blocks * lanes, down), (lanes, down))


@lru_cache(maxsize=1024)
def _adding(shape: tuple[int, int, int], kind: mx.Dtype) -> Launch:
    """Return what adds the partial sums of blocks."""
    kernel = _kernel("layer_norm_sums", SUMS, (("P", kind),), prod(SUMMING))
    (across, down), line = SUMMING, ((shape[2],), kind)
    grid = ceil_div(2 * shape[2], across) * across, down
    return kernel.launcher((True,), [line, line], grid, SUMMING)


@lru_cache(maxsize=256)
def _kernel(
    symbol: str, face: Interface, template: tuple, threads: int, beside: int = 1
) -> GpuKernel:
    limits = {"threads": threads, "blocks_per_multiprocessor": beside}
    files = *CUDA_FILES, "column_sums.cu" if face is COLUMN_SUMS else "row_norms.cu"
    return GpuKernel(CUDA, symbol, files, face, template, **limits)


class CudaColumnSums:
    """The sums over the rows of (N, C), which are not empty."""

    def sums(self, x: mx.array, kind: mx.Dtype) -> mx.array:
        """Return the (C,) sums in a dtype; float32 inside."""
        return _summing(x.shape, x.dtype, kind)([x])[0].reshape(-1)


@lru_cache(maxsize=4096)
def _summing(shape: tuple[int, int], dtype: mx.Dtype, kind: mx.Dtype) -> Launch:
    """Return what launches the sums, (1, C), of one array of this shape."""
    rows, channels = shape
    if rows <= thresholds.ONE_LAUNCH_SUMS:
        return _lines(_SumsBlock(channels, dtype, FEW_BYTES), 1, dtype, kind)
    block = _SumsBlock(channels, dtype, BYTES)
    share = ceil_div(rows, max(1, LINES // block.tiles))
    count = ceil_div(rows, max(share, ROWS * block.down))
    first = _lines(block, count, dtype, mx.float32)
    then = _summing((count, channels), mx.float32, kind)
    return lambda arrays: then(first(arrays))


class _SumsBlock:
    """How the threads of a block share the channels of its rows.

    It reads at most ``most`` neighbouring bytes of a row.
    """

    def __init__(self, channels: int, dtype: mx.Dtype, most: int):
        wide = 16 // dtype.size
        self.channels, self.each = channels, 1 if channels % wide else wide
        vectors = channels // self.each
        fitting = most // (self.each * dtype.size)
        self.across = min(fitting, WARP, 1 << (vectors - 1).bit_length())
        self.tiles = ceil_div(vectors, self.across)
        self.down = THREADS // self.across


def _lines(block: _SumsBlock, count: int, dtype: mx.Dtype, kind: mx.Dtype) -> Launch:
    """Return what launches the sums of ``count`` shares of rows, a line each."""
    template = ("T", dtype), ("EACH", block.each), ("OUT", kind)
    kernel = _kernel("column_sums", COLUMN_SUMS, template, THREADS)
    slots = [((count, block.channels), kind)]
    grid = count * block.across, block.tiles * block.down
    return kernel.launcher((True,), slots, grid, (block.across, block.down))

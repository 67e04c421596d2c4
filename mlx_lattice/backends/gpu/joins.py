"""Rows of two arrays side by side on GPUs, apart again, and filled up with zeros.

One launch each: MLX copies each array by itself, copies a part of rows once for every
kernel that reads it, and pads by a fill and a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod

import mlx.core as mx

from ...checks import FLOATS
from ...devices import CUDA, METAL
from .kernel import (
    THREADS,
    GpuKernel,
    Interface,
    Output,
    blocks_for,
    ceil_div,
    dispatch_limit,
)
from .reductions import GATHER_SUM

DTYPES = *FLOATS, mx.int8
_CUDA_FILES = "alignment.cuh", "channels.cuh", "join_channels.cu"
_BLOCK_BYTES = 32768  # of the joined rows, in a block on CUDA
_JOIN, _SPLIT, _FILL = "join_channels", "split_channels", "fill_lines"
_JOINED = Interface(
    "JoinChannels",
    ("a", "b"),
    ("y",),
    (("rows", "a_shape[0]"), ("c_a", "a_shape[1]"), ("c_b", "b_shape[1]")),
)
_SIZES = ("rows", "y_shape[0]"), ("c_a", "cut_shape[1]")
_SIZES = *_SIZES, ("c_b", "y_shape[1] - cut_shape[1]")
_FILLED = Interface(
    "FillLines",
    ("a",),
    ("y",),
    (("outer", "a_shape[0]"), ("lines", "a_shape[1]"), ("inner", "a_shape[2]")),
)
_FACES = {
    METAL: {
        _JOIN: _JOINED,
        _SPLIT: Interface("SplitChannels", ("y",), ("a", "b"), _SIZES),
    },
    # On CUDA the shape of `cut`, whose values are not read, says where to cut rows.
    CUDA: {
        _JOIN: _JOINED,
        _SPLIT: Interface("SplitChannels", ("y", "cut"), ("a", "b"), _SIZES),
        _FILL: _FILLED,
    },
}


class GpuJoins:
    """Two arrays of rows, joined along their channels, by a GPU's kernels."""

    def __init__(self, backend: str):
        self.backend = backend

    def takes(self, parts: Sequence[mx.array]) -> bool:
        """Whether these (N, C) arrays are joined in a launch: two of one dtype."""
        dtype = parts[0].dtype
        return (
            len(parts) == 2
            and dtype in DTYPES
            and all([a.ndim == 2 and a.size and a.dtype == dtype for a in parts])
            and (
                self.backend != METAL
                or sum([a.size for a in parts]) <= dispatch_limit("elements")
            )
        )

    def join(self, a: mx.array, b: mx.array) -> mx.array:
        """Return (N, C_a + C_b) of what ``takes``."""
        return _join(self.backend, [a, b], (len(a), a.shape[1], b.shape[1]))

    def split(self, y: mx.array, c_a: int) -> list[mx.array]:
        """Return (N, c_a) and (N, C - c_a) of rows that were joined."""
        rows, c_b = len(y), y.shape[1] - c_a
        inputs = [y] if self.backend == METAL else [y, _cut(c_a)]
        outputs = [((rows, c_a), y.dtype), ((rows, c_b), y.dtype)]
        return _run(self.backend, _SPLIT, inputs, outputs, (rows, c_a, c_b))


def zero_padded(array: mx.array, axis: int, multiple: int) -> mx.array:
    """Return the array with zeros up to a multiple of channels; itself if it fits."""
    short = -array.shape[axis] % multiple
    if not short:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, short)
    return mx.pad(array, widths)


def padded(array: mx.array, axis: int, multiple: int) -> mx.array:
    """Return ``zero_padded`` by one launch on CUDA."""
    axis, short = axis % array.ndim, -array.shape[axis] % multiple
    shape, dtype = array.shape, array.dtype
    if not short or not array.size or dtype not in DTYPES:
        return zero_padded(array, axis, multiple)
    if axis == array.ndim - 1 and axis:
        rows = array.reshape(-1, shape[-1])
        rows = _join(CUDA, [rows, None], (*rows.shape, short))
        return rows.reshape(*shape[:-1], shape[-1] + short)
    outer, lines, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    each, whole = gcd(inner, 16 // dtype.size), lines + short
    template = ("T", dtype), ("EACH", each), ("MULTIPLE", multiple)
    grid = (blocks_for(outer * whole * inner // each) * THREADS,)
    kernel, outputs = _kernel(CUDA, _FILL, template), [((outer, whole, inner), dtype)]
    (y,) = kernel([array.reshape(outer, lines, inner)], outputs, grid, (THREADS,))
    return y.reshape(*shape[:axis], whole, *shape[axis + 1 :])


@lru_cache(maxsize=256)
def _cut(c_a: int) -> mx.array:
    return mx.array([[0] * c_a], dtype=mx.int8)


def _join(
    backend: str, parts: list[mx.array | None], sizes: tuple[int, int, int]
) -> mx.array:
    """Return two parts side by side; on CUDA zeros if the second is None."""
    rows, c_a, c_b = sizes
    outputs = [((rows, c_a + c_b), parts[0].dtype)]
    return _run(backend, _JOIN, parts, outputs, sizes)[0]


def _run(
    backend: str,
    symbol: str,
    inputs: list[mx.array | None],
    outputs: list[Output],
    sizes: tuple[int, int, int],
) -> list[mx.array]:
    """Launch a kernel that joins or splits; sizes: rows, channels of a and of b."""
    (rows, c_a, c_b), dtype = sizes, inputs[0].dtype
    wide = 16 // dtype.size
    if backend == METAL:
        kernel = _kernel(METAL, symbol, (("T", dtype),))
        grid = ceil_div(c_a, wide) + ceil_div(c_b, wide), rows
        return kernel(inputs, outputs, grid, rows=rows, c_a=c_a, c_b=c_b)
    # A power of two, so that there are few kernels.
    fitting = max(1, _BLOCK_BYTES // ((c_a + c_b) * dtype.size))
    block = 1 << fitting.bit_length() - 1
    template = ("T", dtype), ("EACH", gcd(c_a, c_b, wide)), ("BLOCK_ROWS", block)
    own = () if inputs[-1] is not None else (("c_b", c_b),)
    kernel = _kernel(CUDA, symbol, template, own)
    return kernel(inputs, outputs, (ceil_div(rows, block) * THREADS,), (THREADS,))


@lru_cache(maxsize=256)
def _kernel(backend: str, symbol: str, template: tuple, sizes: tuple = ()) -> GpuKernel:
    faces = _FACES[backend]
    also = tuple(face for name, face in faces.items() if name != symbol)
    if backend == METAL:
        files, place = (
            ("table_reductions", "join_channels"),
            "thread_position_in_grid.xy",
        )
        also = GATHER_SUM, *also
    else:
        files, place = _CUDA_FILES, ""
    return GpuKernel(
        backend,
        symbol,
        files,
        faces[symbol],
        template,
        place,
        also=also,
        sizes=sizes,
        arguments=(("cut", ""),) if "cut" in faces[symbol].inputs else (),
    )

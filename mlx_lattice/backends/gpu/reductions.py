"""Reductions over tables and segments of rows on Metal and CUDA, joins and padding.

The order of sums depends only on where segments begin: the same input gives the same
bits. A thread has one row of the result and 16 bytes of its channels. Joins and padding
take one launch each, where MLX takes several copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from math import gcd, prod

import mlx.core as mx

from ... import sync
from ...checks import FLOATS
from ...devices import CUDA, METAL
from ...registry import BatchRows
from .kernel import (
    LEAST_DEVICE_SIZE,
    SEGMENT_CUTS,
    THREADS,
    BackendKernels,
    GpuKernel,
    Interface,
    Output,
    blocks_for,
    by_rows,
    ceil_div,
    dispatch_limit,
)


def _face(inputs: str, outputs: str, rows: str, volume: str) -> Interface:
    """Return an interface. A dispatch has `rows` rows of the result from `first` on."""
    sizes = ("first", "0"), ("rows", rows), ("volume", volume)
    sizes = *sizes, ("channels", "x_shape[1]")
    return Interface("Reduction", tuple(inputs.split()), tuple(outputs.split()), sizes)


_BY_TABLE = "table_shape[0]", "table_shape[1]"
_BY_SEGMENT = "starts_shape[0] - 1", "1"
# y[o] = sum over k of weights[o, k] * x[table[o, k]], over divisors[o]; weights (M, K)
# and divisors (M,) may be absent.
GATHER_SUM = _face("x table weights divisors", "y", *_BY_TABLE)
# y[o] = the greatest of x[table[o, k]], and won, the row that has it or -1.
GATHER_MAX = _face("x table", "y won", *_BY_TABLE)
# dx[i] = sum over o = table[i, k] of x[o] where won[o] = i; table is (N, K).
MAX_POOL_BACKWARD = _face("x won table", "dx", *_BY_TABLE)
# Segment s has the places starts[s] .. starts[s + 1] of entries, which are places of a
# flat (M, K) table; without entries a place is its own. divisors (S,) may be absent.
SUM_SEGMENTS = _face("x entries weights starts divisors", "y", *_BY_SEGMENT)
# Entries are rows. When pieces of segments are reduced, names are the rows that won in
# the pieces, -1 for none.
MAX_SEGMENTS = _face("x entries names starts", "y won", *_BY_SEGMENT)

_FILES = {METAL: (), CUDA: ("alignment.cuh", "channels.cuh")}
_SUFFIX = {METAL: "", CUDA: ".cu"}


@cache
def _kernel(
    backend: str, symbol: str, face: Interface, template: tuple, volume: int | None
) -> GpuKernel:
    """Return a kernel; on CUDA ``volume`` is K when no input's shape has it."""
    names = ("table_reductions", "segments")[: 1 + symbol.endswith("_segments")]
    return GpuKernel(
        backend,
        symbol,
        (*_FILES[backend], *(name + _SUFFIX[backend] for name in names)),
        face,
        template,
        place="thread_position_in_grid.xy" if backend == METAL else "",
        sizes=() if volume is None else (("volume", volume),),
    )


class GpuReductions(BackendKernels):
    """The reductions of a GPU's kernels; see ``Reductions``."""

    def gather_sum(
        self,
        x: mx.array,
        table: mx.array,
        weights: mx.array | None = None,
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that a table names, or their means."""
        if table.size == 0 or x.size == 0:
            return mx.zeros((table.shape[0], x.shape[1]), dtype=x.dtype)
        inputs = [x, table, weights, divisors]
        return self._over_table("gather_sum", GATHER_SUM, inputs, table, [x.dtype])[0]

    def gather_max(self, x: mx.array, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that a table names, and their rows."""
        if table.size == 0 or x.size == 0:
            return _no_maxima(x, table.shape[0])
        dtypes = [x.dtype, mx.int32]
        return tuple(
            self._over_table("gather_max", GATHER_MAX, [x, table], table, dtypes)
        )

    def max_pool_backward(
        self, dy: mx.array, rows: mx.array, back: mx.array
    ) -> mx.array:
        """Return to each row the sum of the results that it won."""
        if back.size == 0 or dy.size == 0:
            return mx.zeros((back.shape[0], dy.shape[1]), dtype=dy.dtype)
        face, inputs = MAX_POOL_BACKWARD, [dy, rows, back]
        return self._over_table("max_pool_backward", face, inputs, back, [dy.dtype])[0]

    def scatter_sum(
        self,
        y: mx.array,
        table: mx.array,
        rows: int,
        weights: mx.array | None = None,
        order: tuple[mx.array, ...] = (),
        divisors: mx.array | None = None,
    ) -> mx.array:
        """Return the (weighted) sums of the rows that name each of ``rows``."""
        entries, starts, *cut = order or self.order(table, rows)
        launches = cut or [starts]
        return self._sum(y, launches, entries, table.shape[1], weights, divisors)

    def scatter_max(
        self, x: mx.array, table: mx.array, rows: int
    ) -> tuple[mx.array, mx.array]:
        """Return the maxima over the rows that name each of ``rows``, and which."""
        entries, starts, *cut = self.order(table, rows)
        return self._max(x, entries, cut or [starts])

    def segment_max(self, x: mx.array, rows: BatchRows) -> tuple[mx.array, mx.array]:
        """Return the maxima over batch elements, and their rows."""
        longest = max((b - a for a, b in pairwise(rows.starts)), default=0)
        starts = mx.array(rows.starts, dtype=mx.int32)
        return self._max(x, rows.order, _launches(starts, x.shape[0], longest))

    def sum_segments(self, x: mx.array, starts: mx.array) -> mx.array:
        """Return the sums of rows; segment s is starts[s]..starts[s + 1]."""
        return self._sum(x, _launches(starts, x.shape[0]), None, 1, None)

    def order(
        self, table: mx.array, rows: int, longest: int | None = None
    ) -> tuple[mx.array, ...]:
        """Return places of a table by the row they name, and where those begin."""
        size = table.size
        if size == 0:
            none = mx.zeros((rows + 1,), dtype=mx.int32)
            return mx.zeros((0,), dtype=mx.int32), none
        # Keys are (row + 1) * size + place, so that keys of no row are not below 0.
        place = mx.arange(size, 2 * size, dtype=mx.int64)
        keys = mx.sort(table.flatten().astype(mx.int64) * size + place)
        begin = mx.arange(size, (rows + 2) * size, size, dtype=mx.int64)
        starts = mx.searchsorted(keys, begin).view(mx.int32)
        launches = _launches(starts, size, longest)
        entries = (keys % size).astype(mx.int32)
        return entries, starts, *(launches if len(launches) > 1 else ())

    @staticmethod
    def counts(table: mx.array, rows: int, order: tuple[mx.array, ...]) -> mx.array:
        """Return how many places name each row, by their order."""
        return order[1][1:] - order[1][:-1]

    def _sum(self, x, launches, entries, volume, weights, divisors=None) -> mx.array:
        """Return the sums of segments, by the sums of their pieces."""
        segments, channels = launches[-1].size - 1, x.shape[1]
        size = x.shape[0] * volume if entries is None else entries.size
        if 0 in (segments, size, channels):
            return mx.zeros((segments, channels), dtype=x.dtype)
        dtype, piece = x.dtype, SEGMENT_CUTS["piece"]

        def add(starts, divisors, out, most) -> mx.array:
            inputs = [x, entries, weights, starts, divisors]
            facts = "sum_segments", SUM_SEGMENTS, inputs, starts, [out]
            return self._over_segments(*facts, size, most, volume, volume)[0]

        for starts in launches[:-1]:
            x = add(starts, None, mx.float32, piece)
            entries, weights, volume, size = None, None, 1, starts.size - 1
        return add(launches[-1], divisors, dtype, min(size, SEGMENT_CUTS["longest"]))

    def _max(self, x, entries, launches) -> tuple[mx.array, mx.array]:
        """Return the maxima of segments, by the maxima of their pieces."""
        *cut, starts = launches
        segments, channels, size = starts.size - 1, x.shape[1], x.shape[0]
        if 0 in (segments, size, channels):
            return _no_maxima(x, segments)
        dtype, names, piece = x.dtype, None, SEGMENT_CUTS["piece"]

        def greatest(starts, out, most) -> tuple[mx.array, mx.array]:
            inputs = [x, entries, names, starts]
            facts = "max_segments", MAX_SEGMENTS, inputs, starts, [out, mx.int32]
            return tuple(self._over_segments(*facts, size, most))

        for each in cut:
            x, names = greatest(each, mx.float32, piece)
            entries, size = None, each.size - 1
        return greatest(starts, dtype, min(size, SEGMENT_CUTS["longest"]))

    def _over_table(self, symbol, face, inputs, table, dtypes) -> list[mx.array]:
        """Launch a reduction over the rows of a table."""
        rows, volume = table.shape
        kernel = self._kernel(symbol, face, inputs[0])
        work = table.size * inputs[0].shape[1]
        return self._over_rows(kernel, inputs, rows, dtypes, work, None, volume)

    def _over_segments(
        self, symbol, face, inputs, starts, dtypes, size, most, volume=1, known=None
    ) -> list[mx.array]:
        """Launch a reduction over segments of at most ``most`` of ``size`` entries."""
        kernel = self._kernel(symbol, face, inputs[0], ("OUT", dtypes[0]), volume=known)
        channels = inputs[0].shape[1]
        work = size * channels, most * channels
        return self._over_rows(kernel, inputs, starts.size - 1, dtypes, *work, volume)

    def _kernel(self, symbol, face, x, *template, volume=None) -> GpuKernel:
        """Return the kernel for ``x``; CUDA compiles how many channels a thread has."""
        if self.backend == METAL:
            return _kernel(METAL, symbol, face, (("T", x.dtype), *template), None)
        template = ("T", x.dtype), ("EACH", _channels_each(x)), *template
        return _kernel(CUDA, symbol, face, template, volume)

    def _over_rows(
        self, kernel, inputs, rows, dtypes, work, most, volume
    ) -> list[mx.array]:
        """Launch a kernel over rows of the result; on Metal over slices of rows."""
        channels, each = inputs[0].shape[1], 16 // inputs[0].itemsize
        if self.backend == CUDA:
            each = _channels_each(inputs[0])
            slots = [((rows, channels), dtype) for dtype in dtypes]
            grid = (THREADS * blocks_for(rows * (channels // each)),)
            return kernel(inputs, slots, grid, (THREADS,))

        def launch(first: int, count: int) -> list[mx.array]:
            slots = [((count, channels), dtype) for dtype in dtypes]
            sizes = {"first": first, "rows": count, "volume": volume}
            grid = ceil_div(channels, each), count
            return kernel(inputs, slots, grid, channels=channels, **sizes)

        return by_rows(rows, work, dispatch_limit("elements"), launch, most=most)


def _channels_each(x: mx.array) -> int:
    """Return how many channels a thread of CUDA takes: 16 bytes of them, or one."""
    each = 16 // x.itemsize
    return 1 if x.shape[1] % each else each


def _no_maxima(x: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return the maxima over nothing: zeros, and no row."""
    shape = rows, x.shape[1]
    return mx.zeros(shape, dtype=x.dtype), mx.full(shape, -1, dtype=mx.int32)


def _launches(
    starts: mx.array, size: int, longest: int | None = None
) -> list[mx.array]:
    """Return where the segments of each launch begin: pieces of long ones first."""
    longest, made = size if longest is None else min(longest, size), []
    while longest > SEGMENT_CUTS["longest"]:
        bounds, starts = pieces(starts, size)
        made.append(bounds)
        size, longest = bounds.size - 1, longest // SEGMENT_CUTS["piece"] + 2
    return [*made, starts]


def pieces(starts: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Cut segments of ``size`` entries in all into pieces that a thread can add up."""
    cuts = mx.arange(0, size, SEGMENT_CUTS["piece"], dtype=mx.int32)
    before = mx.searchsorted(cuts, starts).view(mx.int32)
    starts_before = mx.searchsorted(starts, cuts, side="right").view(mx.int32)
    firsts = mx.arange(starts.size, dtype=mx.int32) + before
    places = mx.arange(cuts.size, dtype=mx.int32) + starts_before
    bounds = mx.zeros((starts.size + cuts.size,), dtype=mx.int32)
    bounds[mx.concatenate([firsts, places])] = mx.concatenate([starts, cuts])
    return bounds, firsts


# Interpolation weights

# Dispatches of Metal cover points from `first` on.
_WEIGHTS = Interface(
    "Points",
    ("points", "size", "cells", "table"),
    ("weights",),
    (
        ("first", "0"),
        ("rows", "points_shape[0]"),
        ("columns", "points_shape[1]"),
    ),
)


@cache
def _weights_kernel(backend: str, axes: int, renormalise: bool) -> GpuKernel:
    place = "thread_position_in_grid.x" * (backend == METAL)
    # Weights are cached with coordinate sets: the kernel runs in rehearsals.
    facts = {"place": place, "geometry": True}
    template = ("AXES", axes), ("RENORMALISE", renormalise)
    files = ("points" + _SUFFIX[backend],)
    return GpuKernel(backend, "corner_weights", files, _WEIGHTS, template, **facts)


@lru_cache(maxsize=256)
def _eight(values: tuple[float, ...] | None) -> mx.array | None:
    """Return (8,) float32 on the device, of which the first are the values; cached."""
    if values is None:
        return None
    # Metal has fewer in another address space, and CUDA reads the host's slowly.
    zeros = (0.0,) * (LEAST_DEVICE_SIZE - len(values))
    array = mx.array([*map(float, values), *zeros]) + 0
    sync.compute([array])
    return array


class GpuPoints(BackendKernels):
    """Weights of the cells around points, by a GPU's kernel."""

    def corner_weights(
        self,
        points: mx.array,
        size: tuple[float, ...] | None,
        cells: mx.array | None,
        table: mx.array,
        renormalise: bool,
    ) -> mx.array:
        """Return ``geometry.points.corner_weights`` of points, some of them."""
        (rows, columns), corners = points.shape, table.shape[1]
        kernel = _weights_kernel(self.backend, corners.bit_length() - 1, renormalise)
        inputs = [points, _eight(size), cells, table]
        if self.backend == CUDA:
            outputs, grid = [((rows, corners), mx.float32)], THREADS * blocks_for(rows)
            return kernel(inputs, outputs, (grid,), (THREADS,))[0]

        def launch(first: int, count: int) -> list[mx.array]:
            sizes = {"first": first, "rows": count, "columns": columns}
            return kernel(inputs, [((count, corners), mx.float32)], (count,), **sizes)

        work = rows * (columns + 2 * corners)
        return by_rows(rows, work, dispatch_limit("elements"), launch)[0]


JOINED_DTYPES = *FLOATS, mx.int8
_JOIN_FILES = "alignment.cuh", "channels.cuh", "join_channels.cu"
_BLOCK_BYTES = 32768  # of the joined rows, in a block on CUDA
_JOIN, _SPLIT, _FILL = "join_channels", "split_channels", "fill_lines"
_JOINED = Interface(
    "JoinChannels",
    ("a", "b"),
    ("y",),
    (("rows", "a_shape[0]"), ("c_a", "a_shape[1]"), ("c_b", "b_shape[1]")),
)
_SPLIT_SIZES = ("rows", "y_shape[0]"), ("c_a", "cut_shape[1]")
_SPLIT_SIZES = *_SPLIT_SIZES, ("c_b", "y_shape[1] - cut_shape[1]")
_FILLED = Interface(
    "FillLines",
    ("a",),
    ("y",),
    (("outer", "a_shape[0]"), ("lines", "a_shape[1]"), ("inner", "a_shape[2]")),
)
_FACES = {
    METAL: {
        _JOIN: _JOINED,
        _SPLIT: Interface("SplitChannels", ("y",), ("a", "b"), _SPLIT_SIZES),
    },
    # On CUDA the shape of `cut`, whose values are not read, says where to cut rows.
    CUDA: {
        _JOIN: _JOINED,
        _SPLIT: Interface("SplitChannels", ("y", "cut"), ("a", "b"), _SPLIT_SIZES),
        _FILL: _FILLED,
    },
}


class GpuJoins(BackendKernels):
    """Two arrays of rows, joined along their channels, by a GPU's kernels."""

    def takes(self, parts: Sequence[mx.array]) -> bool:
        """Whether these (N, C) arrays are joined in a launch: two of one dtype."""
        dtype = parts[0].dtype
        return (
            len(parts) == 2
            and dtype in JOINED_DTYPES
            and all([a.ndim == 2 and a.size and a.dtype == dtype for a in parts])
            and (
                self.backend != METAL
                or sum([a.size for a in parts]) <= dispatch_limit("elements")
            )
        )

    def join(self, a: mx.array, b: mx.array) -> mx.array:
        """Return two arrays that ``takes`` accepts side by side, (N, C_a + C_b)."""
        return _join(self.backend, [a, b], (len(a), a.shape[1], b.shape[1]))

    def split(self, y: mx.array, c_a: int) -> list[mx.array]:
        """Return (N, c_a) and (N, C - c_a) of rows that were joined."""
        rows, c_b = len(y), y.shape[1] - c_a
        inputs = [y] if self.backend == METAL else [y, _cut(c_a)]
        outputs = [((rows, c_a), y.dtype), ((rows, c_b), y.dtype)]
        return _launch_joined(self.backend, _SPLIT, inputs, outputs, (rows, c_a, c_b))


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
    if not short or not array.size or dtype not in JOINED_DTYPES:
        return zero_padded(array, axis, multiple)
    if axis == array.ndim - 1 and axis:
        rows = array.reshape(-1, shape[-1])
        rows = _join(CUDA, [rows, None], (*rows.shape, short))
        return rows.reshape(*shape[:-1], shape[-1] + short)
    outer, lines, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    each, whole = gcd(inner, 16 // dtype.size), lines + short
    template = ("T", dtype), ("EACH", each), ("MULTIPLE", multiple)
    grid = (blocks_for(outer * whole * inner // each) * THREADS,)
    kernel, outputs = (
        _join_kernel(CUDA, _FILL, template),
        [((outer, whole, inner), dtype)],
    )
    (y,) = kernel([array.reshape(outer, lines, inner)], outputs, grid, (THREADS,))
    return y.reshape(*shape[:axis], whole, *shape[axis + 1 :])


@lru_cache(maxsize=256)
def _cut(c_a: int) -> mx.array:
    return mx.array([[0] * c_a], dtype=mx.int8)


def _join(
    backend: str, parts: list[mx.array | None], sizes: tuple[int, int, int]
) -> mx.array:
    """Return two arrays side by side; on CUDA zeros in the place of None."""
    rows, c_a, c_b = sizes
    outputs = [((rows, c_a + c_b), parts[0].dtype)]
    return _launch_joined(backend, _JOIN, parts, outputs, sizes)[0]


def _launch_joined(
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
        kernel = _join_kernel(METAL, symbol, (("T", dtype),))
        grid = ceil_div(c_a, wide) + ceil_div(c_b, wide), rows
        return kernel(inputs, outputs, grid, rows=rows, c_a=c_a, c_b=c_b)
    # A power of two, so that there are few kernels.
    fitting = max(1, _BLOCK_BYTES // ((c_a + c_b) * dtype.size))
    block = 1 << fitting.bit_length() - 1
    template = ("T", dtype), ("EACH", gcd(c_a, c_b, wide)), ("BLOCK_ROWS", block)
    own = () if inputs[-1] is not None else (("c_b", c_b),)
    kernel = _join_kernel(CUDA, symbol, template, own)
    return kernel(inputs, outputs, (ceil_div(rows, block) * THREADS,), (THREADS,))


@lru_cache(maxsize=256)
def _join_kernel(
    backend: str, symbol: str, template: tuple, sizes: tuple = ()
) -> GpuKernel:
    faces = _FACES[backend]
    also = tuple(face for name, face in faces.items() if name != symbol)
    if backend == METAL:
        files, place = (
            ("table_reductions", "join_channels"),
            "thread_position_in_grid.xy",
        )
        also = GATHER_SUM, *also
    else:
        files, place = _JOIN_FILES, ""
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

"""Reductions on CUDA, without atomics: the same input gives the same bits."""

from __future__ import annotations

import mlx.core as mx

from .cuda_compile import TYPES
from .cuda_kernels import SHORT, THREADS, blocks_for, channels_each, kernel, run
from .gpu_segments import Segments, no_maxima

_TABLES = "alignment.cuh", "pooling.cu"
_SEGMENTS = *_TABLES, "segments.cu"


def _over_rows(name, files, inputs, outputs, sizes, rows, types=()) -> list[mx.array]:
    """Launch a kernel in which a thread has a row and neighbouring channels.

    Args:
        name: of the function, which takes ``inputs``, ``outputs``, ``sizes`` and the
            channels.
        files: its sources.
        inputs: array by name, None for no array; the first is ``x``.
        outputs: dtype by name.
        sizes: C++ integers.
        rows: of the outputs.
        types: template arguments after the dtype of ``x`` and the channels a thread.
    """
    x = inputs["x"]
    channels = x.shape[1]
    each = channels_each(x, channels)
    given = {key: array for key, array in inputs.items() if array is not None}
    pointers = [key if key in given else "nullptr" for key in inputs]
    arguments = ", ".join([*pointers, *outputs, *sizes, "x_shape[1]"])
    template = ", ".join([TYPES[x.dtype], str(each), *(TYPES[t] for t in types)])
    fixed = [size for size in sizes if size.isdigit()]
    function = kernel(
        "_".join([name, SHORT[x.dtype], *(SHORT[t] for t in types), str(each)])
        + "".join(f"_{part}" for part in (*given, *fixed)),
        files,
        tuple(given),
        tuple(outputs),
        f"lattice::{name}<{template}>({arguments});",
    )
    slots = [((rows, channels), dtype) for dtype in outputs.values()]
    blocks = blocks_for(rows * (channels // each))
    return run(function, list(given.values()), blocks, THREADS, slots)


# By tables

_BY_TABLE = "table_shape[0]", "table_shape[1]"


def gather_sum(x, table, weights=None):
    """Return the (weighted) sums of the rows that a table names."""
    rows = table.shape[0]
    if table.size == 0 or x.size == 0:
        return mx.zeros((rows, x.shape[1]), dtype=x.dtype)
    inputs = {"x": x, "table": table, "weights": weights}
    outputs = {"y": x.dtype}
    return _over_rows("gather_sum", _TABLES, inputs, outputs, _BY_TABLE, rows)[0]


def gather_max(x, table):
    """Return the maxima over the rows that a table names, and their rows."""
    rows = table.shape[0]
    if table.size == 0 or x.size == 0:
        return no_maxima(x, rows)
    inputs, outputs = {"x": x, "table": table}, {"y": x.dtype, "won": mx.int32}
    y, won = _over_rows("gather_max", _TABLES, inputs, outputs, _BY_TABLE, rows)
    return y, won


def max_pool_backward(dy, rows, back):
    """Return to each row the sum of the results that it won."""
    n = back.shape[0]
    if back.size == 0 or dy.size == 0:
        return mx.zeros((n, dy.shape[1]), dtype=dy.dtype)
    inputs, outputs = {"x": dy, "won": rows, "table": back}, {"dx": dy.dtype}
    return _over_rows("max_pool_backward", _TABLES, inputs, outputs, _BY_TABLE, n)[0]


def row_products(x, y, table):
    """Return the (M, K) float32 products of the rows that a table pairs."""
    if table.size == 0 or x.size == 0:
        return mx.zeros(table.shape)
    if x.dtype != y.dtype:
        x, y = x.astype(mx.float32), y.astype(mx.float32)
    function = kernel(
        f"row_products_{SHORT[x.dtype]}",
        _TABLES,
        ("x", "y", "table"),
        ("products",),
        f"lattice::row_products<{TYPES[x.dtype]}>(x, y, table, products, "
        "table_shape[0], table_shape[1], x_shape[1]);",
    )
    slots = [(table.shape, mx.float32)]
    return run(function, [x, y, table], blocks_for(32 * table.size), THREADS, slots)[0]


# By segments


def _sum_segments(x, entries, weights, starts, size, volume, dtype, most) -> mx.array:
    """Return the sums of segments: ``entries`` are places in rows of ``volume``."""
    del size, most
    inputs = {"x": x, "entries": entries, "weights": weights, "starts": starts}
    sizes, rows = ("starts_shape[0] - 1", str(volume)), starts.size - 1
    outputs = {"y": dtype}
    return _over_rows(
        "sum_segments", _SEGMENTS, inputs, outputs, sizes, rows, (dtype,)
    )[0]


def _max_segments(x, entries, names, starts, size, dtype, most):
    """Return the maxima of segments and their rows, or their pieces' names."""
    del size, most
    inputs = {"x": x, "entries": entries, "names": names, "starts": starts}
    outputs, rows = {"y": dtype, "won": mx.int32}, starts.size - 1
    sizes = ("starts_shape[0] - 1",)
    y, won = _over_rows(
        "max_segments", _SEGMENTS, inputs, outputs, sizes, rows, (dtype,)
    )
    return y, won


_segments = Segments(_sum_segments, _max_segments)


class CudaReductions:
    """The reductions of CUDA's kernels; see ``Reductions``."""

    gather_sum = staticmethod(gather_sum)
    scatter_sum = staticmethod(_segments.scatter_sum)
    gather_max = staticmethod(gather_max)
    scatter_max = staticmethod(_segments.scatter_max)
    max_pool_backward = staticmethod(max_pool_backward)
    row_products = staticmethod(row_products)
    segment_sum = staticmethod(_segments.segment_sum)
    segment_max = staticmethod(_segments.segment_max)

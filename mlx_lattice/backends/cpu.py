"""The C++ extension as a backend: geometry builders and contractions on the CPU.

The extension is an accelerator. Where it is absent, or was built for another MLX, the
portable routes run; one warning and ``ml.backend_info()`` say so.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence

import mlx.core as mx

from .. import reductions
from ..geometry.portable import UniqueRows, true_positions

REPAIR = "pip install --force-reinstall --no-deps --no-cache-dir ."


def _load():
    """Return (extension, None), or (None, why it can't be used)."""
    try:
        extension = importlib.import_module("mlx_lattice._cpu")
    except ImportError as error:
        missing = "No module named" in str(error)
        return None, "it is not installed" if missing else f"it does not load: {error}"
    built_for, here = extension.built_for(), mx.__version__
    if built_for != here:
        return None, f"it was built for MLX {built_for}, this is {here}"
    return extension, None


extension, absence = _load()
_warned = False


def usable() -> bool:
    """Whether the extension serves; warns once where it does not."""
    global _warned
    if absence and not _warned:
        _warned = True
        warnings.warn(
            f"mlx_lattice runs without its CPU extension ({absence}): convolutions on "
            f"the CPU use MLX's own operations, many times slower. With a C++ compiler "
            f"at hand, run in the project's folder: {REPAIR}",
            RuntimeWarning,
            stacklevel=3,
        )
    return extension is not None


def bounds(coords: mx.array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the least and greatest value of every column."""
    low, high = extension.bounds(coords)
    return tuple(low), tuple(high)


def unique_rows(coords: mx.array) -> UniqueRows:
    """Return the sorted unique rows and the place of each row among them."""
    rows, inverse, _ = extension.sort_unique(coords)
    return UniqueRows(rows, inverse)


def first_duplicate(coords: mx.array) -> tuple[int, int] | None:
    """Return the earliest pair of equal rows, or None."""
    return extension.first_duplicate(coords)


def cell_rows(coords: mx.array, stride: Sequence[int], *, bounds=None) -> mx.array:
    """Return the sorted unique ``floor(row / stride)``."""
    return extension.cells(coords, stride)


def reached_rows(
    coords: mx.array, offsets, stride, *, spatial_shape=None, bounds=None
) -> mx.array:
    """Return the sorted unique rows that some input reaches, within a dense grid."""
    return _inside(extension.reach(coords, offsets, stride), spatial_shape)


def expanded_rows(
    coords: mx.array, offsets, stride, *, spatial_shape=None, bounds=None
) -> mx.array:
    """Return the sorted unique ``in * stride + offset_k``, within a dense grid."""
    return _inside(extension.expand(coords, offsets, stride), spatial_shape)


def _inside(rows: mx.array, spatial_shape: Sequence[int] | None) -> mx.array:
    if spatial_shape is None:
        return rows
    sites, ends = rows[:, 1:], mx.array(list(spatial_shape))
    return rows[true_positions(mx.all((sites >= 0) & (sites < ends), axis=1))]


def neighbour_table(in_coords, out_coords, offsets, stride, transposed) -> mx.array:
    """Return (N_out, K) int32 input rows, or -1; see ``geometry.forward_table``."""
    return extension.neighbour_table(in_coords, out_coords, offsets, stride, transposed)


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (N_in, K) int32: the row of ``table`` that holds each entry, or -1."""
    return extension.transpose_table(table, n_in)


def edges(table: mx.array) -> mx.array:
    """Return the kernel-major (E, 3) edges of a table."""
    return extension.edges(table)[0]


def gray_order(table: mx.array) -> mx.array:
    """Return the (N,) order of rows by the Gray-code rank of their mask."""
    return extension.mask_sort(table)


# Reductions: what each computes stands in mlx_lattice.reductions, under the same name.


def gather_sum(x, table, weights=None):
    """Return the (weighted) sums of the rows that a table names."""
    return extension.pool_sum(x, table, weights)


def scatter_sum(y, table, rows, weights=None):
    """Return the (weighted) sums of the rows that name each of ``rows``."""
    return extension.scatter_sum(y, table, rows, weights)


def gather_max(x, table):
    """Return the maxima over the rows that a table names, and their rows."""
    return extension.pool_max(x, table)


def scatter_max(x, table, rows):
    """Return the maxima over the rows that name each of ``rows``, and their rows."""
    return extension.scatter_max(x, table, rows)


def spread_max(dy, rows, back):
    """Return to each row the sum of the results that it won."""
    return extension.pool_max_grad(dy, rows, back)


def segment_sum(x, rows):
    """Return the sums over batch elements, by blocks of rows; all threads share one."""
    blocks = extension.scatter_sum(x, rows.blocks, len(rows.block_batch))
    return extension.scatter_sum(blocks, rows.block_batch, rows.size)


def segment_max(x, rows):
    """Return the maxima over batch elements, by blocks of rows, and their rows."""
    best, places = extension.scatter_max(x, rows.blocks, len(rows.block_batch))
    y, block = extension.scatter_max(best, rows.block_batch, rows.size)
    return y, reductions.take(places + 1, block) - 1

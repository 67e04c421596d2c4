"""Geometry by the fastest builder of the device: compiled where there is one.

Compiled builders and the portable ones of ``geometry`` give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import mlx.core as mx

from . import backends, geometry, order
from .geometry import INT32_LIMIT, Bounds, RowIndex, UniqueRows

Offsets = Sequence[Sequence[int]]


class HashIndex:
    """Finds rows by value through a compiled builder, which hashes them.

    Args:
        native: the compiled backend.
        coords: (N, 1 + D) int32.
        bounds: their least and greatest values.
    """

    def __init__(self, native: ModuleType, coords: mx.array, bounds: Bounds):
        self.native, self.coords, self.bounds = native, coords, bounds
        # Some backends keep a set's hash table for all of its relations.
        kept = getattr(native, "RowTable", None)
        self.rows = kept and kept(coords)

    def first_duplicate(self) -> tuple[int, int] | None:
        """Return the earliest pair of equal rows, or None."""
        if self.rows is not None:
            return self.rows.first_duplicate()
        return self.native.first_duplicate(self.coords)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each row its (Q,) int32 place in the set, or -1."""
        if rows.dtype != mx.int32:  # rows beyond int32 are not to be wrapped
            return RowIndex.of(self.coords, self.bounds).find(rows, bounds)
        dims = rows.shape[1] - 1
        return self.table(rows, [[0] * dims], [1] * dims)[:, 0]

    def table(
        self,
        out_coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        transposed: bool = False,
        mirrored: bool = False,
    ) -> mx.array:
        """Return the (N_out, K) neighbour table; see ``builders.table``."""
        if self.rows is None:
            return self.native.neighbour_table(
                self.coords, out_coords, offsets, stride, transposed
            )
        if mirrored:
            return self.rows.submanifold_table(offsets)
        return self.rows.table(out_coords, offsets, stride, transposed)


def index(coords: mx.array, bounds: Bounds) -> RowIndex | HashIndex:
    """Return the look-up of (N, 1 + D) int32 rows with the given bounds."""
    native = backends.native()
    if native is not None:
        return HashIndex(native, coords, bounds)
    return RowIndex.of(coords, bounds)


def unique_rows(coords: mx.array) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32 coordinates."""
    native = backends.native()
    build = native.unique_rows if native is not None else geometry.unique_rows
    return build(coords)


def cell_rows(coords: mx.array, stride: Sequence[int]) -> mx.array:
    """Return the sorted unique ``floor(row / stride)``."""
    native = backends.native()
    if native is not None:
        return native.cell_rows(coords, stride)
    return geometry.unique_rows(geometry.cells(coords, stride)).rows


def reached_rows(
    coords: mx.array, bounds: Bounds, offsets: Offsets, stride: Sequence[int]
) -> mx.array:
    """Return the sorted unique outs with some ``in = out * stride + offset_k``.

    Raises:
        ValueError: a row would lie beyond int32.
    """
    native = backends.native()
    if native is not None and _fits(bounds, geometry.negated(offsets)):
        return native.reached_rows(coords, offsets, stride, bounds=bounds)
    rows = geometry.reached_rows(coords, offsets, stride)
    return geometry.unique_rows(geometry.as_int32(rows, "the convolution")).rows


def expanded_rows(
    coords: mx.array, bounds: Bounds, offsets: Offsets, stride: Sequence[int]
) -> mx.array:
    """Return the sorted unique ``in * stride + offset_k`` of all inputs and k.

    Raises:
        ValueError: a row would lie beyond int32.
    """
    native = backends.native()
    if native is not None and _fits(geometry.scale_bounds(bounds, stride), offsets):
        return native.expanded_rows(coords, offsets, stride, bounds=bounds)
    rows = geometry.expanded_rows(coords, offsets, stride)
    rows = geometry.as_int32(rows, "the generative convolution")
    return geometry.unique_rows(rows).rows


def _fits(bounds: Bounds, offsets: Offsets) -> bool:
    low, high = geometry.grow(bounds, offsets)
    return min(low) >= -INT32_LIMIT and max(high) < INT32_LIMIT


def table(
    found: RowIndex | HashIndex,
    coords: mx.array,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
    *,
    transposed: bool,
    mirrored: bool,
) -> mx.array:
    """Return the (N_out, K) int32 neighbour table, -1 where there is no edge.

    Args:
        found: the look-up of ``coords``.
        coords: (N_in, 1 + D) int32 input rows.
        out_coords: (N_out, 1 + D) int32 output rows, with their bounds.
        out_bounds: least and greatest value of every output column.
        offsets: the K offsets.
        stride: lattice step.
        transposed: whether ``out = in * stride + offset_k``, not the forward rule.
        mirrored: whether the sets are one and the offsets point-symmetric, so that
            half of them need no search.
    """
    if isinstance(found, HashIndex):
        return found.table(out_coords, offsets, stride, transposed, mirrored)
    if mirrored:
        return geometry.submanifold_table(found, coords, offsets)
    build = geometry.transposed_table if transposed else geometry.forward_table
    return build(found, out_coords, out_bounds, offsets, stride)


def transpose_table(out_in: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``out_in`` that holds each entry, or -1."""
    native = backends.native()
    build = native.transpose_table if native is not None else geometry.transpose_table
    return build(out_in, n_in)


def edges(out_in: mx.array) -> mx.array:
    """Return the (E, 3) edges (i, o, k) of a table, sorted by (k, o)."""
    native = backends.native()
    build = native.edges if native is not None else geometry.table_edges
    return build(out_in)


def gray_order(out_in: mx.array) -> mx.array:
    """Return the (N,) order of a table's rows by the Gray-code rank of their mask."""
    native = backends.native()
    if native is not None:
        return native.gray_order(out_in)
    return order.gray_order(out_in >= 0)

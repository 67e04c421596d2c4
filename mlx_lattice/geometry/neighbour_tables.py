"""Neighbour tables in MLX operations, the transpose of one, and its edges."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .keys import Bounds, Offsets, scale
from .lattice import negated, scaled
from .sorted_index import SortedIndex
from .unique import true_positions


def forward_table(
    index: SortedIndex,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
) -> mx.array:
    """Return (N_out, K) int32 places of ``in = out * stride + offset_k``, or -1."""
    rows, bounds = scaled(out_coords, stride), scale(out_bounds, stride)
    return mx.stack(index.columns(rows, bounds, offsets), axis=1)


def submanifold_table(index: SortedIndex, coords: mx.array, offsets: Offsets):
    """Return the (N, K) table of a point-symmetric kernel over its own rows.

    Searches half of the offsets; the edge (i, o, k) gives (o, i, K - 1 - k), as in
    FlexGEMM.
    """
    n, half = coords.shape[0], len(offsets) // 2
    found = index.columns(coords, index.bounds, offsets[:half])
    rows = mx.arange(n, dtype=mx.int32)
    columns = list(found)
    if len(offsets) % 2:
        columns.append(rows)
    for column in reversed(found):
        mirrored = mx.full((n + 1,), -1, dtype=mx.int32)
        mirrored[mx.where(column >= 0, column, n)] = rows
        columns.append(mirrored[:n])
    return mx.stack(columns, axis=1)


def transposed_table(
    index: SortedIndex,
    out_coords: mx.array,
    out_bounds: Bounds,
    offsets: Offsets,
    stride: Sequence[int],
) -> mx.array:
    """Return (N_out, K) int32 places of the in with ``out = in * stride + offset_k``.

    The input set is searched on the fine lattice (its rows times ``stride``), where
    the rule is a plain shift: rows off the lattice simply are not found.
    """
    fine = index if set(stride) == {1} else index.scaled(stride)
    return mx.stack(fine.columns(out_coords, out_bounds, negated(offsets)), axis=1)


def transpose_table(table: mx.array, n_in: int) -> mx.array:
    """Return (n_in, K) with the row of ``table`` that holds each entry, or -1."""
    n_out, volume = table.shape
    flat = mx.full((n_in * volume + 1,), -1, dtype=mx.int32)
    k = mx.arange(volume, dtype=mx.int64)
    place = mx.where(table >= 0, table.astype(mx.int64) * volume + k, n_in * volume)
    rows = mx.arange(n_out, dtype=mx.int32)[:, None]
    flat[place.flatten()] = mx.broadcast_to(rows, table.shape).flatten()
    return flat[: n_in * volume].reshape(n_in, volume)


def table_edges(table: mx.array) -> mx.array:
    """Return the (E, 3) int32 edges (i, o, k) of an (N_out, K) table by (k, o)."""
    n = max(1, table.shape[0])
    flat = table.T.flatten()
    at = true_positions(flat >= 0)
    out, k = (at % n).astype(mx.int32), (at // n).astype(mx.int32)
    return mx.stack([flat[at], out, k], axis=1)

"""Lists of edges: checked, sorted, counted, grouped, and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .. import sync
from ..checks import array_of
from .unique import true_positions


class Csr(NamedTuple):
    """Edges grouped by one of their columns.

    Group g owns ``edges[indptr[g]:indptr[g + 1]]``.
    """

    indptr: mx.array  # (groups + 1,) int32
    edges: mx.array  # (E, 3) int32 rows (input row, output row, offset)


class SortedRows(NamedTuple):
    """Output rows ordered by the Gray-code rank of their occupancy mask."""

    rows: mx.array  # (N_out,) int32: the output row at each sorted place
    table: mx.array  # (N_out, K) int32: the neighbour table in sorted order
    masks: mx.array  # (blocks, words) uint32: offsets that any row of a block uses
    block: int  # rows of a block

    def tile_offsets(self, tile: int) -> list[list[int]]:
        """Return for each tile of ``tile`` rows the offsets that any of them uses."""
        if tile % self.block:
            raise ValueError(f"tile must be a multiple of {self.block}; got {tile}")
        blocks, step = self.masks.tolist(), tile // self.block
        lists = []
        for start in range(0, len(blocks), step):
            bits = [0] * self.masks.shape[1]
            for mask in blocks[start : start + step]:
                bits = [a | b for a, b in zip(bits, mask, strict=True)]
            lists.append(
                [
                    32 * w + b
                    for w, word in enumerate(bits)
                    for b in range(32)
                    if word >> b & 1
                ]
            )
        return lists


@dataclass(frozen=True)
class Coverage:
    """What a relation reaches and what it leaves out.

    Attributes:
        n_in, n_out, volume, edges: the relation's sizes.
        out_degrees: number of output rows with 0, 1, ... edges.
        in_degrees: number of input rows with 0, 1, ... edges.
        unused_inputs: (U,) int32 input rows with no edge: their features are lost.
        empty_outputs: (V,) int32 output rows with no edge: they hold the bias alone.
    """

    n_in: int
    n_out: int
    volume: int
    edges: int
    out_degrees: tuple[int, ...]
    in_degrees: tuple[int, ...]
    unused_inputs: mx.array
    empty_outputs: mx.array

    def __str__(self) -> str:
        """Return the report as a person reads it."""
        per_row = self.edges / self.n_out if self.n_out else 0.0
        filled = self.edges / (self.n_out * self.volume) if self.n_out else 0.0
        lines = [
            f"{self.edges:,} edges from {self.n_in:,} to {self.n_out:,} rows: "
            f"{per_row:.1f} a row, {filled:.0%} of {self.volume} offsets",
            f"inputs with no edge   {self.unused_inputs.size:,}",
            f"outputs with no edge  {self.empty_outputs.size:,}",
            "edges: output rows    "
            + ", ".join(f"{d}: {n:,}" for d, n in enumerate(self.out_degrees) if n),
            "edges: input rows     "
            + ", ".join(f"{d}: {n:,}" for d, n in enumerate(self.in_degrees) if n),
        ]
        return "\n".join(lines)


Rows = mx.array | Sequence[int]


def checked_edges(
    in_rows: Rows, out_rows: Rows, offsets: Rows, limits: tuple[int, int, int]
) -> mx.array:
    """Return (E, 3) int32 edges by offset, output row and input row.

    Args:
        in_rows, out_rows, offsets: (E,) integers, of which there is one an edge.
        limits: what each must lie below.

    Raises:
        ValueError: lengths differ, or a value lies outside its range.
    """
    names = "in_rows", "out_rows", "offsets"
    given = in_rows, out_rows, offsets
    columns = [_vector(c, name) for c, name in zip(given, names, strict=True)]
    sizes = [c.size for c in columns]
    if len(set(sizes)) != 1:
        raise ValueError(
            "in_rows, out_rows and offsets must have one entry an edge; got "
            f"lengths {sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    for column, name, limit in zip(columns, names, limits, strict=True):
        if column.size == 0:
            continue
        low, high = sync.read(column.min(), column.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} must lie in [0, {limit}); got {low} to {high}")
    edges = mx.stack([c.astype(mx.int32) for c in columns], axis=1)
    # Ties by input row too, so that the order given does not matter.
    return edges[lexicographic(edges, (2, 1, 0), limits)]


def _vector(values, name: str) -> mx.array:
    array = array_of(values, name)
    if array.size == 0:
        return mx.zeros((0,), dtype=mx.int32)
    if array.ndim != 1 or not mx.issubdtype(array.dtype, mx.integer):
        raise ValueError(
            "edges must be given as 1-D integer arrays; got shape "
            f"{tuple(array.shape)} of {array.dtype}"
        )
    return array


def lexicographic(edges: mx.array, order, limits) -> mx.array:
    """Return the order of edge rows by the named columns, the first leading."""
    key = mx.zeros((edges.shape[0],), dtype=mx.int64)
    for column in order[:2]:
        key = key * max(1, limits[column]) + edges[:, column].astype(mx.int64)
    last = edges[:, order[2]].astype(mx.int64)
    if (limits[0] or 1) * (limits[1] or 1) * limits[2] < 1 << 62:
        return mx.argsort(key * max(1, limits[order[2]]) + last)
    key = mx.searchsorted(mx.sort(key), key).astype(mx.int64)
    return mx.argsort(key * max(1, limits[order[2]]) + last)


def grouped(
    edges: mx.array, order: tuple[int, ...], limits: tuple[int, ...], groups: int
) -> Csr:
    """Return the edges by the columns of ``order``, with where each group begins.

    Args:
        edges: (E, 3) by offset and output row.
        order: columns, that of the groups first.
        limits: what each column lies below.
        groups: that of the first.
    """
    if order[0] != 2:
        edges = edges[lexicographic(edges, order, limits)]
    starts = mx.arange(groups + 1, dtype=mx.int32)
    indptr = mx.searchsorted(edges[:, order[0]], starts)
    return Csr(indptr.astype(mx.int32), edges)


def repeat(edges: mx.array, column: int, n: int) -> bool:
    """Return whether two edges share an offset and a row of n. Reads one value."""
    if edges.shape[0] < 2:
        return False
    keys = edges[:, 2].astype(mx.int64) * n + edges[:, column].astype(mx.int64)
    keys = mx.sort(keys)
    return sync.read((keys[1:] == keys[:-1]).any())[0]


def table(
    edges: mx.array, columns: tuple[int, int], shape: tuple[int, int]
) -> mx.array:
    """Return the (rows, K) int32 table of edges, -1 where there is none."""
    source, at, k = (edges[:, c] for c in (*columns, 2))
    flat = mx.full((shape[0] * shape[1],), -1, dtype=mx.int32)
    if source.size:
        flat[at.astype(mx.int64) * shape[1] + k.astype(mx.int64)] = source
    return flat.reshape(shape)


def counts(edges: mx.array, column: int, n: int) -> mx.array:
    """Return (n,) int32: how many edges have each value of a column."""
    found = mx.zeros((n,), dtype=mx.int32)
    return found.at[edges[:, column]].add(1) if edges.shape[0] else found


def coverage(edges: mx.array, n_in: int, n_out: int, volume: int) -> Coverage:
    """Return the report of what a relation reaches. Reads the histograms."""
    in_degree, out_degree = counts(edges, 0, n_in), counts(edges, 1, n_out)
    return Coverage(
        n_in,
        n_out,
        volume,
        edges.shape[0],
        _histogram(out_degree),
        _histogram(in_degree),
        true_positions(in_degree == 0),
        true_positions(out_degree == 0),
    )


def _histogram(degree: mx.array) -> tuple[int, ...]:
    if degree.size == 0:
        return ()
    bins = mx.zeros((sync.read(degree.max())[0] + 1,), dtype=mx.int32)
    return tuple(sync.read(bins.at[degree].add(1))[0])

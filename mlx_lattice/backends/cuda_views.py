"""Views of a relation that only the CUDA kernels read."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..relation import Relation
from .cuda_geometry import gray_order, sorted_table

ROW_ALIGNMENT = 384  # a multiple of 64, the rows of a block


class Sorted(NamedTuple):
    """A relation's rows by Gray-code rank, laid out for tiles."""

    table: mx.array  # (K, pitch) int32
    rows: mx.array  # (N_out,) int32
    masks: mx.array  # (pitch / 32, words) uint32
    mirrored: bool  # whether offset k stands for K - 1 - k


def sorted_rows(relation: Relation) -> Sorted:
    """Return the relation's tiles. A mirrored relation and its transpose share them."""
    straight = not (relation.mirrored and relation._swapped)
    base = relation if straight else relation.T

    def build() -> Sorted:
        table = base.out_in
        rows = gray_order(table)
        pitch = -(-table.shape[0] // ROW_ALIGNMENT) * ROW_ALIGNMENT
        ordered, masks = sorted_table(table, rows, pitch)
        return Sorted(ordered, rows, masks, False)

    view = base.view("cuda_sorted", build)
    return view if straight else view._replace(mirrored=True)


def offset_starts(relation: Relation) -> mx.array:
    """Return (K + 1,) int32: where the edges of each offset start."""

    def build() -> mx.array:
        ends = mx.arange(relation.volume + 1, dtype=mx.int32)
        column = mx.contiguous(relation.edges[:, 2])
        return mx.searchsorted(column, ends).astype(mx.int32)

    return relation.view("cuda_starts", build)

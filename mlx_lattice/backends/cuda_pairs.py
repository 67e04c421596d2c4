"""Pairs of rows by offset on CUDA: the edges as weight gradients read them."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..geometry.protocol import RelationViews
from .cuda_views import STAGE_PAIRS, band_counts, listed, release_table, sorted_rows


class Pairs(NamedTuple):
    """The edges of a relation by offset, as weight gradients read them.

    Attributes:
        rows: (P, 2) int32 of (i, o). A mirrored relation has those of the first half of
            its offsets: an edge (i, o, K - 1 - k) is one (o, i, k).
        spans: (K, 2) int32, where the pairs of each offset begin and end; ~begin where
            they are (o, i).
        turned: the spans of the transpose, or None where they were not written.
        firsts: for stages of each of ``STAGE_PAIRS``, (K + 1,) int32: the first stage
            of each offset, and how many there are; () where they were not written.
    """

    rows: mx.array
    spans: mx.array
    turned: mx.array | None = None
    firsts: tuple[mx.array, ...] = ()

    @property
    def of_transpose(self) -> Pairs:
        """The same of the transpose."""
        turned = self.turned
        if turned is None:
            turned = self.spans ^ mx.array([-1, 0])
        return Pairs(self.rows, turned, self.spans, self.firsts)


def pairs(relation: RelationViews) -> Pairs:
    """Return the relation's edges by offset. Its transpose shares them."""

    def build() -> Pairs:
        other = relation.T.kept("cuda_pairs")
        found = _pairs(relation) if other is None else other.of_transpose
        release_table(relation)
        return found

    return relation.view("cuda_pairs", build)


def pair_arrays(relation: RelationViews) -> tuple[mx.array, mx.array]:
    """Return rows and spans of the relation's pairs."""
    found = pairs(relation)
    return found.rows, found.spans


def first_stages(relation: RelationViews, size: int) -> mx.array:
    """Return the first stage of ``size`` pairs of each offset, and how many, int32."""
    found = pairs(relation)
    if found.firsts:
        return found.firsts[STAGE_PAIRS.index(size)]
    if relation.volume == 1:
        return up_to(-(-len(found.rows) // size))
    begin, end = found.spans[:, 0], found.spans[:, 1]
    stages = (end - mx.maximum(begin, ~begin) + (size - 1)) // size
    return mx.pad(mx.cumsum(stages), (1, 0)).astype(mx.int32)


def _pairs(relation: RelationViews) -> Pairs:
    """List the edges by offset, from the table where there is one."""
    if relation.is_identity and relation.n_out:
        rows = sorted_rows(relation).rows  # in order
        rows = mx.contiguous(mx.broadcast_to(rows[:, None], (len(rows), 2)))
        return Pairs(rows, up_to(len(rows))[None])
    volume, n, edges = relation.volume, relation.n_out, relation.n_edges
    if n * relation.n_in == 0 or relation.lists_edges:
        rows, starts = mx.contiguous(relation.edges[:, :2]), offset_starts(relation)
        if volume == 1:
            return Pairs(rows, up_to(len(rows))[None])
        return Pairs(rows, mx.stack([starts[:-1], starts[1:]], axis=1))
    offsets, total = volume, edges
    if relation.mirrored and volume > 1:
        # A row has at most itself by the offset in the middle, if there is one.
        offsets = (volume + 1) // 2
        total = (edges + n * (volume % 2)) // 2
    made = listed(relation.out_in, band_counts(relation), 2, offsets, total)
    if volume == 1:
        return Pairs(made[0], up_to(len(made[0]))[None])
    rows, spans, turned, *firsts = made
    return Pairs(rows, spans, turned, tuple(firsts))


def up_to(end: int) -> mx.array:
    """Return (2,) int32 of 0 and ``end``, a part of more.

    Made on the device: memory that MLX takes for an array from the host may be the
    device's, and is copied first. Arrays of up to 8 bytes it has in a pool that its CPU
    stream shares, and one that was just computed has been seen as zeros.
    """
    made = mx.arange(0, 4 * end, end, dtype=mx.int32) if end else mx.zeros(4, mx.int32)
    return made[:2]


def offset_starts(relation: RelationViews) -> mx.array:
    """Return (K + 1,) int32: where the edges of each offset start."""
    listed = relation.edges  # may bring its starts

    def build() -> mx.array:
        ends = mx.arange(relation.volume + 1, dtype=mx.int32)
        return mx.searchsorted(mx.contiguous(listed[:, 2]), ends).astype(mx.int32)

    return relation.view("cuda_starts", build)

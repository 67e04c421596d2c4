"""Groups of rows that attend to each other, and patches of rows along a curve."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from ..geometry.curves import curve_order
from ..reductions import linear, sum_over
from ..tensor import SparseTensor
from .channels import move_rows
from .global_pool import batch_rows


class Bucket(NamedTuple):
    """Groups that are attended together."""

    groups: int
    length: int  # rows of the largest
    full: bool  # whether all have that many


class Groups(NamedTuple):
    """The rows of every group, padded: bucket after bucket, group after group.

    A row has one slot of its own, which its result is taken from, and may be seen in
    a second one.
    """

    buckets: tuple[Bucket, ...]
    row: mx.array  # (S,) int32: the row in each slot, or -1
    slot: mx.array  # (N,) int32: the slot of each row
    own: mx.array | None = None  # (S,) int32: the row whose own slot it is, or -1
    again: mx.array | None = None  # (N,) int32: the second slot of each row, or -1

    def spread(self, x: mx.array) -> mx.array:
        """Return the (S, C) rows of (N, C) in the slots that see them."""
        if self.again is None:
            return move_rows(x, self.row, self.slot)
        seen = self.row[:, None]
        both = mx.stack([self.slot, self.again], axis=1)

        def run(x):
            return x[self.row]

        transpose = partial(sum_over, table=both, back=lambda: seen)
        return linear(run, transpose, self.spread)(x)

    def collect(self, y: mx.array) -> mx.array:
        """Return the (N, C) rows of (S, C) in the rows' own slots."""
        own = self.row if self.own is None else self.own
        return move_rows(y, self.slot, own, whole=True)


def patches(
    like: SparseTensor, patch: int, curve: str, bits: int | None, shift: int
) -> tuple[mx.array, int, mx.array]:
    """Return (N,) the patch of each row, how many there are, and the curve's order."""
    starts, order, batch, rank = _along(like, curve, bits)
    sizes = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    first = [0, *accumulate(-(-(size + shift) // patch) for size in sizes)]
    along = mx.array(first)[batch] + (rank + shift) // patch
    group = mx.zeros((len(like),), dtype=mx.int32)
    group[order] = along.astype(mx.int32)
    return group, first[-1], order


def filled(like: SparseTensor, patch: int, curve: str, bits: int | None) -> Groups:
    """Return patches of which the last of an element is filled from the one before.

    An element of n > ``patch`` rows has ceil(n / patch) whole patches; a shorter one
    is one patch of n. Nothing is padded.
    """
    starts, order, batch, rank = _along(like, curve, bits)
    sizes = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    # Whole patches come first, so that they are one bucket.
    short = [b for b, size in enumerate(sizes) if 0 < size < patch]
    whole = sum(-(-size // patch) for size in sizes if size >= patch)
    buckets = [Bucket(whole, patch, True)] if whole else []
    first, count = [0] * len(sizes), 0
    for b, size in enumerate(sizes):
        if size >= patch:
            first[b], count = count, count + -(-size // patch) * patch
    for b in short:
        first[b], count = count, count + sizes[b]
        buckets.append(Bucket(1, sizes[b], True))
    place = (mx.array(first)[batch] + rank).astype(mx.int32)
    slot = mx.zeros((len(like),), dtype=mx.int32)
    slot[order] = place
    own = mx.full((count,), -1, dtype=mx.int32)
    own[place] = order
    if all(size < patch or size % patch == 0 for size in sizes):
        return Groups(tuple(buckets), own, slot)
    before = mx.maximum(mx.arange(count, dtype=mx.int32) - patch, 0)
    row = mx.where(own < 0, own[before], own)
    after = slot + patch
    filling = (after < count) & (own[mx.minimum(after, count - 1)] < 0)
    return Groups(tuple(buckets), row, slot, own, mx.where(filling, after, -1))


def _along(like: SparseTensor, curve: str, bits: int | None):
    """Return the elements' starts, the curve's order, and each place's batch, rank."""
    starts = batch_rows(like).starts
    order = curve_order(like.coords, curve, like.manager[like.key].bounds, bits)
    batch = like.coords[:, 0][order]
    rank = mx.arange(len(like), dtype=mx.int32) - mx.array(starts)[batch]
    return starts, order, batch, rank

"""Groups of rows that attend to each other, in buckets of like length.

A bucket is one call of attention: its groups are padded to the longest of them. Where
buckets are cut is worked out from the groups' sizes, once a coordinate set: as few as
keep the padding to an eighth of the useful query-key pairs, or to what takes less time
than a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..devices import CPU, CUDA, METAL
from ..geometry import sync
from ..geometry.scans import running_sums
from ..geometry.segments import segment_counts
from ..geometry.unique import first_of_equals, true_positions
from ..reductions import move_rows, sum_over
from .fused_attention import TILE

# Padding is at most an eighth of the useful pairs, or what is free.
SHARE = 8
# Scores of one call: bounds its memory and its time on the device.
SCORES = 1 << 27


class Padding(NamedTuple):
    """How groups are padded on a device."""

    free: int  # pairs that take less time than a call
    call: int  # a bucket's pairs of padding at most: they take longer than one
    tile: int  # rows of which queries are multiples where their groups have others
    grain: int  # rows that take as long as any fewer

    def budget(self, taken: int) -> int:
        """Return the most padding of groups that take so much."""
        return max(taken // SHARE, self.free) if self.call else 0

    def pairs(self, queries: int, keys: int | None = None) -> int:
        """Return what a group takes, as pairs; without ``keys`` of itself."""
        rows = -(-queries // self.grain) * self.grain
        return rows * (rows if keys is None else keys)


# Of CUDA timed on an H200, where MLX's fused gradient takes whole tiles of queries; on
# Metal nobody has timed it.
PADDING = {
    CPU: Padding(1 << 13, 1 << 17, 1, 1),
    METAL: Padding(1 << 13, 1 << 17, 1, 1),
    CUDA: Padding(1 << 20, 1 << 22, TILE, 64),
}
# Of what is attended as it is.
EXACT = Padding(0, 0, 1, 1)


class Bucket(NamedTuple):
    """Groups that are attended together."""

    groups: int
    queries: int  # of each, padded
    length: int  # keys of each, padded
    full: bool  # whether all have that many keys


class Groups(NamedTuple):
    """The rows of every group, padded: bucket after bucket, group after group.

    The first rows of a group are its queries, and all are its keys. A row is a query
    of one group, and may be a key of a second one.
    """

    buckets: tuple[Bucket, ...]
    pairs: int  # of queries and keys, without padding
    # (S,) int32: the row in each slot of keys, or -1; None where rows stand in their
    # slots, and then there is nothing of what follows.
    row: mx.array | None = None
    slot: mx.array | None = None  # (N,) int32: the slot of each row where it is a query
    again: mx.array | None = None  # (N,) int32: its second slot, or -1
    own: mx.array | None = None  # (Q,) int32: the row of each result, or -1
    place: mx.array | None = None  # (N,) int32: the result of each row
    # What the CPU's kernel reads besides: the first slot of each group, (G + 1,) int32,
    # and its queries without padding, (G,) int32.
    starts: mx.array | None = None
    queries: mx.array | None = None
    # Of each bucket which of its slots hold a row, (groups, 1, 1, length) bool, or None
    # where all do.
    masks: tuple[mx.array | None, ...] = (None,)

    @classmethod
    def standing(cls, count: int, length: int) -> Groups:
        """Return groups of one length whose rows stand in a line already."""
        return cls((Bucket(count, length, length, True),), count * length * length)

    def masked(self) -> Groups:
        """Return them with their ``masks``."""
        masks, start = [], 0
        for groups, _, length, full in self.buckets:
            end = start + groups * length
            here = None if full else self.row[start:end].reshape(groups, 1, 1, length)
            masks.append(None if full else here >= 0)
            start = end
        return self._replace(masks=tuple(masks))

    def slots(self, x: mx.array) -> list[mx.array]:
        """Return the slots of each bucket, (groups, length, ...) of (N, ...)."""
        tail = x.shape[1:]
        rows = self.spread(x.reshape(len(x), prod(tail)))
        ends = [*accumulate(b.groups * b.length for b in self.buckets)]
        parts = mx.split(rows, ends[:-1]) if len(ends) > 1 else [rows]
        shapes = ((b.groups, b.length, *tail) for b in self.buckets)
        return [a.reshape(s) for a, s in zip(parts, shapes, strict=True)]

    @property
    def padded_pairs(self) -> int:
        """Pairs of queries and keys that are computed."""
        return sum(b.groups * b.queries * b.length for b in self.buckets)

    def spread(self, x: mx.array) -> mx.array:
        """Return the (S, C) rows of (N, C) in the slots that see them."""
        if self.row is None:
            return x
        if self.again is None:
            return move_rows(x, self.row, self.slot)
        return sum_over(x, self.row[:, None], lambda: self._both)

    def gather(self, y: mx.array) -> mx.array:
        """Return (N, C) sums of the (S, C) rows in each row's slots."""
        if self.again is None:
            return move_rows(y, self.slot, self.row, whole=True)
        seen = self.row[:, None]
        return sum_over(y, self._both, lambda: seen)

    def collect(self, y: mx.array) -> mx.array:
        """Return the (N, C) rows of (Q, C) results."""
        if self.row is None:
            return y
        return move_rows(y, self.place, self.own, whole=True)

    @property
    def _both(self) -> mx.array:
        return mx.stack([self.slot, self.again], axis=1)


def cut(
    sizes: Sequence[tuple[int, int]],
    pairs: Callable[[int], int],
    budget: int,
    call: int | None = None,
) -> list[int]:
    """Cut groups by size into few buckets, each padded to its largest.

    Buckets are as long as one and the same padding lets them, the most with which all
    of them together keep the budget, and no more than a call is worth.

    Args:
        sizes: ascending (size, number of groups).
        pairs: of a group, by its size.
        budget: the most pairs of padding.
        call: of a bucket; by default as many.

    Returns:
        the largest size of each bucket, ascending.
    """
    most = budget if call is None else min(budget, call)
    while True:
        ends, padding, here = [], 0, 0
        for size, count in reversed(sizes):
            more = count * (pairs(ends[-1]) - pairs(size)) if ends else 0
            if not ends or here + more > most:
                ends.append(size)
                here = more = 0
            here, padding = here + more, padding + more
        if padding <= budget:
            return ends[::-1]
        most = most * 7 // 8


def of_groups(
    group: mx.array, count: int, order: mx.array | None, padding: Padding
) -> Groups:
    """Return the rows of each group, which attend to each other.

    Reads the sizes that there are.

    Args:
        group: (N,) the group of each row.
        count: of the groups.
        order: (N,) the rows in the order of their groups; by default that of rows.
        padding: what may be padded.
    """
    n = group.shape[0]
    if order is None:
        keys = group.astype(mx.int64) * n + mx.arange(n, dtype=mx.int64)
        order = mx.argsort(keys).astype(mx.int32)
    sizes = segment_counts(group, count)
    by_size = mx.argsort(sizes).astype(mx.int32)
    ordered = sizes[by_size]
    at = true_positions(first_of_equals(ordered))
    at, lengths = sync.read(at, ordered[at])
    numbers = [b - a for a, b in zip(at, [*at[1:], count], strict=True)]
    known = [pair for pair in zip(lengths, numbers, strict=True) if pair[0]]
    pairs = sum(number * length * length for length, number in known)
    taken = sum(number * padding.pairs(length) for length, number in known)
    buckets, first, base = [], [count - sum(n for _, n in known)], [0]
    for some in _between(
        known, cut(known, padding.pairs, padding.budget(taken), padding.call)
    ):
        groups, length = sum(n for _, n in some), some[-1][0]
        buckets.append(Bucket(groups, length, length, len(some) == 1))
        first.append(first[-1] + groups)
        base.append(base[-1] + groups * length)
    # The first slot of each group, in the order of their sizes; empty ones have none.
    number = mx.arange(count, dtype=mx.int32)
    bucket = mx.searchsorted(mx.array(first[1:], dtype=mx.int32), number, "right")
    long = mx.array([b.length for b in buckets], dtype=mx.int32)[bucket]
    begin = number - mx.array(first[:-1], dtype=mx.int32)[bucket]
    starts = mx.array(base[:-1], dtype=mx.int32)[bucket] + mx.maximum(begin, 0) * long
    of = mx.zeros((count,), dtype=mx.int32)
    of[by_size] = starts - (running_sums(sizes) - sizes)[by_size]
    slot = mx.zeros((n,), dtype=mx.int32)
    slot[order] = of[group[order]] + mx.arange(n, dtype=mx.int32)
    row = mx.full((base[-1],), -1, dtype=mx.int32)
    row[slot] = mx.arange(n, dtype=mx.int32)
    starts = mx.concatenate([starts, mx.array(base[-1:], dtype=mx.int32)])
    made = Groups(tuple(buckets), pairs, row, slot, None, row, slot, starts, ordered)
    return made.masked()


def _between(
    sizes: Sequence[tuple[int, int]], ends: Sequence[int]
) -> Iterable[list[tuple[int, int]]]:
    """Yield the sizes of each bucket."""
    rest = iter(sizes)
    for end in ends:
        some = [next(rest)]
        while some[-1][0] < end:
            some.append(next(rest))
        yield some

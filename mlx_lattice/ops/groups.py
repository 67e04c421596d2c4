"""Groups of rows that attend to each other: windows, and patches along curves.

Groups are sorted into buckets of like length. A bucket is one call of attention: its
groups are padded to the longest of them. The sizes of the groups decide where buckets
are cut, once for each coordinate set: as few as keep the padding to an eighth of the
useful query-key pairs, or to what takes less time than a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .. import registry, sync
from ..backends.gpu.attention import extents_of
from ..checks import INT32_LIMIT, dtype_name
from ..coordinate_set import CoordinateSet
from ..devices import CPU, CUDA, METAL
from ..geometry import curves
from ..geometry.lattice import first_of_equals, running_sums, true_positions
from ..geometry.points import segment_counts
from ..reductions import gathered, move_rows, sum_over
from ..tensor import SparseTensor, expect_tensor
from .fused_attention import TILE
from .pool import batch_rows

__all__ = ["curve_code", "curve_order"]


def curve_order(
    x: SparseTensor, order: str = "hilbert", *, bits: int | None = None
) -> mx.array:
    """Return the (N,) int32 rows by batch element, then along a curve.

    Args:
        x: the tensor whose rows are ordered; its features do not matter.
        order: "hilbert" (Skilling, "Programming the Hilbert curve", 2004), "morton"
            or "z", which are one, the first axis leading; with "-trans" behind it the
            first two axes are swapped, as in Point Transformer V3.
        bits: of an axis. Cells are then the coordinates themselves, which must lie
            from 0 to ``2 ** bits - 1``; a Hilbert curve of other bits turns otherwise.
            By default cells count from the least coordinates, with as many bits as
            the widest axis needs.

    Raises:
        ValueError: there is no such curve, or a coordinate does not fit the bits.
    """
    curve = _curve(x, order, bits)
    if len(x) == 0:
        return mx.zeros((0,), dtype=mx.int32)
    return registry.geometry().curve_order(x.coordinate_set.coords, curve)


def curve_code(
    x: SparseTensor, order: str = "hilbert", *, bits: int | None = None
) -> mx.array:
    """Return the (N,) int64 place of each row on the curve of its batch element.

    Arguments and errors are those of ``curve_order``; the batch is not in the code.

    Raises:
        ValueError: as there, or a code has more than 62 bits.
    """
    curve = _curve(x, order, bits)
    if len(x) == 0:
        return mx.zeros((0,), dtype=mx.int64)
    return curves.curve_codes(x.coordinate_set.coords, curve)


def _curve(x: SparseTensor, order: str, bits: int | None) -> curves.Curve:
    expect_tensor(x)
    return curves.curve_of(order, x.coordinate_set.bounds, bits)


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

    Reads the sizes that there are. ``group`` is the (N,) group of each row, ``order``
    the (N,) rows in the order of their groups.
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
    rest = iter(sizes)
    for end in ends:
        some = [next(rest)]
        while some[-1][0] < end:
            some.append(next(rest))
        yield some


def patches(
    like: SparseTensor, patch: int, curve: str, bits: int | None, shift: int
) -> tuple[mx.array, int, mx.array]:
    """Return (N,) the patch of each row, how many there are, and the curve's order."""
    order, batch, rank = _along(like, curve, bits)
    sizes = batch_rows(like).sizes
    first = [0, *accumulate(-(-(size + shift) // patch) for size in sizes)]
    along = mx.array(first)[batch] + (rank + shift) // patch
    group = mx.zeros((len(like),), dtype=mx.int32)
    group[order] = along.astype(mx.int32)
    return group, first[-1], order


class _Layout:
    """Where the groups of filled patches begin, in slots of keys and in results."""

    def __init__(self, sizes: list[int], patch: int, padding: Padding):
        self.sizes, self.patch = sizes, patch
        self.buckets: list[Bucket] = []
        self.starts, self.queries = [], []  # of each group
        self.slots = self.results = 0
        whole = self.whole = [n // patch * patch for n in sizes]
        # Of each element: the first slot of its whole patches, and where the rest is.
        self.first, self.rest = [0] * len(sizes), [(0, 0)] * len(sizes)
        rests = {b: n % patch for b, n in enumerate(sizes) if n > patch and n % patch}
        shorts = {b: n for b, n in enumerate(sizes) if 0 < n < patch}
        self.filling = bool(rests)
        self.pairs = sum(w * patch for w in whole)
        self.pairs += sum(r * patch for r in rests.values())
        self.pairs += sum(n * n for n in shorts.values())
        # Half of the padding may be queries of last patches, half short elements.
        most, tile = padding.call, padding.tile
        budget = padding.budget(self.pairs) // 2
        counts = Counter(rests.values())
        if any(whole):
            counts[patch] = sum(whole) // patch
        seen = partial(padding.pairs, keys=patch)
        for some, end in _cut(rests, counts, seen, budget, most)[::-1]:
            begin = len(self.starts)
            if end == patch:  # the first bucket
                self._add_whole(patch)
            end = min(patch, -(-end // tile) * tile)
            for b in some:
                self._add(b, rests[b], patch, end)
            groups = len(self.starts) - begin
            self.buckets.append(Bucket(groups, end, patch, True))
        counts = Counter(shorts.values())
        for some, end in _cut(shorts, counts, padding.pairs, budget, most):
            for b in some:
                self._add(b, shorts[b], end, end)
            full = all(shorts[b] == end for b in some)
            self.buckets.append(Bucket(len(some), end, end, full))

    @cached_property
    def elements(self) -> mx.array:
        begin = [0, *accumulate(self.sizes)][:-1]
        slots, results = zip(*self.rest, strict=True)
        each = begin, self.whole, self.first, slots, results, self.sizes
        rows = [(*words, self.patch, 0) for words in zip(*each, strict=True)]
        return mx.array(rows, dtype=mx.int32)

    def _add_whole(self, patch: int) -> None:
        for b, rows in enumerate(self.whole):
            self.first[b] = self.slots
            self.starts += range(self.slots, self.slots + rows, patch)
            self.queries += [patch] * (rows // patch)
            self.slots = self.results = self.slots + rows

    def _add(self, element: int, queries: int, keys: int, results: int) -> None:
        self.rest[element] = self.slots, self.results
        self.starts.append(self.slots)
        self.queries.append(queries)
        self.slots, self.results = self.slots + keys, self.results + results


def _cut(
    sizes: dict[int, int],
    counts: Counter[int],
    pairs: Callable,
    budget: int,
    most: int,
) -> list[tuple[list[int], int]]:
    """Return the elements of each bucket, and the largest of their sizes."""
    ends = cut(sorted(counts.items()), pairs, budget, most)
    return [
        ([b for b, n in sizes.items() if low < n <= end], end)
        for low, end in zip([0, *ends], ends, strict=False)
    ]


def filled(
    like: SparseTensor,
    patch: int,
    curve: str,
    bits: int | None,
    padding: Padding,
) -> Groups:
    """Return patches of which the last of an element is filled from the one before.

    An element of n > ``patch`` rows has ceil(n / patch) whole patches, of which the
    last asks for what its own rows get alone; a shorter one is one patch of n.
    """
    laid = _Layout(batch_rows(like).sizes, patch, padding)
    kernels = registry.patches()
    if kernels is not None and kernels.takes(len(like)):
        order = curve_order(like, curve, bits=bits)
        ends = laid.slots, laid.results
        given = laid.elements, extents_of(*ends), ends, laid.filling
        row, own, slot, place, *again = kernels.filled(order, *given)
        again = again[0] if again else None
    else:
        row, own, slot, place, again = _composed(like, laid, curve, bits)
    made = Groups(
        tuple(laid.buckets),
        laid.pairs,
        row,
        slot,
        again,
        own,
        place,
        mx.array([*laid.starts, laid.slots], dtype=mx.int32),
        mx.array(laid.queries, dtype=mx.int32),
    )
    return made.masked()


def _composed(like: SparseTensor, laid: _Layout, curve: str, bits: int | None):
    """Return ``row``, ``own``, ``slot``, ``place`` and ``again`` in MLX operations."""
    order, batch, rank = _along(like, curve, bits)
    patch = laid.patch
    slots, results = (mx.array(a)[batch] for a in zip(*laid.rest, strict=True))
    whole, first = mx.array(laid.whole)[batch], mx.array(laid.first)[batch]
    slot, place = (
        mx.where(rank < whole, first + rank, rest + rank - whole).astype(mx.int32)
        for rest in (slots, results)
    )
    row = mx.full((laid.slots,), -1, dtype=mx.int32)
    row[slot] = order
    own = mx.full((laid.results,), -1, dtype=mx.int32)
    own[place] = order
    back = mx.zeros((len(like),), dtype=mx.int32)  # the place of a row on the curve
    back[order] = mx.arange(len(like), dtype=mx.int32)
    again = None
    if laid.filling:
        size = mx.array(laid.sizes)[batch]
        filling = (whole < size) & (whole > 0) & (rank >= size - patch) & (rank < whole)
        again = slots + rank + patch - whole
        # Rows without a second slot all write into an extra last one.
        more = mx.concatenate([row, row[:1]])
        more[mx.where(filling, again, laid.slots)] = order
        row, again = more[: laid.slots], mx.where(filling, again, -1)
        again = again.astype(mx.int32)[back]
    return row, own, slot[back], place[back], again


def _along(like: SparseTensor, curve: str, bits: int | None):
    """Return the curve's order, and the batch and the rank of each place."""
    order = curve_order(like, curve, bits=bits)
    batch = like.coordinate_set.coords[:, 0][order]
    rank = (
        mx.arange(len(like), dtype=mx.int32) - mx.array(batch_rows(like).starts)[batch]
    )
    return order, batch, rank


def biases(table: mx.array, apart: mx.array) -> mx.array:
    """Return the (..., heads) sums of a table's entries for (..., axes) differences."""
    axes, heads = apart.shape[-1], table.shape[1]
    entries = table.shape[0] // axes
    bound = entries // 2
    entry = mx.clip(apart, -bound, bound) + bound + mx.arange(axes) * entries
    flat = entry.reshape(-1, axes).astype(mx.int32)
    return gathered(table, flat).reshape(*apart.shape[:-1], heads)


class RelativeBias:
    """What a table adds to the scores, by the difference of cells along each axis.

    ``table``: (axes * (2 * bound + 1), heads), for each axis from ``-bound`` on;
    differences beyond are taken for the bound.
    """

    def __init__(self, table: mx.array, held: CoordinateSet, groups: Groups):
        self.table, coords = table, held.coords
        low, high = held.bounds
        if any(b - a > INT32_LIMIT for a, b in zip(low, high, strict=True)):
            coords = coords.astype(mx.int64)
        self.cells = coords[mx.maximum(groups.row, 0), 1:]

    def between(
        self, start: int, end: int, shape: tuple[int, int]
    ) -> Callable[[slice, slice], mx.array]:
        """Return what gives the float32 (groups, heads, queries, keys) of a part.

        Args:
            start, end: slots of a bucket.
            shape: its groups, and the keys of each.
        """
        cells = self.cells[start:end].reshape(*shape, -1)

        def of(some: slice, asked: slice) -> mx.array:
            apart = cells[some, asked, None] - cells[some, None]
            return biases(self.table.astype(mx.float32), apart).transpose(0, 3, 1, 2)

        return of


def check_table(table: mx.array, axes: int, heads: int) -> None:
    """Raise unless a table fits the axes and the heads of queries."""
    entries = table.shape[0] // axes if table.ndim == 2 else 0
    fits = entries % 2 and table.shape == (axes * entries, heads)
    if not fits:
        raise ValueError(
            f"table must have shape ({axes} * (2 * bound + 1), {heads}) for queries of "
            f"{heads} heads; got {tuple(table.shape)}"
        )
    dtype_name(table.dtype)

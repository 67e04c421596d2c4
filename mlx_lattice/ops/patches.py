"""Patches of rows along a curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise

import mlx.core as mx

from ..backends import registry
from ..backends.gpu_patches import extents_of
from ..tensor import SparseTensor
from .curves import curve_order
from .global_pool import batch_rows
from .groups import Bucket, Groups, Padding, cut


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


class _Layout:
    """Where the groups of filled patches begin, in slots of keys and in results.

    Args:
        sizes: rows of each batch element.
        patch: rows of a patch.
        padding: what may be padded.
    """

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
        """(B, 8) int32: what ``GpuPatches`` takes of each element."""
        begin = [0, *accumulate(self.sizes)][:-1]
        slots, results = zip(*self.rest, strict=True)
        each = begin, self.whole, self.first, slots, results, self.sizes
        rows = [(*words, self.patch, 0) for words in zip(*each, strict=True)]
        return mx.array(rows, dtype=mx.int32)

    @cached_property
    def extents(self) -> mx.array:
        """How many slots and results there are, as ``GpuPatches`` takes it."""
        return extents_of(self.slots, self.results)

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


@lru_cache(maxsize=64)
def _laid_out(starts: tuple[int, ...], patch: int, padding: Padding) -> _Layout:
    """Return the layout of elements, which the curves through them share."""
    return _Layout([b - a for a, b in pairwise(starts)], patch, padding)


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
    starts = batch_rows(like).starts
    laid = _laid_out(tuple(starts), patch, padding)
    kernels = registry.patches()
    if kernels is not None and kernels.takes(len(like)):
        order = curve_order(like, curve, bits=bits)
        given = laid.elements, laid.extents, (laid.slots, laid.results), laid.filling
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
    _, order, batch, rank = _along(like, curve, bits)
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
    """Return the elements' starts, the curve's order, and each place's batch, rank."""
    starts = batch_rows(like).starts
    order = curve_order(like, curve, bits=bits)
    batch = like.coordinate_set.coords[:, 0][order]
    rank = mx.arange(len(like), dtype=mx.int32) - mx.array(starts)[batch]
    return starts, order, batch, rank

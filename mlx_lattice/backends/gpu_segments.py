"""Segments of rows on GPUs: in what order their rows are reduced, and in which pieces.

A backend hands over its two kernels; what they are launched on, and how often, depends
only on where segments begin, so the same input gives the same bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import mlx.core as mx

from .dispatch_bounds import SEGMENT_CUTS


@dataclass(frozen=True)
class Segments:
    """Sums and maxima of segments, by a backend's kernels.

    Attributes:
        add: ``add(x, entries, weights, starts, divisors, size, volume, dtype, most)``
            returns the (weighted) sums of the segments that ``starts`` bounds, of
            ``most`` entries each at most, over their divisors if there are any.
        greatest: ``greatest(x, entries, names, starts, size, dtype, most)`` returns
            the maxima, and the rows or ``names`` that won.
        by_row, pieces: as the functions of these names, which they are by default.
    """

    add: Callable[..., mx.array]
    greatest: Callable[..., tuple[mx.array, mx.array]]
    by_row: Callable[..., tuple[mx.array, mx.array]] | None = None
    pieces: Callable[..., tuple[mx.array, mx.array]] | None = None

    def scatter_sum(self, y, table, rows, weights=None, order=(), divisors=None):
        """Return the (weighted) sums of the rows that name each of ``rows``."""
        entries, starts, *cut = order or self.order(table, rows)
        launches = cut or [starts]
        return self._sum(y, launches, entries, table.shape[1], weights, divisors)

    def order(self, table, rows, longest=None):
        """Return places of a table by the row they name, and where those begin.

        Where some are many, where those of each launch begin, too.
        """
        entries, starts = (self.by_row or by_row)(table, rows)
        launches = self._launches(starts, entries.size, longest)
        return entries, starts, *(launches if len(launches) > 1 else ())

    @staticmethod
    def counts(table, rows, order):
        """Return how many places name each row, by their order."""
        return order[1][1:] - order[1][:-1]

    def scatter_max(self, x, table, rows):
        """Return the maxima over the rows that name each of ``rows``, and which."""
        entries, starts, *cut = self.order(table, rows)
        return self._max(x, entries, cut or [starts])

    def segment_max(self, x, rows):
        """Return the maxima over batch elements, and their rows."""
        return self._max(
            x, rows.order, _known_launches(rows.starts, SEGMENT_CUTS["piece"])
        )

    def sum(self, x, starts, entries=None, volume=1, weights=None) -> mx.array:
        """Return the sums of segments; long ones by sums of their pieces.

        Args:
            x: (N, C) features.
            starts: (S + 1,) int32: where segments begin.
            entries: places of a flat (N, K) table; by default rows in order.
            volume: K of the table.
            weights: float32 weight of each place, or None.
        """
        size = x.shape[0] * volume if entries is None else entries.size
        return self._sum(x, self._launches(starts, size), entries, volume, weights)

    def _sum(self, x, launches, entries, volume, weights, divisors=None) -> mx.array:
        """Return the sums of segments, by the sums of their pieces."""
        segments, channels = launches[-1].size - 1, x.shape[1]
        size = x.shape[0] * volume if entries is None else entries.size
        if 0 in (segments, size, channels):
            return mx.zeros((segments, channels), dtype=x.dtype)
        dtype, piece = x.dtype, SEGMENT_CUTS["piece"]
        for starts in launches[:-1]:
            given = starts, None, size, volume, mx.float32, piece
            x = self.add(x, entries, weights, *given)
            entries, weights, volume, size = None, None, 1, starts.size - 1
        most = min(size, SEGMENT_CUTS["longest"])
        given = launches[-1], divisors, size, volume, dtype, most
        return self.add(x, entries, weights, *given)

    def _max(self, x, entries, launches) -> tuple[mx.array, mx.array]:
        """Return the maxima of segments, by those of their pieces."""
        *cut, starts = launches
        segments, channels, size = starts.size - 1, x.shape[1], x.shape[0]
        if 0 in (segments, size, channels):
            return no_maxima(x, segments)
        dtype, names, piece = x.dtype, None, SEGMENT_CUTS["piece"]
        for each in cut:
            x, names = self.greatest(x, entries, names, each, size, mx.float32, piece)
            entries, size = None, each.size - 1
        most = min(size, SEGMENT_CUTS["longest"])
        return self.greatest(x, entries, names, starts, size, dtype, most)

    def _launches(
        self, starts: mx.array, size: int, longest: int | None = None
    ) -> list[mx.array]:
        """Return where what each launch reduces begins: pieces of long segments first.

        Args:
            starts: (S + 1,) int32: where segments begin.
            size: of all together.
            longest: no segment is longer; by default one may be all.
        """
        longest, made = size if longest is None else min(longest, size), []
        while longest > SEGMENT_CUTS["longest"]:
            bounds, starts = (self.pieces or pieces)(starts, size)
            made.append(bounds)
            size, longest = bounds.size - 1, longest // SEGMENT_CUTS["piece"] + 2
        return [*made, starts]


def no_maxima(x: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return what maxima over nothing are: zeros, and no row."""
    shape = rows, x.shape[1]
    return mx.zeros(shape, dtype=x.dtype), mx.full(shape, -1, dtype=mx.int32)


def by_row(table: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return a table's places ordered by the row they name, and where each begins.

    Places that name none come first: before the first row begins. By MLX's sort.
    """
    size = table.size
    if size == 0:
        none = mx.zeros((rows + 1,), dtype=mx.int32)
        return mx.zeros((0,), dtype=mx.int32), none
    # Row * size + place, one row on: those of no row are not below 0.
    place = mx.arange(size, 2 * size, dtype=mx.int64)
    keys = mx.sort(table.flatten().astype(mx.int64) * size + place)
    begin = mx.arange(size, (rows + 2) * size, size, dtype=mx.int64)
    starts = mx.searchsorted(keys, begin).view(mx.int32)
    return (keys % size).astype(mx.int32), starts


@lru_cache(maxsize=64)
def _known_launches(starts: tuple[int, ...], piece: int) -> list[mx.array]:
    """Return the same of segments whose places are known: no launch finds them.

    They are few, so that all that are longer than a piece are cut.
    """
    made = []
    while max((b - a for a, b in pairwise(starts)), default=0) > piece:
        made.append(sorted({*starts, *range(0, starts[-1], piece)}))
        starts = [bisect_left(made[-1], start) for start in starts]
    return [mx.array(each, dtype=mx.int32) for each in (*made, starts)]


def pieces(starts: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Cut segments of ``size`` entries in all into pieces that a thread can add up.

    In MLX operations. Where a segment begins at a cut, its piece comes second.

    Returns:
        (P + 1,) int32: where pieces begin, some of them empty, and ``size``; (S + 1,)
        int32: the first piece of each segment.
    """
    cuts = mx.arange(0, size, SEGMENT_CUTS["piece"], dtype=mx.int32)
    before = mx.searchsorted(cuts, starts).view(mx.int32)
    starts_before = mx.searchsorted(starts, cuts, side="right").view(mx.int32)
    firsts = mx.arange(starts.size, dtype=mx.int32) + before
    places = mx.arange(cuts.size, dtype=mx.int32) + starts_before
    bounds = mx.zeros((starts.size + cuts.size,), dtype=mx.int32)
    bounds[mx.concatenate([firsts, places])] = mx.concatenate([starts, cuts])
    return bounds, firsts

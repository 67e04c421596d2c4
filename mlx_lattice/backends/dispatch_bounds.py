"""Bounds of one dispatch on a GPU, and how longer work is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import mlx.core as mx

from .. import devices
from ..devices import Device

# Seconds that one Metal dispatch may hold the slowest Apple GPU: the watchdog kills
# what holds a GPU for long, callers then see empty results, and the screen waits.
DISPATCH_SECONDS = 0.1

# Work of a Metal dispatch: what a unit takes of the peak that bounds it, operations or
# bytes, and the share of the peak that kernels reach where they do worst. More work
# than the slowest chip does in 100 ms is cut, mostly into rows.
DISPATCH = {
    # Simdgroup matrices, which are bounded by the chip they run on instead.
    "matrices": {"operations": 2, "share": 1 / 4},
    # Sums in one thread, both operands from cache every time.
    "multiply_adds": {"operations": 2, "share": 1 / 20},
    # Features and table entries of at most 4 bytes, gathered row by row.
    "elements": {"bytes": 4, "share": 1 / 2},
    # Look-ups in a hash table: a slot and a row, each a cache line of 128 bytes.
    "probes": {"bytes": 256, "share": 1 / 2},
}

# How Metal cuts what one thread or one table would be too long for. All depend on sizes
# only, so that sums have one order.
METAL_CUTS = {
    # Edges of one split of a weight gradient that one thread may add up, and splits.
    "thread_edges": 1 << 18,
    "splits": 256,
    # Rows that one thread lists edges of: few enough to fill the GPU, and the counts of
    # all blocks stay small.
    "edge_block": 64,
    # Candidates of one hash table of generated rows: 256 MB of slots.
    "candidates": 1 << 25,
}

# More dispatches than anyone waits for: plans list them, so their number is bounded.
MOST_DISPATCHES = 1 << 20

# On a GPU, entries of a segment or edges of a row that one thread may add up, and of
# the pieces of longer ones: a thread alone adds about ten million a second.
SEGMENT_CUTS = {"longest": 1024, "piece": 256}


def dispatch_limit(work: str) -> int:
    """Return how much of a kind of work one Metal dispatch may do, on every chip."""
    return _limit(**DISPATCH[work])


@lru_cache(maxsize=64)
def _limit(share: float, **takes: int) -> int:
    least = []
    for chip in devices.PROFILES.values():
        if chip.backend == devices.METAL:
            peaks = {"operations": 1e12 * chip.tflops, "bytes": 1e9 * chip.bandwidth}
            least += [
                rate / takes[peak] for peak, rate in peaks.items() if peak in takes
            ]
    return max(1, int(DISPATCH_SECONDS * share * min(least)))


def matrix_limit(device: Device) -> int:
    """Return the multiply-adds of one dispatch of matrix tiles on a chip."""
    takes = DISPATCH["matrices"]
    rate = takes["share"] * 1e12 * device.tflops / takes["operations"]
    return max(1, int(DISPATCH_SECONDS * rate))


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def cuts(
    count: int, work: int, limit: int, most: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (first, length) slices of ``count`` units, none above ``limit`` of work.

    Args:
        count: units to cut.
        work: what all of them cost, in the terms of ``limit``.
        limit: the most that a slice may cost; one unit is never cut.
        most: what a single unit may cost; by default all cost the same.

    Raises:
        ValueError: there would be more than ``MOST_DISPATCHES`` slices.
    """
    pieces = ceil_div(work, limit)
    if pieces > 1 and most is not None:
        pieces = ceil_div(count, max(1, limit // max(most, 1)))
    pieces = min(count, max(1, pieces))
    if pieces > MOST_DISPATCHES:
        raise ValueError(
            f"this work would be cut into {pieces:,} dispatches of a GPU, and "
            f"{MOST_DISPATCHES:,} are allowed; take fewer rows or channels at a time"
        )
    length = ceil_div(count, pieces) if count else 0
    for first in range(0, count, length or 1):
        yield first, min(length, count - first)


def by_rows(
    rows: int,
    work: int,
    limit: int,
    launch: Callable[[int, int], list[mx.array]],
    *,
    most: int | None = None,
    axis: int = 0,
) -> list[mx.array]:
    """Return the outputs of launches over slices of rows, joined along the rows.

    Args:
        rows: rows of every output.
        work: what all of them cost.
        limit: the most that one launch may cost.
        launch: called with (first row, number of rows).
        most: what a single row may cost; by default all cost the same.
        axis: axis of the outputs that holds the rows.
    """
    parts = [launch(first, length) for first, length in cuts(rows, work, limit, most)]
    if len(parts) == 1:
        return parts[0]
    return [mx.concatenate(outputs, axis) for outputs in zip(*parts, strict=True)]

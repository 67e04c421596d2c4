"""Channel-to-space in blocks: wide rows go straight into the fine rows there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from ..geometry import sync
from ..memory import assembled
from .channels import Slots


def fine_rows(
    parts: Iterator[tuple[int, mx.array]],
    slots: Slots,
    volume: int,
    finish: Callable[[mx.array], mx.array],
) -> mx.array:
    """Return ``finish`` of the fine rows of wide ones, (M, C).

    Args:
        parts: (first coarse row, (n, volume * C) features) of blocks of coarse rows, in
            order, equal in length but for the last.
        slots: of the fine rows.
        volume: fine cells of a coarse one.
        finish: a function of (m, C) rows, each by itself.
    """
    count = slots.slot.shape[0]

    def blank(part: mx.array) -> mx.array:
        return finish(mx.zeros((1, part.shape[1]), dtype=part.dtype))

    return assembled(_fine_parts(parts, slots, volume, finish), count, blank)


def _fine_parts(
    parts, slots: Slots, volume: int, finish
) -> Iterator[tuple[int | mx.array, mx.array]]:
    """Yield (rows, features) of the fine rows of each block that has some."""
    count, total = slots.slot.shape[0], slots.row.shape[0] // volume
    ends, is_empty = None, True
    for first, part in parts:
        length, width = part.shape[0], part.shape[1] // volume
        part = part.reshape(length * volume, width)
        if length == total:
            yield 0, finish(rows_of(part, slots, 0, count))
            return
        if ends is None:
            # Fine rows by their slots; those that have none, -1, come first.
            rows = mx.argsort(slots.slot)
            taken = slots.slot[rows]
            starts = [*range(0, total, length), total]
            starts = mx.array(starts, dtype=taken.dtype) * volume
            (ends,) = sync.read(mx.searchsorted(taken, starts))
            block = iter(zip(ends, ends[1:], strict=False))
        begin, end = next(block)
        if end > begin:
            own, is_empty = finish(part[taken[begin:end] - first * volume]), False
            del part
            yield rows[begin:end], own
            del own
    if is_empty:
        zeros = mx.zeros((1, width), dtype=part.dtype)
        yield 0, mx.broadcast_to(finish(zeros), (count, width))


def rows_of(parts: mx.array, slots: Slots, first: int, last: int) -> mx.array:
    """Return what the slots of fine rows from first to last - 1 hold, zeros for none.

    Args:
        parts: (slots, C).
        slots: of the fine rows.
        first, last: fine rows.
    """
    at = slots.slot[first:last]
    if slots.whole:
        return parts[at]
    if not parts.shape[0]:
        return mx.zeros((last - first, parts.shape[1]), dtype=parts.dtype)
    zero = mx.zeros((), dtype=parts.dtype)
    return mx.where((at >= 0)[:, None], parts[mx.maximum(at, 0)], zero)

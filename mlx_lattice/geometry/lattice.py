"""Arithmetic of coordinate rows (batch, x, y, ...): the batch column never changes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..checks import INT32_LIMIT
from .keys import Offsets, bounds_of


def floor_divide(a: mx.array, by: int) -> mx.array:
    """Return ``floor(a / by)`` for integers, whichever way the backend truncates."""
    if by == 1:
        return a
    # 64 bits, since the multiple below -2^31 may not be an int32.
    wide = a.astype(mx.int64)
    remainder = ((wide % by) + by) % by
    return ((wide - remainder) // by).astype(a.dtype)


def shifted(rows: mx.array, offset: Sequence[int]) -> mx.array:
    """Return int64 rows moved by a spatial offset."""
    return rows.astype(mx.int64) + mx.array([0, *offset], dtype=mx.int64)


def scaled(rows: mx.array, stride: Sequence[int]) -> mx.array:
    """Return int64 rows with each spatial column multiplied by its stride."""
    return rows.astype(mx.int64) * mx.array([1, *stride], dtype=mx.int64)


def cells(rows: mx.array, stride: Sequence[int]) -> mx.array:
    """Return rows with each spatial column floor-divided by its stride."""
    if set(stride) == {1}:
        return rows
    columns = [rows[:, 0]]
    columns += [floor_divide(rows[:, 1 + a], s) for a, s in enumerate(stride)]
    return mx.stack(columns, axis=1)


def negated(offsets: Offsets) -> tuple[tuple[int, ...], ...]:
    """Return every offset with its sign changed."""
    return tuple(tuple(-v for v in offset) for offset in offsets)


def as_int32(rows: mx.array, what: str) -> mx.array:
    """Return int64 rows as int32. Reads their bounds.

    Raises:
        ValueError: a value does not fit; the sentence names ``what`` and the range.
    """
    low, high = bounds_of(rows)
    if min(low) < -INT32_LIMIT or max(high) >= INT32_LIMIT:
        raise ValueError(
            f"{what} would reach coordinates {min(low)} to {max(high)}, beyond int32; "
            "move the input nearer to the origin or use a smaller stride"
        )
    return rows.astype(mx.int32)

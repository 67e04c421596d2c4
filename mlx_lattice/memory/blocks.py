"""Functions of rows by themselves, computed in blocks of rows under a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from .. import devices
from . import limit
from .stages import boundary

# Fewest rows of a block, by backend. MLX's products on GPUs choose kernels, and so the
# order of sums, by the number of rows where that is small; ours on the CPU do not.
LEAST_ROWS = {devices.CPU: 1024, "*": 16384}


def block_rows(rows: int, row_bytes: int) -> int:
    """Return the rows of a block, all of them where no limit holds.

    Blocks are as equal as they can be, and of a block's share of the limit.

    Args:
        rows: in all.
        row_bytes: what a row takes while its block is computed.
    """
    held = limit.active()
    if held is None or not rows:
        return rows
    least = LEAST_ROWS.get(devices.current().backend, LEAST_ROWS["*"])
    if rows * row_bytes <= held.share("whole"):
        return rows
    most = max(least, held.share("block") // max(1, row_bytes))
    return -(-rows // max(1, rows // most)) if rows >= 2 * most else rows


def cut(rows: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of blocks of rows."""
    for first in range(0, rows, max(1, each)):
        yield first, min(rows, first + each)


def by_rows(
    function: Callable[..., mx.array], *arrays: mx.array, row_bytes: int
) -> mx.array:
    """Return a function of rows, each by itself, in blocks where a limit holds.

    Args:
        function: of the arrays' rows; keeps their number.
        *arrays: (N, ...) each.
        row_bytes: what a row takes inside the function.
    """
    rows = arrays[0].shape[0]
    each = block_rows(rows, row_bytes)
    if each >= rows:
        return function(*arrays)
    parts = (
        (first, function(*(array[first:last] for array in arrays)))
        for first, last in cut(rows, each)
    )
    return joined(parts, rows)


def joined(parts: Iterator[tuple[int, mx.array]], rows: int) -> mx.array:
    """Return blocks of rows as one array.

    Args:
        parts: (first row, features) of each block, in order; that of all rows alone
            is returned as it is.
        rows: in all.
    """
    return assembled(parts, rows, None)


def assembled(
    parts: Iterator[tuple[int | mx.array, mx.array]],
    rows: int,
    blank: Callable[[mx.array], mx.array] | None,
) -> mx.array:
    """Return blocks as one array.

    Small ones are put into it together, at the end. Else each is as it comes, and
    waited for: what is under way cannot be written into without a copy of the whole.

    Args:
        parts: (first row or rows, features) of each block; one that is first and of all
            rows is returned as it is.
        rows: in all.
        blank: returns the row, (1, C), that is where nothing is put, of a block; by
            default zeros.
    """

    def put(whole: mx.array | None, at: int | mx.array, part: mx.array) -> mx.array:
        if whole is None:
            whole = mx.zeros((rows, *part.shape[1:]), dtype=part.dtype)
            if blank is not None:
                whole = mx.broadcast_to(blank(part), whole.shape)
        whole[slice(at, at + len(part)) if isinstance(at, int) else at] = part
        return whole

    whole, held, kept = None, limit.active(), []
    for at, part in parts:
        if isinstance(at, int) and part.shape[0] == rows:
            return part
        nbytes = rows * part.nbytes // max(1, part.shape[0])
        if held is not None and nbytes <= held.share("whole"):
            boundary(part)
            kept.append((at, part))
        else:
            whole = put(whole, at, part)
            del part  # or it stays until the next one has come
            boundary(whole, finish=True)
    for at, part in kept:
        whole = put(whole, at, part)
    return whole

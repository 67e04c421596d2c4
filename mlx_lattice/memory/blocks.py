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
    """Return blocks as one array, each put into its place as it comes.

    Args:
        parts: (first row, features) of each block, in order; that of all rows alone
            is returned as it is.
        rows: in all.
    """
    whole = None
    for first, part in parts:
        if part.shape[0] == rows:
            return part
        if whole is None:
            whole = mx.zeros((rows, *part.shape[1:]), dtype=part.dtype)
        whole[first : first + part.shape[0]] = part
        del part  # or it stays until the next one has come
        boundary(whole)
    return whole

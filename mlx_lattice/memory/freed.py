"""Freed memory that MLX keeps: for what it serves no new memory is mapped."""

from __future__ import annotations

from bisect import bisect_left, insort

from .flight import PAGE


class Freed:
    """Buffers that were freed, by their bytes.

    Args:
        before: bytes that were kept when the first is taken, in buffers of any size.
    """

    def __init__(self, before: int):
        self._before, self._sizes = before, []

    def add(self, nbytes: int) -> None:
        """Keep a buffer."""
        insort(self._sizes, nbytes)

    def take(self, nbytes: int) -> bool:
        """Whether a buffer is there for so many bytes, which takes it.

        As MLX does: the least that has room, unless more than it needs would be lost.
        """
        at = bisect_left(self._sizes, nbytes)
        fits = at < len(self._sizes)
        if fits and self._sizes[at] < min(2 * nbytes, nbytes + 2 * PAGE):
            del self._sizes[at]
            return True
        self._before -= nbytes
        return self._before >= 0

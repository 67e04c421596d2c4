"""The kinds of matrix tiles on CUDA: what makes the shape of each, and its memory."""

from __future__ import annotations

from typing import NamedTuple


class SortedTile(NamedTuple):
    """Shape of PersistentTile of sorted_implicit_gemm: its template's first parameters.

    Attributes:
        consumers: warpgroups that multiply.
        blocks: blocks of 64 rows of each.
        producers: warpgroups that copy.
        width: output channels.
        stages: buffers of 64 summed channels, in shared memory.
        per_multiprocessor: thread blocks that a multiprocessor holds at once.
    """

    consumers: int
    blocks: int
    producers: int
    width: int
    stages: int
    per_multiprocessor: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.consumers * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + self.producers)


class Tile(NamedTuple):
    """Shape of WideTile and EdgeTile: a consumer warpgroup has 64 rows of the tile.

    ``splits``: of the sums, side by side in a block, each with such warps and stages.
    """

    consumers: int
    producer_threads: int
    width: int
    stages: int
    per_multiprocessor: int
    splits: int = 1

    @property
    def rows(self) -> int:
        """Rows (of the output, or of dW) of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.splits * (128 * self.consumers + self.producer_threads)


Shape = SortedTile | Tile


def shared_bytes(tile: Shape, weights: int = 1) -> int:
    """Return the dynamic shared memory of a block.

    weights: parts of a weight in a stage.
    """
    stages = tile.stages * (tile.splits if isinstance(tile, Tile) else 1)
    return stages * 128 * (tile.rows + weights * _lines(tile.width)) + 1024


def _lines(width: int) -> int:
    """Return the lines of 128 bytes that a stage's weights take.

    Those that run across the sums come in whole atoms of 64.
    """
    return width if width <= 32 else -(-width // 64) * 64

"""Views of a relation: edges by group, rows sorted by mask, the coverage report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx


class Csr(NamedTuple):
    """Edges grouped by one of their columns.

    Group g owns ``edges[indptr[g]:indptr[g + 1]]``.
    """

    indptr: mx.array  # (groups + 1,) int32
    edges: mx.array  # (E, 3) int32 rows (input row, output row, offset)


class SortedRows(NamedTuple):
    """Output rows ordered by the Gray-code rank of their occupancy mask."""

    rows: mx.array  # (N_out,) int32: the output row at each sorted place
    table: mx.array  # (N_out, K) int32: the neighbour table in sorted order
    masks: mx.array  # (blocks, words) uint32: offsets that any row of a block uses
    block: int  # rows of a block

    def tile_offsets(self, tile: int) -> list[list[int]]:
        """Return for each tile of ``tile`` rows the offsets that any of them uses."""
        if tile % self.block:
            raise ValueError(f"tile must be a multiple of {self.block}; got {tile}")
        blocks, step = self.masks.tolist(), tile // self.block
        lists = []
        for start in range(0, len(blocks), step):
            bits = [0] * self.masks.shape[1]
            for mask in blocks[start : start + step]:
                bits = [a | b for a, b in zip(bits, mask, strict=True)]
            lists.append(
                [
                    32 * w + b
                    for w, word in enumerate(bits)
                    for b in range(32)
                    if word >> b & 1
                ]
            )
        return lists


@dataclass(frozen=True)
class Coverage:
    """What a relation reaches and what it leaves out.

    Attributes:
        n_in, n_out, volume, edges: the relation's sizes.
        out_degrees: number of output rows with 0, 1, ... edges.
        in_degrees: number of input rows with 0, 1, ... edges.
        unused_inputs: (U,) int32 input rows with no edge: their features are lost.
        empty_outputs: (V,) int32 output rows with no edge: they hold the bias alone.
    """

    n_in: int
    n_out: int
    volume: int
    edges: int
    out_degrees: tuple[int, ...]
    in_degrees: tuple[int, ...]
    unused_inputs: mx.array
    empty_outputs: mx.array

    def __str__(self) -> str:
        """Return the report as a person reads it."""
        per_row = self.edges / self.n_out if self.n_out else 0.0
        filled = self.edges / (self.n_out * self.volume) if self.n_out else 0.0
        lines = [
            f"{self.edges:,} edges from {self.n_in:,} to {self.n_out:,} rows: "
            f"{per_row:.1f} a row, {filled:.0%} of {self.volume} offsets",
            f"inputs with no edge   {self.unused_inputs.size:,}",
            f"outputs with no edge  {self.empty_outputs.size:,}",
            "edges: output rows    "
            + ", ".join(f"{d}: {n:,}" for d, n in enumerate(self.out_degrees) if n),
            "edges: input rows     "
            + ", ".join(f"{d}: {n:,}" for d, n in enumerate(self.in_degrees) if n),
        ]
        return "\n".join(lines)

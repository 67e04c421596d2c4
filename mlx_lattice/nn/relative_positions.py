"""A table of biases for attention's scores, by relative positions."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn import Module

from ..ops.relative import biases
from .parameters import Parameters

__all__ = ["RelativePositions"]


class RelativePositions(Parameters, Module):
    """Adds to each score an entry an axis, by how far the key lies from the query.

    Point Transformer V3's ``RPE``; the table is named as there, for
    ``ops.serialized_attention(table=...)``.

    Args:
        patch_size (int): The rows of a patch: differences count up to
            ``int(2 * (4 * patch_size) ** (1 / dims))`` cells, those beyond as that.
        num_heads (int): The number of heads.
        dims (int): The number of spatial axes. Default: ``3``.
    """

    def __init__(self, patch_size: int, num_heads: int, dims: int = 3):
        super().__init__()
        self.bound, self.dims = int((4 * patch_size) ** (1 / dims) * 2), dims
        shape = dims * (2 * self.bound + 1), num_heads
        self.rpe_table = 0.02 * mx.random.truncated_normal(-100.0, 100.0, shape)

    def _extra_repr(self) -> str:
        return f"bound={self.bound}, num_heads={self.rpe_table.shape[1]}"

    def __call__(self, apart: mx.array) -> mx.array:
        """Return (..., heads) biases of (..., dims) integer query cell minus key."""
        return biases(self.rpe_table, apart)

"""Rows that a mask keeps on Metal: MLX's running sums, then one launch."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry.unique import KeptRows, none_of, running_sums
from .dispatch_bounds import cuts, dispatch_limit
from .gpu_kernel import GpuKernel, Interface
from .metal_unique import piece_bounds

# A dispatch covers rows from `first` on; `before` kept ones were written by others.
_KEPT = Interface(
    "KeptRows",
    ("mask", "ends", "coords"),
    ("rows", "kept", "places"),
    (("first", "0"), ("before", "0")),
)


@cache
def _kernel(width: int) -> GpuKernel:
    return GpuKernel(
        METAL,
        "kept_rows",
        ("kept_rows",),
        _KEPT,
        (("WIDTH", width),),
        place="thread_position_in_grid.x",
    )


class StartedRows:
    """Rows that a mask keeps, launched; see ``geometry.protocol.StartedRows``."""

    def __init__(self, mask: mx.array, coords: mx.array):
        self._given = mask, running_sums(mask.astype(mx.int32)), coords
        self.count = self._given[1][-1:]

    def kept(self, count: int) -> KeptRows:
        """Return them."""
        _, ends, coords = self._given
        n, width = coords.shape
        pieces = list(cuts(n, 3 * n * width, dispatch_limit("elements")))
        bounds, parts = piece_bounds(pieces, ends, count), []
        for (first, length), a, b in zip(pieces, bounds[:-1], bounds[1:], strict=True):
            if a == b:
                nowhere = mx.full((length,), -1, dtype=mx.int32)
                parts.append(none_of(coords, nowhere))
                continue
            shapes = (b - a,), (b - a, width), (length,)
            outputs = [(shape, mx.int32) for shape in shapes]
            rows, kept, places = _kernel(width)(
                self._given, outputs, (length,), first=first, before=a
            )
            parts.append(KeptRows(rows, places, kept))
        if len(parts) == 1:
            return parts[0]
        return KeptRows(*map(mx.concatenate, zip(*parts, strict=True)))

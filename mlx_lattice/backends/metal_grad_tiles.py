"""How weight gradients on Metal are cut: tiles of dW[k], and ranges of output rows.

Every number comes from ``thresholds``.
"""

from __future__ import annotations

from typing import NamedTuple

from ..devices import Device
from ..routes import thresholds
from .dispatch_bounds import ceil_div
from .metal_tiles import TENSOR_HEIGHTS, TENSOR_WIDTH

GRAD_HEIGHTS, GRAD_WIDTHS = (16, 32, 64, 128), (16, 32, 64)


def grad_tile(c_in: int, c_out: int) -> tuple[int, int]:
    """Return the smallest tile of dW[k] that holds the channels, or the largest."""
    high = next(t for t in GRAD_HEIGHTS if t >= min(c_in, GRAD_HEIGHTS[-1]))
    return high, next(t for t in GRAD_WIDTHS if t >= min(c_out, GRAD_WIDTHS[-1]))


def tensor_grad_tile(c_in: int, c_out: int) -> tuple[int, int, int]:
    """Return the tile of dW[k] through TensorOps, and the rows of a simdgroup of it.

    Two simdgroups have more than 64 rows, and tiles share the rows evenly.
    """
    tiles = ceil_div(c_in, 2 * TENSOR_HEIGHTS[0])
    down = 1 if c_in <= TENSOR_HEIGHTS[0] else 2
    tall = 16 * ceil_div(c_in, 16 * tiles * down)
    return tall * down, TENSOR_WIDTH * min(2, ceil_div(c_out, TENSOR_WIDTH)), tall


class GradCut(NamedTuple):
    """How the work of a weight gradient is cut.

    Attributes:
        splits: ranges of output rows, whose sums are added.
        sliced: whether all offsets of a range take a tile of the side with more
            channels before the next one, so that the range's features need not stay in
            cache but for those of such tiles.
    """

    splits: int
    sliced: bool = False


def grad_cut(
    edges: int,
    longest: int,
    features: int,
    shape: tuple[int, ...],
    tile: tuple[int, int],
    item: int,
    device: Device,
) -> GradCut:
    """Return into how many ranges of output rows the edges are cut, and their order.

    Enough to fill the GPU evenly, and for the features of a range, those of a slice in
    it, or those of one offset, to stay in cache, whichever moves the fewest bytes with
    the partials.

    Args:
        edges: of all offsets.
        longest: the most edges that one offset may have.
        features: bytes of both sides.
        shape: (K, C_in, C_out).
        tile: rows and columns of a tile of dW[k].
        item: bytes of an element.
        device: whose tiles.
    """
    volume, c_in, c_out = shape
    tiles = ceil_div(c_in, tile[0]) * ceil_div(c_out, tile[1])
    cached = thresholds.value(thresholds.CACHED_FEATURES, device)
    gathered, partial = edges * (c_in + c_out) * item, volume * c_in * c_out * 8
    # One offset's tiles pass the side with fewer channels first: that one has to stay,
    # at an edge a row.
    staying = features * min(c_in, c_out) // (c_in + c_out)
    together, apart = ceil_div(features, cached), ceil_div(staying, cached)
    least = features + together * partial
    if gathered + apart * partial < least:
        together, least = apart, gathered + apart * partial
    # The slice before is still held while the next one comes; and the list of edges.
    wide, high = (c_out, tile[1]) if c_in <= c_out else (c_in, tile[0])
    window = staying + 2 * (features - staying) * min(high, wide) // wide + 12 * edges
    slices = ceil_div(window, thresholds.value(thresholds.CACHED_WINDOW, device))
    sliced = wide > 2 * high and features + slices * partial < least
    together = slices if sliced else together
    filling = thresholds.value(thresholds.GRAD_FILLING, device) * device.cores
    # Offsets have up to three times the edges of the mean one: of what a threadgroup's
    # place on the GPU has to do, no range of one may take more than its share.
    share = thresholds.value(thresholds.LONGEST_RANGE, device)
    even = ceil_div(filling * longest, max(1, int(share * edges * tiles)))
    filling = max(filling // (volume * tiles), even)
    # Edges that make a split worth its partial; partials within 8 times the features.
    worth = ceil_div(edges, volume * thresholds.value(thresholds.SPLIT_EDGES, device))
    most = min(worth, 16 * features // partial)
    splits = max(1, min(max(filling, together), most))
    return GradCut(splits, sliced and splits == together)

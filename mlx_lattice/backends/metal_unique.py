"""Sorted unique rows on Metal: keys that compare as rows do, and MLX's sort.

Boxes whose cells 64-bit keys cannot number are sorted by ranks, in MLX operations.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import sync
from ..geometry.curves import stable_order
from ..geometry.keys import (
    KEY_LIMIT,
    Bounds,
    bounds_of,
    cell_count,
    column_weights,
    row_keys,
)
from ..geometry.unique import UniqueRows
from .dispatch_bounds import by_rows, cuts, dispatch_limit
from .gpu_kernel import GpuKernel, Interface

# A float32 product of extents is compared with it; no rounding reaches twice as far.
SAFE_KEY_LIMIT = float(KEY_LIMIT // 2)

# A dispatch covers the sorted places, or rows, from `first` on; `before` unique rows
# were written by others.
_SIZES = ("first", "0"), ("before", "0")
_PACK = Interface("UniqueRows", ("coords", "least", "weight"), ("keys",), _SIZES)
_STARTS = Interface("UniqueRows", ("coords", "order"), ("starts",), _SIZES)
_UNIQUE = Interface(
    "UniqueRows",
    ("coords", "order", "starts", "ends"),
    ("rows", "inverse"),
    _SIZES,
)


@cache
def _kernel(symbol: str, interface: Interface, width: int) -> GpuKernel:
    return GpuKernel(
        METAL,
        symbol,
        ("unique_rows",),
        interface,
        (("WIDTH", width),),
        place="thread_position_in_grid.x",
    )


def _pack(coords: mx.array, least: mx.array, weights: mx.array) -> mx.array:
    """Return (N,) int64 unique keys in the order of the rows, and of their places.

    Args:
        coords: (N, 1 + D) int32, which may repeat.
        least: (1 + D,) int64 of their box.
        weights: (1 + D,) int64: what a step along each column counts, multiples of N.
    """
    kernel = _kernel("pack_rows", _PACK, coords.shape[1])
    return by_places(kernel, [coords, least, weights], mx.int64, before=0)


def unique_rows(
    coords: mx.array, box: Bounds | None = None, count: int | None = None
) -> UniqueRows:
    """Return the sorted unique rows of (N, 1 + D) int32 coordinates.

    Reads one size, but for what is given. See ``Geometry``.
    """
    n, width = coords.shape
    if n == 0:
        none = mx.zeros((0,), dtype=mx.int32)
        return UniqueRows(coords, none)
    if box is not None and cell_count(box) * n < KEY_LIMIT:
        weights = [n * weight for weight in column_weights(box)]
        numbers = (mx.array(list(v), dtype=mx.int64) for v in (box[0], weights))
        order = mx.argsort(_pack(coords, *numbers)).astype(mx.int32)
        starts, ends = _group_starts(coords, order)
        count = sync.read(ends[-1])[0] if count is None else count
        return UniqueRows(*_write_unique(coords, order, starts, ends, count))
    least = coords.min(axis=0).astype(mx.int64)
    extents = coords.max(axis=0).astype(mx.int64) - least + 1
    after = mx.concatenate([extents[1:], mx.array([n], dtype=mx.int64)])
    keys = _pack(coords, least, mx.cumprod(after, reverse=True))
    order = mx.argsort(keys).astype(mx.int32)
    starts, ends = _group_starts(coords, order)
    # In float32 a product too great for 64 bits stays great.
    cells = extents.astype(mx.float32).prod() * n
    fits = (cells < SAFE_KEY_LIMIT).astype(mx.int32)
    count, fits = sync.read(mx.stack([ends[-1], fits]))[0]
    if not fits:
        order = stable_order(row_keys(coords, bounds_of(coords)))
        starts, ends = _group_starts(coords, order)
        count = sync.read(ends[-1])[0]
    return UniqueRows(*_write_unique(coords, order, starts, ends, count))


def _write_unique(coords, order, starts, ends, count) -> tuple[mx.array, mx.array]:
    """Return the unique rows, and of each given row its place among them."""
    n, width = coords.shape
    pieces = list(cuts(n, 3 * n * width, dispatch_limit("elements")))
    bounds = piece_bounds(pieces, ends, count)
    rows, inverse, kernel = [], None, _kernel("write_unique_rows", _UNIQUE, width)
    for (first, length), a, b in zip(pieces, bounds[:-1], bounds[1:], strict=True):
        listed, places = kernel(
            [coords, order, starts, ends],
            [((max(1, b - a), width), mx.int32), ((n,), mx.int32)],
            (length,),
            fill=-1,
            first=first,
            before=a,
        )
        rows.append(listed[: b - a])
        inverse = places if inverse is None else mx.maximum(inverse, places)
    return rows[0] if len(rows) == 1 else mx.concatenate(rows), inverse


def piece_bounds(pieces: list[tuple[int, int]], ends: mx.array, count: int) -> list:
    """Return how many rows there are up to each piece's start, and in all.

    Args:
        pieces: (first, length) of the places, one after another.
        ends: (N,) rows up to each place, itself included. Read where several are.
        count: in all.
    """
    if len(pieces) < 2:
        return [0, count]
    lasts = mx.array([first + length - 1 for first, length in pieces])
    return [0, *sync.read(ends[lasts])[0]]


def by_places(
    kernel: GpuKernel, inputs: list[mx.array], dtype: mx.Dtype, **sizes: int
) -> mx.array:
    """Launch over slices of the N places, one thread each, and return (N,) results."""
    n, width = inputs[0].shape

    def launch(first: int, length: int) -> list[mx.array]:
        outputs = [((length,), dtype)]
        return kernel(inputs, outputs, (length,), first=first, **sizes)

    return by_rows(n, 3 * n * width, dispatch_limit("elements"), launch)[0]


def _group_starts(coords: mx.array, order: mx.array) -> tuple[mx.array, mx.array]:
    """Return (N,) int32: 1 where equal rows begin in order; running totals."""
    kernel = _kernel("group_starts", _STARTS, coords.shape[1])
    starts = by_places(kernel, [coords, order], mx.int32, before=0)
    return starts, mx.cumsum(starts)

"""Coordinate sets on Metal: hash look-ups, neighbour tables, rows of new sets.

The same results, bit for bit, as the portable builders of ``geometry``.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..geometry import portable, sync
from ..geometry.portable import Bounds
from . import dispatch_bounds
from .dispatch_bounds import dispatch_limit
from .metal_kernels import Kernel, by_rows, ceil_div, cuts
from .metal_unique import row_order, unique_rows

ITSELF, CELL, REACH, EXPAND = range(4)

_INSERT = Kernel(
    "insert_candidates",
    ("hash_table",),
    ("coords", "offsets", "geometry", "sizes"),
    ("slots", "beyond"),
    "insert_candidates<WIDTH, RULE>(coords, offsets, geometry, sizes, slots, beyond, "
    "thread_position_in_grid.x);",
    atomic=True,
)
_COLLECT = Kernel(
    "collect_candidates",
    ("hash_table",),
    ("coords", "offsets", "geometry", "slots", "ends", "sizes"),
    ("rows",),
    "collect_candidates<WIDTH, RULE>(coords, offsets, geometry, slots, ends, sizes, "
    "rows, thread_position_in_grid.x);",
)
_NEIGHBOURS = Kernel(
    "neighbour_table",
    ("hash_table",),
    ("slots", "in_coords", "out_coords", "offsets", "stride", "sizes"),
    ("table",),
    "neighbour_table<WIDTH, TRANSPOSED>(slots, in_coords, out_coords, offsets, stride, "
    "sizes, table, thread_position_in_grid.xy);",
)
_SUBMANIFOLD = Kernel(
    "submanifold_table",
    ("hash_table",),
    ("slots", "coords", "offsets", "stride", "sizes"),
    ("table",),
    "submanifold_table<WIDTH>(slots, coords, offsets, stride, sizes, table, "
    "thread_position_in_grid.xy);",
)


def _integers(values: Sequence, dtype: mx.Dtype = mx.int32) -> mx.array:
    return mx.array(list(values), dtype=dtype).flatten()


def _power_of_two(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    def __init__(self, coords: mx.array):
        self.coords, n = coords, coords.shape[0]
        self.slots, self.masks = mx.full((1,), -1, dtype=mx.int32), [0, 0]
        if n:
            none = _integers([0]), _integers([0], mx.int64)
            parts, _ = _insert(coords, ITSELF, *none, 1)
            self.slots = parts[0] if len(parts) == 1 else mx.concatenate(parts)
            self.masks = [self.slots.size - 1, parts[0].size - 1]

    def find(self, rows: mx.array) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self.table(rows, [(0,) * dims], (1,) * dims)[:, 0]

    def facts(self) -> list[mx.array]:
        """Return small arrays for ``settle``: bounds, the first repeat and its like."""
        n = self.coords.shape[0]
        if n == 0:
            return []
        before, rows = self.find(self.coords), mx.arange(n, dtype=mx.int32)
        at = mx.where(before == rows, n, rows).min()
        repeat = mx.stack([before[mx.minimum(at, n - 1)], at])
        return [self.coords.min(axis=0), self.coords.max(axis=0), repeat]

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        low, high, (before, at) = facts
        pair = None if at == self.coords.shape[0] else (before, at)
        return (tuple(low), tuple(high)), pair

    def first_duplicate(self) -> tuple[int, int] | None:
        """Return the earliest row that repeats one before it, as (before, row)."""
        if self.coords.shape[0] < 2:
            return None
        return self.settle(sync.read(*self.facts()))[1]

    def table(
        self,
        out_coords: mx.array,
        offsets: Sequence[Sequence[int]],
        stride: Sequence[int],
        transposed: bool = False,
    ) -> mx.array:
        """Return the (N_out, K) int32 input row of each output row and offset, or -1.

        Args:
            out_coords: (N_out, 1 + D) int32.
            offsets: K offsets of D integers.
            stride: D integers.
            transposed: whether ``out = in * stride + offset_k``, not
                ``in = out * stride + offset_k``.
        """
        n_out, volume = out_coords.shape[0], len(offsets)
        if n_out == 0 or self.coords.shape[0] == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        flat, steps = _integers(offsets), _integers(stride)

        def launch(first: int, rows: int) -> list[mx.array]:
            return _NEIGHBOURS(
                [self.slots, self.coords, out_coords, flat, steps],
                [first, volume, *self.masks],
                [((rows, volume), mx.int32)],
                (volume, rows),
                WIDTH=out_coords.shape[1],
                TRANSPOSED=transposed,
            )

        return by_rows(n_out, n_out * volume, dispatch_limit("probes"), launch)[0]

    def submanifold_table(self, offsets: Sequence[Sequence[int]]) -> mx.array:
        """Return the (N, K) table of a point-symmetric kernel over the set itself.

        Searches half of the offsets, as FlexGEMM does. The rows must be unique.
        """
        n, volume = self.coords.shape[0], len(offsets)
        dims, half = self.coords.shape[1] - 1, volume // 2
        limit = dispatch_limit("probes")
        if n == 0 or volume == 1 or n > limit:
            return self.table(self.coords, offsets, (1,) * dims)
        pieces = list(cuts(half, n * half, limit))

        def launch(first: int, count: int) -> mx.array:
            columns = volume if len(pieces) == 1 else 2 * count
            return _SUBMANIFOLD(
                [
                    self.slots,
                    self.coords,
                    _integers(offsets[first : first + count]),
                    _integers((1,) * dims),
                ],
                [columns, *self.masks],
                [((n, columns), mx.int32)],
                (count, n),
                init=-1,
                WIDTH=1 + dims,
            )[0]

        parts = [launch(*piece) for piece in pieces]
        if len(parts) == 1:
            return parts[0]
        halves = [mx.split(part, 2, axis=1) for part in parts]
        centre = [mx.arange(n, dtype=mx.int32)[:, None]] * (volume % 2)
        left, right = zip(*halves, strict=True)
        return mx.concatenate([*left, *centre, *reversed(right)], axis=1)


def neighbour_table(
    in_coords: mx.array,
    out_coords: mx.array,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    transposed: bool = False,
) -> mx.array:
    """Return the (N_out, K) int32 input rows, or -1: ``RowTable(in_coords).table``.

    A point-symmetric kernel over a set itself is searched by halves.
    """
    rows = RowTable(in_coords)
    if in_coords is out_coords and set(stride) == {1} and _mirrored(offsets):
        return rows.submanifold_table(offsets)
    return rows.table(out_coords, offsets, stride, transposed)


def _mirrored(offsets: Sequence[Sequence[int]]) -> bool:
    pairs = zip(offsets, reversed(offsets), strict=True)
    return all(a == -b for u, v in pairs for a, b in zip(u, v, strict=True))


def first_duplicate(coords: mx.array) -> tuple[int, int] | None:
    """Return the earliest pair of equal rows, or None. Reads two numbers."""
    return RowTable(coords).first_duplicate()


def _insert(
    coords, rule: int, offsets, box, volume: int
) -> tuple[list[mx.array], mx.array]:
    """Put the candidates of a rule into a hash table, one part a dispatch.

    Returns:
        The slots of each part, and whether a row left the range of int32: above 0.
    """
    candidates = coords.shape[0] * volume
    pieces = _power_of_two(ceil_div(candidates, dispatch_limit("probes")))
    # At least two slots a row. Parts fill alike, to a few in a thousand.
    part = max(16, _power_of_two(2 * candidates) // pieces)
    filled = [
        _INSERT(
            [coords, offsets, box],
            [volume, part * pieces - 1, part - 1, part * piece],
            [((part,), mx.int32), ((1,), mx.int32)],
            (candidates,),
            init=-1,
            WIDTH=coords.shape[1],
            RULE=rule,
        )
        for piece in range(pieces)
    ]
    return [slots for slots, _ in filled], filled[0][1]


def cell_rows(
    coords: mx.array, stride: Sequence[int], bounds: Bounds | None = None
) -> mx.array:
    """Return the sorted unique ``floor(in / stride)`` of (N, 1 + D) int32 rows.

    Reads one size, and the bounds where they are not given.
    """
    zero = [(0,) * len(stride)]
    return _made_rows(coords, CELL, zero, stride, None, bounds, "the convolution")


def reached_rows(
    coords: mx.array,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    spatial_shape: Sequence[int] | None = None,
    bounds: Bounds | None = None,
) -> mx.array:
    """Return the sorted unique rows of every out that some input reaches.

    Reads one size, and the bounds where they are not given.

    Args:
        coords: (N, 1 + D) int32.
        offsets: K offsets of D integers.
        stride: D integers.
        spatial_shape: keep only the rows in ``[0, spatial_shape)``.
        bounds: least and greatest value of every column of ``coords``.

    Raises:
        ValueError: a row would lie beyond int32.
    """
    what = "the convolution"
    return _made_rows(coords, REACH, offsets, stride, spatial_shape, bounds, what)


def expanded_rows(
    coords: mx.array,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    spatial_shape: Sequence[int] | None = None,
    bounds: Bounds | None = None,
) -> mx.array:
    """Return the sorted unique ``in * stride + offset_k`` of all inputs and k.

    Takes and raises what ``reached_rows`` does.
    """
    what = "the generative convolution"
    return _made_rows(coords, EXPAND, offsets, stride, spatial_shape, bounds, what)


def _made_rows(coords, rule, offsets, stride, shape, bounds, what: str) -> mx.array:
    n, width = coords.shape
    none = mx.zeros((0, width), dtype=mx.int32)
    if n == 0:
        return none
    low, high = _box(rule, bounds or portable.bounds_of(coords), offsets, stride, shape)
    if any(a > b for a, b in zip(low, high, strict=True)):
        return none
    box = _integers([*stride, *low[1:], *high[1:]], mx.int64)
    flat = _integers(offsets)
    step = max(1, dispatch_bounds.METAL_CUTS["candidates"] // n)
    parts = []
    for first in range(0, len(offsets), step):
        part = flat[first * (width - 1) : (first + step) * (width - 1)]
        volume = min(step, len(offsets) - first)
        tables, beyond = _insert(coords, rule, part, box, volume)
        ends = [mx.cumsum((slots >= 0).astype(mx.int32)) for slots in tables]
        *counts, left = sync.read(mx.stack([*(e[-1] for e in ends), beyond[0]]))[0]
        if left > 0:
            raise ValueError(
                f"{what} would reach coordinates beyond int32; move the input nearer "
                "to the origin or use a smaller stride"
            )
        for slots, places, count in zip(tables, ends, counts, strict=True):
            if count:
                parts += _COLLECT(
                    [coords, part, box, slots, places],
                    [volume],
                    [((count, width), mx.int32)],
                    (slots.size,),
                    WIDTH=width,
                    RULE=rule,
                )
    if not parts:
        return none
    rows = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if step < len(offsets):  # two offsets may have made one row
        return unique_rows(rows).rows
    return rows[row_order(rows, (low, high))]


def _box(rule, bounds: Bounds, offsets, stride, shape) -> Bounds:
    """Return bounds of the rows that a rule makes of rows within ``bounds``."""
    low, high = [bounds[0][0]], [bounds[1][0]]
    for a, s in enumerate(stride):
        least, most = bounds[0][1 + a], bounds[1][1 + a]
        reach = [offset[a] for offset in offsets]
        if rule == EXPAND:
            least, most = least * s + min(reach), most * s + max(reach)
        else:
            least, most = (least - max(reach)) // s, (most - min(reach)) // s
        if shape is not None:
            least, most = max(least, 0), min(most, shape[a] - 1)
        low.append(least)
        high.append(most)
    return tuple(low), tuple(high)

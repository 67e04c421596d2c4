"""Geometry on Metal: hash look-ups, neighbour tables, rows of new sets."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..geometry import sync
from ..geometry.keys import Bounds, Offsets, bounds_of
from ..geometry.output_rows import Rule, is_empty
from ..geometry.protocol import Keep, RelationViews, Rows
from . import dispatch_bounds, metal_views
from .dispatch_bounds import dispatch_limit
from .metal_kernels import Kernel, by_rows, ceil_div, cuts
from .metal_unique import row_order, unique_rows

_INSERT = Kernel(
    "insert_candidates",
    ("hash_table",),
    ("coords", "offsets", "geometry", "sizes"),
    ("slots",),
    "insert_candidates<WIDTH, RULE>(coords, offsets, geometry, sizes, slots, "
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
            parts = _insert(coords, Rule.ITSELF, *none, 1)
            self.slots = parts[0] if len(parts) == 1 else mx.concatenate(parts)
            self.masks = [self.slots.size - 1, parts[0].size - 1]

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

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self._searched(rows, [(0,) * dims], (1,) * dims, False)[:, 0]

    def table(
        self,
        out: Rows,
        offsets: Offsets,
        stride: Sequence[int],
        *,
        transposed: bool = False,
        mirrored: bool = False,
        keep: Keep | None = None,
        wanted: str | None = None,
    ) -> mx.array:
        """Return the (N_out, K) int32 neighbour table, -1 where there is no edge.

        A mirrored one is searched by halves, as FlexGEMM does, where one dispatch may
        do it; the rows must be unique.
        """
        n, volume = self.coords.shape[0], len(offsets)
        if mirrored and n and volume > 1 and n <= dispatch_limit("probes"):
            return self._mirrored(offsets)
        return self._searched(out.coords, offsets, stride, transposed)

    def _searched(
        self, out: mx.array, offsets: Offsets, stride: Sequence[int], transposed: bool
    ) -> mx.array:
        """Return the (N_out, K) table, one look-up an entry."""
        n_out, volume = out.shape[0], len(offsets)
        if n_out == 0 or self.coords.shape[0] == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        flat, steps = _integers(offsets), _integers(stride)

        def launch(first: int, rows: int) -> list[mx.array]:
            return _NEIGHBOURS(
                [self.slots, self.coords, out, flat, steps],
                [first, volume, *self.masks],
                [((rows, volume), mx.int32)],
                (volume, rows),
                WIDTH=out.shape[1],
                TRANSPOSED=transposed,
            )

        return by_rows(n_out, n_out * volume, dispatch_limit("probes"), launch)[0]

    def _mirrored(self, offsets: Offsets) -> mx.array:
        """Return the (N, K) table of a point-symmetric kernel over the set itself."""
        n, volume = self.coords.shape[0], len(offsets)
        dims, half = self.coords.shape[1] - 1, volume // 2
        pieces = list(cuts(half, n * half, dispatch_limit("probes")))

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


def _insert(
    coords: mx.array, rule: Rule, offsets: mx.array, box: mx.array, volume: int
) -> list[mx.array]:
    """Return a hash table of a rule's candidates, in parts: a dispatch makes each.

    Args:
        coords: (N, 1 + D) int32.
        rule: what candidates are made by.
        offsets: flat offsets, D integers each.
        box: int64 stride, least and greatest value of the D axes.
        volume: number of offsets.
    """
    candidates = coords.shape[0] * volume
    pieces = _power_of_two(ceil_div(candidates, dispatch_limit("probes")))
    # At least two slots a row. Parts fill alike, to a few in a thousand.
    part = max(16, _power_of_two(2 * candidates) // pieces)
    return [
        _INSERT(
            [coords, offsets, box],
            [volume, part * pieces - 1, part - 1, part * piece],
            [((part,), mx.int32)],
            (candidates,),
            init=-1,
            WIDTH=coords.shape[1],
            RULE=int(rule),
        )[0]
        for piece in range(pieces)
    ]


def made_rows(
    rule: Rule,
    coords: mx.array,
    offsets: Offsets,
    stride: Sequence[int],
    box: Bounds,
    is_cut: bool,
) -> mx.array:
    """Return the sorted unique int32 rows that a rule makes within a box.

    Reads one size for each hash table of candidates. See ``Geometry``.
    """
    n, width = coords.shape
    none = mx.zeros((0, width), dtype=mx.int32)
    if n == 0 or is_empty(box):
        return none
    low, high = box
    limits = _integers([*stride, *low[1:], *high[1:]], mx.int64)
    flat = _integers(offsets)
    step = max(1, dispatch_bounds.METAL_CUTS["candidates"] // n)
    parts = []
    for first in range(0, len(offsets), step):
        part = flat[first * (width - 1) : (first + step) * (width - 1)]
        volume = min(step, len(offsets) - first)
        tables = _insert(coords, rule, part, limits, volume)
        ends = [mx.cumsum((slots >= 0).astype(mx.int32)) for slots in tables]
        counts = sync.read(mx.stack([each[-1] for each in ends]))[0]
        for slots, places, count in zip(tables, ends, counts, strict=True):
            if count:
                parts += _COLLECT(
                    [coords, part, limits, slots, places],
                    [volume],
                    [((count, width), mx.int32)],
                    (slots.size,),
                    WIDTH=width,
                    RULE=int(rule),
                )
    if not parts:
        return none
    rows = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if step < len(offsets):  # two offsets may have made one row
        return unique_rows(rows).rows
    return rows[row_order(rows, box)]


class MetalGeometry:
    """The geometry of Metal's kernels; see ``Geometry``."""

    counts_edges = False

    bounds = staticmethod(bounds_of)
    unique_rows = staticmethod(unique_rows)
    made_rows = staticmethod(made_rows)
    transpose_table = staticmethod(metal_views.transpose_table)
    gray_order = staticmethod(metal_views.gray_order)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords)

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k), sorted by (k, o). Reads one size."""
        return metal_views.edges(table)

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build nothing ahead of its first use."""
        return None

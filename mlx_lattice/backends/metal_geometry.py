"""Geometry on Metal: hash look-ups, neighbour tables, rows of new sets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry import sync
from ..geometry.keys import Bounds, Offsets, bounds_of
from ..geometry.one_by_one import OneByOne
from ..geometry.output_rows import Rule, is_empty
from ..geometry.protocol import Keep, RelationViews, Rows
from . import dispatch_bounds, metal_curves, metal_views
from .dispatch_bounds import by_rows, ceil_div, cuts, dispatch_limit
from .gpu_kernel import GpuKernel, Interface
from .metal_unique import row_order, unique_rows

_SIZES = (
    ("first", "0"),  # row of the table, or slot of the part
    ("volume", "1"),  # offsets
    ("last_slot", "0"),  # slots of the hash table less one, and those of a part
    ("last_of_part", "0"),
)


def _interface(inputs: tuple[str, ...], output: str) -> Interface:
    return Interface("HashTable", inputs, (output,), _SIZES)


# `limits` is int64: stride, least and greatest value of the D axes.
_CANDIDATES = "coords", "offsets", "limits"
_INSERT = _interface(_CANDIDATES, "slots")
_COLLECT = _interface((*_CANDIDATES, "slots", "ends"), "rows")
_NEIGHBOURS = _interface(
    ("slots", "in_coords", "out_coords", "offsets", "stride"), "table"
)
_SUBMANIFOLD = _interface(("slots", "coords", "offsets"), "table")


@cache
def _kernel(symbol: str, interface: Interface, axes: str, **template) -> GpuKernel:
    return GpuKernel(
        METAL,
        symbol,
        ("hash_table",),
        interface,
        tuple(template.items()),
        place=f"thread_position_in_grid.{axes}",
        atomic=interface is _INSERT,
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
        self.slots = mx.full((2,), -1, dtype=mx.int32)
        self.sizes = {"last_slot": 0, "last_of_part": 0}
        if n:
            none = _integers([0]), _integers([0], mx.int64)
            parts = _insert(coords, Rule.ITSELF, *none, 1)
            self.slots = parts[0] if len(parts) == 1 else mx.concatenate(parts)
            self.sizes["last_slot"] = self.slots.size // 2 - 1
            self.sizes["last_of_part"] = parts[0].size // 2 - 1

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
        which = {"WIDTH": out.shape[1], "TRANSPOSED": transposed}
        kernel = _kernel("neighbour_table", _NEIGHBOURS, "xy", **which)
        inputs = [self.slots, self.coords, out, _integers(offsets), _integers(stride)]

        def launch(first: int, rows: int) -> list[mx.array]:
            sizes = {"first": first, "volume": volume, **self.sizes}
            return kernel(inputs, [((rows, volume), mx.int32)], (volume, rows), **sizes)

        return by_rows(n_out, n_out * volume, dispatch_limit("probes"), launch)[0]

    def _mirrored(self, offsets: Offsets) -> mx.array:
        """Return the (N, K) table of a point-symmetric kernel over the set itself."""
        n, volume = self.coords.shape[0], len(offsets)
        dims, half = self.coords.shape[1] - 1, volume // 2
        pieces = list(cuts(half, n * half, dispatch_limit("probes")))
        kernel = _kernel("submanifold_table", _SUBMANIFOLD, "xy", WIDTH=1 + dims)

        def launch(first: int, count: int) -> mx.array:
            columns = volume if len(pieces) == 1 else 2 * count
            some = _integers(offsets[first : first + count])
            inputs, out = [self.slots, self.coords, some], (n, columns)
            sizes = {"first": 0, "volume": columns, **self.sizes}
            return kernel(inputs, [(out, mx.int32)], (count, n), fill=-1, **sizes)[0]

        parts = [launch(*piece) for piece in pieces]
        if len(parts) == 1:
            return parts[0]
        halves = [mx.split(part, 2, axis=1) for part in parts]
        centre = [mx.arange(n, dtype=mx.int32)[:, None]] * (volume % 2)
        left, right = zip(*halves, strict=True)
        return mx.concatenate([*left, *centre, *reversed(right)], axis=1)


def _insert(
    coords: mx.array, rule: Rule, offsets: mx.array, limits: mx.array, volume: int
) -> list[mx.array]:
    """Return a hash table of a rule's candidates, in parts: a dispatch makes each.

    A slot has an int; of rows themselves, which are looked up, two: see the kernel.

    Args:
        coords: (N, 1 + D) int32.
        rule: what candidates are made by.
        offsets: flat offsets, D integers each.
        limits: int64 stride, least and greatest value of the D axes.
        volume: number of offsets.
    """
    candidates = coords.shape[0] * volume
    pieces = _power_of_two(ceil_div(candidates, dispatch_limit("probes")))
    # At least two slots a row. Parts fill alike, to a few in a thousand.
    part = max(16, _power_of_two(2 * candidates) // pieces)
    which = {"WIDTH": coords.shape[1], "RULE": int(rule)}
    kernel = _kernel("insert_candidates", _INSERT, "x", **which)
    words = 2 if rule == Rule.ITSELF else 1
    return [
        kernel(
            [coords, offsets, limits],
            [((words * part,), mx.int32)],
            (candidates,),
            fill=-1,
            first=part * piece,
            volume=volume,
            last_slot=part * pieces - 1,
            last_of_part=part - 1,
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
    which = {"WIDTH": width, "RULE": int(rule)}
    collect, parts = _kernel("collect_candidates", _COLLECT, "x", **which), []
    for first in range(0, len(offsets), step):
        part = flat[first * (width - 1) : (first + step) * (width - 1)]
        volume = min(step, len(offsets) - first)
        tables = _insert(coords, rule, part, limits, volume)
        ends = [mx.cumsum((slots >= 0).astype(mx.int32)) for slots in tables]
        counts = sync.read(mx.stack([each[-1] for each in ends]))[0]
        for slots, places, count in zip(tables, ends, counts, strict=True):
            if count:
                parts += collect(
                    [coords, part, limits, slots, places],
                    [((count, width), mx.int32)],
                    (slots.size,),
                    first=0,
                    volume=volume,
                    last_slot=slots.size - 1,
                    last_of_part=slots.size - 1,
                )
    if not parts:
        return none
    rows = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if step < len(offsets):  # two offsets may have made one row
        return unique_rows(rows).rows
    return rows[row_order(rows, box)]


class MetalGeometry(OneByOne):
    """The geometry of Metal's kernels; see ``Geometry``."""

    bounds = staticmethod(bounds_of)
    unique_rows = staticmethod(unique_rows)
    made_rows = staticmethod(made_rows)
    transpose_table = staticmethod(metal_views.transpose_table)
    gray_order = staticmethod(metal_views.gray_order)
    curve_order = staticmethod(metal_curves.curve_order)

    def index(self, coords: mx.array, box: Bounds | None = None) -> RowTable:
        """Return the look-up of (N, 1 + D) int32 rows, launched."""
        return RowTable(coords)

    def edges(self, table: mx.array, relation: RelationViews | None = None) -> mx.array:
        """Return the (E, 3) int32 edges (i, o, k), sorted by (k, o). Reads one size."""
        return metal_views.edges(table)

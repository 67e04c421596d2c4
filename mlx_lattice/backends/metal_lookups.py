"""Hash tables of rows on Metal: look-ups, neighbour tables, candidates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ..devices import METAL
from ..geometry.keys import Bounds, Offsets
from ..geometry.output_rows import Rule
from ..geometry.protocol import Keep, Rows
from .dispatch_bounds import by_rows, ceil_div, cuts, dispatch_limit
from .gpu_kernel import GpuKernel, Interface

_SIZES = (
    ("first", "0"),  # row of the table, or slot of the part
    ("volume", "1"),  # offsets; of CELLS rows
    ("last_slot", "0"),  # slots of the hash table less one, and those of a part
    ("last_of_part", "0"),
)


def table_interface(inputs: tuple[str, ...], *outputs: str) -> Interface:
    """Return the interface of a kernel of hash tables."""
    return Interface("HashTable", inputs, outputs, _SIZES)


CELLS = len(Rule)  # the kernels' rule that makes cells of several strides

# `limits` is int64: stride, least and greatest value of the D axes; of CELLS strides.
CANDIDATES = "coords", "offsets", "limits"
_INSERT = table_interface(CANDIDATES, "slots")
_NEIGHBOURS = table_interface(
    ("slots", "in_coords", "out_coords", "offsets", "stride"), "table"
)
_SUBMANIFOLD = table_interface(("slots", "coords", "offsets"), "table")


@cache
def kernel_of(symbol: str, given: Interface, axes: str, **template) -> GpuKernel:
    """Return a kernel of hash tables; axes are those of its grid."""
    return GpuKernel(
        METAL,
        symbol,
        ("hash_table",),
        given,
        tuple(template.items()),
        place=f"thread_position_in_grid.{axes}",
        atomic=given is _INSERT,
    )


def candidate_kernel(
    symbol: str, given: Interface, width: int, rule: int, key: mx.Dtype | None = None
) -> GpuKernel:
    """Return a kernel that makes candidates by a rule, and keys of them."""
    which = {"WIDTH": width, "RULE": int(rule)} | ({"KEY": key} if key else {})
    return kernel_of(symbol, given, "x", **which)


def integers(values: Sequence, dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return a flat array of numbers, or of what tuples of them hold."""
    return mx.array(list(values), dtype=dtype).flatten()


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    is_sorted = False  # nobody looks

    def __init__(self, coords: mx.array):
        self.coords, n = coords, coords.shape[0]
        self.slots = mx.full((2,), -1, dtype=mx.int32)
        self.sizes = {"last_slot": 0, "last_of_part": 0}
        if n:
            none = integers([0]), integers([0], mx.int64)
            parts = insert(coords, Rule.ITSELF, *none, 1)
            self.slots = parts[0] if len(parts) == 1 else mx.concatenate(parts)
            self.sizes["last_slot"] = self.slots.size // 2 - 1
            self.sizes["last_of_part"] = parts[0].size // 2 - 1

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that ``find`` and ``table`` read."""
        return self.coords, self.slots

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
        do it. Of rows that repeat it is some table of those, which nobody keeps.
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
        kernel = kernel_of("neighbour_table", _NEIGHBOURS, "xy", **which)
        inputs = [self.slots, self.coords, out, integers(offsets), integers(stride)]

        def launch(first: int, rows: int) -> list[mx.array]:
            sizes = {"first": first, "volume": volume, **self.sizes}
            return kernel(inputs, [((rows, volume), mx.int32)], (volume, rows), **sizes)

        return by_rows(n_out, n_out * volume, dispatch_limit("probes"), launch)[0]

    def _mirrored(self, offsets: Offsets) -> mx.array:
        """Return the (N, K) table of a point-symmetric kernel over the set itself."""
        n, volume = self.coords.shape[0], len(offsets)
        dims, half = self.coords.shape[1] - 1, volume // 2
        pieces = list(cuts(half, n * half, dispatch_limit("probes")))
        kernel = kernel_of("submanifold_table", _SUBMANIFOLD, "xy", WIDTH=1 + dims)

        def launch(first: int, count: int) -> mx.array:
            columns = volume if len(pieces) == 1 else 2 * count
            some = integers(offsets[first : first + count])
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


def insert(
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
    pieces = power_of_two(ceil_div(candidates, dispatch_limit("probes")))
    # At least two slots a row. Parts fill alike, to a few in a thousand.
    part = max(16, power_of_two(2 * candidates) // pieces)
    kernel = candidate_kernel("insert_candidates", _INSERT, coords.shape[1], rule)
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


def insert_cells(
    coords: mx.array, none: mx.array, strides: mx.array, levels: int
) -> mx.array:
    """Return a hash table of the cells of each stride, a part of equal size for each.

    Args:
        coords: (N, 1 + D) int32, at least one.
        none: offsets, which are not read.
        strides: int64, D of each level.
        levels: number of strides.
    """
    n, width = coords.shape
    part = max(16, power_of_two(2 * n))
    return candidate_kernel("insert_candidates", _INSERT, width, CELLS)(
        [coords, none, strides],
        [((levels * part,), mx.int32)],
        (levels * n,),
        fill=-1,
        first=0,
        volume=n,
        last_slot=part - 1,
        last_of_part=part - 1,
    )[0]

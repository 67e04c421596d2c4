"""Look-ups of coordinate rows on CUDA: one set in a hash table, searched by value.

Everything is launched without waiting for the device; what Python must know it reads
once, through ``sync.read``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import mlx.core as mx

from ..geometry import sync
from ..geometry.keys import Bounds, Offsets, bounds_of
from ..geometry.protocol import Keep, Rows
from .cuda_interfaces import chosen, geometry_kernel, of_job, run
from .cuda_rules import lookup_rule, rule_kind
from .cuda_sort import THREADS, cleared, constant, digits_of, scratch_words
from .cuda_tables import TILES, Code, Source, counted_table, is_ranked, relation_tiles

HASH_BLOCKS = 1056  # at most: each writes bounds
TABLE_WORDS = 8  # after the slots of a hash, before the bounds: BOUNDS of rows.cuh
FIRST_OFFSETS = 27  # of the first relation, whose scratch is cleared with the hash


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
    """

    def __init__(self, coords: mx.array):
        self.coords, self.scratch = coords, None
        if coords.shape[0]:
            self._hash([self])

    @classmethod
    def of_each(cls, sets: Sequence[mx.array]) -> list[RowTable]:
        """Return the tables of several sets, each of which has rows: one launch."""
        tables = [cls.__new__(cls) for _ in sets]
        for table, coords in zip(tables, sets, strict=True):
            table.coords, table.scratch = coords, None
        cls._hash(tables)
        return tables

    @staticmethod
    def _hash(tables: Sequence[RowTable]) -> None:
        """Hash the rows of tables; one alone gets scratch for its first relation."""
        columns, jobs = tables[0].coords.shape[1], len(tables)
        sizes = [len(table.coords) for table in tables]
        blocks = min(HASH_BLOCKS // jobs, -(-max(sizes) // THREADS))
        inputs, outputs, pair = [], [], ((2,), mx.int32)
        capacities = [max(16, 1 << (2 * n - 1).bit_length()) for n in sizes]
        beside = TABLE_WORDS + 2 * columns * blocks
        ends = list(accumulate([2 * slots + beside for slots in capacities]))
        # Written by the kernel, and so by no other: nobody else holds it. The value
        # is on the device already; a number would be fetched from the CPU's memory.
        whole = mx.full((ends[-1],), constant(-1))
        facts = zip(sizes, tables, capacities, pairwise([0, *ends]), strict=True)
        for n, table, capacity, (begin, end) in facts:
            table.slots = whole[begin:end] if jobs > 1 else whole
            inputs += table.coords, table.slots
            outputs += [pair] * (1 + columns) + [((capacity + n,), mx.int32)]
        if jobs == 1:  # cleared beside
            words = scratch_words(*sizes, digits_of(FIRST_OFFSETS)[0])
            inputs.append(constant(words, 0, 0, 0))
            outputs.append(((words,), mx.uint32))
        kernel = _hash_rows(columns, jobs)
        made = run(kernel, inputs, jobs * blocks, THREADS, outputs)
        for at, table in enumerate(tables):
            *table.found, table.order = made[(2 + columns) * at :][: 2 + columns]
        if jobs == 1:
            tables[0].scratch = made[-1]

    def _take_scratch(self, words: int) -> mx.array:
        scratch, self.scratch = self.scratch, None
        if scratch is None or scratch.size < words:
            return cleared(words)
        return scratch

    @property
    def ranges(self) -> Sequence[mx.array]:
        """(2,) int32 each: the least and greatest of each column, of any rows."""
        return self.found[1:]

    def facts(self) -> list[mx.array]:
        """Return small arrays: (first repeat or -1, 0), then each column's range."""
        return self.found if self.coords.shape[0] else []

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        # Computed by now, and good for once: a traced graph would use it at every call.
        self.scratch = None
        (later, _), *ranges = facts
        low, high = zip(*ranges, strict=True)
        if later < 0:
            return (low, high), None
        first = self.find(self.coords[later : later + 1])
        return (low, high), (sync.read(first)[0][0], later)

    def find(self, rows: mx.array, bounds: Bounds | None = None) -> mx.array:
        """Return for each of the (Q, 1 + D) int32 rows its (Q,) int32 place, or -1."""
        dims = rows.shape[1] - 1
        return self._table(rows, [(0,) * dims], (1,) * dims)[:, 0]

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

        Args:
            out: the output rows.
            offsets: K offsets of D integers.
            stride: D integers.
            transposed: whether ``out = in * stride + offset_k``, not
                ``in = out * stride + offset_k``.
            mirrored: not used: a search of half of the offsets scatters the other half.
            keep: called with a name and what is made with the table: its
                ``BandCounts``, and its tiles if wanted.
            wanted: ``TILES`` where these are wanted too.
        """
        return self._table(out.coords, offsets, stride, transposed, keep, wanted)

    def _table(
        self, out_coords, offsets, stride, transposed=False, keep=None, wanted=None
    ) -> mx.array:
        n_out, volume = out_coords.shape[0], len(offsets)
        if self.coords.shape[0] * n_out * volume == 0:
            return mx.full((n_out, volume), -1, dtype=mx.int32)
        source = self.source(out_coords, offsets, stride, transposed)
        if keep and wanted == TILES and is_ranked(n_out, volume):
            table, counts, tiles = relation_tiles(source, self._take_scratch)
            keep(TILES, tiles)
        else:
            table, counts = counted_table(source, self._take_scratch)
        if keep:
            keep("band_counts", counts)
        return table

    def source(
        self,
        out_coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        transposed: bool,
    ) -> Source:
        """Return where a table's entries come from; neither set is without rows."""
        offsets = tuple(map(tuple, offsets))
        kind, offsets = rule_kind(offsets, tuple(stride), transposed)
        rule = lookup_rule(offsets, tuple(stride), kind)
        inputs = self.coords, self.slots, self.order, out_coords, rule
        code = _find(self.coords.shape[1], kind)
        return Source(code, inputs, out_coords.shape[0], len(offsets))


def bounds(coords: mx.array) -> Bounds:
    """Return the least and the greatest value of every column of (N, 1 + D) int32."""
    if coords.shape[0] == 0:
        return bounds_of(coords)
    rows = RowTable(coords)
    return rows.settle(sync.read(*rows.facts()))[0]


@cache
def _find(columns: int, kind: str) -> Code:
    inputs = "coords", "slots", "order", "out_rows", "rule"
    return Code(
        f"Find<{columns}, {kind}>",
        inputs,
        (*inputs, "coords_shape[0]"),
        "out_rows_shape[0]",
        True,
    )


@cache
def _hash_rows(columns: int, jobs: int):
    has_scratch = jobs == 1
    ranges = [f"range{c}" for c in range(columns)]
    inputs = [of_job(name, j) for j in range(jobs) for name in ("coords", "slots")]
    found = [of_job(n, j) for j in range(jobs) for n in ("repeat", *ranges, "order")]
    passed = ", ".join(chosen(name, jobs) for name in ranges)
    facts, scratch = ["words"] * has_scratch, ["scratch"] * has_scratch
    last = "reinterpret_cast<unsigned*>(scratch)" if has_scratch else "nullptr"
    said = {
        **dict.fromkeys((*inputs, *facts, *found, *scratch), ""),
        "coords": chosen("coords", jobs),
        "slots": f"const_cast<int*>({chosen('slots', jobs)})",
        "repeat": f"{chosen('repeat', jobs)}, ranges, {chosen('order', jobs)}, {last}",
    }
    return geometry_kernel(
        "hash_rows",
        ("rows.cuh", "hash_rows.cu"),
        "HashRows",
        (*inputs, *facts),
        (*found, *scratch),
        template=(("COLUMNS", columns),),
        defines=(("JOBS", jobs),),
        arguments=tuple(said.items()),
        before=f"""const int job = blockIdx.x % JOBS;
  const int n = {chosen("coords_shape[0]", jobs)};
  const int facts[] = {{{"words[0]" if has_scratch else "0"}}};
  int* const ranges[] = {{{passed}}};""",
        threads=THREADS,
        blocks_per_multiprocessor=4,
    )

"""Look-ups of coordinate rows on CUDA: one set in a hash table, searched by value.

Everything is launched without waiting for the device; what Python must know it reads
once, through ``sync.read``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise

import mlx.core as mx

from ..geometry import sync
from ..geometry.keys import Bounds, Offsets, bounds_of
from ..geometry.protocol import Keep, Rows
from ..shared_views import built_by_one
from .cuda_interfaces import chosen, geometry_kernel, of_job, run
from .cuda_rules import rule_kind, rule_words
from .cuda_sort import (
    HEADER,
    THREADS,
    cleared,
    constant,
    digits_of,
    scratch_words,
    sorts,
)
from .cuda_tables import (
    COUNTS,
    TILES,
    Code,
    Source,
    counted_table,
    relation_tiles,
)

HASH_BLOCKS = 1056  # at most: each writes bounds
TABLE_WORDS = 8  # after the slots of a hash, before the bounds: BOUNDS of rows.cuh
FIRST_OFFSETS = 27  # of the first tiles, whose scratch is cleared with the hash
SCRATCH_STEP = 1 << 10  # words; each size of scratch is a constant on the device


class RowTable:
    """Finds the rows of one coordinate set by value, through a hash table.

    Args:
        coords: (N, 1 + D) int32, any values. Of equal rows the first is found.
        is_checked: whether nobody will ask for ``facts``.
    """

    is_sorted = False

    def __init__(self, coords: mx.array, is_checked: bool = False):
        self._start(coords, is_checked)
        n, (digits, _) = coords.shape[0], digits_of(FIRST_OFFSETS)
        if n:
            words = HEADER + scratch_words(n, digits)  # of a look-up, and of tiles
            if not is_checked:  # that of rows that are not sorted, too
                words += scratch_words(n, 0)
            self._hash([self], words)

    def _start(self, coords: mx.array, is_checked: bool) -> None:
        self.coords, self.found, self._is_checked = coords, [], is_checked
        self.scratch, self._taken = None, 0  # words of 0, and how many were taken

    @classmethod
    def of_each(cls, sets: Sequence[mx.array], scratch: int = 0) -> list[RowTable]:
        """Return the tables of several sets that are checked already: one launch.

        Each has rows. The first has that many words of scratch, at least.
        """
        tables = [cls.__new__(cls) for _ in sets]
        for table, coords in zip(tables, sets, strict=True):
            table._start(coords, True)
        cls._hash(tables, scratch)
        return tables

    @staticmethod
    def _hash(tables: Sequence[RowTable], words: int) -> None:
        """Hash the rows of tables; of one alone facts are found.

        The first gets words of scratch. MLX takes the longer over a launch the more
        outputs it has, by their square.
        """
        columns, jobs = tables[0].coords.shape[1], len(tables)
        sizes = [len(table.coords) for table in tables]
        blocks = min(HASH_BLOCKS // jobs, -(-max(sizes) // THREADS))
        capacities = [max(16, 1 << (2 * n - 1).bit_length()) for n in sizes]
        beside = TABLE_WORDS + (2 * columns * blocks if jobs == 1 else 0)
        ends = list(accumulate([2 * slots + beside for slots in capacities]))
        # Written by the kernel, and so by no other: nobody else holds it. The value
        # is on the device already; a number would be fetched from the CPU's memory.
        whole = mx.full((ends[-1],), constant(-1))
        inputs, outputs = [], []
        facts = zip(sizes, tables, capacities, pairwise([0, *ends]), strict=True)
        for n, table, capacity, (begin, end) in facts:
            table.slots = whole[begin:end] if jobs > 1 else whole
            inputs += table.coords, table.slots
            outputs.append(((capacity + n,), mx.int32))
        words = max(1, -(-words // SCRATCH_STEP)) * SCRATCH_STEP
        inputs.append(constant(words, 0, 0, 0))
        outputs.append(((words,), mx.uint32))
        if jobs == 1:
            outputs += [((2,), mx.int32)] * (1 + columns)
        kernel = _hash_rows(columns, jobs)
        made = run(kernel, inputs, jobs * blocks, THREADS, outputs)
        for table, order in zip(tables, made[:jobs], strict=True):
            table.order = order
        tables[0].scratch, *tables[0].found = made[jobs:]

    @built_by_one
    def take_scratch(self, words: int) -> mx.array:
        """Return an even number of words of 0 that nobody has taken.

        What was cleared with the hash serves once, and a traced graph would use it at
        every call. It goes with the first whose rows are put in order, or when the set
        is checked; those who only look rows up leave the rest.
        """
        scratch, begin, end = self.scratch, self._taken, self._taken + words
        if self._is_checked and words > HEADER:
            self.scratch = None
        if scratch is None or scratch.size < end or sync.is_transforming():
            return cleared(words)
        self._taken = end
        return scratch[begin:end]

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that ``find`` and ``table`` read, and ``facts``."""
        read = [self.slots, self.order] if self.coords.shape[0] else []
        scratch = [] if self.scratch is None else [self.scratch]
        return [self.coords, *read, *scratch, *self.found]

    @property
    def ranges(self) -> Sequence[mx.array]:
        """(2,) int32 each: the least and greatest of each column, of any rows."""
        return self.facts()[1:]

    def facts(self) -> list[mx.array]:
        """Return small arrays: (first repeat or -1, whether rows ascend), ranges."""
        if not self.found and self.coords.shape[0]:  # hashed with others, as checked
            self._hash([self], 0)
        return self.found

    def settle(self, facts: list) -> tuple[Bounds, tuple[int, int] | None]:
        """Return the bounds and the earliest pair of equal rows, from read facts."""
        self.scratch = None
        (later, self.is_sorted), *ranges = facts
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
        if keep and wanted == TILES and sorts(n_out):
            table, counts, tiles = relation_tiles(source, self.take_scratch)
            keep(TILES, tiles)
        else:
            table, counts = counted_table(source, self.take_scratch)
        if keep:
            keep(COUNTS, counts)
        return table

    def source(
        self,
        out_coords: mx.array,
        offsets: Offsets,
        stride: Sequence[int],
        transposed: bool,
    ) -> Source:
        """Return where a table's entries come from; neither set is without rows."""
        if not isinstance(offsets, tuple):
            offsets = tuple(map(tuple, offsets))
        code, rule = _rule(self.coords.shape[1], offsets, tuple(stride), transposed)
        inputs = self.coords, self.slots, self.order, out_coords, rule
        return Source(code, inputs, out_coords.shape[0], len(offsets))


def bounds(coords: mx.array) -> Bounds:
    """Return the least and the greatest value of every column of (N, 1 + D) int32."""
    if coords.shape[0] == 0:
        return bounds_of(coords)
    _, *ranges = sync.read(*RowTable(coords).facts())  # rows may repeat
    return tuple(zip(*ranges, strict=True))


@lru_cache(maxsize=256)
def _rule(
    columns: int, offsets: tuple, stride: tuple[int, ...], transposed: bool
) -> tuple[Code, mx.array]:
    """Return how a kernel looks offsets up, and what it reads of them."""
    kind, offsets = rule_kind(offsets, stride, transposed)
    return _find(columns, kind), constant(*rule_words(offsets, stride, kind))


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
    inputs = [of_job(name, j) for j in range(jobs) for name in ("coords", "slots")]
    orders = [of_job("order", j) for j in range(jobs)]
    ranges, is_told = [f"range{c}" for c in range(columns)], jobs == 1
    found = ["repeat", *ranges] * is_told
    told = f"repeat, {{{', '.join(ranges)}}}" if is_told else "nullptr, {nullptr}"
    scratch = "reinterpret_cast<unsigned*>(scratch)"
    said = {
        **dict.fromkeys((*inputs, "words", *orders, "scratch", *found), ""),
        "coords": chosen("coords", jobs),
        "slots": f"const_cast<int*>({chosen('slots', jobs)})",
        "order": f"{told}, {chosen('order', jobs)}, {scratch}",
    }
    # The blocks of the first job clear the scratch.
    return geometry_kernel(
        "hash_rows",
        ("rows.cuh", "hash_rows.cu"),
        "HashRows",
        (*inputs, "words"),
        (*orders, "scratch", *found),
        template=(("COLUMNS", columns),),
        defines=(("JOBS", jobs),),
        arguments=tuple(said.items()),
        before=f"""const int job = blockIdx.x % JOBS;
  const int n = {chosen("coords_shape[0]", jobs)};
  const int facts[] = {{job == 0 ? words[0] : 0}};""",
        threads=THREADS,
        blocks_per_multiprocessor=4,
    )

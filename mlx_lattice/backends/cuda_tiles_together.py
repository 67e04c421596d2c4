"""Tiles of several relations on CUDA in one launch, whatever their searches.

A relation of few rows keeps a GPU busy for less time than its launches take the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from ..geometry.keys import Offsets
from ..geometry.rows import SearchedRows
from ..geometry.search import Search
from .cuda_interfaces import SCRATCH, geometry_kernel, of_job, run
from .cuda_rules import ITSELF, KINDS, UNIT, rule_kind, rule_words
from .cuda_sort import (
    SORT_THREADS,
    constant,
    digits_of,
    multiprocessors,
    scratch_words,
)
from .cuda_tables import (
    BAND,
    EDGES,
    TILE_SCRATCH,
    TILES_FILES,
    TILING_BLOCKS,
    CountsInSeveral,
    Sorted,
    key_of,
    pitch_of,
    rank_bits,
    ranking_fours,
)
from .gpu_kernel import GpuKernel

SETS = 8  # of rows, that the relations of a launch may be between

# Offsets, stride, whether it is transposed, and whether each row feeds itself.
Rule = tuple[Offsets, tuple[int, ...], bool, bool]


class _Jobs(NamedTuple):
    """What searches settle of a launch, whatever rows their sets have.

    Attributes:
        sets: places of the sets, in the kernel's order.
        looked_up: those that must have a look-up.
        each: of every search the place of its target, its offsets, words of a mask,
            and digits by which rows are sorted.
        facts: what the kernel reads of the jobs, and of their rules.
        kernel: that one.
    """

    sets: tuple[int, ...]
    looked_up: tuple[int, ...]
    each: tuple[tuple[int, int, int, int], ...]
    facts: tuple[mx.array, mx.array]
    kernel: GpuKernel


class TilesTogether:
    """Tiles of several relations of one ``kind``, between up to SETS sets.

    Args:
        sets: the searches name them by their places here. None is without rows.
        searches: at least two.

    Attributes:
        searches: those.
        looked_up: the sets that must have a look-up when tiles are launched.
        scratch: the words of it that they take.
        arrays: what is to be started, once they were launched.
    """

    def __init__(self, sets: Sequence[SearchedRows], searches: tuple[Search, ...]):
        self.searches, self._all = searches, sets
        self._jobs = jobs = _jobs(searches, sets[0].coords.shape[1])
        self.looked_up = [sets[at] for at in jobs.looked_up]
        self.scratch, self._sizes = 0, []
        rows = [len(each.coords) for each in sets]
        for target, volume, words, digits in jobs.each:
            n = rows[target]
            self._sizes.append((n, volume, -(-n // BAND), pitch_of(n), words))
            self.scratch += scratch_words(n, digits)

    def launch(self, scratch: mx.array) -> None:
        """Launch all of it.

        Args:
            scratch: as many words of 0.
        """
        jobs, sizes, inputs = self._jobs, self._sizes, []
        for at in jobs.sets:
            rows, is_looked_up = self._all[at], at in jobs.looked_up
            coords, found = rows.coords, rows.lookup if is_looked_up else None
            # What is not read must be an array all the same.
            inputs += (coords, found.slots, found.order) if found else (coords,) * 3
        inputs += inputs[:3] * (SETS - len(jobs.sets))
        rows = bands = edges = entries = words = work = 0
        for n, volume, count, pitch, of_masks in sizes:
            rows, bands, edges = rows + n, bands + count, edges + volume * count
            entries, words = entries + volume * pitch, words + pitch // 32 * of_masks
            work += -(-n * volume // 4) + ranking_fours(n, volume)
        *self._made, _ = run(
            jobs.kernel,
            [*inputs, *jobs.facts, scratch],
            # Side by side: a job whose blocks come last would hold up the launch.
            max(len(sizes), min(multiprocessors() * TILING_BLOCKS, bands)),
            SORT_THREADS,
            [
                ((edges,), mx.int32),
                ((len(sizes),), mx.int64),
                ((rows,), mx.int32),
                ((entries,), mx.int32),
                ((words,), mx.uint32),
                ((work, 4), mx.uint32),
            ],
        )
        self.arrays = self._made[:1]  # the others come with it

    def views(self) -> Iterator[tuple[CountsInSeveral, Sorted]]:
        """Return counts and tiles of each, of what was launched; no table is kept.

        Tiles are views of what holds those of all.
        """
        bands, edges, rows, tables, masks = self._made
        ends = list(accumulate([n for n, *_ in self._sizes]))
        first = table = mask = 0  # where the next one's begin
        each = zip(self._sizes, mx.split(rows, ends[:-1]), strict=True)
        for at, ((_, volume, count, pitch, words), order) in enumerate(each):
            shapes = (volume, pitch), (pitch // 32, words)
            tiles = Sorted(
                mx.as_strided(tables, shapes[0], (pitch, 1), table),
                order,
                mx.as_strided(masks, shapes[1], (words, 1), mask),
            )
            counts = CountsInSeveral(bands, edges, at, first, (volume, count))
            yield counts, tiles
            first += volume * count
            table, mask = table + volume * pitch, mask + pitch // 32 * words


def kind(search: Search) -> str:
    """Return what relations of one launch have in common."""
    return key_of(len(search.offsets))


@cache
def _digits(volume: int, feeds_itself: bool) -> tuple[int, int]:
    """Return the digits by which rows are sorted, none of those, and their bits."""
    return (0, 0) if feeds_itself else digits_of(rank_bits(volume))


@lru_cache(maxsize=256)
def _jobs(searches: tuple[Search, ...], columns: int) -> _Jobs:
    rules: dict[Rule, int] = {}  # few of them serve many relations
    sets: dict[int, int] = {}
    words, looked_up, each = [], {}, []
    for search in searches:
        offsets, is_itself = search.offsets, search.identity
        rule = offsets, search.stride, search.transposed, is_itself
        words.append(rules.setdefault(rule, len(rules)))
        for place in (search.source, search.target):
            words.append(sets.setdefault(place, len(sets)))
        if not is_itself:
            looked_up[search.source] = None
        volume = len(offsets)
        digits = _digits(volume, is_itself)[0]
        each.append((search.target, volume, -(-volume // 32), digits))
    is_unit, *facts = _facts(tuple(rules), tuple(words))
    kernel = _tiles_together(columns, kind(search), is_unit)
    return _Jobs(tuple(sets), tuple(looked_up), tuple(each), tuple(facts), kernel)


def _facts(
    rules: tuple[Rule, ...], jobs: tuple[int, ...]
) -> tuple[bool, mx.array, mx.array]:
    """Return whether UNIT is the only look-up; for kernels words of jobs, and of rules.

    Args:
        rules: each once.
        jobs: of each, numbers of its rule and of its source and target sets.
    """
    words, facts, kinds = [], [], set()
    for offsets, stride, transposed, feeds_itself in rules:
        kind, turned = rule_kind(offsets, stride, transposed)
        passes, bits = _digits(len(offsets), feeds_itself)
        if feeds_itself:
            kind = ITSELF
        else:
            kinds.add(kind)
        facts.append((len(offsets), bits, passes, KINDS.index(kind), len(words)))
        words += rule_words(turned, stride, kind)
        words += [0] * (-len(words) % 4)  # each begins at 16 bytes
    each = []
    for rule, source, target in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        *own, at = facts[rule]
        each += *own, source, target, at, 0
    return kinds <= {UNIT}, constant(*each), constant(*words)


@cache
def _tiles_together(columns: int, key: str, is_unit: bool):
    names = "coords", "slots", "order"
    sets = [of_job(name, s) for s in range(SETS) for name in names]
    inputs = *sets, "jobs", "rules", "scratch"
    outputs = "counts", "edges", "rows", "sorted", "masks", "work"
    listed = [", ".join(of_job(n, s) for s in range(SETS)) for n in names]
    rows = ", ".join(f"{of_job('coords', s)}_shape[0]" for s in range(SETS))
    fields = ", ".join(f"{{{each}}}" for each in (*listed, rows))
    return geometry_kernel(
        "tiles_together",
        (*TILES_FILES, "tiles_together.cu"),
        "TilesTogether",
        inputs,
        outputs,
        template=(("COLUMNS", columns), ("KEY", key), ("IS_UNIT", is_unit)),
        defines=(("SETS", SETS),),
        arguments=(
            *dict.fromkeys(sets, "").items(),
            ("coords", "sets"),
            ("scratch", SCRATCH),
            ("edges", EDGES),
        ),
        before=f"const CoordinateSets sets{{{fields}}};",
        threads=SORT_THREADS,
        blocks_per_multiprocessor=TILING_BLOCKS,
        shared_bytes=TILE_SCRATCH,
    )

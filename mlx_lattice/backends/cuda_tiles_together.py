"""Tiles of several relations on CUDA in one launch, whatever their searches.

A relation of few rows keeps a GPU busy for less time than its launches take the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate

import mlx.core as mx

from ..geometry.keys import Offsets
from ..geometry.protocol import Search, SearchedRows
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

SETS = 8  # of rows, that the relations of a launch may be between

# Offsets, stride, whether it is transposed, and whether each row feeds itself.
Rule = tuple[Offsets, tuple[int, ...], bool, bool]


class TilesTogether:
    """Tiles of several relations of one ``kind``, between up to SETS sets.

    Args:
        searches: each with whether rows feed themselves, which are not looked up. At
            least two; no set is without rows.

    Attributes:
        looked_up: the sets that must have a look-up when tiles are launched.
        scratch: the words of it that they take.
    """

    def __init__(self, searches: Sequence[tuple[Search, bool]]):
        rules: dict[tuple, tuple[int, Rule]] = {}
        sets: dict[int, tuple[int, SearchedRows]] = {}
        looked_up, words, self._sizes = {}, [], []
        self.scratch = self._work = self._bands = 0
        for search, is_itself in searches:
            source, target, offsets = search.source, search.target, search.offsets
            rule = offsets, search.stride, search.transposed, is_itself
            # Few rules serve many relations, and their hashes take a while.
            at, _ = rules.setdefault((id(offsets), *rule[1:]), (len(rules), rule))
            words.append(at)
            for rows in (source, target):
                words.append(sets.setdefault(id(rows), (len(sets), rows))[0])
            if not is_itself:
                looked_up[id(source)] = source
            n, volume = len(target.coords), len(offsets)
            bands = -(-n // BAND)
            self._sizes.append((n, volume, bands, pitch_of(n), -(-volume // 32)))
            self._bands += bands
            self.scratch += scratch_words(n, _digits(volume, is_itself)[0])
            self._work += -(-n * volume // 4) + ranking_fours(n, volume)
        self.looked_up = list(looked_up.values())
        self._sets = [(rows, id(rows) in looked_up) for _, rows in sets.values()]
        given = tuple([rule for _, rule in rules.values()])
        is_unit, *self._facts = _facts(given, tuple(words))
        self._kernel = _tiles_together(*kind(search), is_unit)

    def launch(self, scratch: mx.array) -> list[tuple[CountsInSeveral, Sorted]]:
        """Return counts and tiles of each; their tables are not kept.

        Tiles are views of what holds those of all.

        Args:
            scratch: as many words of 0.
        """
        inputs, sizes = [], self._sizes
        for rows, is_looked_up in self._sets:
            coords, found = rows.coords, rows.lookup if is_looked_up else None
            # What is not read must be an array all the same.
            inputs += (coords, found.slots, found.order) if found else (coords,) * 3
        inputs += inputs[:3] * (SETS - len(self._sets))
        ends = list(accumulate([n for n, *_ in sizes]))
        bands, edges, rows, tables, masks, _ = run(
            self._kernel,
            [*inputs, *self._facts, scratch],
            # Side by side: a job whose blocks come last would hold up the launch.
            max(len(sizes), min(multiprocessors() * TILING_BLOCKS, self._bands)),
            SORT_THREADS,
            [
                ((sum([k * bands for _, k, bands, *_ in sizes]),), mx.int32),
                ((len(sizes),), mx.int64),
                ((ends[-1],), mx.int32),
                ((sum([k * pitch for _, k, _, pitch, _ in sizes]),), mx.int32),
                (
                    (sum([pitch // 32 * words for *_, pitch, words in sizes]),),
                    mx.uint32,
                ),
                ((self._work, 4), mx.uint32),
            ],
        )
        made, first, table, mask = [], 0, 0, 0  # and where the next one's begin
        each = zip(sizes, mx.split(rows, ends[:-1]), strict=True)
        for at, ((_, volume, count, pitch, words), order) in enumerate(each):
            shapes = (volume, pitch), (pitch // 32, words)
            tiles = Sorted(
                mx.as_strided(tables, shapes[0], (pitch, 1), table),
                order,
                mx.as_strided(masks, shapes[1], (words, 1), mask),
            )
            counts = CountsInSeveral(bands, edges, at, first, (volume, count))
            made.append((counts, tiles))
            first += volume * count
            table, mask = table + volume * pitch, mask + pitch // 32 * words
        return made


def kind(search: Search) -> tuple[int, str]:
    """Return what relations of one launch have in common."""
    return search.target.coords.shape[1], key_of(len(search.offsets))


@cache
def _digits(volume: int, feeds_itself: bool) -> tuple[int, int]:
    """Return the digits by which rows are sorted, none of those, and their bits."""
    return (0, 0) if feeds_itself else digits_of(rank_bits(volume))


@lru_cache(maxsize=256)
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

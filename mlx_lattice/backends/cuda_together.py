"""Views of several relations on CUDA, made in few launches: a net's, of a new scan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import mlx.core as mx

from ..geometry.protocol import RelationViews
from ..geometry.rows import SearchedRows
from ..geometry.search import Search
from ..routes import thresholds
from .cuda_lookups import RowTable
from .cuda_sort import cleared
from .cuda_tables import COUNTS, TILES
from .cuda_tiles_together import SETS, TilesTogether, kind
from .cuda_views import keep_tiles, tiled

LOOKUPS = 4  # of a launch that has several: a kernel is compiled for it


def tiles_together(
    sets: Sequence[SearchedRows], searches: Sequence[Search]
) -> Iterator[TilesTogether]:
    """Launch tiles of several relations, and the look-ups they take. See ``Geometry``.

    Those of too many rows, and of none, are left out, and what would be alone.
    """
    able = [_is_ours(rows) and len(rows.coords) for rows in sets]
    most = thresholds.CUDA_ROWS_TOGETHER
    if not all(able) or max(able) > most:
        searches = [
            search
            for search in searches
            if able[search.source] and 0 < able[search.target] <= most
        ]
    for some in _launches(tuple(searches)):
        together = TilesTogether(sets, some)
        together.launch(_looked_up(together.looked_up, together.scratch))
        yield together


def keep_together(made: TilesTogether, relations: Sequence[RelationViews]) -> None:
    """Let relations, one a search, have the tiles that were launched."""
    for relation, (counts, tiles) in zip(relations, made.views(), strict=True):
        base = tiled(relation)[0]
        base.keep(COUNTS, counts)
        base.keep(TILES, tiles)
        keep_tiles(base, tiles)


def _is_ours(rows: SearchedRows) -> bool:
    return not rows.has_lookup or isinstance(rows.lookup, RowTable)


@lru_cache(maxsize=256)
def _launches(searches: tuple[Search, ...]) -> list[tuple[Search, ...]]:
    """Return what each launch makes: of a kind, several between up to SETS sets."""
    kinds: dict[str, list[Search]] = {}
    for search in searches:
        kinds.setdefault(kind(search), []).append(search)
    launches = []
    for alike in kinds.values():
        some, sets = [], set()
        for search in alike:
            ends = {search.source, search.target}
            if len(sets | ends) > SETS:
                launches.append(tuple(some))
                some, sets = [], set()
            some.append(search)
            sets |= ends
        launches.append(tuple(some))
    return [some for some in launches if len(some) > 1]


def _looked_up(sets: Sequence[SearchedRows], words: int) -> mx.array:
    """Give sets their look-ups; return words of 0, which a launch of them clears."""
    new = [rows for rows in sets if not rows.has_lookup]
    whole = len(new) // LOOKUPS * LOOKUPS
    parts = [new[at : at + LOOKUPS] for at in range(0, whole, LOOKUPS)]
    for at, some in enumerate(parts + [[rows] for rows in new[whole:]]):
        tables = RowTable.of_each([rows.coords for rows in some], 0 if at else words)
        for rows, table in zip(some, tables, strict=True):
            rows.lookup = table
    if not sets:
        return cleared(words)
    return (new or sets)[0].lookup.take_scratch(words)

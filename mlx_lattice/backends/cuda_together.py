"""Views of several relations on CUDA, made in few launches: a net's, of a new scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from ..geometry.one_by_one import made_alone
from ..geometry.protocol import RelationViews, Search, SearchedRows, View
from .cuda_levels import MOST_TOGETHER
from .cuda_lookups import RowTable
from .cuda_sort import cleared
from .cuda_tables import COUNTS, TILES
from .cuda_tiles_together import SETS, TilesTogether, kind
from .cuda_views import keep_tiles, sorted_arrays, tiled

LOOKUPS = 4  # of a launch that has several: a kernel is compiled for it

Searched = tuple[RelationViews, Search]


def begin(wanted: Sequence[tuple[RelationViews, View]]) -> Iterator[list[mx.array]]:
    """Make views: tiles together, and the look-ups that they take. See ``Geometry``."""
    found, alone = {}, []
    for relation, view in wanted:
        base = tiled(relation)[0]
        is_new = view is sorted_arrays and base.kept(TILES) is None
        if is_new and (search := _search(base)) is not None:
            found[id(search)] = base, search
        else:
            alone.append((relation, view))
    for some in _launches(found.values()):
        if len(some) == 1:
            alone.append((some[0][0], sorted_arrays))
            continue
        together = TilesTogether([(search, b.is_identity) for b, search in some])
        made = together.launch(_looked_up(together.looked_up, together.scratch))
        for (base, _), (counts, tiles) in zip(some, made, strict=True):
            base.keep(COUNTS, counts)
            base.keep(TILES, tiles)
            keep_tiles(base, tiles)
        yield [counts.bands]  # it starts all that the launch makes
    yield made_alone(alone)


def _search(base: RelationViews) -> Search | None:
    """Return what a launch that makes the relation's tiles is to search by."""
    search, n = base.search, base.n_out
    if search is None or not n * base.n_in or n > MOST_TOGETHER:
        return None
    rows = search.source
    is_ours = not rows.has_lookup or isinstance(rows.lookup, RowTable)
    return search if is_ours else None


def _launches(found: Iterable[Searched]) -> Iterator[list[Searched]]:
    """Yield what one launch makes: relations of a kind, between up to SETS sets."""
    kinds: dict[tuple, list[Searched]] = {}
    for base, search in found:
        kinds.setdefault(kind(search), []).append((base, search))
    for alike in kinds.values():
        some, sets = [], set()
        for base, search in alike:
            ends = {id(search.source), id(search.target)}
            if len(sets | ends) > SETS:
                yield some
                some, sets = [], set()
            some.append((base, search))
            sets |= ends
        yield some


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

"""Tiles of several relations on CUDA, made in few launches: a net's, of a new scan.

A relation of few rows keeps a GPU busy for less time than its launches take the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..geometry.one_by_one import made_alone
from ..geometry.protocol import RelationViews, Search, View
from .cuda_lookups import RowTable
from .cuda_tables import (
    COUNTS,
    TILES,
    Sorted,
    Source,
    identity_tiles,
    is_ranked,
    kind_of_tiles,
    tiles_of_each,
)
from .cuda_views import fed_rows, keep_tiles, sorted_arrays, tiled

JOBS = 4  # of a launch that has several: a kernel is compiled for it


def begin(wanted: Sequence[tuple[RelationViews, View]]) -> Iterator[list[mx.array]]:
    """Make views: tiles together, and the look-ups that they take. See ``Geometry``."""
    found, identities, alone = {}, {}, []
    for relation, view in wanted:
        base = tiled(relation)[0]
        is_new = view is sorted_arrays and base.kept(TILES) is None
        if is_new and base.is_identity and base.n_out:
            identities[id(fed_rows(base))] = base
        elif is_new and (search := _search(base)) is not None:
            found[id(search)] = base, search
        else:
            alone.append((relation, view))
    started = []
    for some in _parts(list(identities.values())):
        made = identity_tiles([fed_rows(base) for base in some])
        for base, tiles in zip(some, made, strict=True):
            _keep(base, tiles)
        started.append(made[0].masks)
    sets = {
        id(s.source): s.source for _, s in found.values() if not s.source.has_lookup
    }
    for some in _parts(list(sets.values())):
        tables = RowTable.of_each([rows.coords for rows in some])
        for rows, table in zip(some, tables, strict=True):
            rows.lookup = table
    kinds: dict[tuple, list[tuple[RelationViews, Source]]] = {}
    for base, search in found.values():
        rule = search.offsets, search.stride, search.transposed
        source = search.source.lookup.source(search.target.coords, *rule)
        kinds.setdefault(kind_of_tiles(source), []).append((base, source))
    for at, alike in enumerate(kinds.values()):
        if at:  # the device makes these while Python is at the next
            yield started
            started = []
        for some in _parts(alike):
            made = tiles_of_each([source for _, source in some])
            for (base, _), (counts, tiles) in zip(some, made, strict=True):
                base.keep(COUNTS, counts)
                _keep(base, tiles)
            started.append(made[0][1].masks)
    yield started + made_alone(alone)


def _keep(base: RelationViews, tiles: Sorted) -> None:
    base.keep(TILES, tiles)
    keep_tiles(base, tiles)


def _search(base: RelationViews) -> Search | None:
    """Return what a launch that makes the relation's tiles is to search by."""
    search, n = base.search, base.n_out
    if search is None or not n * base.n_in or not is_ranked(n):
        return None
    rows = search.source
    is_ours = not rows.has_lookup or isinstance(rows.lookup, RowTable)
    return search if is_ours else None


def _parts(each: Sequence) -> Iterator[Sequence]:
    """Yield what goes into a launch: so many together, or one."""
    whole = len(each) // JOBS * JOBS
    for at in range(0, whole, JOBS):
        yield each[at : at + JOBS]
    for at in range(whole, len(each)):
        yield each[at : at + 1]

"""Tiles of several relations on CUDA, made in few launches: a net's, of a new scan.

A relation of few rows keeps a GPU busy for less time than its launches take the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..geometry.protocol import RelationViews, View
from .cuda_lookups import RowTable
from .cuda_tables import (
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


def begin(wanted: Sequence[tuple[RelationViews, View]]) -> None:
    """Make tiles, of rows that feed themselves and by search, and look-ups for these.

    Of other relations, and for other views, nothing is made here. See ``Geometry``.
    """
    found, identities = {}, {}
    for relation, view in wanted:
        if view is sorted_arrays:
            base = tiled(relation)[0]
            search = base.search
            if base.is_identity:
                if base.n_out and base.kept(TILES) is None:
                    identities[id(fed_rows(base))] = base
            elif search is not None and _is_made(base):
                found[id(search)] = base, search
    for some in _parts(list(identities.values())):
        made = identity_tiles([fed_rows(base) for base in some])
        for base, tiles in zip(some, made, strict=True):
            _keep(base, tiles)
    sets = {
        id(s.source): s.source for _, s in found.values() if not s.source.has_lookup
    }
    for some in _parts(list(sets.values())):
        tables = RowTable.of_each([rows.coords for rows in some])
        for rows, table in zip(some, tables, strict=True):
            rows.lookup = table
    kinds: dict[tuple, list[tuple[RelationViews, Source]]] = {}
    for base, search in found.values():
        table = search.source.lookup
        if isinstance(table, RowTable):  # and not one of another backend
            rule = search.offsets, search.stride, search.transposed
            source = table.source(search.target.coords, *rule)
            kinds.setdefault(kind_of_tiles(source), []).append((base, source))
    for alike in kinds.values():
        for some in _parts(alike):
            made = tiles_of_each([source for _, source in some])
            for (base, _), (_, counts, tiles) in zip(some, made, strict=True):
                base.keep("band_counts", counts)
                _keep(base, tiles)


def _keep(base: RelationViews, tiles: Sorted) -> None:
    base.keep(TILES, tiles)
    keep_tiles(base, tiles)


def _is_made(base: RelationViews) -> bool:
    """Whether a launch makes the relation's tiles."""
    return base.n_in * base.n_out > 0 and is_ranked(base.n_out, base.volume)


def _parts(each: Sequence) -> Iterator[Sequence]:
    """Yield what goes into a launch: so many together, or one."""
    whole = len(each) // JOBS * JOBS
    for at in range(0, whole, JOBS):
        yield each[at : at + JOBS]
    for at in range(whole, len(each)):
        yield each[at : at + 1]

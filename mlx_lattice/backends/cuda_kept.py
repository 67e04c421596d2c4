"""Rows that a mask keeps on CUDA: their places in one launch, then rows in another."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..geometry import unique
from ..geometry.unique import KeptRows
from .cuda_interfaces import SCRATCH, geometry_kernel, run
from .cuda_sort import (
    SORT,
    SORT_THREADS,
    SORT_TILE,
    THREADS,
    cleared,
    sorts,
    striding_blocks,
)

_KEPT = (*SORT, "kept_rows.cu")


class StartedRows:
    """Rows that a mask keeps, launched; see ``geometry.protocol.StartedRows``."""

    def __init__(self, mask: mx.array, coords: mx.array):
        n = mask.size
        tiles, self._coords = -(-n // SORT_TILE), coords
        self._places, self.count = run(
            _kept_places(),
            [mask, cleared(1 + tiles)],
            tiles,
            SORT_THREADS,
            [((n,), mx.int32), ((1,), mx.int32)],
        )

    def kept(self, count: int) -> KeptRows:
        """Return them."""
        if not count:
            return unique.none_of(self._coords, self._places)
        n, columns = self._coords.shape
        rows, kept = run(
            _kept_rows(columns),
            [self._places, self._coords],
            striding_blocks(n),
            THREADS,
            [((count,), mx.int32), ((count, columns), mx.int32)],
        )
        return KeptRows(rows, self._places, kept)


def start_kept(mask: mx.array, coords: mx.array) -> StartedRows | unique.StartedRows:
    """Launch the rows that a mask keeps. See ``Geometry``."""
    kind = StartedRows if sorts(mask.size) else unique.StartedRows
    return kind(mask, coords)


@cache
def _kept_places():
    return geometry_kernel(
        "kept_places",
        _KEPT,
        "KeptPlaces",
        ("mask", "scratch"),
        ("places", "found"),
        arguments=(("scratch", SCRATCH),),
        threads=SORT_THREADS,
    )


@cache
def _kept_rows(columns: int):
    return geometry_kernel(
        "kept_rows",
        _KEPT,
        "KeptRows",
        ("places", "coords"),
        ("rows", "kept"),
        template=(("COLUMNS", columns),),
        threads=THREADS,
    )

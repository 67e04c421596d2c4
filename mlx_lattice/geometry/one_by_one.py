"""OneByOne: what a backend's geometry leaves out that makes each view by itself."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .keys import Bounds
from .protocol import LaunchedViews, RelationViews, StartedLevels
from .rows import SearchedRows
from .search import Search


class OneByOne:
    """Nothing is made ahead, or together with others; see ``Geometry``."""

    counts_edges = searches_unchecked = False
    together = None

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch nothing: levels are made one of the other."""
        return None

    def tiles_together(
        self, sets: Sequence[SearchedRows], searches: Sequence[Search]
    ) -> Sequence[LaunchedViews]:
        """Launch nothing."""
        return ()

    def keep_together(
        self, made: LaunchedViews, relations: Sequence[RelationViews]
    ) -> None:
        """Do nothing: there is nothing to keep."""

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build nothing ahead of its first use."""
        return None

"""OneByOne: what a backend's geometry leaves out that makes each view by itself."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .keys import Bounds
from .protocol import RelationViews, StartedLevels
from .rows import SearchedRows


class OneByOne:
    """Nothing is made ahead, or together with others; see ``Geometry``."""

    counts_edges = False

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch nothing: levels are made one of the other."""
        return None

    def edge_count(self, relation: RelationViews) -> mx.array | None:
        """Return the (1,) number of edges, unread."""
        return (relation.out_in >= 0).sum().reshape(1)

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build nothing ahead of its first use."""
        return None

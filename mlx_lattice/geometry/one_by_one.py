"""OneByOne: what a backend's geometry leaves out that makes each view by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from .keys import Bounds
from .protocol import RelationViews, SearchedRows, StartedLevels, View


def made_alone(wanted: Sequence[tuple[RelationViews, View]]) -> list[mx.array]:
    """Make views one after another, and return their arrays."""
    return [array for relation, view in wanted for array in view(relation)]


class OneByOne:
    """Nothing is made ahead, or together with others; see ``Geometry``."""

    counts_edges = searches_unchecked = False

    def start_levels(
        self,
        source: SearchedRows,
        strides: Sequence[tuple[int, ...]],
        boxes: Sequence[Bounds] | None,
    ) -> StartedLevels | None:
        """Launch nothing: levels are made one of the other."""
        return None

    def begin(
        self, wanted: Sequence[tuple[RelationViews, View]]
    ) -> Iterator[list[mx.array]]:
        """Make every view by itself."""
        yield made_alone(wanted)

    def start(self, relation: RelationViews) -> mx.array | None:
        """Build nothing ahead of its first use."""
        return None

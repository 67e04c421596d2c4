"""Record: what a manager was asked of one scan, for scans to come; it holds no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .kernel_spec import KernelSpec
from .problem import Problem

# Views that routes read, (of the transpose, view), and the layers that did.
Views = dict[tuple[bool, Callable | None], dict[Problem, None]]


class Record:
    """Levels and relations of a scan, its sets by their serials.

    Attributes:
        first: the set that the first layer was asked for; None before.
        cells: each set, the cells that were made of it, and the stride.
        relations: kind, sets, kernel, and what is read of it, which grows.
    """

    __slots__ = "cells", "first", "relations"

    def __init__(self):
        self.first: int | None = None
        self.cells: list[tuple[int, int, tuple]] = []
        self.relations: list[tuple[str, int, int, KernelSpec, Views]] = []

    @property
    def signature(self) -> tuple:
        """What another scan has too that was asked the same, in the same order."""
        asked = [(kind, spec, *views) for kind, _, _, spec, views in self.relations]
        return *[stride for *_, stride in self.cells], *asked

    def levels(self, first: int) -> Iterator[tuple[int, tuple]]:
        """Yield the cells that were made of a set, of those, and so on; each's stride.

        Of several made of one set, the first.
        """
        for source, made, stride in self.cells:
            if source == first:
                yield made, stride
                first = made

    def keep(self, living: set[int]) -> None:
        """Forget other sets."""
        self.cells = [each for each in self.cells if living.issuperset(each[:2])]
        self.relations = [
            each for each in self.relations if living.issuperset(each[1:3])
        ]

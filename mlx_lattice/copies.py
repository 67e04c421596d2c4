"""How tensors and managers are copied and pickled: what goes together stays together.

A tensor takes its own rows along, and no relations, which are built again. Tensors that
are copied by one call share one new manager where they shared one, and their sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .coordinate_set import CoordinateSet


class Links(NamedTuple):
    """A set, and what its manager knows of others beside it, by their serials."""

    held: CoordinateSet
    serial: int
    made: tuple[tuple[str, int, object], ...]  # by this rule, of that set, how
    # By stride, the set that it was computed from; None of several.
    fine: tuple[tuple[tuple, int | None], ...]


class Manager(Protocol):
    """What takes copied sets in."""

    def adopt(self, held: CoordinateSet) -> None:
        """Add a set that no manager has."""

    def link(self, sets: dict[int, CoordinateSet], links: Sequence[Links]) -> None:
        """Take over what is known of sets; by the serials of the originals."""


class OneManager:
    """Stands for a manager in what is copied.

    Whoever copies looks objects up by identity: all that have this one find one copy.
    """

    def __init__(self, kind: Callable[[], Manager]):
        self.kind = kind

    def __reduce__(self) -> tuple:
        """Copy and pickle as a new manager without sets."""
        return Copied, (self.kind,)


class Copied:
    """A new manager, while sets are added to it."""

    def __init__(self, kind: Callable[[], Manager]):
        self.manager = kind()
        self._sets: dict[int, CoordinateSet] = {}  # by the serial of the original
        self._links: list[Links] = []

    def add(self, links: Links) -> CoordinateSet:
        """Add a set, if it is not there, and what is known of it and those there."""
        if links.serial not in self._sets:
            self._sets[links.serial] = links.held
            self._links.append(links)
            self.manager.adopt(links.held)
            self.manager.link(self._sets, self._links)
        return links.held


def copied_tensor(kind: type, copied: Copied, links: Links) -> object:
    """Return a tensor of a class on rows that were copied, without features."""
    held = copied.add(links)
    made = object.__new__(kind)
    place = {"manager": copied.manager, "key": held.key, "coords": held.shown}
    made.__dict__.update(place)
    return made


def copied_manager(copied: Copied, links: tuple[Links, ...]) -> Manager:
    """Return the copy of a manager, which keeps the sets."""
    for each in links:
        copied.add(each).is_kept = True  # nobody has their keys yet
    return copied.manager

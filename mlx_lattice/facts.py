"""Facts: the base of frozen dataclasses by which what is kept is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache, cached_property
from operator import attrgetter


class Facts:
    """A frozen dataclass of two fields or more, whose hash is computed once.

    Copies and pickles have its fields alone: hashes of strings are a process's own.
    """

    def __init_subclass__(cls) -> None:
        """Keep the dataclass from a hash of its own."""
        cls.__hash__ = Facts.__hash__

    @cached_property
    def _hash(self) -> int:
        return hash(values_of(type(self))(self))

    def __hash__(self) -> int:
        """Return a hash of the fields: every call looks it up."""
        return self._hash

    def __reduce__(self) -> tuple:
        """Return how it is copied and pickled."""
        return type(self), values_of(type(self))(self)


@cache
def values_of(kind: type[Facts]) -> Callable[[Facts], tuple]:
    """Return what gives the fields of one of a kind, without a call for each."""
    return attrgetter(*[field.name for field in fields(kind)])

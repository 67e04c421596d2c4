"""Who is told of what runs: a list of observers a kind of fact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

Fact = TypeVar("Fact")
# What computes results that wait to be read; None where nobody observes.
_awaited: ContextVar[list[Callable[[], object]] | None] = ContextVar(
    "awaited", default=None
)


# What is called at the end of the block that observes, or None. Nothing is told of a
# result that waits to be read until it is computed.
awaited = _awaited.get


@contextmanager
def settling() -> Iterator[None]:
    """Compute what waits before the block ends: its observers are told of it."""
    held: list[Callable[[], object]] = []
    token = _awaited.set(held)
    try:
        yield
        for settle in held:
            settle()
    finally:
        _awaited.reset(token)


class Observers(Generic[Fact]):
    """The observers of one kind of fact; true where there are any."""

    def __init__(self, name: str):
        self._now: ContextVar[tuple[Callable[[Fact], None], ...]] = ContextVar(
            name, default=()
        )
        self.now = self._now.get  # those of here; every layer asks

    def __bool__(self) -> bool:
        return bool(self._now.get())

    @contextmanager
    def observe(self, observer: Callable[[Fact], None]) -> Iterator[None]:
        """Call ``observer`` with every fact inside the block."""
        token = self._now.set((*self._now.get(), observer))
        try:
            with settling():
                yield
        finally:
            self._now.reset(token)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Tell nobody inside the block: a dry run is none of their facts."""
        token = self._now.set(())
        try:
            yield
        finally:
            self._now.reset(token)

    def tell(self, fact: Fact) -> None:
        """Call each observer with a fact."""
        for observer in self._now.get():
            observer(fact)

"""Observer lists: callbacks for norms and attention calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

Fact = TypeVar("Fact")


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
            yield
        finally:
            self._now.reset(token)

    def tell(self, fact: Fact) -> None:
        """Call each observer with a fact."""
        for observer in self._now.get():
            observer(fact)

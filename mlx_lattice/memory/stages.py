"""The ends of a net's stages: evaluated under a limit, recorded in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import mlx.core as mx


class Record(Protocol):
    """What a dry run keeps its boundaries in: a list, or anything that appends."""

    def append(self, arrays: tuple[mx.array, ...], /) -> None:
        """Keep the arrays of one boundary."""

    def finish(self, arrays: tuple[mx.array, ...], /) -> None:
        """Keep those of one that is waited for."""


R = TypeVar("R", bound=Record)

_record: ContextVar[Record | None] = ContextVar("record", default=None)
_evaluate: ContextVar[Callable[..., None] | None] = ContextVar("evaluate", default=None)
# What evaluates boundaries here, if anything does.
evaluates: Callable[[], Callable[..., None] | None] = _evaluate.get


def boundary(*arrays: mx.array, finish: bool = False) -> None:
    """Say that a stage ends with these arrays.

    Under a limit (``evaluating``) they are evaluated, so that what the stage held is
    free before the next one starts; in a dry run of it (``recording``) they are
    recorded and stay lazy. Where no limit holds nothing happens, in a dry run neither.

    Args:
        *arrays: what later stages read of this one. Every result that is still lazy
            belongs here: one that is left out keeps its inputs.
        finish: whether the stage is done before the next one starts. Until it is MLX
            holds what an evaluation returns: an array that is written into would be
            copied.
    """
    evaluate = _evaluate.get()
    if evaluate is None:
        return
    record = _record.get()
    if record is not None:
        (record.finish if finish else record.append)(arrays)
        return
    evaluate(*arrays)
    if finish:
        mx.eval(*arrays)


def is_staged() -> bool:
    """Whether ``boundary`` does anything here: a layer may then cut its work."""
    return evaluates() is not None


def is_recording() -> bool:
    """Whether this is a dry run."""
    return _record.get() is not None


@contextmanager
def recording(record: R) -> Iterator[R]:
    """Record boundaries inside the block instead of evaluating: a dry run.

    Args:
        record: where they go, a tuple of arrays each, in their order: ``[]`` will do.
            It is appended to at the moment of the boundary, with the layers' frames
            still there.
    """
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@contextmanager
def evaluating(
    is_on: bool = True, evaluate: Callable[..., None] = mx.eval
) -> Iterator[None]:
    """Make ``boundary`` evaluate inside the block, or leave all lazy.

    Args:
        is_on: whether it evaluates.
        evaluate: what it calls with its arrays.
    """
    token = _evaluate.set(evaluate if is_on else None)
    try:
        yield
    finally:
        _evaluate.reset(token)

"""From a Choice to a kernel call; observers see every call with its Choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import mlx.core as mx

from . import portable
from .problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Problem
from .relation import Relation
from .routes import Choice, select


@dataclass(frozen=True)
class Launch:
    """One contraction as it was launched.

    Attributes:
        problem: its facts.
        choice: the route that ran, and why.
        scope: the layer that asked for it, or None.
        result: what it returned.
        repeat: runs the same contraction on another route, by name.
    """

    problem: Problem
    choice: Choice
    scope: object
    result: mx.array
    repeat: Callable[[str], mx.array]


_observers: ContextVar[tuple[Callable[[Launch], None], ...]] = ContextVar(
    "observers", default=()
)
_scope: ContextVar[object] = ContextVar("scope", default=None)


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``observer`` with every Launch inside the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


@contextmanager
def scope(layer: object) -> Iterator[None]:
    """Name the layer that the contractions inside the block belong to."""
    token = _scope.set(layer)
    try:
        yield
    finally:
        _scope.reset(token)


def current_scope() -> object:
    """Return the layer that asked for the contraction that is being built."""
    return _scope.get()


def conv(
    x: mx.array, w: mx.array, relation: Relation, groups: int, transposed: bool
) -> mx.array:
    """Choose a route and launch y[o] = sum of x[i] @ W[k] (W[k].T if transposed)."""
    # Only gradients contract with transposed weights, and over a transposed relation.
    layer = relation.T if transposed else relation
    c_in, c_out = w.shape[1] * groups, w.shape[2]
    problem = Problem.of(
        INPUT_GRAD if transposed else FORWARD,
        layer,
        c_in,
        c_out,
        x.dtype,
        groups,
        table=relation.has_table,
    )
    choice = select(problem)

    def run(route: str) -> mx.array:
        return portable.CONV[route](x, w, relation, groups, transposed)

    return _finish(problem, choice, run)


def weight_grad(x: mx.array, dy: mx.array, relation: Relation, groups: int) -> mx.array:
    """Choose a route and launch dW[k] = sum of x[i]^T dy[o], in the features' dtype."""
    problem = Problem.of(
        WEIGHT_GRAD,
        relation,
        x.shape[1],
        dy.shape[1],
        x.dtype,
        groups,
        table=relation.has_table,
    )
    choice = select(problem)

    def run(route: str) -> mx.array:
        return portable.WEIGHT_GRAD[route](x, dy, relation, groups).astype(x.dtype)

    return _finish(problem, choice, run)


def _finish(problem: Problem, choice: Choice, run) -> mx.array:
    result = run(choice.route.name)
    for observer in _observers.get():
        observer(Launch(problem, choice, _scope.get(), result, run))
    return result

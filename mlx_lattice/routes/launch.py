"""From a Choice to the execution of its Plan; observers see every Launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx

from .. import backends, devices
from ..backends import mlx_ops
from ..devices import CPU, Device
from ..problem import DTYPES, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Problem, dtype_name
from ..quantized import QuantizedWeight
from ..relation import Relation
from . import measure
from .plan import Plan
from .selection import Choice, candidates, choose, named

# Runs a contraction by a plan: run(plan, *inputs, *bias).
Run = Callable[..., mx.array]


@dataclass(frozen=True)
class Launch:
    """One contraction as it was launched.

    Attributes:
        problem: its facts.
        choice: the route that ran, and why.
        scope: the layer that asked for it, or None.
        relation: the layer's own (untransposed) relation.
        inputs: the arrays that were contracted.
        result: the array that it returned, or None where it was only planned.
        run: runs it by a plan: ``run(plan, *inputs, *bias)``.
        bias: one array, added to every row, or none.
    """

    problem: Problem
    choice: Choice
    scope: object
    relation: Relation
    inputs: tuple[mx.array, ...]
    result: mx.array | None
    run: Run
    bias: tuple[mx.array, ...] = ()

    def repeat(self, route: str) -> mx.array:
        """Run the same contraction on another route, by its name."""
        plan = named(route).plan(self.problem, self.choice.device)
        return self.run(plan, *self.inputs, *self.bias)


_observers: ContextVar[tuple[Callable[[Launch], None], ...]] = ContextVar(
    "observers", default=()
)
_scope: ContextVar[object] = ContextVar("scope", default=None)
_planned: ContextVar[tuple[Device | None, dict[str, str]] | None] = ContextVar(
    "planned", default=None
)


_deterministic: ContextVar[bool] = ContextVar("deterministic", default=True)


@contextmanager
def waive_determinism() -> Iterator[None]:
    """Allow routes whose sums have no fixed order, such as fp32_atomic, in the block.

    Everywhere else the same input gives the same bits on one device.
    """
    token = _deterministic.set(False)
    try:
        yield
    finally:
        _deterministic.reset(token)


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``observer`` with every Launch inside the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


@contextmanager
def planned(
    observer: Callable[[Launch], None],
    device: Device | None = None,
    only: dict[str, str] | None = None,
) -> Iterator[None]:
    """Choose routes without running them: contractions in the block return zeros.

    Relations are built.

    Args:
        observer: called with every Launch; its ``result`` is None.
        device: the profile to choose for; by default the one that MLX runs on.
        only: routes that must be taken, by pass.
    """
    token, watch = _planned.set((device, only or {})), _observers.set((observer,))
    try:
        yield
    finally:
        _planned.reset(token)
        _observers.reset(watch)


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
    x: mx.array,
    w: mx.array | QuantizedWeight,
    relation: Relation,
    groups: int,
    transposed: bool,
    *bias: mx.array,
) -> mx.array:
    """Choose a route and launch y[o] = sum of x[i] @ W[k] (W[k].T if transposed).

    One bias may follow, (C_out,), added to every row.
    """
    # Transposed weights mean an input gradient, over the transposed relation.
    layer = relation.T if transposed else relation
    packed = isinstance(w, QuantizedWeight)
    problem = Problem.of(
        INPUT_GRAD if transposed else FORWARD,
        layer,
        w.shape[1] * groups,
        w.shape[2],
        x.dtype,
        groups,
        table=relation.has_table,
        deterministic=_deterministic.get(),
        bits=w.bits if packed else None,
        group_size=w.group_size if packed else None,
    )
    arrays = w.arrays if packed else (w,)
    count = len(arrays)

    def run(plan: Plan, x: mx.array, *rest: mx.array) -> mx.array:
        held = w.holding(*rest[:count]) if packed else rest[0]
        return plan(relation, x, held, *rest[count:])

    return _finish(problem, run, (x, *arrays), layer, bias)


def packed_linear(x: mx.array, w: QuantizedWeight, transposed: bool) -> mx.array:
    """Return x @ W[0], or x @ W[0].T: without a relation there is one route."""
    if transposed or not x.shape[0]:
        return mlx_ops.packed_matmul(x, w, transpose=not transposed)
    name = dtype_name(x.dtype)
    problem = Problem.linear(x.shape[0], w.shape[1], w.shape[2], name, w.bits)
    return _linear(problem, devices.current(), backends.missing(CPU))(None, x, w)


@lru_cache(maxsize=1024)
def _linear(problem: Problem, device: Device, absent: str | None) -> Plan:
    del absent  # part of the cache's key: the plan depends on it
    return named("quantized_pointwise").plan(problem, device)


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
        deterministic=_deterministic.get(),
    )

    def run(plan: Plan, x: mx.array, dy: mx.array) -> mx.array:
        return plan(relation, x, dy)

    return _finish(problem, run, (x, dy), relation)


def _finish(
    problem: Problem,
    run: Run,
    inputs: tuple[mx.array, ...],
    relation: Relation,
    bias: tuple[mx.array, ...] = (),
) -> mx.array:
    """Choose, launch and tell the observers. Every contraction ends here."""
    planned = _planned.get()
    device, only = planned or (None, {})
    here = devices.current()
    if device not in (None, here) and problem.edges is None:
        # On that device the relation could have been made with its edges counted.
        problem = replace(problem, edges=relation.n_edges)
    choice, tuned = choose(problem, device or here, only.get(problem.pass_))
    if tuned and choice.device == here:
        measure.record(problem, here, candidates(problem, here), run, inputs)
        choice, _ = choose(problem, here)
    if planned:
        result = None
    elif problem.n_in == 0 or problem.n_out == 0:
        # No sums to compute, and a GPU kernel cannot be launched on an empty grid.
        result = _zeros(problem) + bias[0] if bias else _zeros(problem)
    else:
        result = run(choice.plan, *inputs, *bias)
    for observer in _observers.get():
        layer = _scope.get()
        observer(Launch(problem, choice, layer, relation, inputs, result, run, bias))
    return _zeros(problem) if result is None else result


def _zeros(problem: Problem) -> mx.array:
    """Return zeros in the shape and dtype that the pass writes."""
    if problem.pass_ == FORWARD:
        shape = problem.n_out, problem.c_out
    elif problem.pass_ == INPUT_GRAD:
        shape = problem.n_in, problem.c_in
    else:
        shape = problem.volume, problem.c_in // problem.groups, problem.c_out
    return mx.zeros(shape, dtype=DTYPES[problem.dtype])

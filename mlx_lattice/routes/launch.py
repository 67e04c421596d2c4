"""Run a pass by its Plan, chosen once and cached; observers see every Launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from .. import devices, settings
from ..backends.gpu.contraction import without_sums, zeros
from ..devices import Device
from ..epilogue import EpilogueFacts
from ..problem import (
    INPUT_GRAD,
    KERNEL_MAJOR,
    MLX,
    IntegerFacts,
    Plan,
    Problem,
)
from ..quantized import Packing
from ..relation import Relation
from . import proof, selection
from .selection import Choice, candidates, choose
from .table import named

# Runs a contraction by a plan: run(plan, *inputs, *bias).
Run = Callable[..., mx.array]


@dataclass(frozen=True)
class Launch:
    """One contraction as it was launched."""

    problem: Problem  # its facts
    choice: Choice  # the route that ran, and why
    scope: object  # the layer that launched it, or None
    relation: Relation  # the layer's own (untransposed) relation
    inputs: tuple[mx.array, ...]  # the arrays that were contracted
    result: mx.array | None  # None if it was only planned
    run: Run  # runs any plan of it: ``run(plan, *inputs, *bias)``
    bias: tuple[mx.array, ...]  # or the arrays of an epilogue
    cache: Callable[[], Run]  # caches the plan: ``launch(relation, *inputs, *bias)``

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


def is_planning() -> bool:
    """Return whether contractions are only planned; see ``planned``."""
    return _planned.get() is not None


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``observer`` with every Launch inside the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def device() -> Device:
    """Return the device of the ``planned`` block, or the one that MLX runs on."""
    planned = _planned.get()
    return devices.current() if planned is None or planned[0] is None else planned[0]


@contextmanager
def planned(
    observer: Callable[[Launch], None],
    device: Device | None = None,
    only: dict[str, str] | None = None,
) -> Iterator[None]:
    """Choose routes without running them: contractions in the block return zeros."""
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


# Returns the observers of the blocks around a call.
observed: Callable[[], tuple[Callable[[Launch], None], ...]] = _observers.get


def current_scope() -> object:
    """Return the layer whose contraction is being built."""
    return _scope.get()


class Layer(NamedTuple):
    """The facts of a convolution that its three passes share."""

    c_in: int
    c_out: int
    dtype: mx.Dtype  # of the features
    groups: int  # channel groups
    precision: str  # "float32", or "tf32" if the caller allowed it
    packing: Packing | None = None
    layout: str = KERNEL_MAJOR  # of a float weight, and of its gradient


class Request(NamedTuple):
    """One pass of a layer, without row counts."""

    pass_: str  # "forward", "input_grad" or "weight_grad"
    layer: Layer  # the layer
    epilogue: EpilogueFacts | None = None
    integer: IntegerFacts | None = None
    moments: bool = False  # whether a forward pass may return statistics of its rows

    def problem(self, relation: Relation) -> Problem:
        """Return the facts of the pass over the layer's relation."""
        c_in, c_out, dtype, groups, precision, packing, layout = self.layer
        return Problem.of(
            self.pass_,
            relation,
            c_in,
            c_out,
            dtype,
            groups,
            table=_end(self, relation).has_table,
            deterministic=settings.current().deterministic,
            precision=precision,
            bits=packing and packing.bits,
            group_size=packing and packing.group_size,
            layout=layout,
            epilogue=self.epilogue,
            integer=self.integer,
            moments=self.moments,
        )

    @property
    def count(self) -> int:
        """How many arrays are contracted; others are added."""
        packing = self.layer.packing
        return 2 if packing is None else 1 + packing.count

    def operands(self, arrays: tuple[mx.array, ...]) -> tuple[Any, ...]:
        """Return the arrays for a plan; those of a packed weight become one object."""
        packing = self.layer.packing
        if packing is None:
            return arrays
        weight = packing.weight(arrays[1 : self.count])
        return arrays[0], weight, *arrays[self.count :]


def run(
    request: Request, relation: Relation, *arrays: mx.array
) -> mx.array | tuple[mx.array, mx.array]:
    """Run one pass by its plan, which is chosen the first time and cached."""
    key = request, mx.default_device() == devices.GPU, settings.version()
    launch = relation.plans.get(key)
    if launch is None or _observers.get():
        return _first(request, relation, arrays)
    return launch(relation, *arrays)


def _end(request: Request, relation: Relation) -> Relation:
    """Return the relation that the pass contracts over."""
    return relation.T if request.pass_ == INPUT_GRAD else relation


def moments_shape(request: Request, relation: Relation) -> tuple[int, int, int] | None:
    """Return the shape of the statistics after y, or None without statistics."""
    lines = choose(request.problem(relation), device())[0].plan.moments
    return (lines, 3, request.layer.c_out) if lines else None


def _first(request: Request, relation: Relation, arrays: tuple[mx.array, ...]):
    """Choose a route, launch, cache the plan and call the observers."""
    here = devices.current()
    problem, planned = request.problem(relation), _planned.get()
    device, only = planned or (None, {})
    if device not in (None, here) and problem.edges is None:
        # On that device the relation could have been made with its edges counted.
        problem = replace(problem, edges=relation.n_edges)
    forced = only.get(problem.pass_)
    choice, tuned = choose(problem, device or here, forced)
    inputs, added = arrays[: request.count], arrays[request.count :]
    end = _end(request, relation)

    def rows(plan: Plan, *arrays: mx.array) -> mx.array:
        """Return y without its statistics, or dW."""
        result = plan(end, *request.operands(arrays))
        return result[0] if isinstance(result, tuple) else result

    if tuned and choice.device == here:
        # Routes are timed and compared without the epilogue.
        sums = replace(problem, epilogue=None, moments=False)
        able = candidates(sums, here)
        timed = arrays if request.integer else inputs
        tuned = selection.record(sums, here, able, rows, timed)
        if tuned:
            choice, _ = choose(problem, here)

    def cache() -> Run:
        launch = _bound(request, choice.plan, end)
        if not tuned:  # reads the version again: a proof may change it
            key = request, mx.default_device() == devices.GPU, settings.version()
            relation.plans[key] = launch
        return launch

    has_rows = problem.n_in and problem.n_out
    if device in (None, here) and has_rows:
        # A failed proof refuses its kernel, so the loop ends at the last route.
        while not proof.prove(choice.plan, bool(added)):
            choice, _ = choose(problem, here, forced)
    if planned:
        result = zeros(problem)
        if choice.plan.moments:
            result = result, mx.zeros((choice.plan.moments, 3, problem.c_out))
    elif not has_rows:
        # No sums to compute, and a GPU kernel cannot be launched on an empty grid.
        result = without_sums(problem, added)
    else:
        result = cache()(relation, *arrays)
    y = result[0] if isinstance(result, tuple) else result
    for observer in _observers.get():
        scope, y = _scope.get(), None if planned else y
        facts = problem, choice, scope, relation, inputs, y, rows, added, cache
        observer(Launch(*facts))
    return result


def _bound(request: Request, plan: Plan, end: Relation) -> Callable[..., mx.array]:
    """Return ``launch(relation, *arrays)``, which references views, not relations."""
    call = plan.bound(end)
    reads_end = plan.backend == MLX and request.pass_ == INPUT_GRAD
    if request.layer.packing is None and not reads_end:
        return call  # kernels ignore the relation that is passed
    return lambda relation, *arrays: call(
        _end(request, relation), *request.operands(arrays)
    )

"""From a Choice to the execution of its Plan; observers see every Launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx

from .. import devices, settings
from ..devices import Device
from ..epilogue import EpilogueFacts
from ..integer_facts import IntegerFacts
from ..numerics import asked_precision
from ..problem import (
    FORWARD,
    INPUT_GRAD,
    KERNEL_MAJOR,
    MLX_LAYOUT,
    WEIGHT_GRAD,
    Problem,
    weight_axes,
)
from ..quantized import IntegerPacking, Packing, QuantizedWeight
from ..relation import Relation
from ..relation_form import Form
from . import measure, proof, proof_results
from .plan import Plan
from .selection import (
    Choice,
    Deciding,
    candidates,
    choose,
    deciding,
    named,
    situation,
)
from .zeros import nothing, without_sums

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
        bias: one array, added to every row, or none; or those of an epilogue.
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


def is_planning() -> bool:
    """Whether contractions are planned alone here, see ``planned``."""
    return _planned.get() is not None


@contextmanager
def observe(
    observer: Callable[[Launch], None], *, alone: bool = False
) -> Iterator[None]:
    """Call ``observer`` with every Launch inside the block; ``alone``: no other."""
    others = () if alone else _observers.get()
    token = _observers.set((*others, observer))
    try:
        yield
    finally:
        _observers.reset(token)


def device() -> Device:
    """Return the device that is planned for here, or that MLX runs on now."""
    planned = _planned.get()
    return devices.current() if planned is None or planned[0] is None else planned[0]


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


# Those who are told of launches here, and so of layers; every call asks.
observed = _observers.get


def current_scope() -> object:
    """Return the layer that asked for the contraction that is being built."""
    return _scope.get()


class Pass:
    """One pass of a layer over a relation, launched by calling it with arrays.

    The first call chooses a route. While ``selection.situation()`` stays the same and
    nobody observes, later ones go straight to its plan.

    Args:
        pass_: "forward", "input_grad" or "weight_grad".
        layer: the layer's own (untransposed) relation.
        facts: of the layer, which its passes over all relations share:
            c_in, c_out: its channels.
            dtype: of the features.
            groups: channel groups.
            precision: "float32", or "tf32" where the caller asked for it.
            packing: what ``QuantizedWeight.packing``, or that of an integer weight,
                says; None of a float weight.
            layout: of a float weight, and of its gradient.
        epilogue: what a forward pass does to its sums, or None.
        integer: what it does to sums of int8 features, or None.
        moments: whether a forward pass is asked for statistics of its rows.
    """

    __slots__ = (
        "_kept", "epilogue", "facts", "integer", "layer", "moments", "packing", "pass_",
        "relation",
    )  # fmt: skip

    def __init__(
        self,
        pass_: str,
        layer: Relation,
        facts: tuple,
        epilogue: EpilogueFacts | None = None,
        integer: IntegerFacts | None = None,
        moments: bool = False,
    ):
        self.epilogue, self.integer, self.moments = epilogue, integer, moments
        self.pass_, self.layer, self.facts = pass_, layer, facts
        # Transposed weights mean an input gradient, over the transposed relation.
        self.relation = layer.T if pass_ == INPUT_GRAD else layer
        self.packing: Packing | IntegerPacking | None = facts[5]
        # A situation, what its plan calls, and the plan's lines of statistics.
        self._kept: tuple[tuple, Callable[..., mx.array], int] | None = None

    def __call__(self, *arrays: mx.array) -> mx.array | tuple[mx.array, mx.array]:
        """Return y of (x, w), or of (x, the arrays of a packed weight), or dW.

        A bias, or the arrays of an epilogue or of ``integer``, may follow. Where the
        plan sums statistics of y's rows, they follow y: see ``Plan.moments``.
        """
        kept = self._kept
        if kept is None or kept[0] != situation() or _observers.get():
            return self._launch(arrays)
        if self.packing is not None:
            arrays = self._unpacked(arrays)
        return kept[1](*arrays)

    def moments_shape(self) -> tuple[int, int, int] | None:
        """Return the shape of the statistics that follow y, None where none do."""
        kept = self._kept
        if kept is not None and kept[0] == situation():
            lines = kept[2]
        else:
            choice, _ = choose(self.problem(), device())
            lines = choice.plan.moments
        return (lines, 3, self.facts[1]) if lines else None

    def settled(self) -> tuple | None:
        """Return a situation while calls launch what the last one did, or None."""
        kept = self._kept
        if kept is None or kept[0] != situation() or _observers.get():
            return None
        return kept[0]

    def _unpacked(self, arrays: tuple[mx.array, ...]) -> tuple:
        """Return the arrays as plans take them: those of a packed weight as one."""
        if self.packing is None:
            return arrays
        x, *packed = arrays[: 1 + self.packing.count]
        return x, self.packing.weight(packed), *arrays[1 + self.packing.count :]

    def _run(self, plan: Plan, *arrays: mx.array) -> mx.array:
        return plan(self.relation, *self._unpacked(arrays))

    def _rows(self, plan: Plan, *arrays: mx.array) -> mx.array:
        """Return y alone, or dW."""
        made = self._run(plan, *arrays)
        return made[0] if isinstance(made, tuple) else made

    def problem(self) -> Problem:
        """Return the facts, as they are now."""
        return _shared(*self._said()).over(self.layer)

    def _said(self) -> tuple:
        """Return all facts but the rows."""
        now = self.relation.has_table, settings.deterministic.get()
        after = self.epilogue, self.integer, self.moments
        return self.layer.form, self.pass_, self.facts, *now, *after

    def _launch(self, arrays: tuple[mx.array, ...]) -> mx.array:
        """Choose and launch. Every contraction begins here."""
        now = situation()
        if _observers.get():
            return self._told(now, self.problem(), arrays)
        results = proof_results.here(devices.current())
        refused = proof_results.NONE if results is None else results.refused
        layer, table, now = _decided(self._said(), now, refused)
        problem = layer.over(self.layer)
        if table is None or not (problem.n_in and problem.n_out):
            return self._told(now, problem, arrays)
        plan = table.plan(table.row(problem), problem)
        if not proof.prove(plan, len(arrays) > self._count, results):
            return self._launch(arrays)  # its kernel is refused from now on
        return self._keep(now, plan)(*self._unpacked(arrays))

    def _told(self, now: tuple, problem: Problem, arrays: tuple) -> mx.array:
        """Choose by all that there is, launch, and tell the observers."""
        planned = _planned.get()
        device, only = planned or (None, {})
        here = devices.current()
        if device not in (None, here) and problem.edges is None:
            # On that device the relation could have been made with its edges counted.
            problem = replace(problem, edges=self.layer.n_edges)
        choice, tuned = choose(problem, device or here, only.get(problem.pass_))
        inputs, bias = arrays[: self._count], arrays[self._count :]
        if tuned and choice.device == here:
            # Timed and compared by their sums.
            bare = replace(problem, epilogue=None, moments=False)
            able = candidates(bare, here)
            timed = arrays if self.integer else inputs
            tuned = measure.record(bare, here, able, self._rows, timed)
            if tuned:
                choice, _ = choose(problem, here)
        if device in (None, here) and problem.n_in and problem.n_out:
            # Each time another kernel is refused, so that the last row is reached.
            results = proof_results.here(here)
            while not proof.prove(choice.plan, bool(bias), results):
                choice, _ = choose(problem, here, only.get(problem.pass_))
        if planned:
            result = nothing(problem, choice.plan)
        elif problem.n_in == 0 or problem.n_out == 0:
            # No sums to compute, and a GPU kernel cannot be launched on an empty grid.
            result = without_sums(problem, bias)
        elif tuned or _observers.get():
            result = self._run(choice.plan, *arrays)
        else:
            result = self._keep(now, choice.plan)(*self._unpacked(arrays))
        y = result[0] if isinstance(result, tuple) else result
        for observer in _observers.get():
            scope, y = _scope.get(), None if planned else y
            facts = problem, choice, scope, self.layer, inputs, y, self._rows, bias
            observer(Launch(*facts))
        return result

    def _keep(self, now: tuple, plan: Plan) -> Callable[..., mx.array]:
        """Return what a plan calls over the relation, from now on."""
        call = plan.bound(self.relation)
        self._kept = now, call, plan.moments
        return call

    @property
    def _count(self) -> int:
        """How many arrays are contracted: others are added."""
        return 2 if self.packing is None else 1 + self.packing.count


@lru_cache(maxsize=4096)
def _decided(
    said: tuple, now: tuple, refused: proof_results.Refused
) -> tuple[Problem, Deciding | None, tuple]:
    """Return the facts of a pass but for the rows, how those alone decide, and now."""
    layer = _shared(*said)
    return layer, deciding(layer, now, refused), now


@lru_cache(maxsize=4096)
def _shared(
    form: Form, pass_, facts, table, deterministic, epilogue, integer, moments
) -> Problem:
    """Return the facts of a pass of a layer but for the rows, found once."""
    *layer, precision, packing, layout = facts
    return Problem.of_form(
        pass_,
        form,
        *layer,
        table=table,
        deterministic=deterministic,
        precision=precision,
        bits=packing and packing.bits,
        group_size=packing and packing.group_size,
        layout=layout,
        epilogue=epilogue,
        integer=integer,
        moments=moments,
    )


def conv(
    x: mx.array,
    w: mx.array | QuantizedWeight,
    relation: Relation,
    groups: int,
    transposed: bool,
    *bias: mx.array,
) -> mx.array:
    """Choose a route and launch y[o] = sum of x[i] @ W[k] (W[k].T if transposed).

    A weight of more than three axes has MLX's layout. One bias may follow, (C_out,),
    added to every row.
    """
    pass_, layer = (INPUT_GRAD, relation.T) if transposed else (FORWARD, relation)
    layout, volume, c_in, c_out = weight_axes(w.shape)
    packing, arrays = None, (w,)
    if layout == MLX_LAYOUT:
        arrays = (w.reshape(c_out, volume, c_in),)
    if isinstance(w, QuantizedWeight):
        packing, arrays = w.packing, w.arrays
    facts = c_in * groups, c_out, x.dtype, groups, asked_precision(), packing, layout
    return Pass(pass_, layer, facts)(x, *arrays, *bias)


def weight_grad(x: mx.array, dy: mx.array, relation: Relation, groups: int) -> mx.array:
    """Choose a route and launch dW[k] = sum of x[i]^T dy[o], in the features' dtype."""
    asked = asked_precision(), None, KERNEL_MAJOR
    facts = x.shape[1], dy.shape[1], x.dtype, groups, *asked
    return Pass(WEIGHT_GRAD, relation, facts)(x, dy)

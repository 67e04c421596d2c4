"""From a Choice to a kernel call; observers see every call with its Choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType

import mlx.core as mx

from .. import backends, devices
from ..backends import mlx_ops
from ..devices import Device
from ..problem import DTYPES, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Problem
from ..quantized import QuantizedWeight
from ..relation import Relation
from . import measure
from .needs import packed_weight
from .selection import Choice, candidates, named, select

# Runs a contraction on a named route: run(route, *inputs).
Run = Callable[..., mx.array]


@dataclass(frozen=True)
class Launch:
    """One contraction as it was launched.

    Attributes:
        problem: its facts.
        choice: the route that ran, and why.
        scope: the layer that asked for it, or None.
        relation: the layer's own (untransposed) relation, where there is one.
        inputs: the arrays that were contracted.
        result: what it returned, or None where it was only planned.
        run: runs it on a route, by name: ``run(route, *inputs, *bias)``.
        bias: what was added to every row: one array, or none.
    """

    problem: Problem
    choice: Choice
    scope: object
    relation: Relation | None
    inputs: tuple[mx.array, ...]
    result: mx.array | None
    run: Run
    bias: tuple[mx.array, ...] = ()

    def repeat(self, route: str) -> mx.array:
        """Run the same contraction on another route."""
        return self.run(route, *self.inputs, *self.bias)


_observers: ContextVar[tuple[Callable[[Launch], None], ...]] = ContextVar(
    "observers", default=()
)
_scope: ContextVar[object] = ContextVar("scope", default=None)
_plan: ContextVar[tuple[Device | None, dict[str, str]] | None] = ContextVar(
    "plan", default=None
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
    """Choose, and run nothing: contractions inside the block return zeros.

    Relations are built and their edges counted, so that the facts are complete.

    Args:
        observer: called with every Launch; its ``result`` is None.
        device: the profile to choose for; by default the one that MLX runs on.
        only: routes that must be taken, by pass.
    """
    plan, watch = _plan.set((device, only or {})), _observers.set((observer,))
    try:
        yield
    finally:
        _plan.reset(plan)
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
    w: mx.array,
    relation: Relation,
    groups: int,
    transposed: bool,
    *bias: mx.array,
) -> mx.array:
    """Choose a route and launch y[o] = sum of x[i] @ W[k] (W[k].T if transposed).

    One bias may follow, (C_out,), added to every row.
    """
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
        deterministic=_deterministic.get(),
    )

    def run(route: str, x: mx.array, w: mx.array, *bias: mx.array) -> mx.array:
        return _call(
            "CONV", route, problem.pass_, (x, w, relation, groups, transposed), bias
        )

    return _finish(problem, run, (x, w), layer, bias)


def packed_conv(
    x: mx.array,
    w: QuantizedWeight,
    relation: Relation,
    groups: int,
    transposed: bool,
    *bias: mx.array,
) -> mx.array:
    """Choose a route and launch a contraction with a packed weight.

    Routes for packed weights get it as it is; the floor, and every route of the input
    gradient, the dequantised one.
    """
    layer = relation.T if transposed else relation
    problem = Problem.of(
        INPUT_GRAD if transposed else FORWARD,
        layer,
        w.shape[1] * groups,
        w.shape[2],
        x.dtype,
        groups,
        table=relation.has_table,
        deterministic=_deterministic.get(),
        bits=w.bits,
        group_size=w.group_size,
    )

    count = len(w.arrays)

    def run(route: str, x: mx.array, *rest: mx.array) -> mx.array:
        packed, bias = w.holding(*rest[:count]), rest[count:]
        if packed_weight not in named(route).needs:
            # Compiled kernels want one dtype; the floor takes what is stored exactly.
            dense = packed.dense(x.dtype if transposed else mx.float32)
            arguments = x, dense, relation, groups, transposed
            return _call("CONV", route, problem.pass_, arguments, bias)
        return _call("QUANTIZED", route, FORWARD, (x, packed, relation, groups), bias)

    return _finish(problem, run, (x, *w.arrays), layer, bias)


def packed_linear(x: mx.array, w: QuantizedWeight, transposed: bool) -> mx.array:
    """Return x @ W[0], or x @ W[0].T; layers of rows alone have no routes."""
    if transposed:
        return mlx_ops.packed_matmul(x, w, transpose=False)
    return kernel("QUANTIZED", "quantized_pointwise", FORWARD)(x, w, None, 1)


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

    def run(route: str, x: mx.array, dy: mx.array) -> mx.array:
        dw = kernel("WEIGHT_GRAD", route, WEIGHT_GRAD)(x, dy, relation, groups)
        return dw.astype(x.dtype)

    return _finish(problem, run, (x, dy), relation)


def kernel(table: str, route: str, pass_: str) -> Callable[..., mx.array]:
    """Return what runs a route on the current device: compiled code where it has some.

    Args:
        table: "CONV", "WEIGHT_GRAD" or "QUANTIZED".
        route: the route's name.
        pass_: the pass, since a backend may have compiled kernels for some only.
    """
    return getattr(_module(route, pass_), table)[route]


def _module(route: str, pass_: str) -> ModuleType:
    """Return the module that runs a route's pass on the current device."""
    backend = devices.current().backend
    native = backends.of(backend) if named(route).compiled(backend, pass_) else None
    return mlx_ops if native is None else native


def _call(
    table: str, route: str, pass_: str, arguments: tuple, bias: tuple
) -> mx.array:
    """Run a route; add the bias after those that do not add it to their sums."""
    run = kernel(table, route, pass_)
    if bias and route in _module(route, pass_).FUSED_BIAS:
        return run(*arguments, bias=bias[0])
    y = run(*arguments)
    return y + bias[0] if bias else y


def _finish(
    problem: Problem,
    run: Run,
    inputs: tuple[mx.array, ...],
    relation: Relation | None = None,
    bias: tuple[mx.array, ...] = (),
) -> mx.array:
    """Choose, launch and tell the observers. Every contraction ends here."""
    plan = _plan.get()
    if plan and relation is not None:
        problem = replace(problem, edges=relation.n_edges)
    device, only = plan or (None, {})
    choice = select(problem, device=device, only=only.get(problem.pass_))
    here = choice.device
    if measure.enabled() and not choice.forced and here == devices.current():
        measure.record(problem, here, candidates(problem, here), run, inputs)
        if relation is not None:  # some routes have counted its edges meanwhile
            problem = replace(problem, edges=relation.known_edges)
        choice = select(problem, device=device)
    if plan:
        result = None
    elif problem.n_in == 0 or problem.n_out == 0:
        # Nothing to add up, and some GPU kernels can't start for no rows.
        result = _zeros(problem) + bias[0] if bias else _zeros(problem)
    else:
        result = run(choice.route.name, *inputs, *bias)
    for observer in _observers.get():
        layer = _scope.get()
        observer(Launch(problem, choice, layer, relation, inputs, result, run, bias))
    return _zeros(problem) if result is None else result


def _zeros(problem: Problem) -> mx.array:
    """Return what the pass writes where there is nothing to add up."""
    if problem.pass_ == FORWARD:
        shape = problem.n_out, problem.c_out
    elif problem.pass_ == INPUT_GRAD:
        shape = problem.n_in, problem.c_in
    else:
        shape = problem.volume, problem.c_in // problem.groups, problem.c_out
    return mx.zeros(shape, dtype=DTYPES[problem.dtype])

"""Route and Choice: a row of the table, and what was taken from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .. import backends
from ..backends.gpu.contraction import launched
from ..devices import BACKENDS, CPU, CUDA, Device
from ..epilogue import finished
from ..problem import (
    AFTER,
    FORWARD,
    INPUT_GRAD,
    LANGUAGE,
    MLX,
    OPERATIONS,
    WEIGHT_GRAD,
    Plan,
    Planner,
    Problem,
)
from ..settings import FLOAT32
from .needs import Need, packed_or_integers, packed_weight

# A planner, or (pass, planner) pairs where it has some of the row's passes only.
Planners = Planner | tuple[tuple[str, Planner], ...] | None


# Milliseconds of each candidate, fastest first; None where its result was wrong.
Times = tuple[tuple[str, float | None], ...]
Reasons = tuple[tuple[str, str], ...]  # by the names of routes


class RouteError(ValueError):
    """Raised if a forced route does not exist for a pass, or cannot run."""


@dataclass(frozen=True)
class Route:
    """Describe one way to run one or more passes.

    Attributes:
        name: the name, which is also that of the kernel's file and entry symbol on each
            backend.
        passes: the passes it can run.
        needs: predicates that must hold for the route to run.
        idea: the method in one line.
        pays: predicates that must hold for the route to be preferred; a forced route
            ignores them.
        metal, cuda, cpu: planners for the backend's own kernels, which are preferred.
        mlx: the planner in MLX operations.
        mlx_on: the backends on which MLX operations may run it.
        expands: whether it runs a grouped problem as a dense one, with a block-diagonal
            weight; then its predicates are asked about the dense problem.
    """

    name: str
    passes: tuple[str, ...]
    needs: tuple[Need, ...]
    idea: str
    pays: tuple[Need, ...] = ()
    metal: Planners = None
    cuda: Planners = None
    cpu: Planners = None
    mlx: Planners = None
    mlx_on: tuple[str, ...] = BACKENDS
    expands: Callable[[Problem, Device], bool] | None = None

    def planner(self, kind: str, pass_: str) -> Planner | None:
        """Return what plans a pass for a backend's kernels, or for MLX operations."""
        found = getattr(self, kind)  # kinds are names of fields
        return dict(found).get(pass_) if isinstance(found, tuple) else found

    def code(self, backend: str, pass_: str) -> str | None:
        """Return what runs a pass here ("C++", "MLX operations"), None if nothing."""
        kind = self._kind(backend, pass_, backends.missing(backend))
        return None if kind is None else LANGUAGE[kind]

    def _kind(self, backend: str, pass_: str, absent: str | None) -> str | None:
        """Return what runs a pass: own kernels unless ``absent``, "mlx", or None."""
        if not absent and self.planner(backend, pass_):
            return backend
        return MLX if backend in self.mlx_on and self.planner(MLX, pass_) else None

    @cached_property
    def on(self) -> tuple[str, ...]:
        """The backends that run any of its passes."""
        return tuple(
            b for b in BACKENDS if any(self._kind(b, p, None) for p in self.passes)
        )

    def refusal(
        self, problem: Problem, device: Device, forced: bool = False
    ) -> str | None:
        """Return why the route is not taken for the problem, or None if it may be."""
        absent = backends.missing(device.backend)
        return self.obstacle(problem, device, absent, forced)

    def obstacle(
        self, problem: Problem, device: Device, absent: str | None, forced: bool
    ) -> str | None:
        """Return ``refusal``; ``absent``: why the backend's kernels are, or None."""
        pass_, backend = problem.pass_, device.backend
        if pass_ not in self.passes:
            return f"it has no {pass_} pass"
        if backend not in self.on:
            return f"it runs on {' and '.join(self.on)}, not on {backend}"
        multiplied = problem
        if problem.groups > 1:
            multiplied = self._multiplied(problem, device)
        for need in self.needs if forced else (*self.needs, *self.pays):
            if absent and hasattr(need, "of_kernels"):
                continue
            if reason := need(multiplied, device):
                return reason
        return self._absence(backend, pass_, absent)

    def _multiplied(self, problem: Problem, device: Device) -> Problem:
        """Return the problem that its kernels multiply: the dense one if it expands."""
        expands = problem.groups > 1 and self.expands and self.expands(problem, device)
        return problem.dense if expands else problem

    def _absence(self, backend: str, pass_: str, absent: str | None) -> str | None:
        """Return why nothing runs a pass, or None."""
        if self._kind(backend, pass_, absent) is not None:
            return None
        if self._kind(backend, pass_, None) is not None:
            where = " are in an extension, but" if backend == CPU else ":"
            return f"its {backend} kernels{where} {absent}"
        return f"it has no {pass_} pass on {backend}"

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Plan a problem."""
        absent = backends.missing(device.backend)
        kind = self._kind(device.backend, problem.pass_, absent)
        if kind is None:
            reason = self.refusal(problem, device, forced=True)
            raise RouteError(f"{self.name} cannot plan {problem}: {reason}")
        multiplied = self._multiplied(problem, device)
        if multiplied is not problem:
            plan = self.plan(multiplied, device)
            scratch = plan.scratch + multiplied.dense_weight_bytes
            return replace(plan, expanded=problem.groups, scratch=scratch)
        plan = self.planner(kind, problem.pass_)(problem, device)
        if problem.epilogue and plan.epilogue in ("", AFTER):
            compiled = kind != MLX or not absent
            then = (AFTER, launched) if compiled else (OPERATIONS, finished)
            plan = replace(plan, epilogue=then[0], then=then[1])
        reads_packed = {packed_weight, packed_or_integers}.intersection(self.needs)
        if problem.bits and not problem.integer and not reads_packed:
            # Compiled kernels want one dtype; the floor takes what is stored exactly.
            dtypes = {FORWARD: "float32", INPUT_GRAD: problem.dtype, WEIGHT_GRAD: None}
            plan = replace(plan, dequantised=dtypes[problem.pass_])
        return plan

    def __str__(self) -> str:
        """Return the route's name."""
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the name, the passes and the idea, without functions."""
        return Route, (self.name, self.passes, (), self.idea)


@dataclass(frozen=True)
class Choice:
    """Hold the route and plan that run, and why others were refused.

    Attributes:
        route: the route that runs.
        device: the device profile for which the route was chosen.
        plan: what a launch executes.
        others: called for ``rejected`` and ``below``, which a launch does not need. It
            only reads facts that cannot change.
        forced: whether the caller named the route.
        measured: (name, milliseconds) of every route that tuning timed, fastest first,
            with None for a wrong result; empty if the table decided.
    """

    route: Route
    device: Device
    plan: Plan
    others: Callable[[], tuple[Reasons, Reasons]] = field(repr=False, compare=False)
    forced: bool = False
    measured: Times = ()

    @cached_property
    def _reasons(self) -> tuple[Reasons, Reasons]:
        return self.others()

    @property
    def rejected(self) -> Reasons:
        """(name, reason) of every route above it in the table."""
        return self._reasons[0]

    @property
    def below(self) -> Reasons:
        """(name, status) of every route below it in the table."""
        return self._reasons[1]

    @property
    def parameters(self) -> tuple[tuple[str, object], ...]:
        """Facts of the plan as (name, value) pairs."""
        return self.plan.details

    @property
    def precision(self) -> str | None:
        """The reason why TF32 has no effect, or None."""
        p, plan = self.plan.problem, self.plan
        if p.precision == FLOAT32 or plan.products == "TF32":
            return None
        if p.dtype != "float32":
            why = f"features are {p.dtype}, not float32"
        elif self.device.backend != CUDA:
            why = f"{self.device.backend} has no such products, CUDA has"
        elif plan.backend == MLX:
            why = "MLX's matmul multiplies, for which MLX_ENABLE_TF32 decides"
        else:
            why = f"{self.route} does not run on tensor cores"
        return f"TF32 was asked for and changes nothing: {why}"

    @property
    def view(self) -> str:
        """The view of the relation that the plan reads."""
        return self.plan.view

    def __str__(self) -> str:
        """Return the route's name and its plan."""
        return f"{self.route} ({self.plan})"

    @classmethod
    def from_facts(
        cls,
        route: Route,
        device: Device,
        plan: Plan,
        reasons: tuple[Reasons, Reasons],
        forced: bool,
        measured: Times,
    ) -> Choice:
        """Return a choice whose (``rejected``, ``below``) are known."""
        return cls(route, device, plan, lambda: reasons, forced, measured)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the facts; the plan of a copy prints and cannot run."""
        facts = self.route, self.device, self.plan, self._reasons
        return Choice.from_facts, (*facts, self.forced, self.measured)

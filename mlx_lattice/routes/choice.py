"""Route and Choice: a row of the table, and what was taken from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import backends
from ..devices import CPU, Device
from ..problem import WEIGHT_GRAD, Problem
from . import measure
from .needs import Need

# What a pass reads: a view of the relation, or (where, view) pairs of which the first
# that fits holds. Where: a backend, NO_TABLE, or "*" for everywhere.
View = str | tuple[tuple[str, str], ...]
NO_TABLE = "no table"  # where the relation has no neighbour table


class RouteError(ValueError):
    """A forced route does not exist for the pass, or is not admissible."""


@dataclass(frozen=True)
class Route:
    """One way to run one or more passes.

    Attributes:
        name: what ``git grep`` finds: row, kernel files, tests, benchmarks.
        passes: the passes it can run.
        on: backends it is meant for.
        needs: predicates without which it cannot run.
        pays: predicates without which another row serves better; forcing the route
            passes over them.
        ready: backends on which MLX operations run it.
        native: backends that have compiled kernels for all its passes; they go first.
        view: the relation view it reads, by backend where they differ.
        idea: one line for people.
        partly: (backend, pass) pairs of compiled kernels beyond ``native``.
        grad_view: the view its weight gradient reads, where it is another one.
    """

    name: str
    passes: tuple[str, ...]
    on: tuple[str, ...]
    needs: tuple[Need, ...]
    ready: tuple[str, ...]
    view: View
    idea: str
    pays: tuple[Need, ...] = ()
    native: tuple[str, ...] = ()
    partly: tuple[tuple[str, str], ...] = ()
    grad_view: View | None = None

    def compiled(self, backend: str, pass_: str | None = None) -> bool:
        """Whether a backend has compiled kernels for a pass, or for all of them."""
        return backend in self.native or (backend, pass_) in self.partly

    def code(self, backend: str, pass_: str | None = None) -> str | None:
        """Return what runs a pass, or all, on a backend ("C++", "MLX operations")."""
        if self.compiled(backend, pass_) and backends.missing(backend) is None:
            return backends.LANGUAGE[backend]
        return "MLX operations" if backend in self.ready else None

    def views(self, pass_: str) -> tuple[tuple[str, str], ...]:
        """Return what a pass reads as (where, view) pairs, the first to fit first."""
        view = self.grad_view or self.view if pass_ == WEIGHT_GRAD else self.view
        return (("*", view),) if isinstance(view, str) else view

    def reads(self, pass_: str, backend: str, table: bool = True) -> str:
        """Return the relation view that a pass reads on a backend."""
        fits = ("*", backend) if table else ("*", backend, NO_TABLE)
        return next(view for where, view in self.views(pass_) if where in fits)

    def refusal(
        self, problem: Problem, device: Device, forced: bool = False
    ) -> str | None:
        """Return why the route is not taken for the problem, or None if it may be."""
        if problem.pass_ not in self.passes:
            return f"it has no {problem.pass_} pass"
        if device.backend not in self.on:
            return f"it runs on {' and '.join(self.on)}, not on {device.backend}"
        for need in self.needs if forced else (*self.needs, *self.pays):
            if reason := need(problem, device):
                return reason
        if self.code(device.backend, problem.pass_) is not None:
            return None
        if self.compiled(device.backend, problem.pass_):
            why = backends.missing(device.backend)
            where = " are in an extension, but" if device.backend == CPU else ":"
            return f"its {device.backend} kernels{where} {why}"
        return f"admissible, but its {device.backend} kernels are not written yet"

    def __str__(self) -> str:
        """Return the route's name."""
        return self.name


@dataclass(frozen=True)
class Choice:
    """What runs, and why: executed, explained, traced and tested as one object.

    Attributes:
        route: the row that runs.
        device: the profile it was chosen for.
        parameters: what the kernel is launched with, as (name, value) pairs.
        rejected: (name, reason) of every row above it in the table.
        below: (name, status) of every row after it, not reached.
        forced: whether the caller named the route.
        view: the view of the relation that it reads.
        measured: (name, milliseconds) of every candidate that tuning timed, fastest
            first, None for a wrong result; empty where the table decided.
    """

    route: Route
    device: Device
    parameters: tuple[tuple[str, object], ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    below: tuple[tuple[str, str], ...] = field(default=())
    forced: bool = False
    measured: measure.Times = ()
    view: str = "none"

    def __str__(self) -> str:
        """Return the route's name and its parameters."""
        inside = ", ".join(v if k == "code" else f"{k} {v}" for k, v in self.parameters)
        return f"{self.route}" + (f" ({inside})" if inside else "")

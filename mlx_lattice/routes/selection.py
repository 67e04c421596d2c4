"""select(): the one place that decides which route runs; and routes forced by name.

The first admissible row of the table wins for its pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .. import backends, devices, settings
from ..backends import cpu_extension
from ..devices import Device
from ..problem import PASSES, Problem
from . import measure, proof_results
from .choice import Choice, Reasons, Route, RouteError, Times
from .needs import Need
from .plan import Plan
from .proof_results import Refused
from .table import TABLE

NAMES = tuple(route.name for route in TABLE)

_route_variable = settings.reader("MLX_LATTICE_ROUTE")


def parse_only(text: str) -> dict[str, str]:
    """Read "vec4" or "forward=vec4,input_grad=fp16_gather" as {pass: route}.

    A bare name means every pass that the route has.

    Raises:
        RouteError: a route or pass does not exist, a route lacks the pass, or there
            is text without a name.
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"a route is forced by its name; got {type(text).__name__}")
    forced, parts = {}, [part.strip() for part in text.split(",")]
    if text and not any(parts):
        raise RouteError(
            "routes are forced by name, as vec4 or forward=vec4,weight_grad="
            f"grouped_gemm; got {text!r}"
        )
    for part in filter(None, parts):
        pass_, name = (word.strip() for word in part.rpartition("=")[::2])
        route = named(name)
        if pass_ and pass_ not in route.passes:
            raise RouteError(
                f"{name} has no {pass_ if pass_ in PASSES else repr(pass_)} pass; "
                f"it has {', '.join(route.passes)}"
            )
        for each in (pass_,) if pass_ else route.passes:
            forced[each] = name
    return forced


def named(name: str) -> Route:
    """Return the row of a route's name, or raise with the names there are."""
    for route in TABLE:
        if route.name == name:
            return route
    raise RouteError(f"no route is named {name!r}; there are {', '.join(NAMES)}")


@contextmanager
def only(text: str) -> Iterator[None]:
    """Force routes within a ``with`` block; one that cannot run raises.

    Args:
        text: a route's name, for every pass that it has, or pairs such as
            "forward=vec4,weight_grad=grouped_gemm". The environment variable
            MLX_LATTICE_ROUTE takes the same.
    """
    inside = {**dict(settings.forced.get()), **parse_only(text)}
    token = settings.forced.set(tuple(inside.items()))
    try:
        yield
    finally:
        settings.forced.reset(token)


def forced_route(pass_: str) -> str | None:
    """Return the route that a block or the environment forces for a pass."""
    inside = dict(settings.forced.get())
    if pass_ in inside:
        return inside[pass_]
    text = _route_variable()
    return parse_only(text).get(pass_) if text else None


@contextmanager
def waive_determinism() -> Iterator[None]:
    """Allow routes whose sums have no fixed order, such as fp32_atomic, in the block.

    Everywhere else the same input gives the same bits on one device.
    """
    token = settings.deterministic.set(False)
    try:
        yield
    finally:
        settings.deterministic.reset(token)


def situation() -> tuple:
    """Return all that a choice depends on beside the layer and its relation.

    While it compares equal, and measured times do not decide, the choice stays as it
    is. What else may change a choice has to stand in ``settings``, or to be noted
    there. Tests put something else in the place of what is replaced.
    """
    on_gpu, found = mx.default_device() == devices.GPU, settings.findings.count
    replaced = devices.current, cpu_extension.extension
    return (found, *replaced, on_gpu, *settings.said())


def select(
    problem: Problem,
    *,
    device: str | Device | None = None,
    only: str | None = None,
) -> Choice:
    """Choose the route for a problem. Needs no device; executes nothing.

    Args:
        problem: the facts.
        device: a profile or its name ("m5-max", "h200", "cpu"); by default the one
            that MLX runs on.
        only: a route that must be taken; also by ``routes.only`` and by
            MLX_LATTICE_ROUTE.

    Raises:
        RouteError: the forced route is not admissible; the message has the reason.
    """
    if not isinstance(problem, Problem):
        raise TypeError(
            "select takes a Problem, as Problem.forward(...) makes it; got "
            f"{type(problem).__name__}"
        )
    device = devices.current() if device is None else devices.profile(device)
    return choose(problem, device, only)[0]


def choose(
    problem: Problem, device: Device, only: str | None = None
) -> tuple[Choice, bool]:
    """Choose as ``select`` does; and return whether measured times may decide."""
    forced = only or forced_route(problem.pass_)
    tuned = forced is None and measure.enabled()
    times = measure.measured(problem, device) if tuned else ()
    absent = backends.missing(device.backend)
    refused = proof_results.refused_on(device)
    return _select(problem, device, forced, times, absent, refused), tuned


def candidates(problem: Problem, device: Device) -> tuple[Route, ...]:
    """Return the routes that can run a problem, in table order."""
    facts = problem, device, proof_results.refused_on(device)
    return tuple(r for r in TABLE if _obstacle(r, *facts) is None)


def _obstacle(
    route: Route, problem: Problem, device: Device, refused: Refused
) -> str | None:
    """Return why a route cannot run: by its needs, or by what its kernel proved."""
    reason = route.refusal(problem, device, forced=True)
    if reason is None and refused:
        reason = refused.reason(route.plan(problem, device).gpu)
    return reason


class _Remembered:
    """A function's results by its arguments."""

    def __init__(self, function: Callable):
        self._results = lru_cache(maxsize=4096)(function)

    def __call__(self, *facts) -> object:
        return self._results(*facts)

    def cache_clear(self) -> None:
        """Forget all, kept plans of layers included: the table has changed."""
        self._results.cache_clear()
        settings.findings.note()


class Row(NamedTuple):
    """A row of the table, as far as a layer settles it whatever a scan's rows are.

    Attributes:
        route: the row.
        needs: those that are asked with the scan's rows, in order.
        reason: why it is not taken if they all hold, or None.
        plan: what plans the layer's problems; None where there is a reason.
    """

    route: Route
    needs: tuple[Need, ...]
    reason: str | None
    plan: Callable[[Problem], Plan] | None


@_Remembered
def _settled(
    layer: Problem, device: Device, absent: str | None
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return every row, and of these those that may be taken."""
    rows = []
    for route in TABLE:
        needs, reason = route.settled(layer, device, absent)
        plan = None if reason else route.planning(layer, device, absent)
        rows.append(Row(route, needs, reason, plan))
    return tuple(rows), tuple(row for row in rows if row.plan)


class Deciding:
    """How the table decides for the problems of a layer.

    It asks what is given here and nothing else, whenever it is asked.

    Args:
        layer: facts without rows.
        device: the profile.
        absent: why the backend's own kernels cannot be had, or None.
        refused: kernels that are not taken.
    """

    __slots__ = "_facts", "_open", "_refused", "device", "rows"

    def __init__(
        self,
        layer: Problem,
        device: Device,
        absent: str | None,
        refused: Refused,
    ):
        self.rows, self._open = _settled(layer, device, absent)
        self._facts = layer, device, absent
        self.device, self._refused = device, refused or None

    def row(self, problem: Problem) -> Row:
        """Return the first row that may be taken for a problem: the last one may."""
        for row in self._open:
            if self.refusal(row, problem) is None:
                return row
        raise RouteError(f"no row of the table takes {problem}")

    def plan(self, row: Row, problem: Problem) -> Plan:
        """Return a row's plan of a problem."""
        return row.plan(problem)

    def refusal(self, row: Row, problem: Problem) -> str | None:
        """Return why a row is not taken for a problem, or None."""
        for need in row.needs:
            if why := need(problem, self.device):
                return why
        if row.reason is None and self._refused:
            return self._refused.reason(self.plan(row, problem).gpu)
        return row.reason


@lru_cache(maxsize=4096)
def deciding(layer: Problem, now: tuple, refused: Refused) -> Deciding | None:
    """Return how a layer's rows alone decide; None where a name or times do, too.

    Args:
        layer: facts without rows.
        now: ``situation()``, of which all else here is part.
        refused: by ``proof_results.refused_on`` the device of now.
    """
    del now
    if forced_route(layer.pass_) is not None or measure.enabled():
        return None
    device = devices.current()
    return Deciding(layer, device, backends.missing(device.backend), refused)


def _select(
    problem: Problem,
    device: Device,
    forced: str | None,
    times: Times,
    absent: str | None,
    refused: Refused,
) -> Choice:
    table = Deciding(problem.layer, device, absent, refused)

    def others() -> tuple[Reasons, Reasons]:
        reasons = [(row.route, table.refusal(row, problem)) for row in table.rows]
        return _reasons(reasons, route, problem.pass_, times)

    able = {r.name for r in candidates(problem, device)} if times else ()
    times = tuple([t for t in times if t[0] in able])
    if forced is not None:
        route = named(forced)
        if reason := _obstacle(route, problem, device, refused):
            raise RouteError(
                f"route {forced} was forced but cannot run the {problem.pass_} of "
                f"{problem} on {device.name}: {reason}"
            )
    elif times and times[0][1] is not None:
        route = named(times[0][0])
    else:
        row = table.row(problem)
        route, times = row.route, ()
        return Choice(route, device, table.plan(row, problem), others)
    plan = route.plan(problem, device)
    return Choice(route, device, plan, others, forced is not None, times)


def _reasons(
    rows: list[tuple[Route, str | None]], taken: Route, pass_: str, times: Times
) -> tuple[Reasons, Reasons]:
    """Return (name, reason) of the rows above the one that is taken, and below it."""
    at = next(i for i, (route, _) in enumerate(rows) if route is taken)
    passed = "admissible; " + ("not measured" if times else "another route was forced")
    later = "admissible; comes later in the table"
    slower = {name: _measured_reason(name, times) for name, _ in times}
    above = ((r.name, slower.get(r.name) or why or passed) for r, why in rows[:at])
    below = (
        (r.name, slower.get(r.name) or why or later)
        for r, why in rows[at + 1 :]
        if pass_ in r.passes
    )
    return tuple(above), tuple(below)


def _measured_reason(name: str, times: Times) -> str:
    taken, (winner, best) = dict(times)[name], times[0]
    if taken is None:
        return "it failed, or did not give the floor's result, when it was measured"
    return f"measured at {taken:.3g} ms, {winner} at {best:.3g} ms"

"""select(): the one place that decides which route runs; and routes forced by name.

The first admissible row of the table wins for its pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import backends, devices, settings
from ..devices import Device
from ..problem import PASSES, Problem
from . import measure, proof
from .choice import Choice, Reasons, Route, RouteError, Times
from .table import TABLE, named


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


@contextmanager
def only(text: str) -> Iterator[None]:
    """Force routes within a ``with`` block; one that cannot run raises.

    Args:
        text: a route's name, for every pass that it has, or pairs such as
            "forward=vec4,weight_grad=grouped_gemm". The environment variable
            MLX_LATTICE_ROUTE takes the same.
    """
    forced = {**dict(settings.current().forced), **parse_only(text)}
    with settings.block(forced=tuple(forced.items())):
        yield


def forced_route(pass_: str) -> str | None:
    """Return the route that a block or the environment forces for a pass."""
    forced = dict(settings.current().forced)
    if pass_ in forced:
        return forced[pass_]
    text = settings.environment["MLX_LATTICE_ROUTE"]
    return parse_only(text).get(pass_) if text else None


@contextmanager
def waive_determinism() -> Iterator[None]:
    """Allow routes whose sums have no fixed order, such as fp32_atomic, in the block.

    Everywhere else the same input gives the same bits on one device.
    """
    with settings.block(deterministic=False):
        yield


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
    facts = problem, device, backends.missing(device.backend)
    refused = proof.refused_on(device)

    def obstacle(route: Route, forced: bool = False) -> str | None:
        reason = route.obstacle(*facts, forced)
        if reason is None and refused:
            reason = proof.refusal(refused, route.plan(problem, device))
        return reason

    def others() -> tuple[Reasons, Reasons]:
        reasons = [(each, obstacle(each)) for each in TABLE]
        return _reasons(reasons, route, problem.pass_, times)

    times = measure.measured(problem, device) if tuned else ()
    able = {r.name for r in candidates(problem, device)} if times else ()
    times = tuple([t for t in times if t[0] in able])
    if forced is not None:
        route = named(forced)
        if reason := obstacle(route, True):
            raise RouteError(
                f"route {forced} was forced but cannot run the {problem.pass_} of "
                f"{problem} on {device.name}: {reason}"
            )
    elif times and times[0][1] is not None:
        route = named(times[0][0])
    else:
        times = ()
        pass_, backend = problem.pass_, device.backend
        for route in TABLE:
            runs = pass_ in route.passes and backend in route.on
            if runs and obstacle(route) is None:
                break
        else:
            raise RouteError(f"no row of the table takes {problem}")
    plan = route.plan(problem, device)
    if refused:  # plans are asked, which must be those of now
        reasons = others()
        others = lambda: reasons  # noqa: E731
    return Choice(route, device, plan, others, forced is not None, times), tuned


def candidates(problem: Problem, device: Device) -> tuple[Route, ...]:
    """Return the routes that can run a problem, in table order."""
    refused = proof.refused_on(device)
    able = [r for r in TABLE if r.refusal(problem, device, forced=True) is None]
    if refused:
        plans = [(r, r.plan(problem, device)) for r in able]
        able = [r for r, p in plans if proof.refusal(refused, p) is None]
    return tuple(able)


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

"""select(): the one place that decides which route runs.

The first route of the table that can run a problem wins, unless a route is forced by
name. Inside ``tune`` the routes are timed and checked instead, once for each key.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx

from .. import backends, cache_files, devices, settings
from ..checks import LatticeWarning
from ..devices import Device
from ..problem import INPUT_GRAD, PASSES, Problem
from ..settings import FLOAT32
from . import proof
from .choice import Choice, Reasons, Route, RouteError, Times
from .table import FLOOR, TABLE, named

log: logging.Logger = logging.getLogger("mlx_lattice")


def parse_only(text: str) -> dict[str, str]:
    """Parse "vec4" or "forward=vec4,input_grad=fp16_gather" to {pass: route}.

    A name without a pass means every pass that the route has.

    Raises:
        RouteError: a route or pass does not exist, a route does not have the pass, or a
            part has no name.
        TypeError: ``text`` is not a string.
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
    """Force routes within a ``with`` block, or raise if one cannot run.

    Args:
        text: a route's name, for every pass that it has, or pairs such as
            "forward=vec4,weight_grad=grouped_gemm". The environment variable
            MLX_LATTICE_ROUTE takes the same text.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.routes.only("gather_gemm_scatter"):
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.shape
        (64, 16)
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

    Outside the block the same input gives the same bits on one device.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.waive_determinism():
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.shape
        (64, 16)
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
        problem: the problem to run.
        device: a device profile or its name ("m5-max", "h200", "cpu"); by default the
            device that MLX runs on.
        only: the name of a route to force, as ``routes.only`` and MLX_LATTICE_ROUTE do.

    Raises:
        RouteError: the forced route cannot run; the message has the reason.

    Examples:
        >>> problem = ml.Problem.forward(kernel_size=1, c_in=64, c_out=64, n_in=1000)
        >>> ml.select(problem, device="cpu").route.name
        'native_pointwise'
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
    """Return the choice of ``select``, and whether measured times may decide."""
    forced = only or forced_route(problem.pass_)
    tuned = forced is None and is_tuning()
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

    times = measured(problem, device) if tuned else ()
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
        route = next(row for row in TABLE if obstacle(row) is None)
    plan = route.plan(problem, device)
    if refused:  # evaluated now, since refusals may change
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
    """Return (name, reason) of the routes above the chosen one, and below it."""
    at = next(i for i, (route, _) in enumerate(rows) if route is taken)
    passed = "admissible; " + ("not measured" if times else "another route was forced")
    lower = "admissible; comes later in the table"
    slower = {
        name: "it failed, or did not give the floor's result, when it was measured"
        if taken is None
        else f"measured at {taken:.3g} ms, {times[0][0]} at {times[0][1]:.3g} ms"
        for name, taken in times
    }
    above = ((r.name, slower.get(r.name) or why or passed) for r, why in rows[:at])
    below = (
        (r.name, slower.get(r.name) or why or lower)
        for r, why in rows[at + 1 :]
        if pass_ in r.passes
    )
    return tuple(above), tuple(below)


# Increment it when a key or a compiled kernel changes: older files are then ignored.
VERSION = 1


@contextmanager
def tune(on: bool = True) -> Iterator[None]:
    """Choose routes by measurement inside the block, instead of by the table.

    Routes are measured when a new key (device, pass, dtype, kernel volume, channels,
    log2 rows) comes up. Every route that can run is timed on random features over the
    call's relation, and checked against the floor route; a route with another result
    cannot win. Results are saved in the cache folder. The environment variable
    MLX_LATTICE_TUNE=1 does the same for a whole process.

    Args:
        on: False turns measurement off inside the block, also if the environment turns
            it on.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> with ml.cache("measured"), ml.tune():
        ...     y = nn.SubmConv3d(8, 16, 3)(x)
        >>> y.shape
        (64, 16)
    """
    with settings.block(tuned=on):
        yield


def is_tuning() -> bool:
    """Return whether a block or the environment asks for measured choices."""
    inside = settings.current().tuned
    if inside is not None:
        return inside
    return cache_files.is_set("MLX_LATTICE_TUNE")


def cache_file() -> Path:
    """Return the path of the file with the measured times."""
    return cache_files.folder() / "routes.json"


def tuning_key(problem: Problem, device: Device) -> str:
    """Return the key of a measurement; similar problems share it."""
    p = problem
    rows = p.n_in if p.pass_ == INPUT_GRAD else p.n_out
    weight = f"int{p.bits}/{p.group_size}" if p.bits else "dense"
    if p.integer:
        weight += f" int8 by rows{p.integer.row_scales:d} to8{p.integer.writes_int8:d}"
    dtype = p.dtype if p.precision == FLOAT32 else f"{p.dtype}/{p.precision}"
    return (
        f"{device.name}/{device.cores} {p.pass_} {dtype} {weight} K{p.volume} "
        f"{p.c_in}->{p.c_out} groups{p.groups} rows2^{max(1, rows).bit_length() - 1}"
    )


def measured(problem: Problem, device: Device) -> Times:
    """Return the times of a problem's candidates; empty if none are known."""
    times = _file().load().get(tuning_key(problem, device), {})
    return tuple(sorted(times.items(), key=lambda t: (t[1] is None, t[1] or 0.0, t[0])))


def record(
    problem: Problem,
    device: Device,
    routes: tuple[Route, ...],
    run: Callable[..., mx.array],
    inputs: tuple[mx.array, ...],
) -> bool:
    """Time the routes that have no time yet; return whether any was timed."""
    if len(routes) < 2 or not problem.n_in or not problem.n_out:
        return False
    name = tuning_key(problem, device)
    known = _file().load().get(name, {})
    if all(route.name in known for route in routes):
        return False
    trial = tuple(_random_like(a, seed) for seed, a in enumerate(inputs))
    plans = {route.name: route.plan(problem, device) for route in routes}
    reference = run(plans[FLOOR], *trial)
    times = {}
    for route, plan in plans.items():
        try:
            one = partial(run, plan, *trial)
            times[route] = _time(route, one, reference, plan.tolerance)
        except Exception as error:
            times[route] = None
            message = f"route {route} failed while tuned: {error}"
            warnings.warn(message, LatticeWarning, stacklevel=2)
    settings.note_change()
    log.debug("measured %s: %s ms", name, times)
    _file().add(name, times)
    return True


def relative_error(y: mx.array, reference: mx.array) -> tuple[float, int]:
    """Return the error relative to the reference's norm, and the worst row."""
    a, b = y.astype(mx.float32), reference.astype(mx.float32)
    same = (a == b) | ~(mx.isfinite(a) | mx.isfinite(b))
    a, b = mx.where(same, 0, a - b), mx.where(mx.isfinite(b), b, 0)
    if a.size == 0:
        return 0.0, 0
    rows = mx.square(a).reshape(a.shape[0], -1).sum(axis=1)
    # A row with NaN is the worst one.
    worst = mx.argmax(mx.where(mx.isnan(rows), math.inf, rows)).item()
    error, norm = mx.sqrt(rows.sum()).item(), mx.linalg.norm(b.flatten()).item()
    return (error / norm if norm else error), worst


def _random_like(a: mx.array, seed: int) -> mx.array:
    random = mx.random.key(seed)
    if mx.issubdtype(a.dtype, mx.floating):
        return mx.random.normal(a.shape, key=random).astype(a.dtype)
    most = 1 << (8 * a.dtype.size - 1)
    return mx.random.randint(0, most - 1, a.shape, dtype=a.dtype, key=random)


def _time(
    name: str, run: Callable, reference: mx.array, tolerance: float
) -> float | None:
    """Return a route's milliseconds; None if its result is wrong."""
    y = run()
    mx.eval(y)
    error, _ = relative_error(y, reference)
    if not error <= tolerance:
        warnings.warn(
            f"route {name} is off the floor route by {error:.1e} and cannot be chosen "
            "by tuning; please report it",
            LatticeWarning,
            stacklevel=2,
        )
        return None
    best, start = math.inf, time.perf_counter()
    for _ in range(10):
        before = time.perf_counter()
        mx.eval(run())
        after = time.perf_counter()
        best = min(best, after - before)
        if after - start > 0.1:
            break
    return round(1e3 * best, 6)


def _is_times(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        ms is None or (type(ms) in (int, float) and 0 <= ms < math.inf)
        for ms in entry.values()
    )


def _file() -> cache_files.EntryFile:
    header = {"version": VERSION, "mlx": mx.__version__}
    return cache_files.EntryFile(cache_file(), header, _is_times)

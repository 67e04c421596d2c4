"""Every route of every layer, timed and checked, beside what was predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from ...backends import first_use
from ...devices import CPU, CUDA, METAL, Device
from ...problem import FORWARD, Problem
from ...quantized import QuantizedWeight
from ...relation import Relation
from ...routes import measure, measured_tiles
from ...routes.choice import Route
from ...routes.measure import FLOOR, relative_error
from ...routes.selection import candidates, named, select
from ...routes.thresholds import TileShape
from ..cost import Cost, cost
from . import layers
from .clock import Budget, Timing, measured
from .layers import Build, Layer
from .machine import sentence

# Times over the roofline that a route takes before anything was timed here, and
# seconds of a first call besides.
SLOWER = {METAL: 4.0, CUDA: 20.0, CPU: 6.0}
FIRST_SECONDS = {METAL: 0.5, CUDA: 4.0, CPU: 0.01}
LEAST_MS = 0.05  # of a call: its launch and evaluation
# Seconds of the runs of a route, and of the whole of it at most.
RUN_SECONDS, MOST_SECONDS = 0.25, 12.0
QUICK_RUN_SECONDS = 0.12
# Of the floor route over its own estimate, and seconds that it may take as a reference.
FLOOR_SLOWER, REFERENCE_SECONDS, QUICK_REFERENCE_SECONDS = 8.0, 3.0, 0.5
MEMORY_SHARE = 0.4  # of the machine's, that a layer's arrays may take


@dataclass(frozen=True)
class Row:
    """One route of one pass of a layer, as it was timed.

    Attributes:
        layer: the layer, in words.
        pass_: the pass.
        route: its name.
        chosen: whether the library takes it.
        plan: the plan, in words.
        rows, edges: of the relation.
        ms: the median; None where it failed.
        first_ms: the first call, with compilation.
        runs: that the median is of.
        tflops: useful operations a second, 10^12.
        error: relative to the floor route's result, None where it was not compared.
        good: whether it ran and agrees.
        roofline_ms: the least time at the chip's peaks.
        predicted: (fast, slow) ms that the library predicts, or None.
        published_ms: of somebody else's library, or None.
        note: what was raised, or None.
    """

    layer: str
    pass_: str
    route: str
    chosen: bool
    plan: str
    rows: int
    edges: int
    ms: float | None
    first_ms: float | None
    runs: int
    tflops: float | None
    error: float | None
    good: bool
    roofline_ms: float | None
    predicted: tuple[float, float] | None
    published_ms: float | None
    note: str | None = None

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self)


@dataclass(frozen=True)
class Skipped:
    """What was left out, and why."""

    what: str
    why: str

    def as_dict(self) -> dict:
        """Return both."""
        return asdict(self)


@dataclass(frozen=True)
class Kept:
    """What tuning keeps of one problem: its routes' milliseconds."""

    problem: Problem
    times: dict[str, float | None]

    def keep(self, device: Device) -> None:
        """Keep it as the tuning of a device that MLX runs on."""
        measure.keep(self.problem, device, self.times)


@dataclass(frozen=True)
class KeptTiles:
    """What tuning keeps of one problem: the milliseconds of a route's tiles.

    Attributes:
        problem: the facts.
        what: "shape" or "height".
        times: by shape, or by height; None where the result was wrong.
    """

    problem: Problem
    what: str
    times: dict[TileShape | int, float | None]

    def keep(self, device: Device) -> None:
        """Keep the fastest as the tuning of a device that MLX runs on."""
        measured_tiles.keep(self.problem, device, self.what, self.times)


class Timer:
    """Times layers within a budget, and learns how slow this machine is.

    Args:
        device: the profile.
        memory: bytes of the machine, None where they are not known.
        quick: whether the chosen route alone is timed.
    """

    def __init__(self, device: Device, memory: float | None, quick: bool):
        self.device, self.memory, self.quick = device, memory, quick
        self._slower = SLOWER[device.backend]
        self._first = FIRST_SECONDS[device.backend]
        self._floor_slower = FLOOR_SLOWER
        self.kept: list[Kept] = []

    def prepare(self, found: Sequence[Layer], budget: Budget) -> None:
        """Have CUDA's kernels of the chosen routes compiled side by side.

        What fails is met again by the layer itself.
        """
        if self.device.backend != CUDA or not first_use.compiles():
            return
        with first_use.rehearsal():
            for layer in found:
                if not budget.left or self._too_large(layer):
                    continue
                relation = layers.relation_of(layer.scene, layer.kind)
                for pass_ in layer.passes:
                    problem = layers.described(layer, pass_, relation)
                    plan = select(problem, device=self.device).plan
                    with suppress(Exception):
                        plan(*layers.operands(problem, relation))
        try:
            first_use.finish()
            self._first = FIRST_SECONDS[METAL]
        except RuntimeError:
            return

    def time(self, layer: Layer, budget: Budget) -> Iterator[Row | Skipped]:
        """Yield a row a route and pass, or why there is none."""
        if reason := self._too_large(layer):
            yield Skipped(str(layer), reason)
            return
        if not budget.fits(self._scene_seconds(layer)):
            yield Skipped(str(layer), "no time was left")
            return
        relation = layers.relation_of(layer.scene, layer.kind)
        for pass_ in layer.passes:
            yield from self._pass(layer, pass_, relation, budget)

    def _scene_seconds(self, layer: Layer) -> float:
        # A million voxels are made and searched in a second or two on two cores.
        return 3e-6 * layer.scene.rows

    def _too_large(self, layer: Layer) -> str | None:
        needed = layer.scene.rows * (2 * layer.c_in + 3 * layer.c_out) * 4
        if self.memory is None or needed < MEMORY_SHARE * self.memory:
            return None
        return f"it takes {needed / 1e9:.1f} GB of {self.memory / 1e9:.0f}"

    def _pass(
        self, layer: Layer, pass_: str, relation: Relation, budget: Budget
    ) -> Iterator[Row | Skipped]:
        problem = layers.described(layer, pass_, relation)
        choice = select(problem, device=self.device)
        routes, reference, times = [choice.route], None, {}
        if not self.quick:
            able = candidates(replace(problem, deterministic=False), self.device)
            routes += [route for route in able if route != choice.route]
        given = None
        for route in routes:
            what = f"{pass_} of {layer} by {route}"
            counted = self._cost(problem, route, relation)
            needed = self._seconds(counted)
            if not budget.fits(needed) or needed > MOST_SECONDS:
                why = f"{needed:.1f} s of {budget.left:.0f} left are estimated"
                yield Skipped(what, why)
                continue
            if given is None:
                given = layers.operands(problem, relation)
                arrays = given[2].arrays if layer.bits else (given[2],)
                mx.eval(given[1], *arrays)
            if not times and reference is None:
                reference = self._floor(problem, relation, given, budget)
            chosen = route == choice.route
            row = self._row(layer, problem, route, chosen, counted, given, reference)
            if row.ms is not None:
                self._learn(counted, row)
            if not (route.name == "fp32_atomic" or chosen and row.ms is None):
                times[route.name] = row.ms if row.good else None
            yield row
        if len(times) > 1:
            self.kept.append(Kept(problem, times))

    def _cost(self, problem: Problem, route: Route, relation: Relation) -> Cost:
        choice = select(_allowing(problem, route), device=self.device, only=route.name)
        return cost(problem, self.device, choice=choice, relation=relation)

    def _seconds(self, counted: Cost) -> float:
        """Estimate the seconds of a route's first call and runs."""
        least = max(counted.roofline_ms or 0.0, LEAST_MS) / 1e3
        if counted.predicted:
            least = max(least, counted.predicted.slow_ms / 1e3 / 2)
        runs = QUICK_RUN_SECONDS if self.quick else RUN_SECONDS
        return self._first + 3 * self._slower * least + runs

    def _learn(self, counted: Cost, row: Row) -> None:
        """Expect what was seen: half of the old estimate, or the new one."""
        if row.ms > 1:
            ratio = row.ms / max(counted.roofline_ms or 0.0, LEAST_MS)
            self._slower = max(2.0, ratio, 0.5 * self._slower)
        first = max(0.0, row.first_ms - row.ms) / 1e3
        self._first = max(first, 0.5 * self._first)

    def _floor(
        self, problem: Problem, relation: Relation, given: tuple, budget: Budget
    ) -> mx.array | None:
        """Return the floor route's result, None where it would take too long."""
        flops = 2 * problem.useful(relation.n_edges)
        least = flops / self.device.flops(problem.dtype)
        most = QUICK_REFERENCE_SECONDS if self.quick else REFERENCE_SECONDS
        needed = self._floor_slower * least
        if needed > most or not budget.fits(4 * needed + self._first):
            return None
        begun = time.perf_counter()
        try:
            y = _runner(problem, named(FLOOR), self.device, given)()
            mx.eval(y)
        except Exception:  # its own row says what it was
            return None
        # Its first call, which may compile, says nothing of the next one.
        took = time.perf_counter() - begun - self._first
        if took > 0.01:
            self._floor_slower = max(2.0, took / least)
        return y

    def _row(
        self,
        layer: Layer,
        problem: Problem,
        route: Route,
        chosen: bool,
        counted: Cost,
        given: tuple,
        reference: mx.array | None,
    ) -> Row:
        plan = route.plan(_allowing(problem, route), self.device)
        errors: list[float] = []

        def compare(y: mx.array) -> None:
            if reference is not None:
                errors.append(relative_error(y, reference)[0])

        seconds = QUICK_RUN_SECONDS if self.quick else RUN_SECONDS
        took, note = None, None
        try:
            call = _runner(problem, route, self.device, given)
            took = measured(call, seconds, compare)
        except Exception as raised:  # whatever a compiler or driver raises
            note = sentence(raised)
        error = errors[0] if errors else None
        if error is not None and not math.isfinite(error):
            took, error, note = None, None, "the result holds NaN or infinity"
        good = took is not None and (error is None or error <= plan.tolerance)
        predicted = counted.predicted
        stated = layer.published if problem.pass_ == FORWARD else None
        return Row(
            layer=str(layer),
            pass_=problem.pass_,
            route=route.name,
            chosen=chosen,
            plan=str(plan),
            rows=problem.n_out,
            edges=counted.edges,
            **_times(took, counted),
            error=error,
            good=good,
            roofline_ms=counted.roofline_ms,
            predicted=predicted and (predicted.fast_ms, predicted.slow_ms),
            published_ms=stated if self.device.backend == METAL else None,
            note=note,
        )


def _times(took: Timing | None, counted: Cost) -> dict:
    if took is None:
        return {"ms": None, "first_ms": None, "runs": 0, "tflops": None}
    tflops = counted.useful_flops / took.ms / 1e9
    return {
        "ms": took.ms,
        "first_ms": took.first_ms,
        "runs": took.runs,
        "tflops": tflops,
    }


def _allowing(problem: Problem, route: Route) -> Problem:
    """Return the problem as a route takes it: atomics waive determinism."""
    atomic = route.name == "fp32_atomic"
    return replace(problem, deterministic=False) if atomic else problem


def _runner(
    problem: Problem,
    route: Route,
    device: Device,
    given: tuple[Relation, mx.array, mx.array | QuantizedWeight],
) -> Callable[[], mx.array]:
    relation, *arrays = given
    call = route.plan(_allowing(problem, route), device).bound(relation)
    return lambda: call(*arrays)


@dataclass(frozen=True)
class Built:
    """A relation that was built from new coordinates.

    Attributes:
        relation: in words.
        rows, edges: of it.
        ms: the median of new coordinates to the view that inference reads.
        training_ms: the same with the edges that a weight gradient reads.
        first_ms: the first, with compilation.
        note: what was raised, or None.
    """

    relation: str
    rows: int | None
    edges: int | None
    ms: float | None
    training_ms: float | None
    first_ms: float | None
    note: str | None = None

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self)


def built(build: Build, budget: Budget, seconds: float) -> Built | Skipped:
    """Time a relation's build within a budget."""
    if not budget.fits(10e-6 * build.scene.rows + 0.05):
        return Skipped(str(build), "no time was left")
    try:
        coords = layers.coords_of(build.scene)

        def inference() -> mx.array:
            return layers.build(coords + 0, build.kind).out_in

        def training() -> mx.array:
            relation = layers.build(coords + 0, build.kind)
            mx.eval(relation.out_in, relation.edges)
            return relation.out_in

        first = measured(inference, min(seconds, budget.left / 4))
        trained = measured(training, min(seconds, budget.left / 4))
        relation = layers.build(coords, build.kind)
        facts = relation.n_out, relation.n_edges
        return Built(str(build), *facts, first.ms, trained.ms, first.first_ms)
    except Exception as raised:  # whatever a compiler or driver raises
        return Built(str(build), None, None, None, None, None, sentence(raised))

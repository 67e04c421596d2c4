"""What the experiments share: layers, times, checks, and an experiment's record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import mlx.core as mx

from ...devices import METAL, Device
from ...dtypes import DTYPES
from ...problem import FORWARD, KERNEL_MAJOR, Problem
from ...relation import Relation
from ...routes import thresholds
from ...routes.measure import FLOOR, relative_error
from ...routes.plan import Plan
from ...routes.selection import named
from . import layers
from .clock import Budget, measured
from .layers import Scene
from .proofs import planned_for
from .timings import FLOOR_SLOWER, Kept, KeptTiles

RUNS_SECONDS, RUNS = 0.4, 20
SCENE_SECONDS = 3e-6  # of a row, to make and search it on two cores
# On metal/host: the shells and rows that stand for the real ones.
HOST_SHELLS, HOST_SIZES = {16: 7, 32: 7, 64: 8, 128: 9}, (100, 150, 200)
SIZES = (1000, 4000, 16000)
ON_HOST = "Every result is right; times on the host mean nothing."


class NoTime(Exception):
    """An experiment's seconds are used up."""


@dataclass
class Experiment:
    """One experiment: what was asked, how it was measured, what came of it.

    Attributes:
        number: by which others refer to it.
        title: a few words.
        question: that only the chip can answer.
        how: it was measured.
        columns: of the table.
        rows: texts.
        result: what they say, in a sentence.
        wrong: what was computed wrongly, or None.
    """

    number: int
    title: str
    question: str
    how: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    result: str = ""
    wrong: str | None = None

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self)


class Lab:
    """Layers to experiment on, within a budget.

    Args:
        device: the profile that MLX runs on.
        on_host: whether Metal's kernels run on the CPU: tiny layers, one run each.
        budget: seconds of the experiment that runs.
    """

    def __init__(self, device: Device, on_host: bool, budget: Budget):
        self.device, self.on_host, self.budget = device, on_host, budget
        self.wrong: list[str] = []
        self.kept: list[Kept | KeptTiles] = []
        self._slower = FLOOR_SLOWER

    @property
    def on_metal(self) -> bool:
        """Whether Metal's kernels run, on a Mac or on the host."""
        return self.device.backend == METAL

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the layers."""
        return (64, 128) if self.on_host else (64, 128, 256)

    @property
    def shells(self) -> tuple[int, ...]:
        """Sides of the shells that experiments take."""
        return (64,) if self.on_host else (64, 128)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of small scenes."""
        return HOST_SIZES if self.on_host else SIZES

    def shell(self, resolution: int) -> Relation:
        """Return the relation of a shell, on the host that of a tiny one."""
        if self.on_host:
            resolution = HOST_SHELLS[resolution]
        if not self.budget.fits(SCENE_SECONDS * 4 * resolution**2):
            raise NoTime
        return layers.relation_of(Scene("shell", resolution), "submanifold")

    def problem(
        self,
        relation: Relation,
        channels: int,
        dtype: str = "float16",
        pass_: str = FORWARD,
        layout: str = KERNEL_MAJOR,
    ) -> Problem:
        """Return a layer's problem; its weight is (K, C_in, C_out) if not said."""
        facts = pass_, relation, channels, channels, DTYPES[dtype]
        return Problem.of(*facts, table=True, layout=layout)

    def plan(
        self, problem: Problem, route: str, tile: thresholds.TileShape | int = 0
    ) -> Plan | None:
        """Return a route's plan, None where it cannot run.

        tile: the shape or the height of its simdgroups; by default as planned.
        """
        if named(route).refusal(problem, self.device, forced=True):
            return None
        own = ((route, tile),) if tile else ()
        return named(route).plan(problem, self.device, own)

    def said(self, result: str) -> str:
        """Return what came of an experiment, in a sentence: on the host, no times."""
        return ON_HOST if self.on_host else result

    def ms(self, call: Callable[[], mx.array]) -> float:
        """Return the milliseconds of a call: the median of 20 short runs.

        Raises:
            NoTime: the seconds are used up.
        """
        if not self.budget.left:
            raise NoTime
        seconds = 0.0 if self.on_host else min(RUNS_SECONDS, self.budget.left / 2)
        return measured(call, seconds, runs=RUNS).ms

    def floor(self, problem: Problem, given: tuple) -> mx.array:
        """Return the result of the floor route, with which others are compared.

        Raises:
            NoTime: it would take longer than what is left.
        """
        relation = given[0]
        flops = 2 * problem.useful(relation.n_edges)
        least = flops / self.device.flops(problem.dtype)
        # What is compared with it takes as long again, at most.
        if not self.budget.left or not self.budget.fits(2 * self._slower * least):
            raise NoTime
        begun = time.perf_counter()
        y = named(FLOOR).plan(problem, self.device)(*given)
        mx.eval(y)
        took = time.perf_counter() - begun
        if took > 0.01:
            self._slower = max(2.0, took / least)
        return y

    def check(self, what: str, y: mx.array, expected: mx.array, dtype: str) -> None:
        """Compare a result, and note what is wrong."""
        error, most = relative_error(y, expected)[0], thresholds.TOLERANCE[dtype]
        if not error <= most:
            self.wrong.append(f"{what} is off by {error:.1e}, at most {most:.1e}")

    def compared(
        self,
        calls: Sequence[tuple[str, Callable[[], mx.array]]],
        expected: mx.array,
        dtype: str = "float16",
    ) -> list[float]:
        """Return the milliseconds of calls, each compared with what is expected."""
        times = []
        for name, call in calls:
            self.check(name, call(), expected, dtype)
            times.append(self.ms(call))
        return times

    def guarded(
        self, calls: Sequence[tuple[str, Callable[[], mx.array]]], expected: mx.array
    ) -> tuple[dict[str, float], dict[str, float | None]]:
        """Return the milliseconds of calls by name, and those of right results.

        In the second None stands where a result was wrong.
        """
        found, right = {}, {}
        for name, call in calls:
            wrong = len(self.wrong)
            (found[name],) = self.compared([(name, call)], expected)
            right[name] = found[name] if len(self.wrong) == wrong else None
        return found, right


@contextmanager
def splits_of(count: int) -> Iterator[None]:
    """Plan inside the block with tiles in as many splits as are given, if they can."""
    with planned_for(threadgroups=1 << 30, splits=count):
        yield


def in_dtype(dtype: str, given: tuple) -> tuple:
    """Return a plan's arrays in another dtype."""
    relation, x, w = given
    return relation, x.astype(DTYPES[dtype]), w.astype(DTYPES[dtype])


def call_of(plan: Plan, given: tuple) -> Callable[[], mx.array]:
    """Return what executes a plan."""
    return lambda: plan(*given)


def shown(ms: float | None) -> str:
    """Return milliseconds as tables have them."""
    return "-" if ms is None else f"{ms:.3f}"

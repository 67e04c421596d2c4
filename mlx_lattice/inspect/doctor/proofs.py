"""Every kernel of this machine's backend on a small problem, against float64.

Kernels are found through the route table: whatever a planner names for some dtype,
layout, packing and channels is one, and each is compiled and run once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import zip_longest

import mlx.core as mx

from ...backends import first_use
from ...coordinates import CoordinateManager
from ...devices import CUDA, Device
from ...dtypes import DTYPES
from ...integer_facts import IntegerFacts
from ...problem import FORWARD, INPUT_GRAD, LAYOUTS, Problem
from ...quantized import BITS, GROUP_SIZES
from ...relation import Relation
from ...routes import TABLE, proof, proof_results, thresholds
from ...routes.choice import Route
from ...routes.plan import MLX, Plan
from . import scenes
from .clock import Budget
from .exact import by_edges
from .layers import operands
from .machine import scrubbed, sentence

# Channels of the problems, by which tiles differ: each width, odd ones, wide rows.
CHANNELS = ((64, 64), (128, 128), (32, 32), (16, 16), (24, 40), (64, 16), (16, 64))
WIDE = ((576, 32), (3, 16), (5, 7))
WIDEST = 2  # of these, for which groups of every size are tried; of others the usual
USUAL_SIZES = (32, 64)
TOGETHER = 16  # kernels that CUDA compiles side by side


@dataclass(frozen=True)
class Point:
    """A kernel that is proved: a route and the facts that choose among its kernels.

    Attributes:
        route: its name.
        problem: the facts.
        whole: whether the tables say that few threadgroups fill the GPU, so that no
            tile is split.
    """

    route: Route
    problem: Problem
    whole: bool


@dataclass(frozen=True)
class Proof:
    """What came of one kernel.

    Attributes:
        kernel: the route's name.
        pass_: the pass.
        facts: dtype, channels, layout or packing, and the plan in words.
        error: relative to the norm of the result, None where it did not run.
        tolerance: the greatest error that is allowed.
        seconds: of its compilation and run.
        note: what was raised, or None.
    """

    kernel: str
    pass_: str
    facts: str
    error: float | None
    tolerance: float
    seconds: float
    note: str | None = None

    @property
    def good(self) -> bool:
        """Whether it ran and its result is right."""
        return self.error is not None and self.error <= self.tolerance

    def as_dict(self) -> dict:
        """Return every field, and whether it is good."""
        return asdict(self) | {"good": self.good}


@contextmanager
def planned_with(**tables: dict[str | int, int]) -> Iterator[None]:
    """Plan inside the block with other entries of tables of ``thresholds``."""
    before = {name: dict(getattr(thresholds, name)) for name in tables}
    for name, entries in tables.items():
        getattr(thresholds, name).update(entries)
    try:
        yield
    finally:
        for name, held in before.items():
            getattr(thresholds, name).update(held)


@contextmanager
def planned_for(threadgroups: int, splits: int) -> Iterator[None]:
    """Plan inside the block as if so many threadgroups filled the GPU.

    Args:
        threadgroups: that fill it; of TensorOps, simdgroups that fill a core.
        splits: the most of a tile.
    """
    values = {"FILLING": threadgroups, "TENSOR_FILLING": threadgroups, "SPLITS": splits}
    tables = {n: dict.fromkeys(getattr(thresholds, n), v) for n, v in values.items()}
    with planned_with(**tables):
        yield


@contextmanager
def whole_tiles(whole: bool) -> Iterator[None]:
    """Plan inside the block without splits, or as usual."""
    with planned_for(1, 1) if whole else nullcontext():
        yield


@lru_cache(maxsize=4)
def relation_of(kind: str) -> Relation:
    """Return a small relation: a surface's, or edges of which several share a row."""
    if kind == "surface":
        manager = CoordinateManager()
        key = manager.insert(scenes.shell(9))
        return manager.submanifold_kernel_relation(key, kernel_size=3)
    if kind == "pointwise":
        manager = CoordinateManager()
        key = manager.insert(scenes.shell(9))
        return manager.submanifold_kernel_relation(key, kernel_size=1)
    n_in, n_out, volume = 90, 70, 8
    at = mx.arange(900, dtype=mx.int32)
    # Several edges share an output row and offset: no table.
    ends = at * 37 % n_in, at * at % 53 % n_out, at * 11 % volume
    return Relation.from_edges(*ends, n_in, n_out, volume)


def points(device: Device) -> list[Point]:
    """Return a point for each kernel of the device's own, alternating over routes."""
    queues = []
    for route in TABLE:
        for pass_ in route.passes:
            if route.planner(device.backend, pass_):
                queues.append(list(_points(route, pass_, device)))
    mixed = (p for row in zip_longest(*queues) for p in row if p is not None)
    return list(mixed)


def _points(route: Route, pass_: str, device: Device) -> Iterator[Point]:
    seen = set()
    for problem, whole in _problems(pass_):
        if route.refusal(problem, device, forced=True):
            continue
        with whole_tiles(whole):
            plan = route.plan(problem, device)
        if plan.backend == MLX:
            continue
        keys = {_identity(plan), _unpacking(plan)}
        if not keys <= seen:
            seen |= keys
            yield Point(route, problem, whole)


def _identity(plan: Plan) -> tuple:
    """Return what tells a plan's kernels from those of other plans."""
    if plan.gpu is not None:
        kernels = (plan.gpu, plan.add)
        return tuple(k and (k.symbol, k.template, k.defines) for k in kernels)
    p = plan.problem
    packing = p.bits, p.group_size
    return plan.kernel, p.dtype, p.layout, *packing, p.c_in, p.c_out, p.groups, p.table


def _unpacking(plan: Plan) -> tuple:
    """Return what tells the kernel that unpacks integers before a plan's own."""
    p = plan.problem
    return ("unpacked", p.bits, p.group_size) if p.integer and p.bits == 4 else ()


def _problems(pass_: str) -> Iterator[tuple[Problem, bool]]:
    """Yield problems and whether tiles are whole, the most usual ones first."""
    dtypes = ("float16", "float32", "bfloat16")
    for at, channels in enumerate((*CHANNELS, *WIDE)):
        for kind in ("surface", "edges", "pointwise")[: 3 if at < 2 else 1]:
            for dtype in dtypes:
                for layout in reversed(LAYOUTS):
                    for whole in (False, True):
                        facts = {"layout": layout, "deterministic": False}
                        yield _problem(pass_, kind, channels, dtype, **facts), whole
    for channels in ((64, 64), (16, 32)):
        for dtype in dtypes:
            facts = {"groups": channels[0]}
            yield _problem(pass_, "surface", channels, dtype, **facts), False
            facts["layout"] = "mlx"
            yield _problem(pass_, "surface", channels, dtype, **facts), False
    if pass_ != FORWARD:
        return
    for at, channels in enumerate(CHANNELS[:5]):
        sizes = GROUP_SIZES if at < WIDEST else USUAL_SIZES
        for kind in ("surface", "edges", "pointwise"):
            for dtype in dtypes:
                for bits in BITS:
                    for size in sizes:
                        for whole in (False, True):
                            facts = {"bits": bits, "group_size": size}
                            problem = _problem(pass_, kind, channels, dtype, **facts)
                            yield problem, whole
    fours = [{"bits": 4, "group_size": size} for size in GROUP_SIZES]
    for channels in CHANNELS[:5]:
        for dtype in dtypes:
            for packing in ({"bits": 8}, *fours):
                facts = packing | {"integer": IntegerFacts()}
                for whole in (False, True):
                    yield _problem(pass_, "surface", channels, dtype, **facts), whole


def _problem(
    pass_: str, kind: str, channels: tuple[int, int], dtype: str, **facts
) -> Problem:
    relation = relation_of(kind)
    table = (relation.T if pass_ == INPUT_GRAD else relation).has_table
    groups = facts.pop("groups", 1)
    return Problem.of(
        pass_, relation, *channels, DTYPES[dtype], groups, table=table, **facts
    )


def kind_of(problem: Problem) -> str:
    """Return which relation a problem is over."""
    if problem.pointwise:
        return "pointwise"
    return "edges" if problem.kind == "general" else "surface"


def proofs(
    device: Device, found: Iterable[tuple[Point, Callable[[], None]]], budget: Budget
) -> Iterator[Proof | None]:
    """Yield the proof of each point, None where the budget has no room for it.

    Args:
        device: the profile that MLX runs on.
        found: points, and what is called before each is proved.
        budget: seconds for all of them.
    """
    found, longest = list(found), 0.0
    compiles = device.backend == CUDA and first_use.compiles()
    step = TOGETHER if compiles else 1
    for start in range(0, len(found), step):
        batch = found[start : start + step]
        if not budget.fits(longest):
            yield from (None for _ in batch)
            continue
        begun = time.perf_counter()
        if compiles:
            batch[0][1]()
            _compile([point for point, _ in batch], device)
        for point, told in batch:
            told()
            yield prove(point, device) if budget.left else None
        longest = max(longest, time.perf_counter() - begun)


def _compile(batch: list[Point], device: Device) -> None:
    """Have CUDA's kernels compiled side by side; what fails is met again by itself."""
    with first_use.rehearsal():
        for point in batch:
            try:
                with whole_tiles(point.whole):
                    plan = point.route.plan(point.problem, device)
                plan(*operands(point.problem, relation_of(kind_of(point.problem))))
            except Exception:  # its own proof will say what it was
                continue
    try:
        first_use.finish()
    except RuntimeError:
        return


def prove(point: Point, device: Device) -> Proof:
    """Compile and run one kernel, and compare its result with float64.

    A matrix kernel is also tried as before its first launch on a machine, whatever is
    known of it, and what it proves to be is kept for ``select``.
    """
    problem, begun = point.problem, time.perf_counter()
    relation = relation_of(kind_of(problem))
    with whole_tiles(point.whole):
        plan = point.route.plan(problem, device)
    given, error, note = operands(problem, relation), None, None
    try:
        if plan.proof is not None and (why := proof.try_again(plan)):
            note = scrubbed(why)
        else:
            y = plan(*given)
            mx.eval(y)
            error = relative_error(y, problem, relation, given)
            if not math.isfinite(error):
                error, note = None, "the result holds NaN or infinity"
            elif error > plan.tolerance:
                note = f"its result is off float64 by {error:.1e}"
        if plan.proof is not None and note and proof_results.enabled():
            proof_results.current().add([(plan, False, note)])
    except Exception as raised:  # whatever a compiler or driver raises
        error, note = None, sentence(raised)
    facts = f"{problem.c_in} to {problem.c_out}, {plan_facts(plan)}"
    took = time.perf_counter() - begun
    names = point.route.name, problem.pass_, facts
    return Proof(*names, error, plan.tolerance, took, note)


def plan_facts(plan: Plan) -> str:
    """Return dtype, layout or packing, and the plan, in one line."""
    p = plan.problem
    packed = p.layout
    if p.bits:
        grouped = f" in groups of {p.group_size}" if p.group_size else ""
        packed = f"{p.operands}{grouped}"
    groups = f", {p.groups} groups" if p.groups > 1 else ""
    table = "" if p.table else ", edges"
    return f"{p.dtype}, {packed}{groups}{table}, {plan}"


def relative_error(
    y: mx.array, problem: Problem, relation: Relation, given: tuple
) -> float:
    """Return the error of a result relative to the norm of float64's."""
    exact = _exact(_key(problem), problem, relation, given)
    with mx.stream(mx.cpu):
        y = y.astype(mx.float64)
        off = mx.sqrt(mx.square(y - exact).sum()).item()
        norm = mx.sqrt(mx.square(exact).sum()).item()
    return off / norm if norm else off


def _key(p: Problem) -> tuple:
    facts = p.pass_, kind_of(p), p.c_in, p.c_out, p.dtype, p.layout, p.groups
    return (*facts, p.bits, p.group_size, p.integer)


_kept: dict[tuple, mx.array] = {}


def _exact(key: tuple, problem: Problem, relation: Relation, given: tuple) -> mx.array:
    """Return the result in float64, which MLX's CPU has; the last ones are kept."""
    if key not in _kept:
        while len(_kept) > 64:
            del _kept[next(iter(_kept))]
        with mx.stream(mx.cpu):
            _kept[key] = by_edges(problem, relation, *given[1:])
            mx.eval(_kept[key])
    return _kept[key]


def summary(found: Iterable[Proof | None]) -> dict[str, int]:
    """Return how many are good, wrong, and left out."""
    found = list(found)
    done = [proof for proof in found if proof is not None]
    good = sum(proof.good for proof in done)
    return {"good": good, "wrong": len(done) - good, "left_out": found.count(None)}

"""Experiments on Metal's own kernels: tiles in variants, their splits and registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import mlx.core as mx

from ...problem import FORWARD, LAYOUTS, WEIGHT_GRAD
from ...routes.measured_tiles import HEIGHTS, SHAPES
from ...routes.selection import select
from . import layers
from .lab import Experiment, Lab, call_of, shown, splits_of
from .layers import Scene
from .timings import Kept, KeptTiles
from .variants import Variant

ROUTE, DIRECT = "sorted_implicit_gemm", "device_weights_gemm"
HIGH = "tensor_ops"
# What MLX says where a threadgroup is larger than a pipeline allows.
_MOST = re.compile(
    r"threads per threadgroup is (\d+)|allowed threadgroup size \((\d+)\)"
)
MOST_THREADS = 1024


def threads_of_pipelines(lab: Lab, e: Experiment) -> None:
    """2. Threads that a pipeline allows, by what MLX answers to too many."""
    e.columns = "kernel", "most threads"
    relation, least = lab.shell(64), MOST_THREADS
    calls: list[tuple[str, Callable[[int], mx.array]]] = []
    for channels in lab.channels[:2]:
        for pass_, route in (
            (FORWARD, ROUTE),
            (FORWARD, "tensor_ops"),
            (FORWARD, "relation_traversal"),
            (WEIGHT_GRAD, "grouped_gemm"),
        ):
            problem = lab.problem(relation, channels, pass_=pass_)
            plan = lab.plan(problem, route)
            if plan is not None:
                given = layers.operands(problem, relation)
                calls.append((f"{route} {pass_}, {channels}", _sized(plan, given)))
        given = layers.operands(lab.problem(relation, channels), relation)
        for variant in (Variant(), Variant(buffers=1), Variant(depth=16)):
            calls.append((f"{variant}, {channels}", _sized_variant(variant, given)))
    for name, call in calls:
        most = None if lab.on_host else _most_threads(call)
        if lab.on_host:
            mx.eval(call(0))
        elif most is not None:
            least = min(least, most)
        e.rows.append((name, "-" if most is None else str(most)))
    e.result = (
        "The host has no registers: every kernel ran, none was asked."
        if lab.on_host
        else f"at least {least} threads each; 1024 means registers to spare, 384 or "
        "less that spills are near"
    )


def _sized(plan, given) -> Callable[[int], mx.array]:
    def run(threads: int) -> mx.array:
        sized = replace(plan, threadgroup=(threads, 1, 1)) if threads else plan
        return sized(*given)

    return run


def _sized_variant(variant: Variant, given) -> Callable[[int], mx.array]:
    return lambda threads: variant.run(
        *given, **({"threadgroup": threads} if threads else {})
    )


def _most_threads(call: Callable[[int], mx.array]) -> int | None:
    """Return the threads that MLX says a kernel allows, None where it does not say."""
    try:
        mx.eval(call(2 * MOST_THREADS))
    except (ValueError, RuntimeError) as error:
        found = _MOST.search(str(error))
        return int(found[1] or found[2]) if found else None
    return None


def _variants(lab: Lab, e: Experiment, tried: dict[str, Variant], channels) -> dict:
    """Time variants beside the route; return the times by (shell, channels, name)."""
    e.columns = "shell, channels", "the route", *tried
    times = {}
    for resolution in lab.shells:
        relation = lab.shell(resolution)
        for c in channels:
            problem = lab.problem(relation, c)
            given = layers.operands(problem, relation)
            expected = lab.floor(problem, given)
            calls = [(ROUTE, call_of(lab.plan(problem, ROUTE), given))]
            for name, variant in tried.items():
                calls.append((name, lambda v=variant, g=given: v.run(*g)))
            found = lab.compared(calls, expected)
            e.rows.append((f"{resolution}, {c}", *map(shown, found)))
            times |= {
                (resolution, c, n): ms for n, ms in zip(tried, found[1:], strict=True)
            }
    return times


def _fastest(times: dict) -> str:
    """Say which variant is fastest how often."""
    layers_ = {key[:2] for key in times}
    wins: dict[str, int] = {}
    for layer in layers_:
        name = min((k for k in times if k[:2] == layer), key=times.__getitem__)[2]
        wins[name] = wins.get(name, 0) + 1
    ranked = sorted(wins.items(), key=lambda item: -item[1])
    return "fastest: " + ", ".join(f"{name} in {count}" for name, count in ranked)


def buffers(lab: Lab, e: Experiment) -> None:
    """3. Two buffers, one, and a depth of 16."""
    tried = {
        "two buffers of 32": Variant(),
        "one of 32": Variant(buffers=1),
        "two of 16": Variant(depth=16),
        "one of 16": Variant(buffers=1, depth=16),
    }
    times = _variants(lab, e, tried, lab.channels[:2])
    e.result = lab.said(f"{_fastest(times)} of {len(times) // len(tried)} layers")


def skipping(lab: Lab, e: Experiment) -> None:
    """5. What skipping gains, and what its branch costs."""
    e.columns = "shell, channels", "skipped", "all live", "no branch", "x done"
    branch = []
    for resolution in lab.shells:
        relation = lab.shell(resolution)
        for channels in lab.channels[:2]:
            problem = lab.problem(relation, channels)
            given = layers.operands(problem, relation)
            expected = lab.floor(problem, given)
            calls = [
                ("skipped", lambda g=given: Variant().run(*g)),
                ("all live", lambda g=given: Variant().run(*g, all_live=True)),
                ("no branch", lambda g=given: Variant(skips=False).run(*g)),
            ]
            found = lab.compared(calls, expected)
            done = lab.plan(problem, ROUTE).multiply_adds(relation)
            whole = 27 * (-(-relation.n_out // 64) * 64) * channels**2
            branch.append(found[1] / found[2])
            times = map(shown, found)
            e.rows.append((f"{resolution}, {channels}", *times, f"{whole / done:.2f}"))
    e.result = lab.said(
        f"with every block live the branch costs {100 * (max(branch) - 1):.0f}% at "
        "most; 'x done' is how much more is multiplied without skipping"
    )


def device_weights(lab: Lab, e: Experiment) -> None:
    """6. Weights straight from the device."""
    e.columns = "shell, channels", "chosen", ROUTE, DIRECT
    times = {}
    for resolution in lab.shells:
        relation = lab.shell(resolution)
        for c in lab.channels:
            problem = lab.problem(relation, c)
            given = layers.operands(problem, relation)
            expected = lab.floor(problem, given)
            chosen = select(problem, device=lab.device).route.name
            names = dict.fromkeys((chosen, ROUTE, DIRECT))
            calls = [(n, call_of(lab.plan(problem, n), given)) for n in names]
            found, right = lab.guarded(calls, expected)
            lab.kept.append(Kept(problem, right))
            texts = (shown(found[name]) for name in (chosen, ROUTE, DIRECT))
            e.rows.append((f"{resolution}, {c}", *texts))
            times |= {(resolution, c, name): found[name] for name in (ROUTE, DIRECT)}
    e.result = lab.said(f"{_fastest(times)} of {len(e.rows)} layers")


def accelerators(lab: Lab, e: Experiment) -> None:
    """7. TensorOps against simdgroup matrices, and how high its simdgroups are best."""
    lower = {f"{rows} rows": rows for rows in HEIGHTS}
    e.columns = "shell, channels", HIGH, *lower, ROUTE, "ratio"
    ratios, best = [], []
    for resolution in lab.shells:
        relation = lab.shell(resolution)
        for channels in lab.channels:
            problem = lab.problem(relation, channels)
            plans = {name: lab.plan(problem, name) for name in (HIGH, ROUTE)}
            if plans[HIGH] is None:
                e.result = f"{lab.device.name} has no neural accelerators to ask."
                return
            for name, rows in lower.items():
                plans[name] = lab.plan(problem, HIGH, rows)
            given = layers.operands(problem, relation)
            expected = lab.floor(problem, given)
            calls = [(n, call_of(p, given)) for n, p in plans.items()]
            found, right = lab.guarded(calls, expected)
            ratios.append(found[ROUTE] / found[HIGH])
            heights = {rows: right[name] for name, rows in lower.items()}
            lab.kept.append(KeptTiles(problem, "height", heights))
            best.append(min((found[name], rows) for name, rows in lower.items())[1])
            texts = (shown(found[name]) for name in e.columns[1:-1])
            name = f"{resolution}, {channels}"
            e.rows.append((name, *texts, f"{ratios[-1]:.2f}"))
    e.result = lab.said(
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast, and right; at least 2 "
        "was expected at 128 and 256 channels; fastest simdgroups: "
        + ", ".join(f"{best.count(h)} of {h} rows" for h in HEIGHTS if h in best)
    )


def threadgroups(lab: Lab, e: Experiment) -> None:
    """8. Splits where threadgroups are few."""
    counts = 1, 2, 4, 8
    e.columns = (
        "rows, channels",
        *(f"{n} split{'s' * (n > 1)}" for n in counts),
        "threadgroups a core",
    )
    best = []
    for rows in lab.sizes:
        relation = layers.relation_of(Scene("thin", rows), "submanifold")
        for channels in lab.channels[:2]:
            problem = lab.problem(relation, channels)
            given = layers.operands(problem, relation)
            expected = lab.floor(problem, given)
            calls = []
            for count in counts:
                with splits_of(count):
                    plan = lab.plan(problem, ROUTE)
                calls.append((f"{plan.splits} splits", call_of(plan, given)))
            found = lab.compared(calls, expected)
            groups = sum(d.grid[0] for d in plan.dispatches) / plan.threadgroup[0]
            at = found.index(min(found))
            best.append(f"{counts[at]} at {relation.n_out:,} rows of {channels}")
            share = f"{groups / lab.device.cores:.1f}"
            name = f"{relation.n_out:,}, {channels}"
            e.rows.append((name, *map(shown, found), share))
    e.result = lab.said(f"fastest: {', '.join(best)}")


def shapes(lab: Lab, e: Experiment) -> None:
    """12. Shapes of simdgroup matrices, by the route's own kernel."""
    e.columns = "shell, channels, weights", "planned", *SHAPES
    times = {}
    for resolution, c, layout in product(lab.shells, lab.channels[:2], LAYOUTS):
        relation = lab.shell(resolution)
        problem = lab.problem(relation, c, layout=layout)
        given = layers.operands(problem, relation)
        expected = lab.floor(problem, given)
        # In others a lane has more sums than registers.
        able = {n: s for n, s in SHAPES.items() if s.simdgroups * s.width >= c}
        plans = {n: lab.plan(problem, ROUTE, shape) for n, shape in able.items()}
        plans = {"planned": lab.plan(problem, ROUTE), **plans}
        calls = [(name, call_of(plan, given)) for name, plan in plans.items()]
        found, right = lab.guarded(calls, expected)
        kept = {shape: right[name] for name, shape in able.items()}
        lab.kept.append(KeptTiles(problem, "shape", kept))
        texts = (shown(found.get(name)) for name in e.columns[1:])
        e.rows.append((f"{resolution}, {c}, {layout}", *texts))
        times |= {(resolution, f"{c} {layout}", n): ms for n, ms in found.items()}
    e.result = lab.said(f"{_fastest(times)} of {len(e.rows)} layers")

"""The experiments: what only a chip can say of itself, each asked in a few lines.

What is about Metal's kernels is asked where they run; on metal/host results are checked
and times mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import mlx.core as mx

from ...problem import FORWARD, LAYOUTS, WEIGHT_GRAD, Problem
from ...relation import Relation
from ...routes.measured_tiles import HEIGHTS, SHAPES
from ...routes.selection import Choice, select
from ..cost import Cost, cost
from . import layers, published
from .lab import (
    SCENE_SECONDS,
    Experiment,
    Lab,
    NoTime,
    in_dtype,
    splits_of,
)
from .layers import Scene
from .machine import sentence
from .timings import Kept, KeptTiles
from .variants import Variant, divided

ROUTE, DIRECT = "sorted_implicit_gemm", "device_weights_gemm"
HIGH = "tensor_ops"
ON_METAL = "It is about Metal's kernels, which do not run here."
ON_HOST = "Every result is right; times on the host mean nothing."
# What MLX says where a threadgroup is larger than a pipeline allows.
_MOST = re.compile(
    r"threads per threadgroup is (\d+)|allowed threadgroup size \((\d+)\)"
)
MOST_THREADS = 1024


def _text(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"


def _said(lab: Lab, sentence_: str) -> str:
    return ON_HOST if lab.on_host else sentence_


def against_others(lab: Lab, e: Experiment) -> None:
    """1. Ours against the published shells."""
    e.columns = "shell", "route", "ms", "predicted", "mtlgemm ms", "of peak"
    shares = []
    for shell in published.SHELLS[: 3 if lab.on_host else None]:
        relation = lab.shell(shell.resolution)
        channels = min(shell.channels, lab.channels[-1])
        problem = lab.problem(relation, channels)
        choice, counted, ms = _chosen(lab, problem, relation)
        executed = counted.useful_flops * (counted.done_over_useful or 1)
        shares.append(executed / ms / 1e9 / lab.device.half_tflops)
        predicted = counted.predicted.range if counted.predicted else "-"
        published_ms = "-" if lab.on_host else f"{shell.masked_ms:g}"
        name = f"{shell.resolution}, {channels} channels"
        share = f"{100 * shares[-1]:.0f}%"
        e.rows.append(
            (name, str(choice.route), _text(ms), predicted, published_ms, share)
        )
    e.result = _said(
        lab,
        f"executed operations reach {100 * shares[-1]:.0f}% of peak at the largest; "
        + ("75% or more" if shares[-1] >= 0.75 else "below 75%: go down this list"),
    )


def _call(plan, given) -> Callable[[], mx.array]:
    return lambda: plan(*given)


def _chosen(
    lab: Lab, problem: Problem, relation: Relation
) -> tuple[Choice, Cost, float]:
    """Return the chosen route, its cost and its ms, compared with the floor."""
    choice = select(problem, device=lab.device)
    counted = cost(problem, lab.device, choice=choice, relation=relation)
    given = layers.operands(problem, relation)
    expected = lab.floor(problem, given)
    call = _call(choice.plan, given)
    (ms,) = lab.compared([(str(choice.route), call)], expected)
    return choice, counted, ms


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
            calls = [(ROUTE, _call(lab.plan(problem, ROUTE), given))]
            for name, variant in tried.items():
                calls.append((name, lambda v=variant, g=given: v.run(*g)))
            found = lab.compared(calls, expected)
            e.rows.append((f"{resolution}, {c}", *map(_text, found)))
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
    e.result = _said(lab, f"{_fastest(times)} of {len(times) // len(tried)} layers")


def bfloat(lab: Lab, e: Experiment) -> None:
    """4. bfloat16 against float16, and matrices in float."""
    e.columns = "shell, channels", "float16", "bfloat16", "in float, bfloat16", "ratio"
    ratios = []
    for resolution in lab.shells:
        relation = lab.shell(resolution)
        for channels in lab.channels:
            found = []
            for dtype in ("float16", "bfloat16"):
                problem = lab.problem(relation, channels, dtype)
                given = in_dtype(dtype, layers.operands(problem, relation))
                expected = lab.floor(problem, given)
                choice = select(problem, device=lab.device)
                calls = [(f"{choice.route}, {dtype}", _call(choice.plan, given))]
                if dtype == "bfloat16" and lab.on_metal:
                    variant = Variant(in_float=True)
                    calls.append(("in float", lambda g=given, v=variant: v.run(*g)))
                found += lab.compared(calls, expected, dtype)
            found += [None] * (3 - len(found))
            ratios.append(found[1] / found[0])
            name = f"{resolution}, {channels}"
            e.rows.append((name, *map(_text, found), f"{ratios[-1]:.2f}"))
    worst = max(ratios)
    e.result = _said(
        lab,
        f"bfloat16 takes {min(ratios):.2f} to {worst:.2f} of float16's time: "
        + ("within 10%" if worst <= 1.1 else "matrices in float are worth it"),
    )


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
            times = map(_text, found)
            e.rows.append((f"{resolution}, {channels}", *times, f"{whole / done:.2f}"))
    e.result = _said(
        lab,
        f"with every block live the branch costs {100 * (max(branch) - 1):.0f}% at "
        "most; 'x done' is how much more is multiplied without skipping",
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
            calls = [(n, _call(lab.plan(problem, n), given)) for n in names]
            found, right = lab.guarded(calls, expected)
            lab.kept.append(Kept(problem, right))
            texts = (_text(found[name]) for name in (chosen, ROUTE, DIRECT))
            e.rows.append((f"{resolution}, {c}", *texts))
            times |= {(resolution, c, name): found[name] for name in (ROUTE, DIRECT)}
    e.result = _said(lab, f"{_fastest(times)} of {len(e.rows)} layers")


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
            calls = [(n, _call(p, given)) for n, p in plans.items()]
            found, right = lab.guarded(calls, expected)
            ratios.append(found[ROUTE] / found[HIGH])
            heights = {rows: right[name] for name, rows in lower.items()}
            lab.kept.append(KeptTiles(problem, "height", heights))
            best.append(min((found[name], rows) for name, rows in lower.items())[1])
            texts = (_text(found[name]) for name in e.columns[1:-1])
            name = f"{resolution}, {channels}"
            e.rows.append((name, *texts, f"{ratios[-1]:.2f}"))
    e.result = _said(
        lab,
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast, and right; at least 2 "
        "was expected at 128 and 256 channels; fastest simdgroups: "
        + ", ".join(f"{best.count(h)} of {h} rows" for h in HEIGHTS if h in best),
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
                calls.append((f"{plan.splits} splits", _call(plan, given)))
            found = lab.compared(calls, expected)
            groups = sum(d.grid[0] for d in plan.dispatches) / plan.threadgroup[0]
            at = found.index(min(found))
            best.append(f"{counts[at]} at {relation.n_out:,} rows of {channels}")
            share = f"{groups / lab.device.cores:.1f}"
            name = f"{relation.n_out:,}, {channels}"
            e.rows.append((name, *map(_text, found), share))
    e.result = _said(lab, f"fastest: {', '.join(best)}")


def relations(lab: Lab, e: Experiment) -> None:
    """9. Strided and submanifold relations, and what a division costs."""
    e.columns = "what", "rows", "ms"
    scene = Scene("thin", 200 if lab.on_host else 1_000_000)
    if not lab.budget.fits(4 * SCENE_SECONDS * scene.rows):
        raise NoTime
    coords = layers.coords_of(scene)
    for kind in ("strided", "submanifold"):
        ms = lab.ms(lambda kind=kind: layers.build(coords + 0, kind).out_in)
        e.rows.append((f"{kind} relation", f"{len(coords):,}", _text(ms)))
    if not lab.on_metal:
        e.result = "The divisions of coordinates are Metal's: not asked here."
        return
    times, expected = {}, mx.floor(coords.astype(mx.float32) / 4).astype(mx.int32)
    for name, how in (("64-bit", 64), ("32-bit", 32), ("shift", 0)):
        if not mx.array_equal(divided(coords, 4, how), expected).item():
            lab.wrong.append(f"the {name} division")
        times[name] = lab.ms(lambda how=how: divided(coords, 4, how))
        e.rows.append(
            (f"{name} floor division", f"{coords.size:,}", _text(times[name]))
        )
    e.result = _said(
        lab,
        f"a 64-bit division takes {times['64-bit'] / times['shift']:.1f} times a "
        f"shift's time, a 32-bit one {times['32-bit'] / times['shift']:.1f}",
    )


def sorting(lab: Lab, e: Experiment) -> None:
    """10. MLX's argsort by dtype."""
    e.columns = "dtype", "keys", "ms"
    count, times = 4096 if lab.on_host else 1_000_000, {}
    keys = mx.random.randint(0, 1 << 30, (count,), key=mx.random.key(0))
    for dtype in (mx.int64, mx.int32, mx.uint32):
        name, held = str(dtype).rpartition(".")[2], keys.astype(dtype)
        order = mx.argsort(held)
        if mx.any(mx.diff(held[order].astype(mx.int64)) < 0).item():
            lab.wrong.append(f"argsort of {name}")
        times[name] = lab.ms(lambda held=held: mx.argsort(held))
        e.rows.append((name, f"{count:,}", _text(times[name])))
    # As tiles are put in order: region by region, where equal keys keep their places.
    regions = keys.astype(mx.uint32).reshape(32, -1)
    few = regions % 61
    order = mx.argsort(few, axis=1).astype(mx.int64)
    ranked = mx.take_along_axis(few, order, axis=1).astype(mx.int64) * count + order
    if mx.any(mx.diff(ranked, axis=1) <= 0).item():
        lab.wrong.append("argsort, which does not keep the order of equal keys")
    within = lab.ms(lambda: mx.argsort(regions, axis=1))
    e.rows.append(("uint32 in regions", f"{count:,}", _text(within)))
    wide, apart = times["int64"] / times["uint32"], times["uint32"] / within
    e.result = _said(
        lab,
        f"64-bit keys take {wide:.1f} times 32-bit ones' time, these {apart:.1f} times "
        "what they take in 32 regions",
    )


def weight_gradient(lab: Lab, e: Experiment) -> None:
    """11. A weight gradient, of which nobody published a time on a Mac."""
    e.columns = "shell, channels", "route", "ms", "TFLOP/s", "predicted"
    relation, channels = lab.shell(128), lab.channels[1]
    problem = lab.problem(relation, channels, pass_=WEIGHT_GRAD)
    choice, counted, ms = _chosen(lab, problem, relation)
    rate = counted.useful_flops / ms / 1e9
    predicted = counted.predicted.range if counted.predicted else "-"
    name = f"128, {channels}"
    e.rows.append((name, str(choice.route), _text(ms), f"{rate:.3g}", predicted))
    e.result = _said(lab, f"{ms:.3f} ms, {rate:.2f} useful TFLOP/s")


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
        calls = [(name, _call(plan, given)) for name, plan in plans.items()]
        found, right = lab.guarded(calls, expected)
        kept = {shape: right[name] for name, shape in able.items()}
        lab.kept.append(KeptTiles(problem, "shape", kept))
        texts = (_text(found.get(name)) for name in e.columns[1:])
        e.rows.append((f"{resolution}, {c}, {layout}", *texts))
        times |= {(resolution, f"{c} {layout}", n): ms for n, ms in found.items()}
    e.result = _said(lab, f"{_fastest(times)} of {len(e.rows)} layers")


Run = Callable[[Lab, Experiment], None]
# Number, whether it is about Metal alone, title, question, how it is measured.
EXPERIMENTS: tuple[tuple[int, bool, Run, str, str, str], ...] = (
    (
        1,
        False,
        against_others,
        "others' shells",
        "How long do the layers take whose times were published?",
        "submanifold 3x3x3 over shells, float16, the route that is chosen",
    ),
    (
        3,
        True,
        buffers,
        "buffers",
        "Do two buffers in threadgroup memory pay, or the room that one leaves?",
        "the tiles of sorted_implicit_gemm in variants, 64 and 128 channels",
    ),
    (
        12,
        True,
        shapes,
        "shapes of tiles",
        "Which simdgroups are fastest: many of few sums, or few of many?",
        "sorted_implicit_gemm in other shapes; --keep keeps the fastest",
    ),
    (
        4,
        False,
        bfloat,
        "bfloat16",
        "Does bfloat16 cost more than float16?",
        "the same layer in both, and with matrices in float",
    ),
    (
        5,
        True,
        skipping,
        "skipping",
        "What does the branch cost that passes over blocks of rows?",
        "masks as they are, all set, and no branch at all",
    ),
    (
        6,
        True,
        device_weights,
        "weights from the device",
        "Need weights pass through threadgroup memory?",
        "sorted_implicit_gemm and device_weights_gemm; --keep keeps their times",
    ),
    (
        7,
        True,
        accelerators,
        "neural accelerators",
        "How much faster are TensorOps, are they right, and how high simdgroups best?",
        "tensor_ops, as planned and by heights, of which --keep keeps the fastest; and "
        "sorted_implicit_gemm",
    ),
    (
        8,
        True,
        threadgroups,
        "threadgroups a core",
        "Into how many splits should few tiles be cut?",
        "1, 2, 4 and 8 splits over 1 000, 4 000 and 16 000 rows",
    ),
    (
        9,
        False,
        relations,
        "relations",
        "What does a relation over a million rows take, and what divisions in it?",
        "new coordinates to the table; a copy with three kinds of division",
    ),
    (
        10,
        False,
        sorting,
        "sorting",
        "Would keys of four bytes sort faster than those of eight?",
        "mx.argsort of a million keys",
    ),
    (
        11,
        False,
        weight_gradient,
        "a weight gradient",
        "How long does a weight gradient take? Nobody has published one on a Mac.",
        "shell 128, 128 channels, float16, the route that is chosen",
    ),
    # The last one: it asks for what a pipeline does not allow.
    (
        2,
        True,
        threads_of_pipelines,
        "registers",
        "How many threads does each pipeline allow, which says how many registers?",
        "a threadgroup that is too large, to which MLX answers with the most",
    ),
)


def experiments(lab: Lab, told: Callable[[int, str], None]) -> Iterator[Experiment]:
    """Run the experiments one after another, each with its share of the time left.

    Args:
        lab: where; its budget is that of all.
        told: called with the place and the title of each before it runs.
    """
    whole = lab.budget
    rest = [e for e in EXPERIMENTS if lab.on_metal or not e[1]]
    for at, (number, on_metal, run, title, question, how) in enumerate(EXPERIMENTS):
        told(at, title)
        experiment = Experiment(number, title, question, how)
        running = [e[0] for e in rest]
        after = len(running) - running.index(number) if number in running else 1
        lab.budget = whole.part(2 * whole.left / (after + 1))
        lab.wrong = []
        if on_metal and not lab.on_metal:
            experiment.result = ON_METAL
        else:
            _run(run, lab, experiment)
        yield experiment
        mx.clear_cache()


def _run(run: Run, lab: Lab, experiment: Experiment) -> None:
    try:
        run(lab, experiment)
    except NoTime:
        experiment.result = "No time was left for all of it."
    except Exception as raised:  # whatever a compiler or driver raises
        lab.wrong.append(sentence(raised))
    if lab.wrong:
        experiment.wrong = "; ".join(lab.wrong)

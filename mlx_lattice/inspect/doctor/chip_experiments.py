"""Experiments on what any backend has: chosen routes, relations, sorting, dtypes."""

from __future__ import annotations

import mlx.core as mx

from ...problem import WEIGHT_GRAD, Problem
from ...relation import Relation
from ...routes.selection import Choice, select
from ..cost import Cost, cost
from . import layers, published
from .lab import SCENE_SECONDS, Experiment, Lab, NoTime, call_of, in_dtype, shown
from .layers import Scene
from .variants import Variant, divided


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
            (name, str(choice.route), shown(ms), predicted, published_ms, share)
        )
    e.result = lab.said(
        f"executed operations reach {100 * shares[-1]:.0f}% of peak at the largest; "
        + ("75% or more" if shares[-1] >= 0.75 else "below 75%: go down this list")
    )


def _chosen(
    lab: Lab, problem: Problem, relation: Relation
) -> tuple[Choice, Cost, float]:
    """Return the chosen route, its cost and its ms, compared with the floor."""
    choice = select(problem, device=lab.device)
    counted = cost(problem, lab.device, choice=choice, relation=relation)
    given = layers.operands(problem, relation)
    expected = lab.floor(problem, given)
    call = call_of(choice.plan, given)
    (ms,) = lab.compared([(str(choice.route), call)], expected)
    return choice, counted, ms


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
                calls = [(f"{choice.route}, {dtype}", call_of(choice.plan, given))]
                if dtype == "bfloat16" and lab.on_metal:
                    variant = Variant(in_float=True)
                    calls.append(("in float", lambda g=given, v=variant: v.run(*g)))
                found += lab.compared(calls, expected, dtype)
            found += [None] * (3 - len(found))
            ratios.append(found[1] / found[0])
            name = f"{resolution}, {channels}"
            e.rows.append((name, *map(shown, found), f"{ratios[-1]:.2f}"))
    worst = max(ratios)
    e.result = lab.said(
        f"bfloat16 takes {min(ratios):.2f} to {worst:.2f} of float16's time: "
        + ("within 10%" if worst <= 1.1 else "matrices in float are worth it")
    )


def relations(lab: Lab, e: Experiment) -> None:
    """9. Strided and submanifold relations, and what a division costs."""
    e.columns = "what", "rows", "ms"
    scene = Scene("thin", 200 if lab.on_host else 1_000_000)
    if not lab.budget.fits(4 * SCENE_SECONDS * scene.rows):
        raise NoTime
    coords = layers.coords_of(scene)
    for kind in ("strided", "submanifold"):
        ms = lab.ms(lambda kind=kind: layers.build(coords + 0, kind).out_in)
        e.rows.append((f"{kind} relation", f"{len(coords):,}", shown(ms)))
    if not lab.on_metal:
        e.result = "The divisions of coordinates are Metal's: not asked here."
        return
    times, expected = {}, mx.floor(coords.astype(mx.float32) / 4).astype(mx.int32)
    for name, how in (("64-bit", 64), ("32-bit", 32), ("shift", 0)):
        if not mx.array_equal(divided(coords, 4, how), expected).item():
            lab.wrong.append(f"the {name} division")
        times[name] = lab.ms(lambda how=how: divided(coords, 4, how))
        e.rows.append(
            (f"{name} floor division", f"{coords.size:,}", shown(times[name]))
        )
    e.result = lab.said(
        f"a 64-bit division takes {times['64-bit'] / times['shift']:.1f} times a "
        f"shift's time, a 32-bit one {times['32-bit'] / times['shift']:.1f}"
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
        e.rows.append((name, f"{count:,}", shown(times[name])))
    # As tiles are put in order: region by region, where equal keys keep their places.
    regions = keys.astype(mx.uint32).reshape(32, -1)
    few = regions % 61
    order = mx.argsort(few, axis=1).astype(mx.int64)
    ranked = mx.take_along_axis(few, order, axis=1).astype(mx.int64) * count + order
    if mx.any(mx.diff(ranked, axis=1) <= 0).item():
        lab.wrong.append("argsort, which does not keep the order of equal keys")
    within = lab.ms(lambda: mx.argsort(regions, axis=1))
    e.rows.append(("uint32 in regions", f"{count:,}", shown(within)))
    wide, apart = times["int64"] / times["uint32"], times["uint32"] / within
    e.result = lab.said(
        f"64-bit keys take {wide:.1f} times 32-bit ones' time, these {apart:.1f} times "
        "what they take in 32 regions"
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
    e.rows.append((name, str(choice.route), shown(ms), f"{rate:.3g}", predicted))
    e.result = lab.said(f"{ms:.3f} ms, {rate:.2f} useful TFLOP/s")

"""Forward passes of packed weights and of int8 features, beside half's."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

import mlx_lattice as ml
from mlx_lattice import devices, routes
from mlx_lattice.problem import FORWARD, IntegerFacts, Plan

BITS = (8, 4)  # of weights


def chained(step, start, budget_ms: float = 20, repeats: int = 5) -> float:
    """Median ms of one ``step`` in a chain of dependent ones.

    From the difference to a chain three times as long, in which the constant cost of a
    chain (its start, the wait for its end) cancels.
    """

    def chain(calls: int) -> float:
        x, kept = start, []
        for _ in range(calls):
            x, more = step(x)
            kept += more
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval(x, *kept)
        mx.synchronize()
        return (time.perf_counter() - begin) * 1e3

    chain(5)
    calls = max(2, min(100, int(budget_ms / (chain(10) / 10) / 3)))
    times = [(chain(3 * calls) - chain(calls)) / (2 * calls) for _ in range(repeats)]
    return statistics.median(times)


def plan_of(
    pass_: str, relation: ml.Relation, channels: int, dtype: mx.Dtype, **packing
) -> Plan:
    """The plan that a pass of a layer over a relation gets."""
    width = channels, channels
    problem = ml.Problem.of(pass_, relation, *width, dtype, **packing)
    return routes.select(problem, device=devices.current()).plan


def packed_rows(facts, relation, x, w, half_ms, rates) -> list[dict]:
    """The forward with the same weight packed, in groups of 32."""
    work = 2 * facts["edges"] * facts["channels"] ** 2
    channels, rows = facts["channels"], []
    for bits in BITS:
        packed = ml.quantize_weight(w, bits=bits, group_size=32)
        mx.eval(*packed.arrays)
        packing = {"bits": bits, "group_size": 32}
        conv = plan_of(FORWARD, relation, channels, x.dtype, **packing)

        def forward(x, conv=conv, packed=packed):
            return conv(relation, x, packed), []

        ms = chained(forward, x)
        weights = sum(array.nbytes for array in packed.arrays)
        moved = 2 * x.nbytes + weights + 4 * facts["edges"]
        floor = max(work / rates[0], moved / rates[1]) * 1e3
        row = {"case": "quantised", **facts, "bits": bits, "plan": str(conv)}
        row["ms"] = round(ms, 4)
        row |= {"floor_ms": round(floor, 4), "share_of_floor": round(floor / ms, 3)}
        rows.append({**row, "of_half_ms": round(ms / half_ms, 2)})
    return rows


def integer_rows(facts, relation, w, half_ms, rates) -> list[dict]:
    """The forward of int8 features to int8, with a shift and ReLU, in a chain.

    The dense rate of int8 is taken for twice that of half.
    """
    work = 2 * facts["edges"] * facts["channels"] ** 2
    channels, rows = facts["channels"], []
    after = IntegerFacts(("scale", "shift", "out_inverse"), "relu")
    start = mx.random.randint(-127, 128, (relation.n_in, channels)).astype(mx.int8)
    added = mx.full((channels,), 1e-3), mx.ones((channels,)), mx.ones((1,))
    for bits in BITS:
        packed = ml.integer_weight(w, bits=bits, group_size=32 if bits == 4 else None)
        mx.eval(start, added, *packed.arrays)
        packing = {"bits": bits, "group_size": packed.group_size, "integer": after}
        conv = plan_of(FORWARD, relation, channels, mx.float16, **packing)

        def forward(x, conv=conv, packed=packed):
            return conv(relation, x, packed, *added), []

        ms = chained(forward, start)
        weights = sum(array.nbytes for array in packed.arrays)
        moved = 2 * start.nbytes + weights + 4 * facts["edges"]
        floor = max(work / (2 * rates[0]), moved / rates[1]) * 1e3
        row = {"case": "int8", **facts, "bits": bits, "plan": str(conv)}
        row |= {"dtype": "int8", "ms": round(ms, 4), "floor_ms": round(floor, 4)}
        row["share_of_floor"] = round(floor / ms, 3)
        rows.append({**row, "times_half": round(half_ms / ms, 2)})
    return rows

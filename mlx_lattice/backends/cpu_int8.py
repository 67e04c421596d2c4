"""Int8 features by the C++ extension: the planner of int8_blocked, and rounding."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..devices import CPU, Device
from ..dtypes import DTYPES
from ..problem import Problem
from ..quantized import IntegerWeight
from ..relation import Relation
from ..routes.plan import IN_KERNEL, Plan, integers_unpacked
from .cpu_extension import extension


def int8_blocked(problem: Problem, device: Device) -> Plan:
    """Plan int8_blocked by the extension."""
    weights = integers_unpacked(problem)
    facts = {"epilogue": IN_KERNEL, "weights": weights}
    view = "none" if problem.pointwise else "out_in"
    return Plan(problem, CPU, "int8_blocked", view, _bind, **facts)


def _bind(plan: Plan, relation: Relation) -> Callable[..., mx.array]:
    """Return y, in tiles over the neighbour table, or over the rows themselves."""
    p = plan.problem
    options = {"activation": p.integer.act.code, "dtype": DTYPES[p.dtype]}
    options["groups"] = p.groups
    table = None if p.pointwise else relation.out_in

    def call(x: mx.array, w: IntegerWeight, *after: mx.array | None) -> mx.array:
        arrays = w.values, table, *after
        return extension.int8_blocked(x, *arrays, w.multipliers, **options)

    return call


def quantise(x: mx.array, scale: mx.array) -> mx.array:
    """Return (N, C) floats as int8, by one scale (1,) float32."""
    return extension.quantise(x, scale)


def quantise_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return (N, C) floats as int8, and the (N,) float32 scales of their rows."""
    return extension.quantise_rows(x)

"""Contractions of int8 features in MLX operations: exact, on every backend.

MLX multiplies no integer matrices: float32 ones of int8 values add up exactly while a
sum stays below 2**24, and int32 adds the parts.
"""

from __future__ import annotations

import mlx.core as mx

from ..devices import Device
from ..dtypes import DTYPES
from ..integer_facts import MOST, finished
from ..problem import Problem
from ..quantized import IntegerWeight
from ..relation import Relation
from ..routes.plan import MLX, OPERATIONS, Plan, integers_unpacked
from . import mlx_ops
from .mlx_ops import grouped_matmul, slices, sum_by_output

EXACT = 2**24 // MOST**2 // 8 * 8  # channels whose products float32 adds up exactly


def gather_gemm_scatter(problem: Problem, device: Device) -> Plan:
    """Plan gather_gemm_scatter in MLX operations, of int8 features too."""
    if not problem.integer:
        return mlx_ops.gather_gemm_scatter(problem, device)
    facts = {"epilogue": OPERATIONS, "weights": integers_unpacked(problem)}
    return Plan(problem, MLX, "gather_gemm_scatter", "edges", _run, **facts)


def _run(
    plan: Plan,
    relation: Relation,
    x: mx.array,
    w: IntegerWeight,
    scale: mx.array,
    shift: mx.array | None,
    residual: mx.array | None,
    residual_scale: mx.array | None,
    out_inverse: mx.array | None,
    row_scales: mx.array | None,
) -> mx.array:
    """Return y: an offset at a time, its rows gathered, multiplied and added."""
    p = plan.problem
    sums = _sums(x, w, relation, p.groups, row_scales)
    after = scale, shift, residual, residual_scale, out_inverse
    return finished(sums, p.integer, DTYPES[p.dtype], *after)


def _sums(x, w: IntegerWeight, relation: Relation, groups: int, row_scales) -> mx.array:
    """Return (N_out, C_out) int32, or float32 where rows have scales of their own."""
    values = w.integers()[..., : w.in_channels].swapaxes(1, 2)
    shape = relation.n_out, values.shape[2]
    products = (
        (i, o, _products(x[i], values[k], groups)) for k, i, o in slices(relation)
    )
    if row_scales is not None:
        products = (
            (i, o, part.astype(mx.float32) * row_scales[i][:, None])
            for i, o, part in products
        )
    dtype = mx.int32 if row_scales is None else mx.float32
    if not relation.has_table:
        parts = [part for _, _, part in products]
        return sum_by_output(parts, relation, shape).astype(dtype)
    y = mx.zeros(shape, dtype=dtype)
    for _, o, part in products:
        # Within one offset no output row comes twice, so the add has one order.
        y = y.at[o].add(part)
    return y


def _products(x: mx.array, w: mx.array, groups: int) -> mx.array:
    """Return int32 x @ w of int8 (E, C_in) and (C_in / groups, C_out)."""
    sums = 0
    x = x.reshape(x.shape[0], groups, -1)
    for first in range(0, w.shape[0], EXACT):
        of = slice(first, first + EXACT)
        a = x[:, :, of].astype(mx.float32).reshape(x.shape[0], -1)
        part = grouped_matmul(a, w[of].astype(mx.float32), groups)
        sums = sums + part.astype(mx.int32)
    return sums

"""The contractions of the C++ extension: a planner for each route.

The extension's function of a route has its name; that of its gradient ends in
``_weight_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from ..devices import CPU, Device
from ..problem import MLX_LAYOUT, WEIGHT_GRAD, Problem
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..routes.plan import IN_KERNEL, IN_TILES, Plan, Planner
from .cpu_extension import extension

# Rows that the extension has in one tile, at most, and of a line of statistics.
ONE_TILE, LINE_ROWS = 512, 64


def _stored(p: Problem) -> dict:
    """Return the arguments that say how channels and weights are stored."""
    if p.bits and p.pass_ != WEIGHT_GRAD and not p.transposed:
        return {"groups": p.groups, "bits": p.bits, "group_size": p.group_size}
    return {"groups": p.groups, "transpose_weight": p.transposed}


def _of_gradient(p: Problem) -> dict:
    """Return the arguments that say how a weight gradient is stored."""
    return {"groups": p.groups, "output_major": p.layout == MLX_LAYOUT}


def _call(function: Callable, p: Problem, edges: Sequence, options: dict) -> Callable:
    """Return ``call(x, w, bias, *after)`` of a function of the extension.

    Args:
        function: takes x, the arrays of a weight, those of the edges, and a bias.
        p: the problem.
        edges: arrays and sizes of the relation.
        options: its keyword arguments.
    """
    after = p.epilogue

    def call(x, w, bias=None, *arrays):
        weights = w.arrays if isinstance(w, QuantizedWeight) else (w,)
        if after is None:
            return function(x, *weights, *edges, bias, **options)
        epilogue = (*arrays, after.act.code, after.eps)
        return function(x, *weights, *edges, bias, epilogue=epilogue, **options)

    return call


def _blocked_gather_gemm(plan: Plan, relation: Relation) -> Callable:
    """Return y, in tiles over the neighbour table; and statistics of its rows."""
    p, edges = plan.problem, (relation.out_in,)
    if plan.moments:
        function, groups = extension.blocked_gather_gemm_moments, {"groups": p.groups}
        return _call(function, replace(p, epilogue=None), edges, groups)
    return _call(extension.blocked_gather_gemm, p, edges, _stored(p))


def _grouped_gemm(plan: Plan, relation: Relation) -> Callable:
    """Return y, in tiles over the kernel-major edges."""
    p, edges = plan.problem, (relation.edges, relation.n_out)
    return _call(extension.grouped_gemm, p, edges, _stored(p))


def _relation_traversal(plan: Plan, relation: Relation) -> Callable:
    """Return y, in tiles over each output row's edges (CSR)."""

    def columns():
        csr = relation.output_csr
        return csr.indptr, *(mx.contiguous(csr.edges[:, c]) for c in (0, 2))

    p, edges = plan.problem, relation.view("output_csr_columns", columns)
    return _call(extension.relation_traversal, p, edges, _stored(p))


def _native_pointwise(plan: Plan, relation: Relation) -> Callable:
    """Return x @ W[0]."""
    p = plan.problem
    options = {"transpose": p.transposed}
    call = _call(extension.native_pointwise, p, (), options)
    # Squeezed it is a view; an index gathers a copy.
    return lambda x, w, *added: call(x, w.squeeze(0), *added)


def _native_pointwise_weight_grad(plan: Plan, relation: Relation) -> Callable:
    """Return x.T @ dy."""
    options = _of_gradient(plan.problem)
    gradient = extension.native_pointwise_weight_grad
    return lambda x, dy, _=None: gradient(x, dy, **options)


def _edge_weight_grad(plan: Plan, relation: Relation) -> Callable:
    """Return dW over the kernel-major edges."""
    gradient = getattr(extension, f"{plan.kernel}_weight_grad")
    edges, options = (relation.edges, relation.volume), _of_gradient(plan.problem)
    return lambda x, dy, _=None: gradient(x, dy, *edges, **options)


def _quantized_pointwise(plan: Plan, relation: Relation) -> Callable:
    """Return x @ W[0], weights unpacked into panels."""
    p = plan.problem
    options = {"bits": p.bits, "group_size": p.group_size}

    def function(x, *arrays, **options):
        *packed, bias = arrays
        squeezed = (a.squeeze(0) for a in packed)
        return extension.quantized_pointwise(x, *squeezed, bias, **options)

    return _call(function, p, (), options)


def _quantized_sorted(plan: Plan, relation: Relation) -> Callable:
    """Return y, in tiles over the neighbour table."""
    p = plan.problem
    return _call(extension.quantized_sorted, p, (relation.out_in,), _stored(p))


def _quantized_traversal(plan: Plan, relation: Relation) -> Callable:
    """Return y, in tiles over the kernel-major edges of any relation."""
    p, edges = plan.problem, (relation.edges, relation.n_out)
    return _call(extension.quantized_traversal, p, edges, _stored(p))


def _planner(
    name: str,
    view: str,
    bind,
    grad_view: str = "",
    gradient=None,
    sums_moments: bool = False,
) -> Planner:
    """Return the planner of a route that the extension runs."""

    def plan(problem: Problem, device: Device) -> Plan:
        if problem.pass_ == WEIGHT_GRAD:
            facts = {"reads_stored": True}
            return Plan(problem, CPU, name, grad_view, gradient, **facts)
        weights = IN_TILES if problem.bits else ""
        facts = {"epilogue": IN_KERNEL if problem.epilogue else "", "weights": weights}
        if sums_moments and problem.sums_moments and problem.n_out > ONE_TILE:
            facts["moments"] = -(-problem.n_out // LINE_ROWS)
        return Plan(problem, CPU, name, view, bind, **facts)

    plan.__doc__ = f"Plan {name} by the extension."
    return plan


blocked_gather_gemm = _planner(
    "blocked_gather_gemm",
    "out_in",
    _blocked_gather_gemm,
    "edges",
    _edge_weight_grad,
    sums_moments=True,
)
grouped_gemm = _planner(
    "grouped_gemm", "edges", _grouped_gemm, "edges", _edge_weight_grad
)
relation_traversal = _planner(
    "relation_traversal", "output_csr", _relation_traversal, "edges", _edge_weight_grad
)
native_pointwise = _planner(
    "native_pointwise", "none", _native_pointwise, "none", _native_pointwise_weight_grad
)
quantized_pointwise = _planner("quantized_pointwise", "none", _quantized_pointwise)
quantized_sorted = _planner("quantized_sorted", "out_in", _quantized_sorted)
quantized_traversal = _planner("quantized_traversal", "edges", _quantized_traversal)

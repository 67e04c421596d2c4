"""The contractions of the C++ extension: a planner for each route.

The extension's function of a route has its name; that of its gradient ends in
``_weight_grad``.
"""

from __future__ import annotations

import mlx.core as mx

from ..devices import CPU, Device
from ..problem import MLX_LAYOUT, WEIGHT_GRAD, Problem
from ..routes.plan import IN_KERNEL, IN_TILES, Plan, Planner
from .cpu_extension import extension

# Rows that the extension has in one tile, at most, and of a line of statistics.
ONE_TILE, LINE_ROWS = 512, 64


def _options(p: Problem, *after) -> dict:
    """Return the arguments that say how channels and weights are stored, and more."""
    return _stored(p) | _epilogue(p, *after)


def _epilogue(p: Problem, *after) -> dict:
    """Return the argument that says what follows the sums and their shift."""
    if p.epilogue is None:
        return {}
    return {"epilogue": (*after, p.epilogue.act.code, p.epilogue.eps)}


def _stored(p: Problem) -> dict:
    """Return the arguments that say how channels and weights are stored."""
    if p.bits and p.pass_ != WEIGHT_GRAD and not p.transposed:
        return {"groups": p.groups, "bits": p.bits, "group_size": p.group_size}
    return {"groups": p.groups, "transpose_weight": p.transposed}


def _of_gradient(p: Problem) -> dict:
    """Return the arguments that say how a weight gradient is stored."""
    return {"groups": p.groups, "output_major": p.layout == MLX_LAYOUT}


def _blocked_gather_gemm(plan, relation, x, w, bias, *after):
    """Return y, in tiles over the neighbour table; and statistics of its rows."""
    if plan.moments:
        groups, given = plan.problem.groups, (x, w, relation.out_in, bias)
        return extension.blocked_gather_gemm_moments(*given, groups=groups)
    options = _options(plan.problem, *after)
    return extension.blocked_gather_gemm(x, w, relation.out_in, bias, **options)


def _grouped_gemm(plan, relation, x, w, bias, *after):
    """Return y, in tiles over the kernel-major edges."""
    edges, options = (relation.edges, relation.n_out), _options(plan.problem, *after)
    return extension.grouped_gemm(x, w, *edges, bias, **options)


def _relation_traversal(plan, relation, x, w, bias, *after):
    """Return y, in tiles over each output row's edges (CSR)."""

    def columns():
        csr = relation.output_csr
        return csr.indptr, *(mx.contiguous(csr.edges[:, c]) for c in (0, 2))

    edges, options = (
        relation.view("output_csr_columns", columns),
        _options(plan.problem, *after),
    )
    return extension.relation_traversal(x, w, *edges, bias, **options)


def _native_pointwise(plan, relation, x, w, bias, *after):
    """Return x @ W[0]. Squeezed it is a view; an index gathers a copy."""
    p = plan.problem
    options = {"transpose": p.transposed, **_epilogue(p, *after)}
    return extension.native_pointwise(x, w.squeeze(0), bias, **options)


def _native_pointwise_weight_grad(plan, relation, x, dy, _):
    """Return x.T @ dy."""
    return extension.native_pointwise_weight_grad(x, dy, **_of_gradient(plan.problem))


def _edge_weight_grad(plan, relation, x, dy, _):
    """Return dW over the kernel-major edges."""
    gradient = getattr(extension, f"{plan.kernel}_weight_grad")
    options = _of_gradient(plan.problem)
    return gradient(x, dy, relation.edges, relation.volume, **options)


def _quantized_pointwise(plan, relation, x, w, bias, *after):
    """Return x @ W[0], weights unpacked into panels."""
    arrays, p = (a.squeeze(0) for a in w.arrays), plan.problem
    packing = {"bits": p.bits, "group_size": w.group_size, **_epilogue(p, *after)}
    return extension.quantized_pointwise(x, *arrays, bias, **packing)


def _quantized_sorted(plan, relation, x, w, bias, *after):
    """Return y, in tiles over the neighbour table."""
    options = _options(plan.problem, *after)
    return extension.quantized_sorted(x, *w.arrays, relation.out_in, bias, **options)


def _quantized_traversal(plan, relation, x, w, bias, *after):
    """Return y, in tiles over the kernel-major edges of any relation."""
    edges, options = (relation.edges, relation.n_out), _options(plan.problem, *after)
    return extension.quantized_traversal(x, *w.arrays, *edges, bias, **options)


def _planner(
    name: str,
    view: str,
    run,
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
        return Plan(problem, CPU, name, view, run, **facts)

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

"""The contractions of the C++ extension: a planner for each route."""

from __future__ import annotations

import mlx.core as mx

from ..devices import CPU, Device
from ..problem import WEIGHT_GRAD, Problem
from ..routes.plan import Plan, Planner
from .cpu_extension import extension


def _options(p: Problem) -> dict:
    """Return how the extension is to read channels and weights."""
    if p.bits and p.pass_ != WEIGHT_GRAD and not p.transposed:
        return {"groups": p.groups, "bits": p.bits, "group_size": p.group_size}
    return {"groups": p.groups, "transpose_weight": p.transposed}


def _over_table(plan, relation, x, w, bias):
    """Return y by output-stationary tiles over the neighbour table."""
    return extension.conv(x, w, relation.out_in, bias, **_options(plan.problem))


def _over_edges(plan, relation, x, w, bias):
    """Return y over the kernel-major edges."""
    edges = relation.edges, relation.n_out
    return extension.conv_edges(x, w, *edges, bias, **_options(plan.problem))


def _by_rows(plan, relation, x, w, bias):
    """Return y by walking each output row's edges."""

    def columns():
        csr = relation.output_csr
        return csr.indptr, *(mx.contiguous(csr.edges[:, c]) for c in (0, 2))

    edges = relation.view("output_csr_columns", columns)
    return extension.conv_csr(x, w, *edges, bias, **_options(plan.problem))


def _rows_alone(plan, relation, x, w, bias):
    """Return x @ W[0] by the extension's own matmul."""
    return extension.matmul(x, w[0], bias, transpose=plan.problem.transposed)


def _weight_grad(plan, relation, x, dy, _):
    """Return dW over the kernel-major edges."""
    edges, groups = relation.edges, plan.problem.groups
    return extension.weight_grad_edges(x, dy, edges, relation.volume, groups=groups)


def _rows_weight_grad(plan, relation, x, dy, _):
    """Return x.T @ dy."""
    return extension.weight_grad_rows(x, dy, groups=plan.problem.groups)


def _packed_rows_alone(plan, relation, x, w, bias):
    """Return x @ W[0], weights unpacked into panels."""
    arrays, p = (a[0] for a in w.arrays), plan.problem
    packing = {"bits": p.bits, "group_size": w.group_size}
    return extension.matmul_quantized(x, *arrays, bias, **packing)


def _packed_over_table(plan, relation, x, w, bias):
    """Return y over the neighbour table, edges compacted an offset in each tile."""
    options = _options(plan.problem)
    return extension.conv_quantized(x, *w.arrays, relation.out_in, bias, **options)


def _packed_over_edges(plan, relation, x, w, bias):
    """Return y over the kernel-major edges of any relation."""
    edges, options = (relation.edges, relation.n_out), _options(plan.problem)
    return extension.conv_edges_quantized(x, *w.arrays, *edges, bias, **options)


def _planner(name: str, view: str, run, grad_view: str = "", gradient=None) -> Planner:
    """Return the planner of a route that the extension runs."""

    def plan(problem: Problem, device: Device) -> Plan:
        if problem.pass_ == WEIGHT_GRAD:
            return Plan(problem, CPU, name, grad_view, gradient)
        weights = "unpacked in tiles" if problem.bits else ""
        return Plan(problem, CPU, name, view, run, weights=weights)

    plan.__doc__ = f"Plan {name} by the extension."
    return plan


native_pointwise = _planner(
    "native_pointwise", "none", _rows_alone, "none", _rows_weight_grad
)
blocked_gather_gemm = _planner(
    "blocked_gather_gemm", "out_in", _over_table, "edges", _weight_grad
)
grouped_gemm = _planner("grouped_gemm", "edges", _over_edges, "edges", _weight_grad)
relation_traversal = _planner(
    "relation_traversal", "output_csr", _by_rows, "edges", _weight_grad
)
quantized_pointwise = _planner("quantized_pointwise", "none", _packed_rows_alone)
quantized_sorted = _planner("quantized_sorted", "out_in", _packed_over_table)
quantized_traversal = _planner("quantized_traversal", "edges", _packed_over_edges)

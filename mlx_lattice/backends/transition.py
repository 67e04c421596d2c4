"""Plans over the functions of CUDA's backend, which has no planners yet."""

from __future__ import annotations

from .. import backends
from ..devices import CUDA
from ..problem import WEIGHT_GRAD
from ..routes.plan import Plan

_TILED = backends.TILED


def _run(plan, relation, x, w, bias):
    module, p = backends.of(plan.backend), plan.problem
    if p.pass_ == WEIGHT_GRAD:
        dw = module.WEIGHT_GRAD[plan.kernel](x, w, relation, p.groups)
        return dw.astype(x.dtype)
    packed = p.bits and not plan.dequantised
    table = module.QUANTIZED if packed else module.CONV
    more = () if packed else (p.transposed,)
    if bias is not None and plan.kernel in module.FUSED_BIAS:
        return table[plan.kernel](x, w, relation, p.groups, *more, bias=bias)
    y = table[plan.kernel](x, w, relation, p.groups, *more)
    return y if bias is None else y + bias


def _planner(backend, name):
    def plan(problem, device):
        said = dict(backends.parameters(name, problem, device))
        tile = said.get("tile")
        view = said.get("view") or _view(backend, name, problem)

        def count(plan, relation):
            if relation is None:
                return None
            return backends.multiply_adds(name, problem, device, said, relation)

        return Plan(
            problem,
            backend,
            name,
            view,
            _run,
            variant=said.get("kernel", ""),
            tile=tile and tuple(map(int, tile.split(" x "))),
            splits=said.get("split-K", 1),
            weights=said.get("weights", ""),
            scratch=said.get("scratch bytes", 0),
            count=count if name in _TILED else None,
        )

    return plan


def _view(backend, name, problem):
    if problem.pass_ == WEIGHT_GRAD:
        return "out_in" if name == "depthwise" else "edges"
    if name.endswith(("sorted", "tensor_ops", "implicit_gemm")):
        return "sorted"
    if not problem.table or (backend == CUDA and name == "relation_traversal"):
        return "output_csr"
    return "out_in"


def cuda(name):
    """Return the planner of a route on CUDA."""
    return _planner(CUDA, name)

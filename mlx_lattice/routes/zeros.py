"""What a pass writes where it has no edges: zeros, and what follows them."""

from __future__ import annotations

import mlx.core as mx

from ..dtypes import DTYPES
from ..epilogue import finished
from ..integer_facts import finished as finished_integers
from ..problem import FORWARD, INPUT_GRAD, MLX_LAYOUT, Problem
from .plan import Plan


def without_sums(problem: Problem, added: tuple[mx.array, ...]) -> mx.array:
    """Return what a pass writes where it has nothing to add up."""
    if problem.integer:
        facts, sums = problem.integer, mx.zeros((problem.n_out, problem.c_out))
        given = facts.named(added)[:-1]
        return finished_integers(sums, facts, DTYPES[problem.dtype], *given)
    if problem.epilogue:
        after = problem.epilogue
        return finished(zeros(problem), after, *after.named(added))
    return zeros(problem) + added[0] if added else zeros(problem)


def nothing(problem: Problem, plan: Plan) -> mx.array | tuple[mx.array, mx.array]:
    """Return zeros in the place of all that a problem's plan writes."""
    y = zeros(problem)
    if not plan.moments:
        return y
    return y, mx.zeros((plan.moments, 3, problem.c_out))


def zeros(problem: Problem) -> mx.array:
    """Return zeros in the shape and dtype that the pass writes."""
    if problem.pass_ == FORWARD:
        shape = problem.n_out, problem.c_out
    elif problem.pass_ == INPUT_GRAD:
        shape = problem.n_in, problem.c_in
    else:
        shape = problem.volume, problem.c_in // problem.groups, problem.c_out
        if problem.layout == MLX_LAYOUT:
            shape = shape[2], *shape[:2]
    dtype = DTYPES[problem.dtype]
    if problem.integer:
        dtype = problem.integer.out_dtype(dtype)
    return mx.zeros(shape, dtype=dtype)

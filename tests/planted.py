"""Plants another result where a plan is executed, and counts executions."""

from collections import Counter
from functools import partial

from mlx_lattice.problem import FORWARD
from mlx_lattice.routes.plan import Plan


def plant(monkeypatch, kernels, change, pass_=FORWARD):
    """Return ``change(right)`` for plans of some kernels; ``right()`` is the result."""
    call = Plan.__call__

    def planted(plan, relation, x, w, bias=None):
        right = partial(call, plan, relation, x, w, bias)
        wanted = plan.kernel in kernels and plan.problem.pass_ == pass_
        return change(right) if wanted else right()

    monkeypatch.setattr(Plan, "__call__", planted)


def counting(monkeypatch):
    """Return a Counter of the kernels that are executed from now on."""
    call, counts = Plan.__call__, Counter()

    def counted(plan, *arguments):
        counts[plan.kernel] += 1
        return call(plan, *arguments)

    monkeypatch.setattr(Plan, "__call__", counted)
    return counts

"""Plants another result where a plan is executed, and counts executions."""

from collections import Counter
from functools import partial

from mlx_lattice import settings
from mlx_lattice.problem import FORWARD, Plan


def plant(monkeypatch, kernels, change, pass_=FORWARD):
    """Return ``change(right)`` for plans of some kernels; ``right()`` is the result."""
    execute = Plan._execute

    def planted(plan, *arguments):
        right = partial(execute, plan, *arguments)
        wanted = plan.kernel in kernels and plan.problem.pass_ == pass_
        return change(right) if wanted else right()

    monkeypatch.setattr(Plan, "_execute", planted)
    settings.note_change()  # plans that are kept execute without it


def counting(monkeypatch):
    """Return a Counter of the kernels that are executed from now on."""
    execute, counts = Plan._execute, Counter()

    def counted(plan, *arguments):
        counts[plan.kernel] += 1
        return execute(plan, *arguments)

    monkeypatch.setattr(Plan, "_execute", counted)
    settings.note_change()
    return counts

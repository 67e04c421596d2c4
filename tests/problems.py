"""A problem as it is described by hand, and why a choice refused other routes."""

from dataclasses import replace

from mlx_lattice.problem import Problem


def problem(pass_="forward", **facts):
    facts = dict(c_in=64, c_out=64, n_in=50_000, dtype="float16") | facts
    return replace(Problem.forward(**facts), pass_=pass_)


def reasons(choice):
    return dict(choice.rejected) | dict(choice.below)

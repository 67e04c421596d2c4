"""A matrix kernel proves itself before its first launch on a machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock

import mlx.core as mx

from . import proof_results
from .plan import Plan
from .proof_problem import Trial
from .proof_results import key_of, named

# What waits to be proved: its kernels are compiled side by side before.
_waiting: ContextVar[list[tuple[Plan, bool]] | None] = ContextVar(
    "waiting", default=None
)
_lock = RLock()
_MOST = 400  # characters of what a compiler says


@contextmanager
def put_off() -> Iterator[list[tuple[Plan, bool]]]:
    """Let kernels in the block wait for ``prove_all`` of what is yielded."""
    waiting: list[tuple[Plan, bool]] = []
    token = _waiting.set(waiting)
    try:
        yield waiting
    finally:
        _waiting.reset(token)


def prove(plan: Plan, biased: bool) -> bool:
    """Return whether a plan may run here: its kernel is right, or is no matrix kernel.

    The first time that a kernel comes up on this machine it is tried, which takes some
    milliseconds beside its compilation. What fails is refused from then on.

    Args:
        plan: of a launch.
        biased: whether that is given a bias.
    """
    if plan.proof is None or not proof_results.enabled():
        return True
    if proof_results.current().knows(plan, biased):
        return True  # or it was forced, or chosen, before it was refused
    waiting = _waiting.get()
    if waiting is not None:
        waiting.append((plan, biased))
        return True
    return prove_all([(plan, biased)])


def prove_all(plans: list[tuple[Plan, bool]]) -> bool:
    """Prove kernels of (plan, whether biased) pairs; return whether all are right."""
    with _lock:
        results, found = proof_results.current(), {}
        for plan, biased in plans:
            key = key_of(plan, biased)
            if key not in found and not results.knows(plan, biased):
                found[key] = plan, biased, check(plan, biased)
        if found:
            results.add(list(found.values()))
    refused = [(plan, why) for plan, _, why in found.values() if why]
    for plan, why in refused:
        warnings.warn(
            f"the route {plan.kernel} is refused for a {plan.problem.pass_} in "
            f"{plan.problem.dtype} on this machine ({results.where}), and the next one "
            f"serves: {why}. Kernel: {named(plan.gpu)}. Please report it; "
            f"{proof_results.VARIABLE}=0 runs it all the same",
            RuntimeWarning,
            stacklevel=2,
        )
    return not refused


def check(plan: Plan, biased: bool = False) -> str | None:
    """Try a plan's matrix kernel on its small problem, whatever is known of it.

    Returns:
        Why it has to be refused, or None where it is right.

    Raises:
        Exception: what the kernel raised, where the device runs nothing any more.
    """
    failed = "its kernel failed its proof on this machine: "
    trial = Trial(plan, biased)
    try:
        y = trial.run()
        mx.eval(y)
    except Exception as error:
        try:
            mx.eval(mx.zeros((1,)) + 1)
        except Exception:
            raise error from None  # says nothing of the kernel
        said = " ".join(str(error).split())[:_MOST]
        return f"{failed}{type(error).__name__}: {said}"
    fault = trial.fault(y)
    return fault and failed + fault

"""A matrix kernel proves itself before its first launch on a machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock

import mlx.core as mx

from . import attempts, proof_results
from .plan import Plan
from .proof_problem import Trial
from .proof_results import Results, key_of, named

# What waits to be proved: its kernels are compiled side by side before.
_waiting: ContextVar[list[tuple[Plan, bool]] | None] = ContextVar(
    "waiting", default=None
)
_lock = RLock()
_MOST = 400  # characters of what a compiler says
_FAILED = "its kernel failed its proof on this machine: "


class DeviceLost(RuntimeError):
    """A kernel was tried, and nothing runs on the device since."""


@contextmanager
def put_off() -> Iterator[list[tuple[Plan, bool]]]:
    """Let kernels in the block wait for ``prove_all`` of what is yielded."""
    waiting: list[tuple[Plan, bool]] = []
    token = _waiting.set(waiting)
    try:
        yield waiting
    finally:
        _waiting.reset(token)


def prove(plan: Plan, biased: bool, results: Results | None) -> bool:
    """Return whether a plan may run here: its kernel is right, or is no matrix kernel.

    The first time that a kernel comes up on this machine it is tried, which takes some
    milliseconds beside its compilation. What fails is refused from then on.

    Args:
        plan: of a launch.
        biased: whether that is given a bias.
        results: ``proof_results.here`` of the device.
    """
    if plan.proof is None or results is None:
        return True
    if results.knows(plan, biased):
        return True  # or it was forced, or chosen, before it was refused
    waiting = _waiting.get()
    if waiting is not None:
        waiting.append((plan, biased))
        return True
    return prove_all([(plan, biased)])


def prove_all(plans: list[tuple[Plan, bool]]) -> bool:
    """Prove kernels of (plan, whether biased) pairs; return whether all are right."""
    is_right = True
    with _lock:
        results = proof_results.current()
        for plan, biased in plans:
            if not results.knows(plan, biased):
                is_right &= _tried(results, plan, biased)
    return is_right


def try_again(plan: Plan) -> str | None:
    """Try a matrix kernel whatever is known of it, and keep what it proved to be.

    It is given no bias.

    Returns:
        Why it is refused from now on, or None.

    Raises:
        DeviceLost: the kernel raised, and the device runs nothing since.
    """
    if not proof_results.enabled():
        return check(plan, False)
    with _lock:
        return _kept(proof_results.current(), plan, False)


def _kept(results: Results, plan: Plan, biased: bool) -> str | None:
    """Try a kernel, keep what it proved to be, and return why it is refused."""
    with attempts.of(results.path, key_of(plan, biased)) as ended:
        if ended > 1:
            why = f"{_FAILED}{ended} processes ended while it was tried"
        else:
            try:
                why = check(plan, biased)
            except DeviceLost as error:
                results.add([(plan, biased, str(error))])
                raise
        results.add([(plan, biased, why)])
    return why


def _tried(results: Results, plan: Plan, biased: bool) -> bool:
    """Try a kernel, keep what it proved to be, and warn if it is refused."""
    why = _kept(results, plan, biased)
    if why is None:
        return True
    warnings.warn(
        f"the route {plan.kernel} is refused for a {plan.problem.pass_} in "
        f"{plan.problem.dtype} on this machine ({results.where}), and the next one "
        f"serves: {why}. Kernel: {named(plan.gpu)}. Please report it; "
        f"{proof_results.VARIABLE}=0 runs it all the same",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def check(plan: Plan, biased: bool = False) -> str | None:
    """Try a plan's matrix kernel on its small problem, whatever is known of it.

    Returns:
        Why it has to be refused, or None where it is right.

    Raises:
        DeviceLost: the kernel raised, and the device runs nothing since.
        Exception: what the device raised before it was tried.
    """
    trial = Trial(plan, biased)
    _wait()  # for what was launched before: its errors are not the kernel's
    try:
        y = trial.run()
        mx.eval(y)
    except Exception as error:
        said = " ".join(str(error).split())[:_MOST]
        why = f"{_FAILED}{type(error).__name__}: {said}"
        try:
            _wait()
        except Exception:
            raise DeviceLost(
                f"{why}; the device runs nothing since. Start the process again: the "
                "kernel is refused there"
            ) from error
        return why
    fault = trial.fault(y)
    return fault and _FAILED + fault


def _wait() -> None:
    """Have the device run something, behind all that it was given."""
    mx.eval(mx.zeros((1,)) + 1)

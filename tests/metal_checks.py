"""Running kernels of the Metal backend without a Mac: checked, and in random order."""

import functools
import re

import cases
import mlx.core as mx
import numpy as np
import reference as ref
from conftest import Numbers

from metal import host
from mlx_lattice.backends import (
    dispatch_bounds,
    metal,
)
from mlx_lattice.problem import PASSES

__all__ = [
    "PASSES",
    "VOLUMES",
    "bounded",
    "check",
    "check_bias",
    "checked",
    "host",
    "run",
]

VOLUMES = (
    cases.Case("submanifold", 3, 1),
    cases.Case("submanifold", 3, (1, 3, 5)),
    cases.Case("submanifold", 3, 4),
    cases.Case("submanifold", 3, 7),
    cases.Case("submanifold", 4, 3),
    cases.Case("forward", 2, 3, 2, padding=1, support="reach"),
    cases.Case("transposed", 1, 3, 2),
)


def bounded(monkeypatch, work: str, limit: int) -> None:
    """Let a Metal dispatch do no more than ``limit`` of a kind of work."""
    takes = dict(dispatch_bounds.DISPATCH[work])
    takes["share"] *= (limit + 0.5) / dispatch_bounds.dispatch_limit(work)
    monkeypatch.setitem(dispatch_bounds.DISPATCH, work, takes)
    assert abs(dispatch_bounds.dispatch_limit(work) - limit) <= 1


_CONSTANT = re.compile(r"const constant [^\[\n]*?(\w+) \[\[buffer")


@functools.cache
def _lint(text: str, name: str) -> tuple[str, ...]:
    return tuple(host.lint(text, name))


def _values(arrays) -> list[mx.array]:
    if isinstance(arrays, (tuple, list)):
        return [a for part in arrays for a in _values(part)]
    return [arrays] if isinstance(arrays, mx.array) else []


def _bits(arrays) -> list[bytes]:
    return [np.array(a.view(mx.uint8)).tobytes() for a in _values(arrays)]


def checked(call, *args, orders=("random", "reverse"), deterministic=True, **kwargs):
    """Return what a call of the backend returns, after all checks of its kernels.

    No fault, no finding of lint in any instantiation, and the same bits in every order
    of threads.

    Args:
        call: a function of arrays that launches kernels.
        *args: its arguments.
        orders: orders of threads; the first one's results are returned.
        deterministic: whether the bits must not depend on the order.
        **kwargs: its keyword arguments.
    """
    results = []
    for seed, order in enumerate(orders):
        with host.recording(checked=True, order=order, seed=seed) as record:
            result = call(*args, **kwargs)
            mx.eval(_values(result))
        report = record.report
        assert not report.faults, "\n".join(map(str, report.faults[:5]))
        results.append(result)
    # Lint does not know TensorOps.
    for launch in (r for r in report.launches if "matmul2d" not in r.source):
        findings = _lint(launch.source, launch.kernel)
        assert not findings, f"{launch.kernel}: " + "\n".join(findings)
        # MLX moves arrays of few elements to another address space: not ours.
        names = set(_CONSTANT.findall(launch.source))
        assert names <= {"sizes", "numbers"}, launch.source
    if deterministic:
        first, *others = map(_bits, results)
        assert all(other == first for other in others), "bits depend on the order"
    checked.launches = len(report.launches)
    return results[0]


def run(route, relation, numbers, pass_, groups=1, **checks):
    """One pass on one route."""
    if pass_ == "weight_grad":
        call, arrays = metal.WEIGHT_GRAD[route], (numbers.x, numbers.dy, relation)
        return checked(call, *arrays, groups, **checks)
    call = metal.CONV[route]
    if pass_ == "input_grad":
        return checked(call, numbers.dy, numbers.w, relation.T, groups, True, **checks)
    return checked(call, numbers.x, numbers.w, relation, groups, False, **checks)


def check(route, both, c_in, c_out, pass_, dtype="float32", groups=1, **checks):
    """One pass on one route gives what the oracle gives, in any order of threads."""
    relation, expected = both
    numbers = Numbers(relation, c_in, c_out, groups, dtype)
    got = run(route, relation, numbers, pass_, groups, **checks)
    x, w, dy = numbers.exact
    wanted = {
        "forward": lambda: ref.conv(x, w, expected, groups=groups),
        "input_grad": lambda: ref.input_grad(dy, w, expected, groups=groups),
        "weight_grad": lambda: ref.weight_grad(x, dy, expected, groups=groups),
    }[pass_]()
    assert got.dtype == numbers.x.dtype
    ref.assert_close(got, wanted, dtype, f"{route} {pass_}")


def check_bias(route, both, c_in, c_out, dtype):
    """One route adds a bias to its sums, before they are rounded."""
    relation, expected = both
    numbers = Numbers(relation, c_in, c_out, 1, dtype)
    bias = mx.arange(c_out).astype(numbers.x.dtype)
    arguments = numbers.x, numbers.w, relation, 1, False
    y = checked(metal.CONV[route], *arguments, bias=bias)
    wanted = ref.conv(*numbers.exact[:2], expected) + ref.to_numpy(bias)
    ref.assert_close(y, wanted, dtype, route)

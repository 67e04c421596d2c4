"""Run Metal kernels without a Mac: checked, and in several orders of threads."""

import functools
import re

import mlx.core as mx
from conftest import bits

from metal import host
from mlx_lattice.backends.gpu import kernel as gpu_kernel

__all__ = ["arrays_of", "bounded", "checked", "host", "kernel", "sized", "threads"]


def bounded(monkeypatch, work: str, limit: int) -> None:
    """Bound the work of a kind that one Metal dispatch may do."""
    takes = dict(gpu_kernel.DISPATCH[work])
    takes["share"] *= (limit + 0.5) / gpu_kernel.dispatch_limit(work)
    monkeypatch.setitem(gpu_kernel.DISPATCH, work, takes)
    assert abs(gpu_kernel.dispatch_limit(work) - limit) <= 1


def kernel(name: str, inputs: str, source: str, outputs: str = "o", **options):
    """A Metal kernel of MLX; the names of its arrays are separated by spaces."""
    return mx.fast.metal_kernel(
        name=name,
        input_names=inputs.split(),
        output_names=outputs.split(),
        source=source,
        **options,
    )


def threads(count: int, group: int | None = None) -> dict:
    """The arguments of a launch of a line of threads; one threadgroup by default."""
    return {"grid": (count, 1, 1), "threadgroup": (group or count, 1, 1)}


def sized(count: int, group: int, shape: tuple, dtype: mx.Dtype) -> dict:
    """The arguments of a launch of a line of threads that writes one array."""
    return threads(count, group) | {"output_shapes": [shape], "output_dtypes": [dtype]}


_CONSTANT = re.compile(r"const constant [^\[\n]*?(\w+) \[\[buffer")


@functools.cache
def _lint(text: str, name: str) -> tuple[str, ...]:
    return tuple(host.lint(text, name))


def arrays_of(values) -> list[mx.array]:
    """Every array in nested tuples and lists."""
    if isinstance(values, (tuple, list)):
        return [a for part in values for a in arrays_of(part)]
    return [values] if isinstance(values, mx.array) else []


def checked(call, *args, orders=("random", "reverse"), deterministic=True, **kwargs):
    """Return the result of a call of the backend, after all checks of its kernels.

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
            mx.eval(arrays_of(result))
        report = record.report
        assert not report.faults, "\n".join(map(str, report.faults[:5]))
        results.append(result)
    for launch in report.launches:
        findings = _lint(launch.source, launch.kernel)
        assert not findings, f"{launch.kernel}: " + "\n".join(findings)
        # MLX moves arrays of few elements to another address space: not ours.
        names = set(_CONSTANT.findall(launch.source))
        assert names <= {"sizes", "numbers"}, launch.source
    if deterministic:
        first, *others = ([bits(a) for a in arrays_of(r)] for r in results)
        assert all(other == first for other in others), "bits depend on the order"
    checked.launches = len(report.launches)
    return results[0]

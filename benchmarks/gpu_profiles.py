"""What ran on an NVIDIA GPU, by PyTorch's profiler, where it is installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import mlx.core as mx

PROFILED = 5  # steps


def gpu_kernels(run: Callable[[], object]) -> dict[str, tuple[float, float]] | None:
    """Return (launches, ms) of each GPU kernel of a step, None without a profiler."""
    found = gpu_profile(run)
    return found and found[0]


def gpu_profile(
    run: Callable[[], object],
) -> tuple[dict[str, tuple[float, float]], float] | None:
    """Return (launches, ms) of each GPU kernel of a step, and the GPU's busy ms.

    Each launch has the median of some steps in a row, and so have the busy ms: where a
    profile begins, a kernel waits for it. Kernels that run side by side take longer
    each; their sum counts that time for every one, the busy ms once.
    """
    if not mx.cuda.is_available():
        return None
    try:
        from torch import profiler
    except ImportError:
        return None
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            mx.eval(run())
            mx.synchronize()
    events = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    ms: dict[str, list[float]] = {}
    for event in events:
        ms.setdefault(event.name, []).append(event.device_time / 1e3)
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    return {name: of_a_step(each) for name, each in ms.items()}, busy_ms(spans)


def busy_ms(spans: list[tuple[float, float]]) -> float:
    """Return how long something runs in one of the steps that were profiled.

    spans: of all of them, from when to when in us, in order.
    """
    each = -(-len(spans) // PROFILED) or 1
    found = []
    for first in range(0, len(spans), each):
        total = end = 0.0
        for begin, until in spans[first : first + each]:
            total += max(0.0, until - max(begin, end))
            end = max(end, until)
        found.append(total / 1e3)
    return statistics.median(found) if found else 0.0


def of_a_step(ms: list[float]) -> tuple[float, float]:
    """Return the (launches, ms) of a kernel in one of the steps that were profiled."""
    count = len(ms) / PROFILED
    if not count.is_integer():  # not every step has it
        return count, count * statistics.median(ms)
    places = (ms[i :: int(count)] for i in range(int(count)))
    return int(count), sum(statistics.median(place) for place in places)

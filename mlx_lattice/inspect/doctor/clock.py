"""Time: budgets that are kept, and medians of short runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

BATCH_SECONDS = 0.004  # of a run: long enough for the clock, too short to heat a laptop
BATCH_BYTES = 1 << 28  # of results that a run holds at a time
RUNS = 9


@dataclass
class Budget:
    """Seconds that a part may take; what does not fit is left out, and said.

    Attributes:
        seconds: from now on.
        now: the clock.
    """

    seconds: float
    now: Callable[[], float] = lambda: time.perf_counter()  # looked up when called
    _end: float = field(init=False)

    def __post_init__(self):
        self._end = self.now() + self.seconds

    @property
    def left(self) -> float:
        """Seconds that are left; 0 or more."""
        return max(0.0, self._end - self.now())

    def fits(self, seconds: float) -> bool:
        """Whether what takes so long still fits."""
        return seconds <= self.left

    def part(self, seconds: float) -> Budget:
        """Return a budget of at most so many seconds inside this one."""
        return Budget(min(seconds, self.left), self.now)


@dataclass(frozen=True)
class Timing:
    """How long a call takes.

    Attributes:
        first_ms: of the first call, which also compiles and builds views.
        ms: the median of the runs, a call; the first call's where no run fitted.
        runs: how many there were.
    """

    first_ms: float
    ms: float
    runs: int


def measured(
    call: Callable[[], mx.array],
    seconds: float,
    first: Callable | None = None,
    runs: int = RUNS,
) -> Timing:
    """Time a call: the first, one more, then the median of runs within the seconds.

    Args:
        call: returns what is evaluated.
        seconds: that the runs may take, beside the first two calls.
        first: called with the first result.
        runs: the most that there are.
    """
    took, y = _once(call)
    if first is not None:
        first(y)
    size, y = max(1, y.nbytes), None
    again = _once(call)[0]  # without compilation
    if again > seconds:
        return Timing(1e3 * took, 1e3 * again, 1)
    calls = int(min(BATCH_SECONDS / again, BATCH_BYTES / size, 50))
    calls, taken, begun = max(1, calls), [], time.perf_counter()
    while len(taken) < runs and time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        mx.eval([call() for _ in range(calls)])
        mx.synchronize()
        taken.append((time.perf_counter() - start) / calls)
    return Timing(1e3 * took, 1e3 * statistics.median(taken), len(taken))


def _once(call: Callable[[], mx.array]) -> tuple[float, mx.array]:
    mx.synchronize()
    start = time.perf_counter()
    y = call()
    mx.eval(y)
    mx.synchronize()
    return time.perf_counter() - start, y

"""What MLX itself reaches here: matmuls and copies, the yardstick of the layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import mlx.core as mx

from ...devices import Device
from ...dtypes import DTYPES
from .clock import Budget, measured

# Sides of the matmuls, smallest first; a larger one follows while this is quicker.
SIDES, ENOUGH_MS = (512, 1024, 2048, 4096), 8.0
COPIES, ENOUGH_COPY_MS = (1 << 22, 1 << 24, 1 << 26), 2.0  # float32 elements


@dataclass(frozen=True)
class Rate:
    """A rate that MLX reaches.

    Attributes:
        what: "matmul float16, 4096 x 4096".
        value: of the unit: "TFLOP/s" or "GB/s".
        peak: what the profile says of the chip.
    """

    what: str
    value: float
    unit: str
    peak: float

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self)


def rates(device: Device, budget: Budget) -> list[Rate]:
    """Measure MLX's matmul in each dtype, and its copy."""
    found = []
    for dtype in DTYPES:
        if (rate := _matmul(dtype, device, budget)) is not None:
            found.append(rate)
    if (rate := _copy(device, budget)) is not None:
        found.append(rate)
    return found


def _matmul(dtype: str, device: Device, budget: Budget) -> Rate | None:
    rate, ms = None, 0.0
    for side in SIDES:
        # Eight times the work, on this side and once more, beside a few runs.
        if ms > ENOUGH_MS or not budget.fits(30 * ms / 1e3):
            break
        a = mx.random.normal((side, side), key=mx.random.key(0)).astype(DTYPES[dtype])
        mx.eval(a)
        ms = measured(lambda a=a: a @ a, min(0.3, budget.left / 8)).ms
        what = f"matmul {dtype}, {side} x {side}"
        peak = device.flops(dtype) / 1e12
        rate = Rate(what, 2 * side**3 / ms / 1e9, "TFLOP/s", peak)
    return rate


def _copy(device: Device, budget: Budget) -> Rate | None:
    rate, ms = None, 0.0
    for count in COPIES:
        if ms > ENOUGH_COPY_MS or not budget.fits(30 * ms / 1e3):
            break
        a = mx.ones((count,))
        mx.eval(a)
        ms = measured(lambda a=a: a + 1, min(0.3, budget.left / 8)).ms
        what = f"copy of {4 * count >> 20} MiB"
        rate = Rate(what, 8 * count / ms / 1e6, "GB/s", device.bandwidth)
    return rate

"""How long a host and its GPU take, roughly: what is under way at a peak depends on it.

Usual figures: hosts differ by half, and a GPU reaches more or less of its rates. A
pass that does not find its memory in MLX's cache takes the host longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import devices
from ..routes.launch import Launch
from .graph import Node
from .rules import Input

# Seconds: of the host for a launch, between 6 and 25 microseconds; of the GPU at least;
# from the end of a task until what it held is free.
HOST, LAUNCH, FREED = 12e-6, 3e-6, 50e-6
MAPPED = 1.2e-12  # seconds of the host for a byte of new memory
REACHED = 0.5  # of the peak rates
OCCUPANCY = 0.5  # edges of a neighbour table's entries, where nobody has counted them
PRODUCTS = ("AddMM", "Matmul", "QuantizedMatmul")


class Pace:
    """The rates of a GPU.

    Args:
        device: its profile.
        cached: bytes that MLX keeps for it when a pass begins.
    """

    def __init__(self, device: devices.Device, cached: int = 0):
        self.cached = cached
        self._bandwidth = REACHED * 1e9 * device.bandwidth
        self._wide, self._narrow = (
            REACHED * device.flops(dtype) for dtype in ("float32", "float16")
        )

    def seconds(
        self, outputs: Sequence[Node], inputs: Sequence[Input], launches: int
    ) -> float:
        """Return what a primitive takes, by what it reads, writes and multiplies."""
        if not launches:
            return 0.0
        first = outputs[0]
        moved = sum(x.layout.span * x.node.itemsize for x in inputs)
        moved += sum(out.nbytes for out in outputs)
        flops = sum(out.flops for out in outputs)
        if first.primitive in PRODUCTS:
            flops = 2 * first.size * inputs[0].node.shape[-1]
        rate = self._wide if first.itemsize > 2 else self._narrow
        return launches * LAUNCH + max(moved / self._bandwidth, flops / rate)


def operations(launched: Launch) -> float:
    """Return the operations of a contraction, counted or by a usual occupancy."""
    p = launched.problem
    if p.useful_flops is not None:
        return p.useful_flops
    return 2 * OCCUPANCY * p.volume * p.n_out * p.c_in * p.c_out / p.groups

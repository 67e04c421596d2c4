"""How long a plan should take on an Apple GPU: predicted, never measured here.

Time is what the plan executes at rates that others measured on such chips: the slower
and the faster end of what they saw. The first measurement on a chip replaces it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import NamedTuple

from .. import devices
from ..devices import METAL, Device
from ..problem import FORWARD, WEIGHT_GRAD, Problem
from ..routes.plan import MLX, Plan


class Range(NamedTuple):
    """The slower and the faster end of what others measured."""

    slow: float
    fast: float


# Share of a chip's peak that dense matrix kernels reach: MLX float32 on M2 Ultra 0.75,
# MLX and MPSGraph bfloat16 on M3 Ultra 0.77 to 0.89, metal-flash-attention on M1 Max
# 0.83 to 0.86, llama.cpp on M1 Max 0.88.
DENSE = Range(0.75, 0.88)
# The same of the neural accelerators' peak: MLX on M5 Max 0.77 to 0.87, on M5 0.90.
ACCELERATED = Range(0.77, 0.90)
# Of the dense rate, where rows are gathered into tiles that share weights: MLX's sorted
# gather on M3 Ultra, 14.2 of 20.5 TFLOP/s.
GATHERED = 0.69
# Share of the memory rate: M4 Max sums at 0.73 of it, M2 copies at 0.93.
MEMORY = Range(0.73, 0.93)
# Bytes that a core's ALUs are fed in a cycle: from the L2 cache, from its own data
# cache (M1, M2; taken for all). In a cycle it does 256 operations.
FED, OPERATIONS = Range(32, 64), 256
# Bytes moved over compulsory ones where tiles gather rows, through a cache of 8 MB:
# benchmarks/metal_counts.py counts them.
CACHED = Range(1.5, 1.2)
# Share of a core's lanes that simdgroup matrices keep multiplying (M1, M2).
MATRICES = 102 / 128
# Cycles of a lane for a packed weight that becomes a float: in the pipelines that
# multiply, to scale and to round it, and in the one of shifts and conversions, which
# work side by side (M1, M1 Max). int4 with half features ran at 0.95 to 1.0 times the
# rate of half weights at 64 to 256 rows (MLX on M3 Max).
SCALED, CONVERTED = 2, 8
# Milliseconds of a launch that waits for the one before (M4 Max: 0.03), and those of
# one operation that MLX evaluates by itself (M4 Max: 0.055 to 0.07).
WAIT, EVALUATION = Range(0.03, 0.0), Range(0.07, 0.055)
# Elements that a thread loads for a multiply-add, where it multiplies without matrices:
# by kernel, in the forward pass and in others where they differ.
LOADED = {
    "vec4": 1 / 2,  # 4 of x and 4 of W for 4 x 4
    "fp16_gather": 3 / 4,  # 2 and 4 for 2 x 4
    "depthwise": 2,
    "*": 5 / 4,  # 1 and 4 for 4
}
LOADED_GRAD = {"depthwise": 2, "*": 1 / 2}  # a thread has 4 x 4 of dW


@dataclass(frozen=True)
class Prediction:
    """The time of a plan on a chip that it never ran on.

    Attributes:
        chip: name of the profile.
        fast_ms, slow_ms: the ends of the range.
        bound: what takes it: "compute", "memory", "cache" (operands of threads that
            multiply without matrices), "unpacking" (packed weights become floats) or
            "launch" (less than MLX takes to evaluate one operation by itself).
        operations: those that are executed.
        counted: whether they were counted over the relation; else they are the useful
            ones, which are fewer.
        rate: the share of the chip's peak that is assumed for them, slow and fast.
    """

    chip: str
    fast_ms: float
    slow_ms: float
    bound: str
    operations: float
    counted: bool
    rate: Range

    @property
    def range(self) -> str:
        """The range as people read it: "0.83 to 0.97 ms"."""
        return f"{_number(self.fast_ms)} to {_number(self.slow_ms)} ms"

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self) | {"rate": list(self.rate)}

    def __str__(self) -> str:
        """Return the prediction in one line, as ``explain`` prints it."""
        executed = "executed" if self.counted else "useful, those executed not counted"
        work = f"{self.operations / 1e9:.3g} GFLOP {executed}"
        share = " to ".join(f"{100 * end:.0f}" for end in self.rate)
        bounds = {"launch": "below what MLX takes to evaluate one operation"}
        return (
            f"predicted {self.range} on {self.chip}, "
            f"{bounds.get(self.bound, f'{self.bound}-bound')} ({work}; others' rates, "
            f"{share}% of peak; not measured)"
        )


def _number(ms: float) -> str:
    digits = next((d for d, least in enumerate((100, 10, 0.1)) if ms >= least), 3)
    return f"{ms:,.{digits}f}"


def predict(
    plan: Plan,
    device: Device,
    *,
    done: int | None,
    unpacked: int | None,
    useful: int,
    moved: int,
    gathered: int,
) -> Prediction | None:
    """Predict a plan's time on an Apple GPU; None for other devices.

    Args:
        plan: what would be launched.
        device: the chip.
        done: multiply-adds that it executes, None where they are not counted.
        unpacked: packed weights that its kernels make floats of, None where they make
            none.
        useful: those of the edges.
        moved: bytes that must move.
        gathered: bytes of gathered rows that explicit GEMM writes and reads besides.
    """
    if device.backend != METAL:
        return None
    executed = 2 * (useful if done is None else done)
    matrices = plan.tile is not None or plan.backend == MLX
    peak, share = _rate(plan, device)
    fed = 0.0 if matrices else _loaded(plan) * plan.problem.itemsize * executed / 2
    moved += 8 * prod(plan.partials) if plan.partials else 0
    if unpacked is not None:
        moved -= _padding(plan.problem)
    one_after_another = plan.backend == MLX and not plan.problem.pointwise
    if one_after_another:
        moved += gathered + _results(plan, executed)
    ends = []
    for at in range(2):
        cached = 1 if plan.tile is None else CACHED[at]
        parts = {
            "compute": executed / (share[at] * peak),
            "cache": fed / (FED[at] * peak / OPERATIONS),
            "unpacking": _unpacking(plan, device, unpacked or 0, executed),
            "memory": moved * cached / (MEMORY[at] * 1e9 * device.bandwidth),
        }
        taken = sum(parts.values()) if one_after_another else max(parts.values())
        ends.append((1e3 * taken + waits(plan) * WAIT[at], parts))
    (slow, parts), (fast, _) = ends
    bound = max(parts, key=parts.__getitem__)
    if slow < EVALUATION.fast:
        bound = "launch"
    counted = done is not None
    chip = devices.HOST_CHIP if device.name == devices.HOST else device.name
    return Prediction(chip, fast, slow, bound, executed, counted, share)


def _rate(plan: Plan, device: Device) -> tuple[float, Range]:
    """Return the peak, in operations a second, of the units that a plan runs on, and
    the share of it that is reached.
    """
    half = plan.problem.dtype != "float32"
    accelerated = device.neural_accelerators and half
    if plan.backend == MLX:  # MLX's own matmul
        share = ACCELERATED if accelerated else DENSE
        return device.flops(plan.problem.dtype), share
    if plan.tile is None:
        return 1e12 * device.tflops, Range(1.0, 1.0)
    on_accelerators = accelerated and plan.kernel.endswith("tensor_ops")
    peak = device.half_tflops if on_accelerators else device.tflops
    ends = ACCELERATED if on_accelerators else DENSE
    return 1e12 * peak, Range(*(GATHERED * end for end in ends))


def _padding(p: Problem) -> int:
    """Return the bytes of a packed weight's padding, which no kernel reads."""
    c_in = p.c_in // p.groups
    channels = -c_in % (p.group_size or c_in)
    return p.volume * p.c_out * channels * p.bits // 8


def _unpacking(plan: Plan, device: Device, unpacked: int, executed: float) -> float:
    """Return the seconds in which lanes unpack weights, and multiply beside that."""
    multiplying = executed / 2 / (MATRICES if plan.tile else 1)
    if device.neural_accelerators and plan.kernel.endswith("tensor_ops"):
        multiplying = 0.0
    if not unpacked:
        return 0.0
    cycles = max(multiplying + SCALED * unpacked, CONVERTED * unpacked)
    return cycles / (1e12 * device.tflops / 2)


def _results(plan: Plan, executed: float) -> float:
    """Return the bytes of an edge's result, which MLX operations write and read."""
    p = plan.problem
    if plan.kernel == "explicit_gemm" or p.pass_ == WEIGHT_GRAD:
        return 0
    return 8 * executed / 2 / (p.channels[0] // p.groups)


def _loaded(plan: Plan) -> float:
    """Return the elements that a thread loads for a multiply-add."""
    p = plan.problem
    if plan.unpacked:  # 1 of x for 4 weights, and each weight with its share of a scale
        return 1 / 4 + p.bits / 8 / p.itemsize + 2 / (p.group_size or p.c_in)
    table = LOADED_GRAD if p.pass_ == WEIGHT_GRAD else LOADED
    return table.get(plan.kernel, table["*"])


def waits(plan: Plan) -> int:
    """Return the launches of a plan that wait for another of it."""
    p: Problem = plan.problem
    if plan.backend != MLX:
        return sum(bool(d.add) for d in plan.dispatches)
    if p.pointwise:
        return 0
    if plan.kernel == "explicit_gemm":
        return 1
    # A gather, a matmul and an addition an offset.
    return 2 * p.volume if p.pass_ == FORWARD else 3 * p.volume

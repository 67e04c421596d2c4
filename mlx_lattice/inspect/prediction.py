"""How long a plan should take on an Apple GPU: predicted, never measured here.

Time is the largest of what bounds a launch: what the plan executes, and what its kernel
was counted to do besides, at rates that others measured on such chips, the slower and
the faster end of what they saw; and the launches that wait for others. The first
measurement on a chip replaces it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

from .. import devices
from ..devices import METAL, Device
from ..problem import FORWARD, WEIGHT_GRAD, Problem
from ..routes.plan import MLX, Plan
from . import bounds, kernel_facts
from .apple_rates import (
    ACCELERATED,
    CACHED,
    CONVERTED,
    DENSE,
    EVALUATION,
    FED,
    GATHERED,
    INTEGERS,
    MATRICES,
    MEMORY,
    OPERATIONS,
    SCALED,
    WAIT,
    Range,
)

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
        bound: what takes it: "compute", "memory", "cache" (operands that lanes read),
            "threadgroup memory" (those that are staged), "integer" (arithmetic with
            places), "barrier" (threadgroups that wait), "unpacking" (packed weights
            become floats) or "launch" (less than MLX takes to evaluate one operation by
            itself).
        operations: those that are executed.
        counted: whether they were counted over the relation; else they are the useful
            ones, which are fewer.
        rate: the share of the chip's peak that is assumed for them, slow and fast.
        bounds_ms: the slower end by bound, without the launches that wait.
        simdgroups: that a core holds at once, of a kernel that was counted, else None.
        registers: of a lane of that kernel, an estimate, or None.
        current: whether the kernel's text is the one that was counted.
    """

    chip: str
    fast_ms: float
    slow_ms: float
    bound: str
    operations: float
    counted: bool
    rate: Range
    bounds_ms: tuple[tuple[str, float], ...] = ()
    simdgroups: int | None = None
    registers: int | None = None
    current: bool = True

    @property
    def range(self) -> str:
        """The range as people read it: "0.83 to 0.97 ms"."""
        return f"{number(self.fast_ms)} to {number(self.slow_ms)} ms"

    def as_dict(self) -> dict:
        """Return every field."""
        changed = {"rate": list(self.rate), "bounds_ms": dict(self.bounds_ms)}
        return asdict(self) | changed

    @property
    def besides(self) -> str:
        """What else bounds it, as people read it; or that it is not known."""
        others = sorted(self.bounds_ms, key=lambda pair: -pair[1])
        said = [f"{n} {number(ms)} ms" for n, ms in others if n != self.bound][:2]
        if self.simdgroups is None:
            return "; ".join([*said, "the kernel's own steps are not counted"])
        held = f"{self.simdgroups} simdgroups a core"
        said.append(f"{held}, about {self.registers} registers a lane")
        if not self.current:
            said.append("counted of an older text of the kernel")
        return "; ".join(said)

    def __str__(self) -> str:
        """Return the prediction in one line, as ``explain`` prints it."""
        executed = "executed" if self.counted else "useful, those executed not counted"
        work = f"{self.operations / 1e9:.3g} GFLOP {executed}"
        share = " to ".join(f"{100 * end:.0f}" for end in self.rate)
        words = {"launch": "below what MLX takes to evaluate one operation"}
        bound = words.get(self.bound, f"{self.bound}-bound")
        return (
            f"predicted {self.range} on {self.chip}, {bound} ({work}; others' rates, "
            f"{share}% of peak; not measured; {self.besides})"
        )


def number(ms: float) -> str:
    """Return milliseconds as people read them, without their unit."""
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
    cached: float | None = None,
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
        cached: bytes that move through a cache, partial sums too, where somebody
            counted them; else they follow from ``moved``.
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
    ends, facts = [], kernel_facts.of(plan.gpu)
    # Threads that multiply without matrices have their cache's bound by operands.
    tiles = facts if plan.tile is not None else None
    for at in range(2):
        through = (1 if plan.tile is None else CACHED[at]) * moved
        through = through if cached is None else cached
        full = bounds.filled(tiles, device) if tiles and at == 0 else 1.0
        parts = {
            "compute": executed / (share[at] * full * peak),
            "cache": fed / (FED[at] * peak / OPERATIONS),
            "unpacking": _unpacking(plan, device, unpacked or 0, executed),
            "memory": through / (MEMORY[at] * 1e9 * device.bandwidth),
        }
        if facts:
            own = bounds.beside(facts, executed / 2, device, at)
            parts |= {n: max(t, parts.get(n, 0)) for n, t in own.items() if tiles}
            parts.setdefault("integer", own["integer"])
        taken = sum(parts.values()) if one_after_another else max(parts.values())
        ends.append((1e3 * taken + waits(plan) * WAIT[at], parts))
    (slow, parts), (fast, _) = ends
    bound = max(parts, key=parts.__getitem__)
    if slow < EVALUATION.fast:
        bound = "launch"
    counted = done is not None
    chip = devices.HOST_CHIP if device.name == devices.HOST else device.name
    return Prediction(
        chip,
        fast,
        slow,
        bound,
        executed,
        counted,
        share,
        tuple((name, 1e3 * seconds) for name, seconds in parts.items() if seconds),
        bounds.held(facts, device) if facts else None,
        facts.registers if facts else None,
        facts is None or kernel_facts.is_current(plan.gpu),
    )


def _rate(plan: Plan, device: Device) -> tuple[float, Range]:
    """Return the peak, in operations a second, of the units that a plan runs on, and
    the share of it that is reached.
    """
    integers = plan.problem.integer is not None and plan.backend != MLX
    half = plan.problem.dtype != "float32" or integers
    accelerated = device.neural_accelerators and half
    if plan.backend == MLX:  # MLX's own matmul
        share = ACCELERATED if accelerated else DENSE
        return device.flops(plan.problem.dtype), share
    if plan.tile is None:
        return 1e12 * device.tflops, Range(1.0, 1.0)
    on_accelerators = accelerated and plan.kernel.endswith("tensor_ops")
    peak = device.half_tflops if on_accelerators else device.tflops
    if on_accelerators and integers:
        peak *= INTEGERS
    ends = ACCELERATED if on_accelerators else DENSE
    return 1e12 * peak, Range(*(GATHERED * end for end in ends))


def _padding(p: Problem) -> int:
    """Return the bytes of a packed weight's padding, which no kernel reads."""
    channels = p.packed_channels - p.c_in // p.groups
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

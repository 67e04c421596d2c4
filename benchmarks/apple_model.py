"""A model of the time that matrix kernels take on Apple GPUs. Nothing is timed.

The model takes the operations and bytes of a plan, and what ``kernel_facts.py`` counted
for its kernel, at rates that others published. The time of a launch is the largest of
its bounds, plus the launches that wait for others. Each rate has a slower and a faster
end, and so has the time. The model also covers the making of a kernel map.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from mlx_lattice.backends.gpu.kernel import GpuKernel
from mlx_lattice.devices import METAL, Device, source
from mlx_lattice.inspect.explain import INTEGERS, cost
from mlx_lattice.problem import MLX, Plan, Problem
from mlx_lattice.relation import Relation
from mlx_lattice.routes.choice import Choice


class Range(NamedTuple):
    """The slowest and the fastest rate that others measured."""

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
# Bytes moved over compulsory ones where tiles gather rows, through a cache of 8 MB
# (counted by metal_counts.py).
CACHED = Range(1.5, 1.2)
# Share of a core's lanes that simdgroup matrices keep multiplying (M1, M2).
MATRICES = 102 / 128
# Milliseconds of a launch that waits for the one before (M4 Max: 0.03), and those of
# one operation that MLX evaluates by itself (M4 Max: 0.055 to 0.07).
WAIT, EVALUATION = Range(0.03, 0.0), Range(0.07, 0.055)
# Lanes of a core. Bytes that pass through its threadgroup memory in a cycle (M1, M2:
# on-core data; taken for all).
LANES, STAGED = 128, 64
LINE = 128  # bytes that memory and caches move at a time
# Cycles of a lane for an integer multiplication (M1, M2) and a division. The latter
# follow from a copy on M2 that divides and takes a rest for each element (Metal.jl):
# 67 GB/s in 32 bits, 10.3 in 64; llama.cpp has some 700 for 64 bits too.
MULTIPLY = {32: 4, 64: 16}
DIVIDE = {32: 100, 64: 700}
# Cycles that a threadgroup waits at a barrier, as long as threadgroup memory takes to
# answer (M1: 48): other threadgroups of the core work meanwhile.
BARRIER = 48
# Bytes of a core's registers and of its threadgroup memory, two pools on M1 and M2.
# From M3 on both share one memory with the cache. Its size is not published: the sum
# is assumed.
REGISTERS, THREADGROUP = 208 << 10, 60 << 10
FIXED_POOLS = "m1", "m2"
SIMDGROUP, MOST_SIMDGROUPS, MOST_REGISTERS = 32, 96, 128
# Simdgroups from which a core of M1 and M2 reaches its full rate. With half of them
# others saw 1/1.2 to 1/1.5 of it: the root of the share is the slower end.
FULL_RATE = 24
# Multiply-adds of a product of simdgroup matrices, 8 x 8 x 8, which counts are for.
PRODUCT = 512

# Of a look-up, counted by launch_counts.py: lines of slots, and 32-bit multiplications
# of a hash of four columns, two each.
PROBE_LINES, HASH_COLUMN = 1.03, 2
# Keys that MLX sorts in one threadgroup, by bytes of a key (sort.cpp): larger arrays
# are merged two by two, in two launches a pass.
BLOCKS = {2: 2048, 4: 2048, 8: 1024}


def simdgroups(memory: int, registers: int, threads: int, family: str) -> int:
    """Return the simdgroups of a kernel that a core holds at once.

    Args:
        memory: bytes of threadgroup memory.
        registers: of a lane, 4 bytes each; more than a lane has are spilled.
        threads: of a threadgroup.
        family: of chips, "m1" and on.
    """
    each = -(-threads // SIMDGROUP)
    size = each * SIMDGROUP * 4 * min(registers, MOST_REGISTERS)
    if family in FIXED_POOLS:
        groups = min(REGISTERS // size, THREADGROUP // memory if memory else 1 << 20)
    else:
        groups = (THREADGROUP + REGISTERS) // (memory + size)
    return min(each * max(groups, 1), MOST_SIMDGROUPS)


def number(ms: float) -> str:
    """Return milliseconds as people read them, without their unit."""
    digits = next((d for d, least in enumerate((100, 10, 0.1)) if ms >= least), 3)
    return f"{ms:,.{digits}f}"


def core_cycles(device: Device) -> float:
    """Return the cycles of all cores in a second, by the chip's rate in float32."""
    return 1e12 * device.tflops / OPERATIONS


# Counted facts of kernels.

FACTS = Path(__file__).with_name("kernel_facts.json")
# Template arguments that change where results go, not how they are computed, and those
# of an epilogue.
_ASIDE = {"OUT", "PLACED", "SLICED", "FAR", "ACTIVATION", "P", "EPS", "R"}


@dataclass(frozen=True)
class KernelFacts:
    """Counts of one kernel over a thin shell of voxels.

    All but the first three are for 512 multiply-adds, as a product of 8 x 8 x 8 has.

    Attributes:
        memory: bytes of threadgroup memory.
        registers: of a lane, 32 bits each: an estimate.
        threads: of a threadgroup.
        staged: bytes through threadgroup memory.
        loads: of simdgroup matrices.
        barriers: of threadgroups.
        divisions32, divisions64: of integers, over lanes.
        multiplications32, multiplications64: the same.
        read: bytes that lanes ask of device memory.
        lines: 128-byte lines that simdgroups ask for between two barriers.
    """

    memory: int
    registers: int
    threads: int
    staged: float
    loads: float
    barriers: float
    divisions32: float
    divisions64: float
    multiplications32: float
    multiplications64: float
    read: float
    lines: float

    @classmethod
    def of(cls, kernel: GpuKernel | None) -> KernelFacts | None:
        """Return the counted facts of a kernel, or None if it was not counted."""
        if kernel is None or kernel.backend != METAL:
            return None
        entry = counted_kernels().get(kernel_key(kernel))
        return None if entry is None else cls(*entry[1:])

    def simdgroups(self, device: Device) -> int:
        """Return the simdgroups that a core of a chip holds at once."""
        return simdgroups(self.memory, self.registers, self.threads, device.family)

    def filled(self, device: Device) -> float:
        """Return the share of the rate that so few simdgroups reach, slower end."""
        if device.family not in FIXED_POOLS:
            return 1.0
        return min(1.0, self.simdgroups(device) / FULL_RATE) ** 0.5

    def bounds(
        self, multiply_adds: float, device: Device, end: int
    ) -> dict[str, float]:
        """Return seconds by bound.

        Args:
            multiply_adds: number that the kernel executes.
            device: an Apple GPU.
            end: 0 for the slower end of rates, 1 for the faster one.
        """
        products, cycles = multiply_adds / PRODUCT, core_cycles(device)
        groups = max(1, self.simdgroups(device) * SIMDGROUP // self.threads)
        lanes = (
            DIVIDE[32] * self.divisions32
            + DIVIDE[64] * self.divisions64
            + MULTIPLY[32] * self.multiplications32
            + MULTIPLY[64] * self.multiplications64
        )
        # Lanes read from a core's own cache; whole lines come to it from the next one.
        read = max(self.read / FED.fast, self.lines * LINE / FED[end])
        return {
            "threadgroup memory": products * self.staged / STAGED / cycles,
            "integer": products * lanes / LANES / cycles,
            "barrier": products * self.barriers * BARRIER / groups / cycles,
            "cache": products * read / cycles,
        }


NAMES = tuple(each.name for each in fields(KernelFacts))


def kernel_key(kernel: GpuKernel) -> str:
    """Return the name of a kernel in ``kernel_facts.json``."""
    own = [(n, v) for n, v in kernel.template if n not in _ASIDE]
    values = (f"{n}={str(v).removeprefix('mlx.core.')}" for n, v in own)
    return " ".join([kernel.symbol, *values])


@cache
def digest(files: tuple[str, ...]) -> str:
    """Return a digest of the text of a kernel's files."""
    text = "\0".join(source(METAL, f"{file}.metal") for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def counted_kernels() -> dict[str, list]:
    """Return every entry: the digest of a kernel's text, then its facts in order."""
    return json.loads(FACTS.read_text(encoding="utf-8"))


# A launch.


@dataclass(frozen=True)
class Prediction:
    """The time that a plan should take on a chip.

    Attributes:
        fast_ms, slow_ms: the ends of the range.
        bound: the largest bound: "compute", "memory", "cache" (operands that lanes
            read), "threadgroup memory", "integer", "barrier", or "launch" (less than
            MLX takes to evaluate one operation by itself).
        operations: number that the plan executes.
        bounds_ms: the slower end by bound, without the launches that wait.
        simdgroups, registers: of a core, and of a lane, if the kernel was counted.
    """

    fast_ms: float
    slow_ms: float
    bound: str
    operations: float
    bounds_ms: dict[str, float]
    simdgroups: int | None = None
    registers: int | None = None

    @property
    def range(self) -> str:
        """The range as people read it: "0.83 to 0.97"."""
        return f"{number(self.fast_ms)} to {number(self.slow_ms)}"

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self)


def predict(
    plan: Plan, device: Device, *, done: int, moved: int, cached: float | None = None
) -> Prediction:
    """Predict the time of a plan with matrix tiles, or of MLX's matmul.

    Args:
        plan: what would be launched.
        device: an Apple GPU.
        done: multiply-adds that the plan executes.
        moved: bytes that must move.
        cached: bytes that move through a cache, partial sums included, if they were
            counted; else they follow from ``moved``.

    Raises:
        ValueError: the plan has no matrix tiles.
    """
    if plan.tile is None and plan.backend != MLX:
        raise ValueError(f"the model has matrix kernels only; got {plan.kernel}")
    peak, share = _rate(plan, device)
    moved += 8 * prod(plan.partials) if plan.partials else 0
    facts = KernelFacts.of(plan.gpu)
    waits = 0 if plan.backend == MLX else sum(bool(d.add) for d in plan.dispatches)
    ends = []
    for at in range(2):
        through = (1 if plan.tile is None else CACHED[at]) * moved
        through = through if cached is None else cached
        full = facts.filled(device) if facts and at == 0 else 1.0
        parts = {
            "compute": 2 * done / (share[at] * full * peak),
            "memory": through / (MEMORY[at] * 1e9 * device.bandwidth),
        }
        if facts:
            parts |= facts.bounds(done, device, at)
        ends.append((1e3 * max(parts.values()) + waits * WAIT[at], parts))
    (slow, parts), (fast, _) = ends
    bound = max(parts, key=parts.__getitem__)
    return Prediction(
        fast,
        slow,
        "launch" if slow < EVALUATION.fast else bound,
        2 * done,
        {name: 1e3 * seconds for name, seconds in parts.items() if seconds},
        facts.simdgroups(device) if facts else None,
        facts.registers if facts else None,
    )


def predict_layer(
    problem: Problem,
    device: Device,
    choice: Choice,
    relation: Relation | None = None,
    done_over_useful: float = 1.0,
) -> Prediction:
    """Predict the time of a layer by its cost.

    Args:
        problem: the facts; its edges are known, or counted over the relation.
        device: an Apple GPU.
        choice: whose plan would run.
        relation: the layer's (untransposed) relation, to count what tiles execute.
        done_over_useful: executed operations over useful ones, without a relation.
    """
    counts = cost(problem, device, choice=choice, relation=relation)
    ratio = done_over_useful if relation is None else counts.done_over_useful
    done = round(ratio * counts.useful_flops / 2)
    return predict(choice.plan, device, done=done, moved=counts.bytes_moved)


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
    on_accelerators = accelerated and plan.kernel.endswith("tensor_ops")
    peak = device.half_tflops if on_accelerators else device.tflops
    if on_accelerators and integers:
        peak *= INTEGERS
    ends = ACCELERATED if on_accelerators else DENSE
    return 1e12 * peak, Range(*(GATHERED * end for end in ends))


# The making of a kernel map: the launches of backends/metal/geometry.py, one after
# another. At the slower end a random slot of a hash is a line from memory; at the
# faster end the hash is in the caches. Coordinates of new rows, and divisions by
# strides that are no powers of two, are left out.


class Step(NamedTuple):
    """One part of the making of a kernel map.

    Attributes:
        name: what it makes.
        launches: of kernels, one after another.
        moved: bytes of arrays.
        lines: 128-byte lines of a hash, at random.
        lanes: cycles of lanes of integer arithmetic.
    """

    name: str
    launches: int
    moved: int
    lines: float = 0
    lanes: float = 0


def sort_step(rows: int, offsets: int, region: int) -> Step:
    """Return the Step of the order of tiles: keys, MLX's sort, rows in that order.

    Args:
        rows: of the table.
        offsets: its columns.
        region: rows that are sorted among themselves.
    """
    region = max(1, min(region, rows))
    filled = -(-rows // region) * region
    item = next(b for b in (1, 2, 4, 8) if offsets < 8 * b or b == 8)
    words = -(-(offsets + 1) // (8 * item))
    merges = max(0, -(-region // BLOCKS[max(item, 2)]) - 1).bit_length()
    pair = item + 4
    one = filled * (item + pair + 2 * merges * pair)
    keys = rows * offsets * 4 + filled * item * words
    ordered = 2 * rows * offsets * 4 + 4 * rows
    # A sort that merges copies its result; other words are taken in order first.
    launches = words * (1 + 2 * merges + (merges > 0)) + 2 * (words - 1) + 3
    return Step("order of tiles", launches, keys + words * one + ordered)


def map_steps(p: Problem, region: int) -> list[Step]:
    """Return the Steps of a problem's kernel map.

    Args:
        p: its facts.
        region: rows that are sorted together if the plan reads sorted tiles, else 0.
    """
    columns, mirrored = 1 + p.dims, p.kind == "submanifold"
    slots = 1 << max(4, (2 * p.n_in - 1).bit_length()) if p.n_in else 0
    multiply = HASH_COLUMN * columns * MULTIPLY[32]
    hashed = Step(
        "hash",
        2,
        8 * slots + 4 * columns * p.n_in,
        PROBE_LINES * p.n_in,
        multiply * p.n_in,
    )
    probes = p.n_out * (p.volume // 2 if mirrored else p.volume)
    entries = 4 * p.n_out * p.volume * (2 if mirrored else 1)
    table = Step(
        "table",
        1 + mirrored,
        entries + 4 * columns * (p.n_out + p.n_in),
        PROBE_LINES * probes,
        multiply * probes,
    )
    more = [sort_step(p.n_out, p.volume, region)] if region else []
    return [hashed, table, *more]


def making_ms(plan: Plan, device: Device) -> Range:
    """Return the milliseconds that a plan's kernel map should take to make."""
    cycles, ends = core_cycles(device), []
    for at in range(2):
        rate, ms = MEMORY[at] * 1e9 * device.bandwidth, 0.0
        hashed = rate if at == 0 else FED.slow * cycles
        for step in map_steps(plan.problem, plan.region):
            memory = step.moved / rate + step.lines * LINE / hashed
            integer = step.lanes / LANES / cycles
            ms += 1e3 * max(memory, integer) + step.launches * WAIT[at]
        ends.append(ms)
    return Range(*ends)

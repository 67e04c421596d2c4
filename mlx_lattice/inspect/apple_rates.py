"""Rates of Apple GPUs that others measured: the one table that predictions go by.

Sources are projects whose authors had the chips; ``docs/predictions.md`` names them.
Where a range stands, it is what they saw, the slower end first.
"""

from __future__ import annotations

from typing import NamedTuple


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
# Their rate for int8 over that for half: 1.8 on an A19, 2.0 on M5 Max.
INTEGERS = 2.0
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
# From M3 on they are one, with the cache; nobody published its size: the sum is taken.
REGISTERS, THREADGROUP = 208 << 10, 60 << 10
FIXED_POOLS = "m1", "m2"
SIMDGROUP, MOST_SIMDGROUPS, MOST_REGISTERS = 32, 96, 128
# Simdgroups from which a core of M1 and M2 reaches its full rate. With half of them
# others saw 1/1.2 to 1/1.5 of it: the root of the share is the slower end.
FULL_RATE = 24


def simdgroups(memory: int, registers: int, threads: int, family: str) -> int:
    """Return the simdgroups of a kernel that a core holds at once.

    Args:
        memory: bytes of threadgroup memory.
        registers: of a lane, 4 bytes each; more than a lane has are spilled.
        threads: of a threadgroup.
        family: of chips, "m1" and on.
    """
    each = -(-threads // SIMDGROUP)
    held = each * SIMDGROUP * 4 * min(registers, MOST_REGISTERS)
    if family in FIXED_POOLS:
        groups = min(REGISTERS // held, THREADGROUP // memory if memory else 1 << 20)
    else:
        groups = (THREADGROUP + REGISTERS) // (memory + held)
    return min(each * max(groups, 1), MOST_SIMDGROUPS)

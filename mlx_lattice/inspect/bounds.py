"""What bounds a Metal kernel besides multiplying and memory, by its counted facts."""

from __future__ import annotations

from ..devices import Device
from .apple_rates import (
    BARRIER,
    DIVIDE,
    FED,
    FIXED_POOLS,
    FULL_RATE,
    LANES,
    LINE,
    MULTIPLY,
    OPERATIONS,
    SIMDGROUP,
    STAGED,
    simdgroups,
)
from .kernel_facts import PRODUCT, KernelFacts


def core_cycles(device: Device) -> float:
    """Return the cycles of all cores in a second, by the chip's rate in float32."""
    return 1e12 * device.tflops / OPERATIONS


def held(facts: KernelFacts, device: Device) -> int:
    """Return the simdgroups of a kernel that a core holds at once."""
    return simdgroups(facts.memory, facts.registers, facts.threads, device.family)


def filled(facts: KernelFacts, device: Device) -> float:
    """Return the share of the rate that so few simdgroups reach at the slower end."""
    if device.family not in FIXED_POOLS:
        return 1.0
    return min(1.0, held(facts, device) / FULL_RATE) ** 0.5


def beside(
    facts: KernelFacts, multiply_adds: float, device: Device, end: int
) -> dict[str, float]:
    """Return seconds by bound.

    Args:
        facts: of the kernel.
        multiply_adds: that it executes.
        device: an Apple GPU.
        end: 0 for the slower end of rates, 1 for the faster one.
    """
    products, cycles = multiply_adds / PRODUCT, core_cycles(device)
    groups = max(1, held(facts, device) * SIMDGROUP // facts.threads)
    lanes = (
        DIVIDE[32] * facts.divisions32
        + DIVIDE[64] * facts.divisions64
        + MULTIPLY[32] * facts.multiplications32
        + MULTIPLY[64] * facts.multiplications64
    )
    # Lanes read from a core's own cache; whole lines come to it from the next one.
    read = max(facts.read / FED.fast, facts.lines * LINE / FED[end])
    return {
        "threadgroup memory": products * facts.staged / STAGED / cycles,
        "integer": products * lanes / LANES / cycles,
        "barrier": products * facts.barriers * BARRIER / groups / cycles,
        "cache": products * read / cycles,
    }

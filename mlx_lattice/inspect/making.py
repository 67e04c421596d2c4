"""How long a relation should take to make on an Apple GPU: predicted, never measured.

The launches of ``backends/metal_lookups.py`` and ``metal_views.py``, one after
another: bytes that each moves at a chip's memory rate, its integer arithmetic, and what
a launch that waits costs. A random slot of a hash is a line of 128 bytes, from memory
at the slower end; at the faster one all of a hash is in the caches. MLX's sort is
modelled by its passes. Left out: coordinates of new rows, and divisions by strides that
are no powers of two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from .. import devices
from ..devices import METAL, Device
from ..problem import Problem
from ..routes.plan import Plan
from .apple_rates import FED, LANES, LINE, MEMORY, MULTIPLY, WAIT
from .bounds import core_cycles
from .prediction import number

# Of a look-up, counted by benchmarks/launch_counts.py: lines of slots, and 32-bit
# multiplications of a hash of four columns, two each.
PROBE_LINES, HASH_COLUMN = 1.03, 2
# Keys that MLX sorts in one threadgroup, by bytes of a key (sort.cpp): larger arrays
# are merged two by two, in two launches a pass.
BLOCKS = {2: 2048, 4: 2048, 8: 1024}


class Step(NamedTuple):
    """One part of a relation's making.

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


@dataclass(frozen=True)
class Making:
    """The predicted time of a relation's making.

    Attributes:
        chip: name of the profile.
        fast_ms, slow_ms: the ends of the range.
        bound: what takes the most of the slower end: "memory", "integer" or "launch".
        launches: of kernels.
        steps: (name, slower end in milliseconds) of each part.
    """

    chip: str
    fast_ms: float
    slow_ms: float
    bound: str
    launches: int
    steps: tuple[tuple[str, float], ...]

    @property
    def range(self) -> str:
        """The range as people read it."""
        return f"{number(self.fast_ms)} to {number(self.slow_ms)} ms"

    def as_dict(self) -> dict:
        """Return every field."""
        return asdict(self) | {"steps": dict(self.steps)}

    def __str__(self) -> str:
        """Return it in one line, as ``explain`` prints it."""
        parts = ", ".join(f"{name} {number(ms)}" for name, ms in self.steps)
        return (
            f"made once: predicted {self.range} on {self.chip}, {self.bound}-bound "
            f"({parts} ms at most; {self.launches} launches)"
        )


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


def steps_of(p: Problem, region: int) -> list[Step]:
    """Return the Steps of a problem's relation.

    Args:
        p: its facts.
        region: rows that are sorted together where the plan reads sorted tiles, else 0.
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


def making(plan: Plan, device: Device) -> Making | None:
    """Predict how long a plan's relation takes to make; None where none is made.

    Args:
        plan: what would be launched.
        device: the chip; there is a prediction for Apple GPUs only.
    """
    p, region = plan.problem, plan.region
    if device.backend != METAL or not p.table or p.pointwise or not p.n_out:
        return None
    cycles, ends, totals = core_cycles(device), [], {}
    for at in range(2):
        rate, parts = MEMORY[at] * 1e9 * device.bandwidth, []
        hashed = rate if at == 0 else FED.slow * cycles
        for step in steps_of(p, region):
            memory = step.moved / rate + step.lines * LINE / hashed
            bounds = {"memory": memory, "integer": step.lanes / LANES / cycles}
            wait = step.launches * WAIT[at] / 1e3
            parts.append((step.name, 1e3 * (max(bounds.values()) + wait)))
            if at == 0:
                for name, seconds in (*bounds.items(), ("launch", wait)):
                    totals[name] = totals.get(name, 0) + seconds
        ends.append(parts)
    slow, fast = (sum(ms for _, ms in parts) for parts in ends)
    launches = sum(step.launches for step in steps_of(p, region))
    bound = max(totals, key=totals.__getitem__)
    chip = devices.HOST_CHIP if device.name == devices.HOST else device.name
    return Making(chip, fast, slow, bound, launches, tuple(ends[0]))

"""What Metal's kernels do besides multiplying: counted, and kept beside this file.

``benchmarks/kernel_facts.py`` runs every kernel on ``metal/host`` in counted mode and
estimates its registers from what clang makes of it; ``kernel_facts.json`` keeps both,
with a digest of the kernel's text. Where the text is another since, a prediction says
so; where there are no facts, it goes by operations and bytes alone, and says that.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from ..backends.gpu_kernel import GpuKernel
from ..backends.kernel_sources import source
from ..devices import METAL

FILE = "kernel_facts.json"
# Template arguments that change where results go, not how they are computed, and those
# of an epilogue.
_ASIDE = {"OUT", "PLACED", "SLICED", "FAR", "ACTIVATION", "P", "EPS", "R"}
# Multiply-adds of a product of simdgroup matrices, 8 x 8 x 8, which counts are for.
PRODUCT = 512


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


NAMES = tuple(each.name for each in fields(KernelFacts))


def key(kernel: GpuKernel) -> str:
    """Return the name of a kernel among the facts."""
    own = [(n, v) for n, v in kernel.template if n not in _ASIDE]
    values = (f"{n}={str(v).removeprefix('mlx.core.')}" for n, v in own)
    return " ".join([kernel.symbol, *values])


@cache
def digest(files: tuple[str, ...]) -> str:
    """Return what tells the text of a kernel's files from another."""
    text = "\0".join(source(METAL, f"{file}.metal") for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def kept() -> dict[str, list]:
    """Return every entry: the digest of its text, then the facts in order."""
    path = resources.files(__package__).joinpath(FILE)
    return json.loads(path.read_text(encoding="utf-8"))


def of(kernel: GpuKernel | None) -> KernelFacts | None:
    """Return the facts of a kernel, None where it was not counted."""
    if kernel is None or kernel.backend != METAL:
        return None
    entry = kept().get(key(kernel))
    return None if entry is None else KernelFacts(*entry[1:])


def is_current(kernel: GpuKernel) -> bool:
    """Return whether a kernel that was counted has the same text still."""
    return kept()[key(kernel)][0] == digest(kernel.files)

"""What a launch did: faults, and counts of bytes, atomics, matrix work and barriers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """Something that a kernel may not do.

    Attributes:
        kind: What it is, for instance ``"device read out of bounds"``.
        kernel: The kernel's name.
        place: Source file and line, ``"conv.metal:31"``; empty where there is none.
        message: Which bytes of what, by which thread.
        times: How often it happened at this place.
    """

    kind: str
    kernel: str
    place: str
    message: str
    times: int = 1

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        times = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.kernel}: {self.kind}{at}: {self.message}{times}"


@dataclass(frozen=True)
class Traffic:
    """What went through one buffer (checked launches only).

    Attributes:
        read_bytes: Bytes of all plain reads.
        written_bytes: Bytes of all plain writes.
        atomics: Atomic operations.
        distinct_read_bytes: Bytes read at least once, atomically or not.
        distinct_written_bytes: Bytes written at least once, atomically or not.
        read_lines: 128-byte lines that simdgroups asked for, each once in a step: what
            lies between two threadgroup_barriers (counted launches only, as below).
        read_line_bytes: Bytes of those lines that were asked for.
        written_lines, written_line_bytes: The same of writes.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    atomics: int = 0
    distinct_read_bytes: int = 0
    distinct_written_bytes: int = 0
    read_lines: int = 0
    read_line_bytes: int = 0
    written_lines: int = 0
    written_line_bytes: int = 0

    @property
    def asked_of_line(self) -> float:
        """Bytes that a step of a simdgroup asks of a 128-byte line that it reads."""
        return self.read_line_bytes / max(self.read_lines, 1)


@dataclass(frozen=True)
class Counts:
    """What one or several launches added up to.

    Byte counts and ``buffers`` are those of checked launches; in fast ones they are 0.

    Attributes:
        launches: Kernels that ran.
        threadgroups: Threadgroups that ran.
        threads: Threads that ran.
        barriers: threadgroup_barriers that opened, over all threadgroups.
        simdgroup_barriers: simdgroup_barriers, over all simdgroups.
        collectives: Other simdgroup functions, matrix ones too, over all simdgroups.
        matrix_flop: Floating point operations of simdgroup matrices and TensorOps.
        threadgroup_memory: Bytes of threadgroup memory of the largest kernel.
        device_read_bytes: Bytes of all plain device reads.
        device_written_bytes: Bytes of all plain device writes.
        device_atomics: Atomic operations on device memory.
        threadgroup_read_bytes: Bytes of all plain threadgroup reads.
        threadgroup_written_bytes: Bytes of all plain threadgroup writes.
        threadgroup_atomics: Atomic operations on threadgroup memory.
        matrix_loads: simdgroup_loads, over all simdgroups; these and those below are
            those of counted launches, and 0 in others.
        matrix_stores: simdgroup_stores, over all simdgroups.
        divisions32, divisions64: Integer divisions and remainders by what is no
            constant, over all threads; 32 bits and fewer, and 64.
        multiplications32, multiplications64: Integer multiplications, but by powers of
            two; one for a division by a constant.
        conversions: Integers that became floats.
        seconds: Time on the host, which says nothing about a GPU.
        buffers: Traffic by parameter name; launches with one name for two are added.
    """

    launches: int = 0
    threadgroups: int = 0
    threads: int = 0
    barriers: int = 0
    simdgroup_barriers: int = 0
    collectives: int = 0
    matrix_flop: int = 0
    threadgroup_memory: int = 0
    device_read_bytes: int = 0
    device_written_bytes: int = 0
    device_atomics: int = 0
    threadgroup_read_bytes: int = 0
    threadgroup_written_bytes: int = 0
    threadgroup_atomics: int = 0
    matrix_loads: int = 0
    matrix_stores: int = 0
    divisions32: int = 0
    divisions64: int = 0
    multiplications32: int = 0
    multiplications64: int = 0
    conversions: int = 0
    seconds: float = 0.0
    buffers: dict[str, Traffic] = field(default_factory=dict)

    @property
    def matrix_multiplies(self) -> int:
        """8 x 8 x 8 multiply-accumulates that the matrix work is worth."""
        return self.matrix_flop // 1024

    @property
    def barriers_per_threadgroup(self) -> float:
        """threadgroup_barriers that a threadgroup passes."""
        return self.barriers / max(self.threadgroups, 1)


def _add(a: object, b: object) -> object:
    """Adds two instances of Traffic or Counts field by field."""
    sums = {}
    for f in dataclasses.fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "buffers":
            names = [*x, *(n for n in y if n not in x)]
            empty = Traffic()
            sums[f.name] = {n: _add(x.get(n, empty), y.get(n, empty)) for n in names}
        elif f.name == "threadgroup_memory":
            sums[f.name] = max(x, y)
        else:
            sums[f.name] = x + y
    return dataclasses.replace(a, **sums)


class KernelFault(RuntimeError):
    """A kernel did something that it may not do."""


@dataclass(frozen=True)
class Report:
    """One launch, or several seen as one.

    Attributes:
        kernel: The kernel's name; of several, their names with commas.
        source: The Metal source as MLX generated it; of several, '' (see ``launches``).
        faults: What went wrong, in the order in which it was found.
        counts: What it added up to.
        launches: A report for each launch, in the order in which they ran.
    """

    kernel: str
    source: str
    faults: tuple[Fault, ...]
    counts: Counts
    launches: tuple[Report, ...] = ()

    @staticmethod
    def merge(reports: Iterable[Report]) -> Report:
        """Several reports as one; a single one is given back as it is."""
        reports = tuple(reports)
        if len(reports) == 1:
            return dataclasses.replace(reports[0], launches=reports)
        counts = Counts()
        for report in reports:
            counts = _add(counts, report.counts)
        kernels = ", ".join(dict.fromkeys(r.kernel for r in reports))
        faults = tuple(f for r in reports for f in r.faults)
        return Report(kernels, "", faults, counts, reports)

    def raise_faults(self) -> None:
        """Raises KernelFault if there are faults."""
        if self.faults:
            raise KernelFault("\n".join(map(str, self.faults)))

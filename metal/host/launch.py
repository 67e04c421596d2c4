"""Launching a compiled kernel on NumPy arrays, and reading the runtime's report.

This is the lower of the two ways to run a kernel: it takes any kernel function, MLX's
own included, with every buffer given by hand. Kernels of ``mx.fast.metal_kernel`` are
run by lazy.py, inside MLX's graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from .compile import Entry, runtime
from .report import Counts, Fault, Report, Traffic
from .toolchain import MODES

ORDERS = ("forward", "reverse", "random")
OUTPUT, INITIALISED = 1, 2
REPORT_BYTES = 1 << 16


class _U3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint32) for axis in "xyz"]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in Traffic.__dataclass_fields__),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("grid", _U3),
        ("threadgroup", _U3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
    ]


_COUNTED = [n for n in Counts.__dataclass_fields__ if n not in ("launches", "buffers")]


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double if name == "seconds" else ctypes.c_uint64)
        for name in _COUNTED
    ]


def order_index(order: str) -> int:
    """The runtime's number for an order of threads."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    return ORDERS.index(order)


def read_report(
    kernel: str,
    source: str,
    counts: bytes,
    traffic: Iterable[tuple[str, Sequence[int]]],
    text: str,
) -> Report:
    """A Report from what the runtime gives back.

    Args:
        kernel: The kernel's name.
        source: Its source.
        counts: The bytes of the runtime's Counts.
        traffic: For each buffer its name and its numbers in the order of Traffic.
        text: A line for each fault: kind, place, times and message between tabs.
    """
    raw = _Counts.from_buffer_copy(counts)
    buffers = {name: Traffic(*numbers) for name, numbers in traffic}
    faults = []
    for line in text.splitlines():
        kind, place, times, message = line.split("\t", 3)
        faults.append(Fault(kind, kernel, place, message, int(times)))
    numbers = {name: getattr(raw, name) for name in _COUNTED}
    return Report(
        kernel, source, tuple(faults), Counts(launches=1, buffers=buffers, **numbers)
    )


def launch(
    entry: Entry,
    buffers: Sequence[object],
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    order: str = "forward",
    seed: int = 0,
    workers: int = 1,
    constants: dict[int, object] | None = None,
    initialised: bool = False,
) -> Report:
    """Runs a kernel on NumPy arrays.

    Args:
        entry: The kernel, from ``compile_source``.
        buffers: Arrays or scalars by buffer index; None where the kernel has none.
            Outputs are written in place and must be contiguous.
        grid: Threads in all.
        threadgroup: Threads of a threadgroup.
        order: In what order threads run: ``"forward"``, ``"reverse"`` or ``"random"``.
        seed: Of the random order.
        workers: OS threads that share the threadgroups; a checked kernel runs on one.
        constants: Function constants by index.
        initialised: Whether outputs hold values that the kernel may read.

    Returns:
        What it did. Faults are not raised.
    """
    import numpy as np

    if constants:
        entry.set_constants(constants)
    parameters = {p.index: p for p in entry.buffers}
    count = max(parameters, default=-1) + 1
    described, kept = (_Buffer * count)(), []
    for i in range(count):
        if i not in parameters or i >= len(buffers) or buffers[i] is None:
            described[i] = _Buffer(None, 0, b"unbound", INITIALISED)
            continue
        parameter = parameters[i]
        array = np.asarray(buffers[i])
        flags = INITIALISED
        if parameter.output:
            if not array.flags.c_contiguous:
                raise ValueError(f"the output {parameter.name!r} is not contiguous")
            flags = OUTPUT | (INITIALISED if initialised else 0)
            if not initialised:
                array.view(np.uint8).fill(0xFF)  # NaN, which shows in a fast run
        array = np.ascontiguousarray(array)
        kept.append(array)
        name = parameter.name.encode()
        described[i] = _Buffer(array.ctypes.data, array.nbytes, name, flags)
    options = _Options(
        _U3(*grid),
        _U3(*threadgroup),
        order_index(order),
        seed,
        workers,
        MODES.index(entry.mode),
    )
    counts, text = _Counts(), ctypes.create_string_buffer(REPORT_BYTES)
    runtime().mtl_launch(
        ctypes.c_void_p(entry.address),
        described,
        count,
        ctypes.byref(options),
        ctypes.byref(counts),
        text,
        len(text),
    )
    traffic = [
        (d.name.decode(), [getattr(d, f) for f in Traffic.__dataclass_fields__])
        for d in described
        if d.data and options.checked
    ]
    return read_report(entry.name, "", bytes(counts), traffic, text.value.decode())

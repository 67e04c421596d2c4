"""Device profiles: backend, capability tier and rooflines, a row per chip."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import mlx.core as mx

from . import settings

METAL, CUDA, CPU = BACKENDS = ("metal", "cuda", "cpu")

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Device:
    """The facts of one kind of chip. Rates are peaks.

    Attributes:
        name: "m4-max", "h200", "cpu".
        backend: "metal", "cuda" or "cpu".
        family: key of the tables of thresholds: "m4", "h200", "cpu".
        cores: GPU cores or multiprocessors; CPU threads. MLX does not say how many an
            Apple GPU has: they are those of the largest chip of its name, and where
            the name is not known, of the family's base chip, its Max ("s" in the
            architecture) or its Ultra ("d").
        tflops: float32 rate, 10^12 operations a second.
        half_tflops: half rate of the matrix units, 10^12 operations a second.
        bandwidth: memory rate, 10^9 bytes a second.
        neural_accelerators: whether TensorOps run on matrix hardware (M5 or later).
        matrices: whether an Apple GPU has simdgroup matrices: all but virtual ones.
        estimated: whether the rates are public or assumed figures, not measured ones.
    """

    name: str
    backend: str
    family: str
    cores: int
    tflops: float
    half_tflops: float
    bandwidth: float
    neural_accelerators: bool = False
    matrices: bool = True
    estimated: bool = True

    def flops(self, dtype: str) -> float:
        """Return the peak rate for a dtype in operations a second."""
        return 1e12 * (self.tflops if dtype == "float32" else self.half_tflops)


def _apple() -> list[Device]:
    # Public figures: cores, float32 TFLOP/s, GB/s for each size of each family.
    chips = {
        "m1": [(8, 2.6, 68), (16, 5.3, 200), (32, 10.6, 400), (64, 21.2, 800)],
        "m2": [(10, 3.6, 100), (19, 6.8, 200), (38, 13.6, 400), (76, 27.2, 800)],
        "m3": [(10, 3.5, 100), (18, 6.4, 150), (40, 14.2, 400), (80, 28.4, 819)],
        # No Ultra of these was announced: two of the Max, as each Ultra so far.
        "m4": [(10, 4.6, 120), (20, 9.2, 273), (40, 18.4, 546), (80, 36.8, 1092)],
        "m5": [(10, 4.9, 153), (20, 9.8, 307), (40, 19.6, 614), (80, 39.2, 1228)],
    }
    devices = []
    for family, sizes in chips.items():
        tiers = ("", "-pro", "-max", "-ultra")
        for tier, (cores, tflops, bandwidth) in zip(tiers, sizes, strict=True):
            # Neural accelerators: about four times the SIMD rate in half.
            accelerated = family == "m5"
            devices.append(
                Device(
                    family + tier,
                    METAL,
                    family,
                    cores,
                    tflops,
                    tflops * (3.5 if accelerated else 1.0),
                    bandwidth,
                    accelerated,
                )
            )
    return devices


# H100 and A100 are the maker's dense figures; the H200's were measured through MLX.
_CUDA = [
    Device("a100", CUDA, "a100", 108, 19.5, 312, 2039),
    Device("h100", CUDA, "h100", 132, 67, 989, 3350),
    Device("h200", CUDA, "h200", 132, 67, 776, 4260, estimated=False),
    Device("cuda", CUDA, "cuda", 108, 19.5, 150, 900),
]


def _this_cpu() -> Device:
    threads = os.cpu_count() or 1
    # Assumed, as `estimated` says: 3 GHz, 16 float32 multiply-adds a cycle and core.
    rate = 0.096 * threads
    return Device("cpu", CPU, "cpu", threads, rate, rate, 20 + 5 * threads)


PROFILES = {d.name: d for d in [*_apple(), *_CUDA, _this_cpu()]}


def profile(name: str | Device) -> Device:
    """Return the profile of a name such as "m5-max", "h200" or "cpu", or raise."""
    if isinstance(name, Device):
        return name
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(
            f"no device profile is named {name!r}; there are {', '.join(PROFILES)}"
        ) from None


# Metal's kernels on the CPU: its name, and the chip whose facts it has.
HOST, HOST_CHIP = "metal-host", "m1"
_METAL_HOST = replace(PROFILES[HOST_CHIP], name=HOST)


@contextmanager
def metal(where: str) -> Iterator[None]:
    """Run the Metal routes inside the block: ``metal("host")`` on the CPU, for tests.

    The environment variable MLX_LATTICE_METAL=host does it for a whole process. Needs
    a checkout of the project and clang.
    """
    if where != "host":
        raise ValueError(f'metal() takes "host"; got {where!r}')
    with settings.block(metal=where):
        yield


def metal_on_host() -> bool:
    """Whether Metal kernels are to run on the CPU."""
    named = settings.current().metal or settings.environment["MLX_LATTICE_METAL"]
    if named and named != "host":
        raise ValueError(f"MLX_LATTICE_METAL must be 'host' or empty; got {named!r}")
    return bool(named)


def current() -> Device:
    """Return the profile of the device that MLX runs on now."""
    if metal_on_host():
        return _METAL_HOST
    return _gpu() if mx.default_device() == GPU else PROFILES["cpu"]


GPU = mx.Device(mx.gpu)


@cache
def _gpu() -> Device:
    """Return the profile of the GPU, which is the same for the whole process."""
    info = mx.device_info(GPU)
    if mx.metal.is_available():
        # mac_ver() says 16.x on macOS 26 in a Python built against an older SDK.
        return from_metal_info(info, platform.release())
    return from_cuda_name(str(info.get("device_name", "")), compute_capability()[0])


@cache
def compute_capability() -> tuple[int, int]:
    """Return the compute capability of the NVIDIA device that MLX runs on."""
    info = mx.device_info(mx.gpu)
    if "compute_capability_major" in info:
        major = int(info["compute_capability_major"])
        return major, int(info["compute_capability_minor"])
    digits = "".join(c for c in str(info.get("architecture", "")) if c.isdigit())
    return (int(digits[:-1]), int(digits[-1])) if len(digits) > 1 else (8, 0)


# Apple's names of GPUs so far: generation, then phone, base, or larger parts.
_ARCHITECTURE = re.compile(r"applegpu_g([0-9]{2})[pgscd]")


def from_metal_info(info: dict, darwin: str) -> Device:
    """Return the profile of an Apple GPU from ``mx.device_info()``.

    Neural accelerators are there by MLX's own check: architecture generation 17 or
    later (18 for phone parts, last letter p) on macOS 26.2 (Darwin 25.2) or later. They
    count as absent if a text has another form. The GPU of a virtual machine ("Apple
    Paravirtual device") has no simdgroup matrices.
    """
    architecture = str(info.get("architecture", ""))
    known = _ARCHITECTURE.fullmatch(architecture)
    generation = int(known[1]) if known else 0
    name = str(info.get("device_name", "")).lower().removeprefix("apple ").strip()
    found = PROFILES.get(name.replace(" ", "-"))
    if found is None:
        sizes = {"s": "-max", "d": "-ultra"}
        family = f"m{min(max(generation - 12, 1), 5)}"
        found = PROFILES.get(family + sizes.get(architecture[-1:], ""))
        found = found or PROFILES[family]
    numbers = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*", darwin)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    needed = 18 if architecture.endswith("p") else 17
    accelerated = generation >= needed and version >= (25, 2)
    return replace(
        found,
        half_tflops=found.half_tflops if accelerated else found.tflops,
        neural_accelerators=accelerated,
        matrices="paravirtual" not in name,
    )


def from_cuda_name(name: str, major: int = 8) -> Device:
    """Return the profile of an NVIDIA device name; unknown ones share a safe row.

    ``major`` is of the compute capability: 9 is Hopper, whose kernels are its own.
    """
    for device in _CUDA:
        if device.name in name.lower():
            return device
    unknown = PROFILES["cuda"]
    return replace(unknown, family="h100") if major == 9 else unknown


def entry(table: dict[str, _Entry], device: Device) -> _Entry:
    """Return the entry of a table for a chip, its family, or "*", the default."""
    return table.get(device.name, table.get(device.family, table["*"]))

"""Devices: profiles of chips, and whether a backend's compiled kernels serve here.

A profile has the backend, the capability tier and the rooflines of a chip.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from . import distribution, settings
from .checks import LatticeWarning
from .distribution import checkout

METAL, CUDA, CPU = BACKENDS = ("metal", "cuda", "cpu")

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Device:
    """The facts of one kind of chip. Rates are peaks.

    MLX does not say how many cores an Apple GPU has: they are those of the largest chip
    of its name, or else of the family's base chip, its Max or its Ultra.
    """

    name: str  # "m4-max", "h200", "cpu"
    backend: str
    family: str  # key of the tables of thresholds: "m4", "h200", "cpu"
    cores: int  # GPU cores or multiprocessors; CPU threads
    tflops: float  # float32, 10^12 operations a second
    half_tflops: float  # of the matrix units, in half precision
    bandwidth: float  # 10^9 bytes a second
    neural_accelerators: bool = False  # TensorOps run on matrix hardware (M5 or later)
    matrices: bool = True  # an Apple GPU has simdgroup matrices: all but virtual ones
    estimated: bool = True  # rates are public or assumed figures, not measured ones

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
        has_units = family == "m5"  # neural accelerators: more than the SIMD rate
        tiers = ("", "-pro", "-max", "-ultra")
        for tier, (cores, rate, bandwidth) in zip(tiers, sizes, strict=True):
            rates = rate, rate * (3.5 if has_units else 1.0), bandwidth
            name = family + tier
            devices.append(Device(name, METAL, family, cores, *rates, has_units))
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

    The environment variable MLX_LATTICE_METAL=host does the same for a whole process.
    This needs a checkout of the project and clang.
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


def from_metal_info(info: dict[str, Any], darwin: str) -> Device:
    """Return the profile of an Apple GPU from ``mx.device_info()``.

    Neural accelerators are there by MLX's own check: architecture generation 17 or
    later (18 for phone parts, last letter p) on macOS 26.2 (Darwin 25.2) or later.
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
    """Return the profile of an NVIDIA device name; unknown ones share a safe row."""
    for device in _CUDA:
        if device.name in name.lower():
            return device
    unknown = PROFILES["cuda"]
    return replace(unknown, family="h100") if major == 9 else unknown


def entry(table: dict[str, _Entry], device: Device) -> _Entry:
    """Return the entry of a table for a chip, its family, or "*", the default."""
    return table.get(device.name, table.get(device.family, table["*"]))


OLDEST_GPU = (8, 0)  # compute capability that the CUDA kernels need


@contextmanager
def portable_only() -> Iterator[None]:
    """Leave compiled kernels out inside the block: only MLX operations run."""
    with settings.block(portable=True):
        yield


def serves(backend: str) -> bool:
    """Whether compiled kernels of a backend run on this machine, inside this block."""
    if settings.current().portable:
        return False
    if backend == METAL and metal_on_host():
        install_host()
        return True
    if backend == METAL:
        return mx.metal.is_available()
    if backend == CUDA:
        return mx.cuda.is_available() and _old_gpu() is None
    return backend == CPU and has_extension()


@cache
def _old_gpu() -> str | None:
    """Return why the CUDA kernels can't run on the GPU that is here, or None."""
    if not mx.cuda.is_available() or compute_capability() >= OLDEST_GPU:
        return None
    here, needed = (".".join(map(str, c)) for c in (compute_capability(), OLDEST_GPU))
    return f"the GPU has compute capability {here}; the kernels need {needed}"


def absence(backend: str) -> str | None:
    """Return why a backend's kernels can't run here and what to do, or None."""
    if backend == CPU:
        why = extension_absence
        return f"{why}; {extension_repair}" if why else None
    if backend == METAL and metal_on_host():
        return host_absence()
    if backend == METAL and not mx.metal.is_available():
        return "this MLX has no Metal; it comes with MLX on Apple silicon"
    if backend == CUDA and not mx.cuda.is_available():
        how = distribution.install("cuda")
        return f"this MLX has no CUDA, or finds no NVIDIA GPU; for MLX's CUDA {how}"
    if backend == CUDA and (why := _old_gpu()):
        return why
    try:
        source_folder(backend)
    except FileNotFoundError as error:
        return str(error)
    return None


def missing(backend: str) -> str | None:
    """Return why a backend's compiled kernels cannot be had, or None."""
    if settings.current().portable:
        return "compiled kernels are left out here"
    if backend == METAL and metal_on_host():
        install_host()
    if backend == CUDA:
        return _old_gpu()
    if backend != CPU or has_extension():
        return None
    return extension_absence


def _rebuild() -> str:
    options = "--force-reinstall --no-deps --no-cache-dir"
    if not distribution.checkout():
        options += f" --no-binary {distribution.NAME}"
    return f"with a C++ compiler at hand {distribution.install(options=options)}"


def _other_mlx(version: str) -> str:
    extra = " with its extra: [cpu], [cuda12] or [cuda13]"
    return f'run: pip install "mlx=={version}"{extra * (sys.platform == "linux")}'


def _load():
    """Return (extension, None, ""), or (None, why it can't be used, what to do)."""
    here = mx.__version__
    try:
        extension = importlib.import_module("mlx_lattice._cpu")
    except ImportError as error:
        if "No module named" in str(error):
            return None, "it is not installed", _rebuild()
        if here != distribution.MLX:
            why = f"it does not load with MLX {here}: {error}"
            return None, why, _other_mlx(distribution.MLX)
        return None, f"it does not load: {error}", _rebuild()
    built_for = extension.built_for()
    if built_for != here:
        why = f"it was built for MLX {built_for}, this is {here}"
        return None, why, _other_mlx(built_for)
    return extension, None, ""


THREADS, MOST_THREADS = "MLX_LATTICE_THREADS", 1024


def _check_threads(extension) -> None:
    """Warn where the variable names no number of threads; the extension reads it."""
    text = os.environ.get(THREADS, "").strip()
    if not text or (text.isdecimal() and 1 <= int(text) <= MOST_THREADS):
        return
    warnings.warn(
        f"{THREADS} must be 1 to {MOST_THREADS}; got {text!r}. The CPU's kernels take "
        "a thread a core",
        LatticeWarning,
        stacklevel=2,
    )
    if extension is not None:
        extension.set_num_threads(os.cpu_count() or 1)


extension, extension_absence, extension_repair = _load()
_check_threads(extension)
_warned = False


def has_extension() -> bool:
    """Whether the extension serves; warns once where it does not."""
    global _warned
    if extension_absence and not _warned:
        _warned = True
        warnings.warn(
            f"mlx_lattice runs without its CPU extension ({extension_absence}): "
            "convolutions on the CPU use MLX's own operations, many times slower. To "
            f"get it, {extension_repair}",
            LatticeWarning,
            stacklevel=3,
        )
    return extension is not None


class HostMissing(RuntimeError):
    """Metal on the host was asked for where Metal kernels can't run on the CPU."""


def host_absence() -> str | None:
    """Return why the CPU can't run Metal kernels here, or None."""
    root = checkout()
    if root is None or not (root / "metal" / "host" / "__init__.py").is_file():
        return (
            "MLX_LATTICE_METAL=host runs Metal kernels by metal/host, which is in the "
            "project's checkout only; run from a checkout, or unset the variable"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from metal import host

    why = host.missing()
    return f"MLX_LATTICE_METAL=host: {why}" if why else None


@lru_cache(maxsize=1)
def install_host() -> None:
    """Make ``mx.fast.metal_kernel`` run kernels on the CPU, or raise HostMissing."""
    if why := host_absence():
        raise HostMissing(why)
    from metal import host

    host.install()


# A file that every folder of kernel sources has.
_SIGN = {METAL: "relation_traversal.metal", CUDA: "rows.cuh"}


@cache
def source_folder(backend: str) -> Path:
    """Return the folder of a backend's sources: in the package or a checkout."""
    package = Path(__file__).resolve().parent
    places = package / backend, package.parent / backend
    for place in places:
        if (place / _SIGN[backend]).is_file():
            return place
    raise FileNotFoundError(
        f"the {backend} kernel sources are neither in {places[0]} nor in {places[1]}; "
        "install mlx_lattice again"
    )


@cache
def source(backend: str, file: str) -> str:
    """Return the text of a file of a backend's folder."""
    return (source_folder(backend) / file).read_text(encoding="utf-8")

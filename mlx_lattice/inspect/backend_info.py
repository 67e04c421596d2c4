"""backend_info(): which kernels run on this machine, what is missing, and its load."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .. import devices
from ..availability import absence
from ..devices import CPU, CUDA, METAL, Device, metal_on_host
from ..distribution import __version__
from ..routes import measure, proof_results, selection
from ..settings import environment


@dataclass(frozen=True)
class BackendInfo:
    """The state of the library on this machine. Prints as a list.

    Attributes:
        version: of the library.
        mlx: version of MLX.
        device: the profile in use.
        backends: for each backend, whether its kernels can run here, and a sentence.
        routes: routes that can be selected on the device, by pass.
        cache: file of measured choices.
        tuning: whether routes are chosen by measurement.
        proving: whether matrix kernels prove themselves before their first launch.
        kernels: (name, why it is refused or None) of the kernels that were proved on
            this machine, refused ones first.
        forced: routes that a block or the environment forces, by pass.
        environment: the library's variables that are set.
    """

    version: str
    mlx: str
    device: Device
    backends: Mapping[str, tuple[bool, str]]
    routes: Mapping[str, tuple[str, ...]]
    cache: str
    tuning: bool
    proving: bool
    kernels: tuple[tuple[str, str | None], ...]
    forced: Mapping[str, str]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Return the list as a person reads it."""
        d = self.device
        rates = "estimated" if d.estimated else "measured"
        lines = [
            ("mlx_lattice", self.version),
            ("MLX", self.mlx),
            (
                "device",
                f"{d.name} ({d.backend}): {d.tflops:.3g} TFLOP/s float32, "
                f"{d.half_tflops:.3g} half, {d.bandwidth:,.0f} GB/s ({rates})",
            ),
        ]
        for name, (runs, text) in self.backends.items():
            lines.append((name, f"{'' if runs else 'not '}available: {text}"))
        for pass_, names in self.routes.items():
            lines.append((pass_, ", ".join(names) or "no route can run"))
        lines.append(("cache", self.cache))
        lines.append(("tuning", "on" if self.tuning else "off"))
        refused = [(name, why) for name, why in self.kernels if why]
        counts = f"{len(self.kernels) - len(refused)} right, {len(refused)} refused"
        state = "on" if self.proving else "off: matrix kernels run unproved"
        lines.append(("proof", f"{state}; matrix kernels proved here: {counts}"))
        lines += [("refused", f"{name}: {why}") for name, why in refused]
        forced = ", ".join(f"{k}={v}" for k, v in self.forced.items())
        lines.append(("forced", forced or "none"))
        variables = ", ".join(f"{k}={v}" for k, v in self.environment.items())
        lines.append(("environment", variables or "none set"))
        return "\n".join(f"{name:<12} {text}" for name, text in lines)

    __repr__ = __str__


def backend_info() -> BackendInfo:
    """Return MLX's version, the device, its kernels, and the settings that apply."""
    device = devices.current()
    states = {backend: _state(backend) for backend in (METAL, CUDA, CPU)}
    # If Metal's kernels are to run on a CPU that cannot run them, every call raises.
    runs = not metal_on_host() or states[METAL][0]
    return BackendInfo(
        version=__version__,
        mlx=mx.__version__,
        device=device,
        backends={
            "portable": (True, "routes in MLX operations, on every backend"),
            **states,
        },
        routes={
            pass_: tuple(
                route.name
                for route in selection.TABLE
                if runs and pass_ in route.passes and route.code(device.backend, pass_)
            )
            for pass_ in selection.PASSES
        },
        cache=str(measure.cache_file()),
        tuning=measure.enabled(),
        proving=proof_results.enabled(),
        kernels=proof_results.current().kernels,
        forced={
            pass_: name
            for pass_ in selection.PASSES
            if (name := selection.forced_route(pass_)) is not None
        },
        environment={k: v for k, v in environment.items() if v},
    )


def _state(backend: str) -> tuple[bool, str]:
    """Return whether a backend's kernels run here, and their routes, or why not."""
    if why := absence(backend):
        return False, why
    where = "on the CPU, for tests: " if backend == METAL and metal_on_host() else ""
    routes = [
        route.name
        for route in selection.TABLE
        if any(route.planner(backend, pass_) for pass_ in route.passes)
    ]
    return True, where + ", ".join(routes)


# The machine, as a report of the doctor has it

# Variables that name folders are left out.
VARIABLES = tuple(name for name in environment if "CACHE" not in name)
BUSY, BUSY_SECONDS = 0.4, 0.2  # share of the processors' time that disturbs timings
# Folder names may hold spaces, so a path ends at the last slash before a mark.
_PATH = re.compile(
    r"(?<![\w.<])(?:~|[A-Za-z]:)?[/\\](?:[^'\":;,()<>\n]*[/\\])?([^\s'\":;,()<>/\\]+)"
)


def machine_facts(device: Device) -> dict:
    """Return the chip, the software and the settings; safe to publish."""
    info = mx.device_info(mx.cpu if device.backend == CPU else mx.default_device())
    memory = info.get("memory_size", info.get("total_memory"))
    darwin = platform.system() == "Darwin"  # other releases may contain a host name
    return {
        "chip": str(info.get("device_name", "unknown")),
        "memory_gb": None if memory is None else round(memory / 2**30, 1),
        "system": platform.system(),
        "release": platform.release() if darwin else None,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "library": __version__,
        "on_host": devices.metal_on_host(),
        "environment": {k: environment[k] for k in VARIABLES if environment[k]},
    }


def busy() -> str | None:
    """Return how much other programs use the processors, or None below ``BUSY``."""
    before = _ticks()
    time.sleep(BUSY_SECONDS)
    total, idle = (b - a for a, b in zip(before, _ticks(), strict=True))
    # Without /proc/stat, count the programs that ran in the last minute.
    average = os.getloadavg()[0] / (os.cpu_count() or 1)
    used = min(1 - idle / total if total else average, 1)
    busy = f"other programs use {used:.0%} of the processors' time"
    return busy if used >= BUSY else None


def _ticks() -> tuple[int, int]:
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0
    times = [int(text) for text in line.split()[1:9]]
    return sum(times), sum(times[3:5])


def sentence(error: BaseException) -> str:
    """Return an error as one line; of each path only the file name is left."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _PATH.sub(r"<\1>", text if len(text) <= 400 else f"{text[:400]} ...")

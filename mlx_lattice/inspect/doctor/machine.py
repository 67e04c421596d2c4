"""What a report says of the machine: its chip and software, nothing of its owner."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import time
from functools import cache
from pathlib import Path

import mlx.core as mx

from ... import devices
from ...devices import CPU, METAL, Device
from ...distribution import __version__

# Variables whose values are ours; the others may name folders.
SAID = (
    "MLX_LATTICE_ROUTE",
    "MLX_LATTICE_METAL",
    "MLX_LATTICE_TUNE",
    "MLX_LATTICE_PRECISION",
    "MLX_LATTICE_PROOF",
    "MLX_LATTICE_THREADS",
    "MLX_LATTICE_CPU_ISA",
)
# Share of the processors' time that other programs may use: more makes times long.
BUSY, BUSY_SECONDS = 0.4, 0.2
# What a kernel that is compiled at run time sees; TensorOps hang on it.
_TARGET = """
#ifdef __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__
  target[0] = __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__;
#else
  target[0] = none[0];
#endif
"""
_SLASH = re.compile(r"[/\\]")
# A folder may have spaces in its name: up to the last slash before a mark.
_PATH = re.compile(
    r"(?<![\w.<])(?:~|[A-Za-z]:)?[/\\](?:[^'\":;,()<>\n]*[/\\])?[^\s'\":;,()<>]+"
)


def facts(device: Device) -> dict:
    """Return the machine's facts, which a stranger may publish."""
    info = dict(
        mx.device_info(mx.cpu if device.backend == CPU else mx.default_device())
    )
    memory = next((info[k] for k in ("memory_size", "total_memory") if k in info), None)
    darwin = platform.system() == "Darwin"
    found = {
        "chip": str(info.get("device_name", "unknown")),
        "architecture": str(info.get("architecture", "unknown")),
        "memory_gb": None if memory is None else round(memory / 2**30, 1),
        "system": platform.system(),
        # Darwin's release does not lie about macOS; a Linux release may name a host.
        "release": platform.release() if darwin else None,
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "library": __version__,
        "on_host": devices.metal_on_host(),
        "busy": busy(),
        "metal_target": metal_target() if device.backend == METAL else None,
        "environment": {k: os.environ[k] for k in SAID if os.environ.get(k)},
    }
    return {k: scrubbed(v) if isinstance(v, str) else v for k, v in found.items()}


def busy() -> str | None:
    """Return how much other programs use the processors, None if that is little."""
    before = _ticks()
    time.sleep(BUSY_SECONDS)
    total, idle = (b - a for a, b in zip(before, _ticks(), strict=True))
    # Elsewhere, the programs that ran in the last minute.
    average = os.getloadavg()[0] / (os.cpu_count() or 1)
    used = 1 - idle / total if total else average
    if used < BUSY:
        return None
    return f"other programs use {min(used, 1):.0%} of its processors' time"


def _ticks() -> tuple[int, int]:
    """Return all processors' time since Linux started, and the idle part of it."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0
    times = [int(text) for text in line.split()[1:9]]
    return sum(times), sum(times[3:5])


def metal_target() -> int | str:
    """Return the version of macOS for which Metal compiles kernels at run time.

    260200 is macOS 26.2; 0 if the compiler does not say it; or why it does not compile.
    """
    kernel = mx.fast.metal_kernel(
        name="lattice_metal_target",
        input_names=["none"],
        output_names=["target"],
        source=_TARGET,
    )
    try:
        (found,) = kernel(
            inputs=[mx.zeros((1,), dtype=mx.int32)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return found.item()
    except RuntimeError as error:
        return sentence(error)


def scrubbed(text: str) -> str:
    """Return a text without paths, host name and user name."""
    text = _PATH.sub(lambda path: f"<{_SLASH.split(path[0])[-1]}>", text)
    for name in _private():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<private>", text)
    return text


@cache
def _private() -> tuple[str, ...]:
    """Return the names that a report must not hold, longest first."""
    names = {Path.home().name, socket.gethostname(), socket.gethostname().split(".")[0]}
    try:
        names.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # nobody has a name here
        names.add("")
    return tuple(sorted((n for n in names if len(n) > 1), key=len, reverse=True))


def sentence(error: BaseException, most: int = 400) -> str:
    """Return an error as one scrubbed line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return scrubbed(text if len(text) <= most else f"{text[:most]} ...")

"""What a report says of the machine: its chip and software, nothing of its owner."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from functools import cache
from pathlib import Path

import mlx.core as mx

from ... import devices
from ...devices import CPU, Device
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
        "environment": {k: os.environ[k] for k in SAID if os.environ.get(k)},
    }
    return {k: scrubbed(v) if isinstance(v, str) else v for k, v in found.items()}


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

"""This machine, as far as compiled kernels depend on it: the chip, its system, MLX."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

import mlx.core as mx

from . import devices
from .devices import CUDA, METAL


@cache
def described(name: str, backend: str) -> str:
    """Return the chip that MLX runs on, the build of its system, and MLX's version.

    Kernels of one text may compute something else where any of them differs.

    Args:
        name: of the device.
        backend: its.
    """
    return f"{_of_chip(name, backend)}, MLX {mx.__version__}"


def _of_chip(name: str, backend: str) -> str:
    if devices.metal_on_host() or backend not in (METAL, CUDA):
        return f"{name} on {platform.system()} {platform.machine()}"
    info = mx.device_info(devices.GPU)
    chip = str(info.get("device_name", "")) or name
    if backend == CUDA:
        return f"{chip}, driver of CUDA {_driver()}"
    architecture = info.get("architecture", "")
    return f"{chip} ({architecture}), macOS build {_macos_build()}"


def _macos_build() -> str:
    """Return the build of macOS ("25C56"), which a version may have several of."""
    try:
        library, size = ctypes.CDLL(None), ctypes.c_size_t(64)
        text = ctypes.create_string_buffer(size.value)
        failed = library.sysctlbyname(
            b"kern.osversion", text, ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        failed = True
    # What Darwin says of itself changes with its kernel, not with every build.
    return platform.version() if failed else text.value.decode()


def _driver() -> str:
    """Return the version of CUDA that the driver has ("13.0")."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        failed = True
    if failed:
        return "unknown"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"

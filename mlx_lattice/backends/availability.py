"""Whether a backend's compiled kernels serve here and now, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .. import settings
from ..devices import CPU, CUDA, METAL, metal_on_host
from . import cpu_extension, metal_host


@contextmanager
def portable_only() -> Iterator[None]:
    """Leave compiled kernels out inside the block: only MLX operations run."""
    token = settings.portable.set(True)
    try:
        yield
    finally:
        settings.portable.reset(token)


def serves(backend: str) -> bool:
    """Whether compiled kernels of a backend run on this machine, inside this block."""
    if settings.portable.get():
        return False
    if backend == METAL and metal_on_host():
        metal_host.install()
        return True
    if backend == METAL:
        return mx.metal.is_available()
    if backend == CUDA:
        return mx.cuda.is_available()
    return backend == CPU and cpu_extension.usable()


def missing(backend: str) -> str | None:
    """Return why a backend's compiled kernels cannot be had, or None.

    Metal and CUDA kernels come with the package; the CPU's are an extension.
    """
    if settings.portable.get():
        return "compiled kernels are left out here"
    if backend == METAL and metal_on_host():
        metal_host.install()
    if backend != CPU or cpu_extension.usable():
        return None
    return cpu_extension.absence

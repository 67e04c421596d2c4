"""Whether a backend's compiled kernels serve here and now, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx

from .. import distribution, settings
from ..devices import CPU, CUDA, METAL, compute_capability, metal_on_host
from . import cpu_extension, kernel_sources, metal_host

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
        metal_host.install()
        return True
    if backend == METAL:
        return mx.metal.is_available()
    if backend == CUDA:
        return mx.cuda.is_available() and _old_gpu() is None
    return backend == CPU and cpu_extension.usable()


@cache
def _old_gpu() -> str | None:
    """Return why the CUDA kernels can't run on the GPU that is here, or None."""
    if not mx.cuda.is_available() or compute_capability() >= OLDEST_GPU:
        return None
    here, needed = (".".join(map(str, c)) for c in (compute_capability(), OLDEST_GPU))
    return f"the GPU has compute capability {here}; the kernels need {needed}"


def absence(backend: str) -> str | None:
    """Return why a backend's kernels can't run on this machine now, and what to do.

    None where they can: what is said to be there, runs.
    """
    if backend == CPU:
        why = cpu_extension.absence
        return f"{why}; {cpu_extension.repair}" if why else None
    if backend == METAL and metal_on_host():
        return metal_host.absence()
    if backend == METAL and not mx.metal.is_available():
        return "this MLX has no Metal; it comes with MLX on Apple silicon"
    if backend == CUDA and not mx.cuda.is_available():
        how = distribution.install("cuda")
        return f"this MLX has no CUDA, or finds no NVIDIA GPU; for MLX's CUDA {how}"
    if backend == CUDA and (why := _old_gpu()):
        return why
    try:
        kernel_sources.folder(backend)
    except FileNotFoundError as error:
        return str(error)
    return None


def missing(backend: str) -> str | None:
    """Return why a backend's compiled kernels cannot be had, or None.

    Metal and CUDA kernels come with the package; the CPU's are an extension.
    """
    if settings.current().portable:
        return "compiled kernels are left out here"
    if backend == METAL and metal_on_host():
        metal_host.install()
    if backend == CUDA:
        return _old_gpu()
    if backend != CPU or cpu_extension.usable():
        return None
    return cpu_extension.absence

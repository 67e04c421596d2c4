"""Compiled backends: a module each, with the same names in it.

Geometry: ``unique_rows``, ``cell_rows``, ``reached_rows``, ``expanded_rows``,
``first_duplicate``, ``neighbour_table``, ``transpose_table``, ``edges``,
``gray_order``. Reductions: those of ``mlx_lattice.reductions``, ``segment_sum`` and
``segment_max``; MLX operations run those that a module has not. Contractions:
``CONV``, ``WEIGHT_GRAD`` and ``QUANTIZED``, functions by route name, as in
``mlx_lattice.portable``, which serves wherever a backend has none; ``FUSED_BIAS``
names the routes whose functions take a bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import mlx.core as mx

from ..devices import CPU, CUDA, METAL, current, metal_on_host

# What the kernels of each backend are written in, as a Choice says it.
LANGUAGE = {METAL: "Metal", CUDA: "CUDA", CPU: "C++"}

_portable: ContextVar[bool] = ContextVar("portable", default=False)


@contextmanager
def portable_only() -> Iterator[None]:
    """Leave compiled kernels out inside the block: only MLX operations run."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def native() -> ModuleType | None:
    """Return the compiled backend of the device that MLX runs on, if there is one."""
    return of(current().backend)


def of(backend: str) -> ModuleType | None:
    """Return the compiled backend of a name, or None where it cannot serve here."""
    if _portable.get():
        return None
    if backend == METAL and (mx.metal.is_available() or metal_on_host()):
        from . import metal, metal_host

        if metal_on_host():
            metal_host.install()
        return metal
    if backend == CUDA and mx.cuda.is_available():
        from . import cuda

        return cuda
    if backend == CPU:
        from . import cpu

        return cpu if cpu.usable() else None
    return None


def missing(backend: str) -> str | None:
    """Return why a backend's compiled kernels cannot be had, or None.

    Metal and CUDA kernels come with the package; the CPU's are an extension.
    """
    if _portable.get():
        return "compiled kernels are left out here"
    if backend != CPU:
        return None
    from . import cpu

    return None if cpu.usable() else cpu.absence


# Routes of matrix tiles on GPUs; all others multiply nothing but edges.
TILED = frozenset(
    {
        "sorted_implicit_gemm",
        "quantized_sorted",
        "tensor_ops",
        "quantized_tensor_ops",
        "grouped_gemm",
        "dense_channel",
        "cout16",
    }
)


def multiply_adds(route, problem, device, said, relation) -> int | None:
    """Return what a Choice's matrix tiles multiply, or None where that is not known.

    ``relation`` is the layer's (untransposed) one.
    """
    if device.backend == METAL:
        from .metal_counts import multiply_adds

        return multiply_adds(route, problem, device, relation)
    from .cuda_counts import multiply_adds

    return multiply_adds(problem, said, relation)


def parameters(route: str, problem, device) -> tuple[tuple[str, object], ...]:
    """Return what a backend launches a route's kernel with, as (name, value) pairs."""
    from ..problem import WEIGHT_GRAD

    if device.backend == METAL:
        from .metal_tiles import parameters
    elif device.backend == CUDA and problem.pass_ == WEIGHT_GRAD:
        from .cuda_weight_grad import parameters
    elif device.backend == CUDA:
        from .cuda_sorted import parameters
    else:
        return ()
    return parameters(route, problem, device)

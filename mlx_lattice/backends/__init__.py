"""Contractions by backend: a module each, with the same names in it.

``CONV``, ``WEIGHT_GRAD`` and ``QUANTIZED`` are functions by route name, as in
``mlx_ops``, which serves wherever a backend has none; ``FUSED_BIAS`` names the routes
whose functions take a bias. Geometry and reductions: see ``backends.registry``.
"""

from __future__ import annotations

from types import ModuleType

from ..devices import CUDA
from .availability import missing, portable_only, serves

__all__ = [
    "TILED",
    "missing",
    "multiply_adds",
    "of",
    "parameters",
    "portable_only",
]


def of(backend: str) -> ModuleType | None:
    """Return the contractions of a GPU, or None where it cannot serve here."""
    if not serves(backend):
        return None
    from . import cuda

    return cuda


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
    from .cuda_counts import multiply_adds

    return multiply_adds(problem, said, relation)


def parameters(route: str, problem, device) -> tuple[tuple[str, object], ...]:
    """Return what a backend launches a route's kernel with, as (name, value) pairs."""
    from ..problem import WEIGHT_GRAD

    if device.backend == CUDA and problem.pass_ == WEIGHT_GRAD:
        from .cuda_weight_grad import parameters
    elif device.backend == CUDA:
        from .cuda_sorted import parameters
    else:
        return ()
    return parameters(route, problem, device)

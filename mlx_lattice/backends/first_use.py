"""What a process does before its first launches: CUDA kernels are compiled early."""

from __future__ import annotations

from ..devices import CUDA, compute_capability
from . import cuda_compile, cuda_geometry
from .cuda_compile import finish, rehearsal
from .registry import serving

__all__ = ["compiles", "finish", "rehearsal", "rehearse_geometry"]


def compiles() -> bool:
    """Return whether CUDA's kernels serve here, and are compiled by this library."""
    return serving() == CUDA and bool(cuda_compile.compiler(compute_capability()))


def rehearse_geometry(dims: int) -> None:
    """Begin to compile what relations in ``dims`` dimensions commonly need, on CUDA."""
    if compiles():
        cuda_geometry.rehearse(dims)

"""What a process does before its first launches: CUDA kernels are compiled early."""

from __future__ import annotations

from ..devices import CUDA, compute_capability
from . import cuda_compile, cuda_geometry
from .cuda_compile import finish, rehearsal
from .registry import serving

__all__ = ["finish", "rehearsal", "rehearse_geometry"]


def rehearse_geometry(dims: int) -> None:
    """Begin to compile what relations in ``dims`` dimensions commonly need, on CUDA."""
    if serving() == CUDA and cuda_compile.compiler(compute_capability()):
        cuda_geometry.rehearse(dims)

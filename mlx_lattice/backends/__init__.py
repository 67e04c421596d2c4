"""The kernels of each backend, and what launches them.

Contractions are planned by the rows of ``routes.table``. All other families of kernels
are registered in ``registry`` when this package is imported.
"""

from __future__ import annotations

from .. import registry
from ..devices import CPU, CUDA, METAL, missing, portable_only
from .cpu import CpuGeometry, CpuNorms, CpuReductions
from .cuda.geometry import CudaGeometry
from .gpu.attention import GpuHeads, GpuPatches
from .gpu.norms import CudaNorms, GpuNorms
from .gpu.optimizers import GpuUpdates
from .gpu.reductions import GpuJoins, GpuPoints, GpuReductions
from .metal.geometry import MetalGeometry
from .mlx import MlxGeometry, MlxReductions

__all__ = ["missing", "portable_only"]

registry.GEOMETRY.update(
    {
        registry.MLX: MlxGeometry(),
        METAL: MetalGeometry(),
        CUDA: CudaGeometry(),
        CPU: CpuGeometry(),
    }
)
registry.REDUCTIONS.update({registry.MLX: MlxReductions(), CPU: CpuReductions()})
registry.NORMS.update({CPU: CpuNorms(), METAL: GpuNorms(METAL), CUDA: CudaNorms()})
for name in (METAL, CUDA):
    registry.REDUCTIONS[name] = GpuReductions(name)
    registry.HEADS[name] = GpuHeads(name)
    registry.POINTS[name] = GpuPoints(name)
    registry.PATCHES[name] = GpuPatches(name)
    registry.UPDATES[name] = GpuUpdates(name)
    registry.JOINS[name] = GpuJoins(name)

"""What the device that MLX runs on now has: geometry, reductions, norms, and others."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..activations import GELU, GELU_TANH, SILU
from ..devices import CPU, CUDA, METAL, current
from ..geometry.protocol import Geometry
from .availability import serves
from .cpu_extension import extension
from .cpu_geometry import CpuGeometry
from .cpu_reductions import CpuNorms, CpuReductions
from .cuda_geometry import CudaGeometry
from .cuda_norms import CudaColumnSums, CudaRowNorms
from .gpu_heads import GpuHeads
from .gpu_joins import GpuJoins
from .gpu_norms import GpuNorms
from .gpu_patches import GpuPatches
from .gpu_points import GpuPoints
from .gpu_reductions import GpuReductions
from .gpu_updates import GpuUpdates
from .metal_geometry import MetalGeometry
from .mlx_geometry import MlxGeometry
from .mlx_reductions import MlxReductions
from .norms_protocol import Norms
from .reductions_protocol import Reductions

MLX = "mlx"  # MLX operations, which run on every device
GEOMETRY: dict[str, Geometry] = {
    MLX: MlxGeometry(),
    METAL: MetalGeometry(),
    CUDA: CudaGeometry(),
    CPU: CpuGeometry(),
}
REDUCTIONS: dict[str, Reductions] = {
    MLX: MlxReductions(),
    METAL: GpuReductions(METAL),
    CUDA: GpuReductions(CUDA),
    CPU: CpuReductions(),
}
# Without kernels, norms are MLX operations.
NORMS: dict[str, Norms] = {
    METAL: GpuNorms(METAL),
    CUDA: GpuNorms(CUDA),
    CPU: CpuNorms(),
}
# Elsewhere MLX's kernel normalises each row, and its activations run.
ROW_NORMS = {CUDA: CudaRowNorms()}
# By kind: ``kernel(x)`` is the activation, ``kernel(x, dy)`` its derivative times dy.
CPU_ACTIVATIONS = {GELU: "gelu", GELU_TANH: "gelu_tanh", SILU: "silu"}
# Elsewhere MLX operations normalise heads, and turn them.
HEADS = {METAL: GpuHeads(METAL), CUDA: GpuHeads(CUDA)}
# Elsewhere MLX operations find the cells of points, and weigh those around them.
POINTS = {METAL: GpuPoints(METAL), CUDA: GpuPoints(CUDA)}
# Elsewhere MLX operations, or the CPU's kernel of attention, lay patches out.
PATCHES = {METAL: GpuPatches(METAL), CUDA: GpuPatches(CUDA)}
# Without kernels, MLX's own optimizers run.
UPDATES = {METAL: GpuUpdates(METAL), CUDA: GpuUpdates(CUDA)}
# Elsewhere the norms' kernels sum columns, or MLX.
COLUMN_SUMS = {CUDA: CudaColumnSums()}
# Elsewhere MLX operations join channels.
JOINS = {METAL: GpuJoins(METAL), CUDA: GpuJoins(CUDA)}


def serving() -> str:
    """Return the backend whose kernels serve now: the device's own, or MLX's."""
    backend = current().backend
    return backend if serves(backend) else MLX


def geometry() -> Geometry:
    """Return the geometry of the device that MLX runs on now."""
    return GEOMETRY[serving()]


def reductions() -> Reductions:
    """Return the reductions of the device that MLX runs on now."""
    return REDUCTIONS[serving()]


def norms() -> Norms | None:
    """Return the norms of the device that MLX runs on now, if it has kernels."""
    return NORMS.get(serving())


def row_norms() -> CudaRowNorms | None:
    """Return what normalises rows in one launch on the device of now, if any does."""
    return ROW_NORMS.get(serving())


def activation(kind: int) -> Callable[..., mx.array] | None:
    """Return the kernel of an activation on the current device, if it has one."""
    name = CPU_ACTIVATIONS.get(kind)
    return getattr(extension, name) if name and serving() == CPU else None


def heads() -> GpuHeads | None:
    """Return what prepares heads for attention on the device of now, if any does."""
    return HEADS.get(serving())


def points() -> GpuPoints | None:
    """Return what finds cells of points on the device of now, if any kernel does."""
    return POINTS.get(serving())


def patches() -> GpuPatches | None:
    """Return what lays filled patches out on the device of now, if a kernel does."""
    return PATCHES.get(serving())


def updates() -> GpuUpdates | None:
    """Return the optimizers' steps of the device that MLX runs on now, if any."""
    return UPDATES.get(serving())


def column_sums() -> CudaColumnSums | None:
    """Return what sums columns alone on the device of now, if any does."""
    return COLUMN_SUMS.get(serving())


def joins() -> GpuJoins | None:
    """Return what joins channels on the device that MLX runs on now, if any does."""
    return JOINS.get(serving())

"""spconv.utils: points to voxels, in the order that points come.

Voxels are numbered as their first points come, and hold the first points that fall into
them, as spconv's generators on the CPU do. Extents are given as x, y, z; voxel indices
come as z, y, x.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext as nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "Point2VoxelCPU1d",
    "Point2VoxelCPU2d",
    "Point2VoxelCPU3d",
    "Point2VoxelCPU4d",
    "VoxelGenerator",
    "VoxelGeneratorV2",
    "nullcontext",
]


class Voxels(NamedTuple):
    """Points by voxel.

    Attributes:
        voxels: (V, P, C): the points of each voxel, zeros behind them.
        indices: (V, D) int32, last axis of the points first.
        counts: (V,) int32: points that each voxel holds.
        voxel_of_point: (N,) int64: the voxel that each point lies in, or -1.
    """

    voxels: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    voxel_of_point: torch.Tensor


class Grid:
    """A grid of voxels over a box.

    Args:
        vsize_xyz: D sizes of a voxel.
        coors_range_xyz: D least and D greatest coordinates.
    """

    def __init__(self, vsize_xyz: Sequence[float], coors_range_xyz: Sequence[float]):
        self.size: np.ndarray = np.array(vsize_xyz, dtype=np.float32)
        self.range: np.ndarray = np.array(coors_range_xyz, dtype=np.float32)
        if len(self.range) != 2 * len(self.size):
            raise ValueError(
                f"coors_range_xyz must have {2 * len(self.size)} values, the least and "
                f"the greatest coordinates; got {len(self.range)}"
            )
        extent = self.range[self.dims :] - self.range[: self.dims]
        self.shape: np.ndarray = np.round(extent / self.size).astype(
            np.int64
        )  # x, y, z

    @property
    def dims(self) -> int:
        """Number of spatial axes."""
        return len(self.size)

    def cells(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (N, D) int64 cells, z first, and whether each lies in the grid."""
        low = torch.from_numpy(self.range[: self.dims]).to(points.device)
        size = torch.from_numpy(self.size).to(points.device)
        cells = torch.floor((points[:, : self.dims] - low) / size)
        extents = torch.from_numpy(self.shape).to(points.device)
        inside = ((cells >= 0) & (cells < extents)).all(dim=1)
        return cells.nan_to_num().clamp(-1, 2**31).long().flip(1), inside

    def voxelize(
        self,
        points: torch.Tensor,
        most_voxels: int,
        most_points: int,
        mean: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Voxels:
        """Put points into voxels; cells are computed in the points' own dtype.

        Args:
            points: (N, C), the first D columns coordinates.
            most_voxels: voxels beyond this many are dropped, with their points.
            most_points: points of a voxel beyond this many are dropped.
            mean: fill the places without a point with the mean of the voxel.
            dtype: of the voxels, by default that of the points.
        """
        cells, inside = self.cells(points)
        steps = torch.ones(self.dims, dtype=torch.int64)
        for axis in reversed(range(self.dims - 1)):
            steps[axis] = steps[axis + 1] * int(self.shape[::-1][axis + 1])
        rows = inside.nonzero().flatten()
        codes = (cells[rows] * steps.to(cells.device)).sum(1)
        known, voxel = torch.unique(codes, return_inverse=True)
        first = torch.full_like(known, len(rows)).scatter_reduce(
            0, voxel, torch.arange(len(rows), device=codes.device), "amin"
        )
        order = torch.argsort(first)
        voxel = torch.argsort(order)[voxel]
        count = min(len(known), most_voxels)
        kept = voxel < count
        rows, voxel = rows[kept], voxel[kept]
        voxel_of_point = torch.full(
            (len(points),), -1, dtype=torch.int64, device=points.device
        )
        voxel_of_point[rows] = voxel
        indices = cells[inside][first[order[:count]]].int()
        # The place of each point in its voxel.
        order = torch.argsort(voxel, stable=True)
        starts = torch.cumsum(torch.bincount(voxel, minlength=count), 0)
        starts = torch.cat([starts.new_zeros(1), starts])
        places = torch.arange(len(order), device=order.device) - starts[voxel[order]]
        fits = places < most_points
        chosen, places = order[fits], places[fits]
        points = points if dtype is None else points.to(dtype)
        voxels = points.new_zeros((count, most_points, points.shape[1]))
        voxels[voxel[chosen], places] = points[rows[chosen]]
        counts = (starts[1:] - starts[:-1]).clamp(max=most_points).int()
        if mean:
            means = voxels.sum(1) / counts[:, None].clamp(min=1)
            place = torch.arange(most_points, device=points.device)
            empty = place >= counts[:, None]
            voxels = torch.where(empty[..., None], means[:, None], voxels)
        return Voxels(voxels, indices, counts, voxel_of_point)


def as_points(points: object) -> torch.Tensor:
    """Return points as a tensor: one of PyTorch, of NumPy, or of cumm."""
    if isinstance(points, torch.Tensor):
        return points.detach()
    if not isinstance(points, np.ndarray) and hasattr(points, "numpy"):
        points = points.numpy()
    return torch.from_numpy(np.ascontiguousarray(points))


class _Point2Voxel:
    """spconv's Point2VoxelCPU: results are tensors, which have ``numpy()``."""

    dims = 3

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
    ):
        self._grid = Grid(vsize_xyz, coors_range_xyz)
        if self._grid.dims != self.dims:
            raise ValueError(
                f"{type(self).__name__} takes {self.dims} sizes of a voxel; got "
                f"{self._grid.dims}"
            )
        self.num_point_features = num_point_features
        self._most = max_num_voxels, max_num_points_per_voxel

    @property
    def grid_size(self) -> list[int]:
        """Cells of the grid, z first."""
        return self._grid.shape[::-1].tolist()

    def point_to_voxel(self, points: object, clear_voxels: bool = True):
        """Return voxels, their indices (z, y, x) and their numbers of points."""
        return tuple(self._voxelize(points, False)[:3])

    def point_to_voxel_empty_mean(self, points: object, clear_voxels: bool = True):
        """Return the same with the mean of a voxel where it has no point."""
        return tuple(self._voxelize(points, True)[:3])

    def _voxelize(self, points: object, mean: bool) -> Voxels:
        points = as_points(points)
        if points.ndim != 2 or points.shape[1] != self.num_point_features:
            raise ValueError(
                f"points must have shape (N, {self.num_point_features}); got "
                f"{tuple(points.shape)}"
            )
        return self._grid.voxelize(points, *self._most, mean, torch.float32)


class Point2VoxelCPU1d(_Point2Voxel):
    """Points of 1 axis to voxels."""

    dims = 1


class Point2VoxelCPU2d(_Point2Voxel):
    """Points of 2 axes to voxels."""

    dims = 2


class Point2VoxelCPU3d(_Point2Voxel):
    """Points of 3 axes to voxels."""


class Point2VoxelCPU4d(_Point2Voxel):
    """Points of 4 axes to voxels."""

    dims = 4


class VoxelGenerator:
    """spconv 1.x's generator, of NumPy's arrays.

    Args:
        voxel_size: sizes of a voxel: x, y, z.
        point_cloud_range: least and greatest x, y, z.
        max_num_points: points of a voxel, at most.
        max_voxels: voxels, at most.
        full_mean: fill the places without a point with the mean of the voxel.
    """

    def __init__(
        self,
        voxel_size: Any,
        point_cloud_range: Any,
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = True,
    ):
        self._grid = Grid(voxel_size, point_cloud_range)
        self.voxel_size: np.ndarray = self._grid.size
        self.point_cloud_range: np.ndarray = self._grid.range
        self.max_num_points_per_voxel = max_num_points
        self.grid_size: np.ndarray = self._grid.shape
        self._max_voxels, self._mean = max_voxels, full_mean

    def _generate(self, points: np.ndarray, max_voxels: int | None) -> Voxels:
        most = max_voxels or self._max_voxels, self.max_num_points_per_voxel
        return self._grid.voxelize(as_points(points), *most, self._mean)

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> Any:
        """Return voxels, their coordinates (z, y, x) and their numbers of points."""
        return tuple(a.numpy() for a in self._generate(points, max_voxels)[:3])


class VoxelGeneratorV2(VoxelGenerator):
    """spconv 1.x's second generator, whose results are a dict."""

    def __init__(
        self,
        voxel_size: Any,
        point_cloud_range: Any,
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
        block_filtering: bool = False,
        **_: object,
    ):
        if block_filtering:
            raise NotImplementedError(
                "VoxelGeneratorV2 has no block_filtering; filter the points by height "
                "before they are put into voxels"
            )
        args = voxel_size, point_cloud_range, max_num_points, max_voxels, full_mean
        super().__init__(*args)

    def generate(
        self, points: np.ndarray, max_voxels: int | None = None
    ) -> dict[str, Any]:
        """Return voxels, coordinates (z, y, x), counts and a mask of the points."""
        voxels, indices, counts, _ = self._generate(points, max_voxels)
        places = torch.arange(voxels.shape[1])
        mask = (places < counts[:, None]).to(voxels.dtype)[..., None]
        return {
            "voxels": voxels.numpy(),
            "coordinates": indices.numpy(),
            "num_points_per_voxel": counts.numpy(),
            "voxel_point_mask": mask.numpy(),
            "voxel_num": len(voxels),
        }

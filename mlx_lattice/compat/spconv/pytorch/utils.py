"""spconv.pytorch.utils: points to voxels, and features back to points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..utils import Grid, as_points

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]


class PointToVoxel:
    """Puts points into voxels, in the order that points come.

    Args:
        vsize_xyz: D sizes of a voxel.
        coors_range_xyz: D least and D greatest coordinates.
        num_point_features: columns of the points.
        max_num_voxels: voxels, at most; later ones are dropped.
        max_num_points_per_voxel: points of a voxel, at most.
        device: device of the points.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device = torch.device("cpu:0"),  # noqa: B008 (spconv's own)
    ):
        self._grid = Grid(vsize_xyz, coors_range_xyz)
        self.ndim: int = self._grid.dims
        self.vsize: list[float] = self._grid.size[::-1].tolist()
        self.grid_size: list[int] = self._grid.shape[::-1].tolist()
        self.device: torch.device = torch.device(device)
        self.num_point_features = num_point_features
        self.max_num_voxels = max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel

    def __call__(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> Any:
        """Return voxels, indices (last axis first) and numbers of points."""
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    def generate_voxel_with_id(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> Any:
        """Return the same, and the voxel of each point, or -1."""
        pc = as_points(pc)
        if pc.device.type != self.device.type:
            raise AssertionError(
                f"points are on {pc.device}, and the generator was made for "
                f"{self.device}; move the points, or make it with device="
            )
        if pc.ndim != 2 or pc.shape[1] != self.num_point_features:
            raise ValueError(
                f"points must have shape (N, {self.num_point_features}); got "
                f"{tuple(pc.shape)}"
            )
        most = self.max_num_voxels, self.max_num_points_per_voxel
        return tuple(self._grid.voxelize(pc, *most, empty_mean, torch.float32))


def gather_features_by_pc_voxel_id(
    seg_res_features: torch.Tensor,
    pc_voxel_id: torch.Tensor,
    invalid_value: float = 0,
) -> torch.Tensor:
    """Return the features of each point's voxel, ``invalid_value`` for id -1."""
    ids = pc_voxel_id.to(seg_res_features.device)
    shape = ids.shape[0], *seg_res_features.shape[1:]
    result = seg_res_features.new_full(shape, invalid_value)
    valid = (ids != -1).nonzero().flatten()
    result[valid] = seg_res_features[ids[valid]]
    return result

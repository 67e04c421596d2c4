"""Voxels of a bounded grid, as OpenPCDet makes them: hard and dynamic.

OpenPCDet's ``transform_points_to_voxels`` with its MeanVFE, and its DynamicMeanVFE.
Cells are counted from the corner of the range. Lattices of detectors have OpenPCDet's
axes, (batch, z, y, x), since its weights do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ...checks import positions_of, real, single, single_or_double, stream_of, whole
from ...coordinates import CoordinateManager
from ...geometry.lattice import true_positions, unique_rows
from ...geometry.points import batch_of, reduce_segments
from ...tensor import SparseTensor
from ..pretrained import attribute, finite_points


class HardVoxels(NamedTuple):
    """Points by voxel, as of OpenPCDet's voxel generator."""

    voxels: mx.array  # (M, max_points, C): points of a voxel in order, then zeros
    coords: mx.array  # (M, 3) int32 (z, y, x), in the order of their first points
    counts: mx.array  # (M,) int32: points of each voxel


@dataclass(frozen=True)
class GridRecipe:
    """From the points of a scan to the tensor that a detector was trained on.

    Attributes:
        voxel_size: extents of a voxel in x, y, z.
        point_range: low x, y, z and high x, y, z; what lies outside is dropped.
        features: what the channels are: "x", "y", "z", then "ones" or names of
            attributes of points, such as "intensity", "elongation" or "timestamp".
        max_points: points of a voxel that count, the first ones; None for all.
        max_voxels: voxels that are made, the first ones by their first points; None
            for all.

    Raises:
        ValueError: sizes are not positive, or the range is empty.
    """

    voxel_size: tuple[float, float, float]
    point_range: tuple[float, float, float, float, float, float]
    features: tuple[str, ...] = ("x", "y", "z", "intensity")
    max_points: int | None = 5
    max_voxels: int | None = 150_000

    def __post_init__(self):
        for name, count in (("voxel_size", 3), ("point_range", 6)):
            value = getattr(self, name)
            if not isinstance(value, Iterable) or len(value := tuple(value)) != count:
                raise ValueError(f"{name} must be {count} numbers; got {value}")
            value = tuple(real(v, name) for v in value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "features", tuple(self.features))
        if min(self.voxel_size) <= 0 or min(self.grid_size) <= 0:
            raise ValueError(
                "voxel_size must be positive and point_range hold a voxel; got "
                f"{self.voxel_size} and {self.point_range}"
            )
        if self.features[:3] != ("x", "y", "z"):
            raise ValueError(
                f"features must begin with x, y and z; got {', '.join(self.features)}"
            )
        for name in ("max_points", "max_voxels"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(value, name, 1))

    @property
    def channels(self) -> int:
        """Channels of the features."""
        return len(self.features)

    @property
    def grid_size(self) -> tuple[int, int, int]:
        """Cells along x, y and z."""
        low, high = self.point_range[:3], self.point_range[3:]
        return tuple(
            round((b - a) / s)
            for a, b, s in zip(low, high, self.voxel_size, strict=True)
        )

    @property
    def spatial_shape(self) -> tuple[int, int, int]:
        """Extents of the lattice: (z + 1, y, x) cells, as OpenPCDet's backbones say."""
        x, y, z = self.grid_size
        return z + 1, y, x

    def __call__(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> SparseTensor:
        """Voxelise a scan; a voxel's features are the mean of its points that count.

        Args:
            points: (P, 3) float, an array of MLX or NumPy.
            attributes: name to values, as of ``io.PointCloud``. Points with values that
                are not finite are left out, with a warning.
            fill: whether to read zeros for a missing attribute.

        Returns:
            A tensor at (batch 0, z, y, x), with a ``spatial_shape``.

        Raises:
            ValueError: an attribute is missing or of another shape.
        """
        points = single_or_double(positions_of(points, "points"))
        names = self.features[3:]
        points, attributes, _ = finite_points(points, attributes or {}, names)
        if points.ndim != 2 or points.shape[1] != 3:
            raise ValueError(
                f"points must have shape (P, 3); got {tuple(points.shape)}"
            )
        count = len(points)
        columns = [
            mx.ones((count, 1))
            if name == "ones"
            else attribute(name, self.features, attributes, count, 1, fill)
            for name in names
        ]
        with stream_of(points):
            points = mx.concatenate([points, *columns], axis=1)
        if self.max_points is None and self.max_voxels is None:
            batch = mx.zeros((len(points),), dtype=mx.int32)
            return dynamic_voxels(points, self.voxel_size, self.point_range, batch)
        hard = hard_voxels(
            points,
            self.voxel_size,
            self.point_range,
            self.max_points or max(1, len(points)),
            self.max_voxels,
        )
        coords = mx.concatenate([mx.zeros_like(hard.coords[:, :1]), hard.coords], 1)
        return _tensor(coords, mean_vfe(hard), self.spatial_shape, 1)


def hard_voxels(
    points: mx.array,
    voxel_size: Sequence[float],
    point_range: Sequence[float],
    max_points: int,
    max_voxels: int | None = None,
) -> HardVoxels:
    """Gather points by voxel, in their order, as spconv's ``Point2VoxelCPU3d`` does.

    A voxel is numbered at its first point. Voxels beyond ``max_voxels``, and points of
    a voxel beyond ``max_points``, are left out.

    Args:
        points: (P, C) float32: x, y, z and other channels; cells of float64 are exact.
        voxel_size, point_range: as of ``GridRecipe``.
        max_points: slots of a voxel.
        max_voxels: by default all.

    Raises:
        ValueError: a shape does not fit, or a number is below 1.
    """
    max_points = whole(max_points, "max_points", 1)
    if max_voxels is not None:
        max_voxels = whole(max_voxels, "max_voxels", 1)
    points, cells, inside = _cells(points, voxel_size, point_range)
    inside_rows = true_positions(inside)
    points, cells = points[inside_rows], cells[inside_rows]
    count, channels = points.shape
    if not count:
        empty = mx.zeros((0, 3), dtype=mx.int32)
        slots = mx.zeros((0, max_points, channels))
        return HardVoxels(slots, empty, mx.zeros((0,), dtype=mx.int32))
    place = mx.arange(count, dtype=mx.int32)
    unique = unique_rows(mx.concatenate([mx.zeros_like(cells[:, :1]), cells], axis=1))
    voxels = len(unique.rows)
    first = mx.full((voxels,), count, dtype=mx.int32)
    first = first.at[unique.inverse].minimum(place)
    # Voxels in the order of their first points, which are all different.
    order = mx.argsort(first)[:max_voxels]
    number = mx.full((voxels,), len(order), dtype=mx.int32)
    number[order] = mx.arange(len(order), dtype=mx.int32)
    numbers = number[unique.inverse]
    # Points by voxel and then by place; the slot is how far the voxel's first one is.
    keys = mx.sort(numbers.astype(mx.int64) * count + place.astype(mx.int64))
    by, at = (keys // count).astype(mx.int32), keys % count
    starts = mx.searchsorted(by, mx.arange(len(order) + 1, dtype=mx.int32))
    starts = starts.astype(mx.int32)
    slot = place - starts[by]
    fits = (by < len(order)) & (slot < max_points)
    # Points without a slot go to an additional one, behind the last.
    last = len(order) * max_points
    target = mx.where(fits, by * max_points + slot, last)
    slots = mx.zeros((last + 1, channels), dtype=points.dtype)
    slots[target] = mx.where(fits[:, None], points[at], 0)
    return HardVoxels(
        slots[:last].reshape(len(order), max_points, channels),
        unique.rows[order][:, 1:],
        mx.minimum(starts[1:] - starts[:-1], max_points),
    )


def mean_vfe(hard: HardVoxels) -> mx.array:
    """Return (M, C): the mean of each voxel's points, as OpenPCDet's MeanVFE."""
    return hard.voxels.sum(axis=1) / mx.maximum(hard.counts, 1)[:, None]


def dynamic_voxels(
    points: mx.array,
    voxel_size: Sequence[float],
    point_range: Sequence[float],
    batch: mx.array,
    *,
    batch_size: int | None = None,
) -> SparseTensor:
    """Return the mean of all points of each voxel, as OpenPCDet's DynamicMeanVFE.

    Args:
        points: (P, C) float32: x, y, z and other channels; cells of float64 are exact.
        voxel_size, point_range: as of ``GridRecipe``.
        batch: (P,) integer batch index of each point.
        batch_size: as for ``SparseTensor``.

    Returns:
        A tensor at (batch, z, y, x), rows sorted by (batch, x, y, z), as OpenPCDet's.

    Raises:
        ValueError: a shape does not fit, or the batch indices are not integers.
    """
    points, cells, inside = _cells(points, voxel_size, point_range)
    batch, inside_rows = batch_of(batch, len(inside)), true_positions(inside)
    points, batch = points[inside_rows], batch[inside_rows]
    rows = mx.concatenate([batch[:, None], cells[inside_rows][:, ::-1]], axis=1)
    unique = unique_rows(rows)
    feats = points
    if len(rows):
        feats = reduce_segments(points, unique.inverse, len(unique.rows), "mean")
    coords = unique.rows[:, mx.array([0, 3, 2, 1])]
    x, y, z = GridRecipe(voxel_size, point_range).grid_size
    return _tensor(coords, feats, (z + 1, y, x), batch_size)


def _tensor(coords, feats, shape, batch_size) -> SparseTensor:
    manager = CoordinateManager()
    key = manager.insert(coords, spatial_shape=shape, batch_size=batch_size)
    return SparseTensor.of(manager, key, feats)


def _cells(points, voxel_size, point_range) -> tuple[mx.array, mx.array, mx.array]:
    """Return float32 points, (P, 3) int32 cells (z, y, x), and whether in the range."""
    recipe = GridRecipe(voxel_size, point_range)
    points = positions_of(points, "points")
    if points.ndim != 2 or points.shape[1] < 3:
        raise ValueError(
            f"points must have shape (P, 3 or more); got {tuple(points.shape)}"
        )
    wide = single_or_double(points)
    with stream_of(wide):
        low, size, high = (
            mx.array(v, dtype=wide.dtype)
            for v in (recipe.point_range[:3], recipe.voxel_size, recipe.grid_size)
        )
        at = mx.floor((wide[:, :3] - low) / size)
        inside = mx.all((at >= 0) & (at < high), axis=1)  # False for NaN
        cells = mx.where(inside[:, None], at, 0).astype(mx.int32)
    points = single(points) if points.dtype == mx.float64 else points
    return points, cells[:, ::-1], inside

"""VoxelRecipe: how a net's voxels were made of points, to make them so again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..arrays import (
    array_of,
    positions_of,
    single,
    single_or_double,
    stream_of,
)
from ..checks import one_of, real
from ..coordinates import CoordinateManager
from ..geometry import sync
from ..geometry.voxelize import REDUCTIONS, voxelize
from ..tensor import SparseTensor
from .attributes import MissingAttribute, finite_points

# Features of a point and their channels; those of ATTRIBUTES come from the file.
FEATURES = {
    "coordinates": 3,
    "colours": 3,
    "normals": 3,
    "intensity": 1,
    "height": 1,
    "ones": 1,
}
ATTRIBUTES = ("colours", "normals", "intensity")
ROUNDINGS = ("floor", "nearest")


class Voxels(NamedTuple):
    """Points as a tensor, and the row that each point is in."""

    x: SparseTensor
    rows: mx.array  # (P,) int32; -1 for a point that was left out

    @property
    def dropped(self) -> int:
        """The number of points left out, because a value of theirs is not finite."""
        return sync.read((self.rows < 0).sum())[0] if self.rows.size else 0


@dataclass(frozen=True)
class VoxelRecipe:
    """From the points of one scan to the tensor that a net was trained on.

    Attributes:
        voxel_size: edge of a voxel, in the unit of the points.
        features: what the channels are, in their order: "coordinates" (3), "colours"
            (3), "normals" (3), "intensity" (1), "height" above the lowest point (1)
            and "ones" (1).
        reduce: what becomes of points of one voxel: "first", "mean", "sum" or "max".
        centred: whether points are first moved so that their box is centred on 0 in
            all axes but the last, in which it begins at 0.
        from_zero: whether voxels are counted from the lowest one of each axis. What
            a strided convolution joins depends on it.
        rounding: "floor", or "nearest" for the voxel with the nearest corner.
        colour_range: what black and white become.

    Raises:
        TypeError: a size or a colour is no number.
        ValueError: a value is none of these.
    """

    voxel_size: float
    features: tuple[str, ...] = ("ones",)
    reduce: str = "first"
    centred: bool = False
    from_zero: bool = False
    rounding: str = "floor"
    colour_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self):
        object.__setattr__(self, "features", tuple(self.features))
        object.__setattr__(self, "voxel_size", real(self.voxel_size, "voxel_size"))
        if self.voxel_size <= 0:
            raise ValueError(f"voxel_size must be positive; got {self.voxel_size}")
        if not self.features or not set(self.features) <= set(FEATURES):
            raise ValueError(
                f"features must be of {', '.join(FEATURES)}; got {self.features}"
            )
        for name, value, known in (
            ("reduce", self.reduce, REDUCTIONS),
            ("rounding", self.rounding, ROUNDINGS),
        ):
            one_of(value, known, name)
        limits = tuple(real(v, "colour_range") for v in self.colour_range)
        if len(limits) != 2:
            raise ValueError(f"colour_range must be two numbers; got {limits}")
        object.__setattr__(self, "colour_range", limits)

    @property
    def channels(self) -> int:
        """Channels of the features."""
        return sum(FEATURES[name] for name in self.features)

    def __call__(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> Voxels:
        """Voxelise a scan.

        Args:
            points: (P, 3) float, an array of MLX or NumPy; none at all is legal.
                Cells of float64 are exact, map coordinates' too; features are float32.
            attributes: what is known of each point, as of ``io.PointCloud``:
                "colours" (P, 3), "normals" (P, 3), "intensity" (P,). Colours are of
                256 values, of 65 536 where uint16 ones reach beyond 255, or between 0
                and 1.
            fill: whether an attribute that is not there is read as zeros.

        Returns:
            The tensor, whose rows are sorted, and the row of each point. Points with a
            coordinate or attribute that is not finite are left out, with a warning;
            their row is -1, and ``dropped`` counts them.

        Raises:
            ValueError: an attribute is missing or of another shape, or the points are
                none that ``SparseTensor.from_points`` takes.
        """
        points = positions_of(points, "points")
        points = single_or_double(points)
        names = [name for name in self.features if name in ATTRIBUTES]
        count = points.shape[0]
        points, attributes, kept = finite_points(points, attributes or {}, names)
        if points.ndim == 2 and points.shape[0] and self.centred:
            with stream_of(points):
                low, high = points.min(axis=0), points.max(axis=0)
                middle = (low + high) / 2
                points = points - mx.concatenate([middle[:-1], low[-1:]])
        feats = mx.concatenate(
            [self._feature(name, points, attributes, fill) for name in self.features],
            axis=1,
        )
        size = self.voxel_size
        if self.rounding == "nearest":  # a half to the even voxel, as NumPy's does
            with stream_of(points):
                points = mx.round(points / mx.array(size, dtype=points.dtype))
            size = 1.0
        coords, feats, rows = voxelize(points, feats, size, reduce=self.reduce)
        if self.from_zero and coords.shape[0]:
            low = coords.min(axis=0)
            coords = coords - mx.concatenate([mx.zeros_like(low[:1]), low[1:]])
        manager = CoordinateManager()
        key = manager.insert(coords, trusted=True)
        if kept is not None:
            placed = mx.full((count,), -1, dtype=rows.dtype)
            placed[kept] = rows
            rows = placed
        return Voxels(SparseTensor.of(manager, key, feats), rows)

    def _feature(self, name, points, attributes, fill) -> mx.array:
        """Return (P, channels) float32 of one feature."""
        count, channels = points.shape[0], FEATURES[name]
        if name == "coordinates":
            return single(points)
        if name == "ones":
            return mx.ones((count, 1))
        if name == "height":
            with stream_of(points):
                height = points[:, 2:]
                return single(height - height.min() if count else height)
        if attributes.get(name) is None:
            if fill:
                return mx.zeros((count, channels))
            raise MissingAttribute(name, self.features, attributes)
        given = array_of(attributes[name], name)
        flat = channels == 1 and given.size == count  # (P,) is one column
        if given.shape != (count, channels) and not flat:
            raise ValueError(
                f"{name} must have shape ({count}, {channels}), one row a point; got "
                f"{tuple(given.shape)}"
            )
        value = given.astype(mx.float32).reshape(count, channels)
        if name == "colours" and count:
            black, white = self.colour_range
            value = value / white_of(given) * (white - black) + black
        return value


def white_of(colours: mx.array) -> float:
    """Return the value of white in colours of a file."""
    if colours.dtype == mx.uint8:
        return 255.0
    highest = float(sync.read(colours.max())[0])
    if mx.issubdtype(colours.dtype, mx.floating) and highest <= 1:
        return 1.0
    return 255.0 if highest <= 255 else 65535.0

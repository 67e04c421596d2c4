"""Voxels of points as in a net's training: ``VoxelRecipe``, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from .. import sync
from ..checks import (
    LatticeWarning,
    array_of,
    one_of,
    positions_of,
    real,
    single,
    single_or_double,
    stream_of,
)
from ..coordinates import CoordinateManager
from ..geometry.lattice import true_positions
from ..geometry.points import REDUCTIONS, cells_of, voxelize
from ..tensor import SparseTensor

__all__ = ["VoxelRecipe", "Voxels"]

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
# Voxels along an edge of the coarsest cells: those of four strided convolutions.
COARSEST = 16


class Voxels(NamedTuple):
    """Points as a tensor, with the row of each point.

    Examples:
        >>> points = mx.array([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.2, 0.1, 0.1]])
        >>> voxels = models.VoxelRecipe(0.5)(points)
        >>> voxels.x.shape, voxels.rows.tolist()
        ((2, 1), [0, 1, 0])
    """

    x: SparseTensor
    rows: mx.array  # (P,) int32; -1 for a point that was left out

    @property
    def dropped(self) -> int:
        """The number of points left out because one of their values is not finite."""
        return sync.read((self.rows < 0).sum())[0] if self.rows.size else 0


@dataclass(frozen=True)
class VoxelRecipe:
    """Make voxels from the points of a scan, as for a net's training.

    Attributes:
        voxel_size: edge of a voxel, in the unit of the points.
        features: the channels in their order: "coordinates" (3), "colours" (3),
            "normals" (3), "intensity" (1), "height" above the lowest point (1), "ones"
            (1).
        reduce: how points of one voxel are merged: "first", "mean", "sum" or "max".
        centred: whether the points are first moved: their box is centred on 0 in all
            axes but the last, where it begins at 0. Voxels then do not depend on the
            origin of a scan.
        from_zero: whether voxels count from the lowest voxel of each axis. The cells of
            strided convolutions depend on it.
        rounding: "floor", or "nearest" for the voxel with the nearest corner.
        colour_range: the values of black and white in the channels.

    Raises:
        TypeError: a size or a colour is not a number.
        ValueError: a value is not valid.

    Examples:
        >>> points = mx.array([[0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.2, 0.1, 0.1]])
        >>> recipe = models.VoxelRecipe(0.5, ("coordinates", "ones"), reduce="mean")
        >>> x, rows = recipe(points)
        >>> x.shape, rows.tolist()  # two voxels, and the voxel of each point
        ((2, 4), [0, 1, 0])
    """

    voxel_size: float
    features: tuple[str, ...] = ("ones",)
    reduce: str = "first"
    centred: bool = False
    from_zero: bool = False
    rounding: str = "floor"
    colour_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", names_of(self.features, "features"))
        object.__setattr__(self, "voxel_size", real(self.voxel_size, "voxel_size"))
        if self.voxel_size <= 0:
            raise ValueError(f"voxel_size must be positive; got {self.voxel_size}")
        if not self.features or not set(self.features) <= set(FEATURES):
            raise ValueError(
                f"features must be names of {', '.join(FEATURES)}; got {self.features}"
            )
        one_of(self.reduce, REDUCTIONS, "reduce")
        one_of(self.rounding, ROUNDINGS, "rounding")
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
        box: Any = None,
    ) -> Voxels:
        """Voxelise a scan.

        Args:
            points: (P, 3) float, an array of MLX or NumPy; no points are legal. Cells
                of float64 points are exact; features are float32.
            attributes: name to values, as of ``io.PointCloud``: "colours" (P, 3),
                "normals" (P, 3), "intensity" (P,). White is 1 in floats up to 1, 65 535
                if a value is above 255, else 255.
            fill: whether to read zeros for a missing attribute.
            box: (2, D) lowest and highest corner of a whole scan, if the points are a
                part of it. Their voxels, and the cells of strided convolutions up to
                16, are then the whole scan's. Features are made as for a scan of its
                own.

        Returns:
            The tensor, whose rows are sorted, and the row of each point. Points with a
            coordinate or attribute that is not finite are left out, with a warning;
            their row is -1, and ``dropped`` counts them.

        Raises:
            ValueError: an attribute is missing or of another shape, or the points are
                not valid for ``SparseTensor.from_points``.
        """
        points = single_or_double(positions_of(points, "points"))
        names = [name for name in self.features if name in ATTRIBUTES]
        count = points.shape[0]
        points, attributes, positions = finite_points(points, attributes or {}, names)
        with stream_of(points):
            corners = None if box is None else mx.array(box, dtype=points.dtype)
            places = points
            if points.ndim == 2 and points.shape[0] and self.centred:
                middle = _middle(points if corners is None else corners)
                places = points - middle
                corners = None if corners is None else corners - middle
                points = points - _middle(points)
        feats = mx.concatenate(
            [self._feature(name, points, attributes, fill) for name in self.features],
            axis=1,
        )
        size = self.voxel_size
        if self.rounding == "nearest":  # a half to the even voxel, as NumPy's does
            with stream_of(points):
                places = mx.round(places / mx.array(size, dtype=points.dtype))
                if corners is not None:
                    corners = mx.round(corners / mx.array(size, dtype=points.dtype))
            size = 1.0
        coords, feats, rows = voxelize(places, feats, size, reduce=self.reduce)
        if self.from_zero and coords.shape[0]:
            low = coords.min(axis=0)[1:]
            if corners is not None:
                lowest = cells_of(corners[:1], size=(size,) * low.size)[0]
                low = lowest + (low - lowest) // COARSEST * COARSEST
            coords = coords - mx.concatenate([mx.zeros((1,), dtype=low.dtype), low])
        manager = CoordinateManager()
        key = manager.insert(coords, trusted=True)
        if positions is not None:
            placed = mx.full((count,), -1, dtype=rows.dtype)
            placed[positions] = rows
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
        value = attribute(name, self.features, attributes, count, channels, fill)
        if name == "colours" and count and attributes.get(name) is not None:
            black, white = self.colour_range
            colours = array_of(attributes[name], name)
            value = value / white_of(colours) * (white - black) + black
        return value


def names_of(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return names as a tuple; raise a TypeError for one string."""
    if isinstance(names, str):
        raise TypeError(f'{what} must be a tuple of names, ("{names}",); got a string')
    return tuple(names)


def _middle(points: mx.array) -> mx.array:
    """Return what ``centred`` takes from points: their box's middle, and its lowest."""
    low, high = points.min(axis=0), points.max(axis=0)
    return mx.concatenate([((low + high) / 2)[:-1], low[-1:]])


def white_of(colours: mx.array) -> float:
    """Return the value of white in colours of a file."""
    if colours.dtype == mx.uint8:
        return 255.0
    highest = float(sync.read(colours.max())[0])
    if mx.issubdtype(colours.dtype, mx.floating) and highest <= 1:
        return 1.0
    return 255.0 if highest <= 255 else 65535.0


# Points and scores that a net cannot take


def attribute(
    name: str,
    features: Sequence[str],
    attributes: Mapping[str, Any],
    count: int,
    channels: int,
    fill: bool,
) -> mx.array:
    """Return an attribute as (count, channels) float32; with ``fill`` also zeros."""
    if attributes.get(name) is None:
        if fill:
            return mx.zeros((count, channels))
        names = ", ".join(attributes) or "no attributes"
        raise ValueError(
            f"the net reads {', '.join(features)}, and these points have no {name} "
            f"({names}): give the attribute, or pass fill=True (--fill of a command) "
            "to read zeros"
        )
    values = array_of(attributes[name], name)
    flat = channels == 1 and values.size == count  # (P,) is one column
    if values.shape != (count, channels) and not flat:
        raise ValueError(
            f"{name} must have shape ({count}, {channels}), one row a point; got "
            f"{tuple(values.shape)}"
        )
    return single(values).reshape(count, channels)


def finite_points(
    points: mx.array, attributes: Mapping[str, Any], names: Iterable[str]
) -> tuple[mx.array, Mapping[str, Any], mx.array | None]:
    """Leave out points with values that are not finite in float32, with a warning."""
    count = points.shape[0] if points.ndim == 2 else 0
    if not count:
        return points, attributes, None
    with stream_of(points):
        finite = {"coordinates": mx.isfinite(points).all(axis=1)}
    columns = {}
    for name in names:
        if attributes.get(name) is None:
            continue
        value = array_of(attributes[name], name)
        if value.size and value.size % count == 0:  # the recipe refuses other sizes
            with stream_of(value):
                columns[name] = value.reshape(count, -1)
            finite[name] = mx.isfinite(single(columns[name])).all(axis=1)
    bad = sync.read(*(mx.logical_not(mask).any() for mask in finite.values()))
    if not any(bad):
        return points, attributes, None
    positions = true_positions(mx.stack([*finite.values()]).all(axis=0))
    wrong = [name for name, is_bad in zip(finite, bad, strict=True) if is_bad]
    warnings.warn(
        f"{count - len(positions):,} of {count:,} points left out: not finite in "
        f"{' and '.join(wrong)}",
        LatticeWarning,
        stacklevel=3,
    )
    for name, value in columns.items():
        with stream_of(value):
            columns[name] = value[positions]
    with stream_of(points):
        return points[positions], {**attributes, **columns}, positions


def check_scores(*scores: mx.array) -> None:
    """Raise a ValueError if scores of a net are NaN. Waits for the device."""
    if any(sync.read(*(mx.isnan(each).any() for each in scores))):
        raise ValueError(
            "the net's scores are NaN: its weights or the features hold NaN or "
            "infinity, or half precision overflows; try net.set_dtype(mx.float32)"
        )


@contextmanager
def of_scan(scan: object) -> Iterator[None]:
    """Name the scan in the errors of its points."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{scan}: {error}") from None

"""CoordinateKey and CoordinateSet: coordinate rows, checked, with their look-up."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import mlx.core as mx

from . import builders, geometry
from .geometry import Bounds

Index = geometry.RowIndex | builders.HashIndex


@dataclass(frozen=True)
class CoordinateKey:
    """Names one coordinate set of a manager.

    Attributes:
        stride: the size of its lattice cell on each axis, in cells of the first
            lattice; a fraction where a generative convolution refined it.
        serial: distinguishes sets of equal stride; never reused in one process.
    """

    stride: tuple
    serial: int

    def __repr__(self) -> str:
        """Return ``#3 at stride 2``."""
        same = len(set(self.stride)) == 1
        stride = self.stride[0] if same else tuple(map(str, self.stride))
        return f"#{self.serial} at stride {stride}"


class CoordinateSet:
    """One set of coordinate rows and what is known of it.

    Args:
        coords: (N, 1 + D) int32.
        stride: the size of its lattice cell on each axis.
        spatial_shape: extents of a dense grid from 0, or None.
        batch_size: number of batch elements, or None for the greatest index + 1.
        trusted: whether the library made the rows, so they are sorted and unique.
    """

    def __init__(self, coords, stride, spatial_shape, batch_size, trusted):
        self.coords, self.stride = coords, stride
        self.spatial_shape, self.trusted = spatial_shape, trusted
        self.declared_batch_size = batch_size
        self._bounds: Bounds | None = None
        self._index: Index | None = None

    def __len__(self) -> int:
        return self.coords.shape[0]

    @property
    def bounds(self) -> Bounds:
        """Least and greatest value of every column; read from the device once."""
        if self._bounds is None:
            self._bounds = geometry.bounds_of(self.coords)
        return self._bounds

    @property
    def batch_size(self) -> int:
        """Number of batch elements, empty ones included where they were declared."""
        if self.declared_batch_size is not None:
            return self.declared_batch_size
        return self.bounds[1][0] + 1 if len(self) else 0

    @property
    def index(self) -> Index:
        """The look-up of its rows. Checks range and uniqueness the first time.

        Raises:
            ValueError: a batch index is out of range, or a row comes twice.
        """
        if self._index is None:
            self._check_range()
            index = builders.index(self.coords, self.bounds)
            pair = None if self.trusted else index.first_duplicate()
            if pair is not None:
                row = tuple(self.coords[pair[1]].tolist())
                raise ValueError(
                    f"coordinates must be unique; rows {pair[0]} and {pair[1]} are "
                    f"both {row}. Build the tensor with SparseTensor.from_points, "
                    "which merges points of one voxel, or drop the repeats"
                )
            self._index = index
        return self._index

    def _check_range(self) -> None:
        if not len(self):
            return
        low, high = self.bounds
        if low[0] < 0:
            raise ValueError(
                f"batch indices (column 0) must be 0 or more; got {low[0]} to {high[0]}"
            )
        declared = self.declared_batch_size
        if declared is not None and high[0] >= declared:
            raise ValueError(
                f"batch indices (column 0) must be below batch_size {declared}; got "
                f"{low[0]} to {high[0]}"
            )
        if self.spatial_shape is None:
            return
        for axis, extent in enumerate(self.spatial_shape):
            if low[1 + axis] < 0 or high[1 + axis] >= extent:
                raise ValueError(
                    f"coordinates of axis {axis} must lie in [0, {extent}), the "
                    f"spatial_shape; got {low[1 + axis]} to {high[1 + axis]}"
                )


def check_coords(coords) -> mx.array:
    """Return coordinates as (N, 1 + D) int32, or raise with what was wrong."""
    if not isinstance(coords, mx.array):
        coords = mx.array(coords)
        if coords.size == 0 and coords.ndim == 2:
            coords = coords.astype(mx.int32)
    if coords.ndim != 2 or not 2 <= coords.shape[1] <= 5:
        raise ValueError(
            "coords must have shape (N, 1 + D): a batch index and 1 to 4 spatial "
            f"coordinates a row; got shape {tuple(coords.shape)}"
        )
    if not mx.issubdtype(coords.dtype, mx.integer):
        raise ValueError(
            f"coords must be int32; got {coords.dtype}. Points in metres become "
            "voxels through SparseTensor.from_points"
        )
    if coords.dtype in (mx.int64, mx.uint32, mx.uint64):
        return geometry.as_int32(coords, "coords")
    # An array that is right already keeps its identity: managers find sets by it.
    return coords if coords.dtype == mx.int32 else coords.astype(mx.int32)


def exact_ratio(a, b):
    """Return ``a / b`` as an int where it is one, else as a Fraction."""
    quotient = Fraction(a) / Fraction(b)
    return int(quotient) if quotient.denominator == 1 else quotient

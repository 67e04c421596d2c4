"""Features of a tensor at continuous points, and of voxels at the points they hold."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from .. import devices, registry, sync
from ..checks import (
    INT32_LIMIT,
    array_of,
    positions_of,
    single,
    single_or_double,
    stream_of,
)
from ..coordinate_set import CoordinateSet, OfPairs, check_coords
from ..geometry.lattice import bounds_of, floor_divide
from ..geometry.points import (
    NO_CELL,
    Numbers,
    cells_of,
    corner_weights,
    corners_of,
    in_cells,
)
from ..geometry.tables import BoxedRows
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import gathered, weighted
from ..tensor import SparseTensor, expect_tensor, features_of
from .convolution import Coordinates, finer_key

__all__ = ["devoxelize", "grid_sample_3d", "interpolate"]


MODES = ("linear", "nearest")
FRACTIONAL = (
    "column 0 of {} must be a whole number, the batch index; some are not: put a "
    "column of zeros before the positions"
)
_blends = OfPairs()  # of cells and the finer rows, by steps and how they are weighed


def interpolate(
    x: SparseTensor,
    points: mx.array,
    *,
    mode: str = "linear",
    renormalise: bool = False,
) -> mx.array:
    """Interpolate features at points of the lattice.

    Values sit at integer coordinates, as in MinkowskiEngine; subtract 0.5 from the
    points where they should sit at the centres of cells. Differentiable in the
    features and, for "linear", in the points.

    Args:
        x: tensor of 1 to 4 spatial axes.
        points: (Q, 1 + D) rows (batch, x, y, ...), in cells of the tensor's own
            lattice. float32 holds cells up to 2^24; integers, and float64 of NumPy or
            of a list, are exact.
        mode: "linear" weighs the 2^D cells around a point; "nearest" takes the cell
            ``floor(point + 0.5)``.
        renormalise: divide by the weight of the cells that are active, instead of
            counting the others as zeros.

    Returns:
        (Q, C) in the features' dtype, added in float32; 0 where no cell is active.

    Raises:
        ValueError: shapes or modes do not fit, a batch index is not whole, or a point
            is not finite or beyond int32.
    """
    expect_tensor(x)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}; got {mode!r}")
    points = positions_of(points, "points")
    if points.ndim != 2 or points.shape[1] != 1 + x.dims:
        raise ValueError(
            f"points must have shape (Q, {1 + x.dims}): a batch index and {x.dims} "
            f"coordinates a row; got {tuple(points.shape)}"
        )
    coordinate_set = x.coordinate_set
    if mx.issubdtype(points.dtype, mx.integer):  # on a cell, which alone has a weight
        rows = coordinate_set.index.find(check_coords(points))
        return gathered(x.feats, rows[:, None])
    points = single_or_double(points)
    if mode == "nearest":
        cells = _checked(points, (0.0, *(-0.5,) * x.dims)).coords
        return gathered(x.feats, coordinate_set.index.find(cells)[:, None])
    cells = _checked(points)
    places = _around(coordinate_set, cells)
    if points.dtype == mx.float64:  # how far beyond its cell float32 does hold
        with stream_of(points):
            beyond = single((points - mx.floor(points))[:, 1:])
        weights = corner_weights(beyond, None, places, renormalise)
    else:
        weights = corner_weights(points, cells.coords, places, renormalise)
    return weighted(x.feats, weights, places)


def _checked(points: mx.array, origin: Numbers = None) -> BoxedRows:
    """Return the cells of points; raise if one is wrong. Reads whether one is."""
    cells = cells_of(points, origin=origin)
    if not cells.size:
        return BoxedRows(cells, None)
    with stream_of(points):
        batch = mx.stop_gradient(points[:, 0])
        is_whole = mx.all(batch == mx.floor(batch))
    missing, is_whole = sync.read((cells == NO_CELL).any(), is_whole)
    if missing:
        with stream_of(points):
            low, high = bounds_of(mx.floor(in_cells(points, origin, None)))
        if not all(-INT32_LIMIT <= v < INT32_LIMIT for v in (*low, *high)):
            raise ValueError(
                f"points must be finite and within int32; got cells {low} to {high}"
            )
    if not is_whole:
        raise ValueError(FRACTIONAL.format("points"))
    return BoxedRows(cells, None)


def _around(coordinate_set: CoordinateSet, cells: BoxedRows) -> mx.array:
    """Return (Q, 2^D) int32: the rows of the cells from each of ``cells`` on, or -1."""
    dims = cells.coords.shape[1] - 1
    return coordinate_set.index.table(cells, corners_of(dims), (1,) * dims)


def upsample_linear(
    x: SparseTensor,
    scale: IntOrTuple = 2,
    coordinates: Coordinates = None,
    *,
    renormalise: bool = True,
) -> SparseTensor:
    """Interpolate each finer row between the cells around it.

    Values sit at the centres of cells: fine row f lies at ``(f + 0.5) / scale - 0.5``.
    Where all cells of a grid are active that is PyTorch's trilinear interpolation
    without aligned corners.

    Args:
        x: input.
        scale: fine cells in a coarse one, int or one per axis.
        coordinates: the finer rows; by default the set that an earlier strided
            pooling or convolution consumed.
        renormalise: divide by the weight of the cells that are active, instead of
            counting the others as zeros.

    Returns:
        Features on exactly those rows, added in float32; 0 where no cell is active.

    Raises:
        ValueError: dimensions do not fit, or no target is known.
    """
    expect_tensor(x)
    steps = per_axis(scale, x.dims, "scale")
    key = finer_key(x, coordinates, steps)
    coarse, fine = x.coordinate_set, x.manager[key]
    cached, key_of_blend = _blends.of(coarse, fine), (steps, renormalise)
    if key_of_blend not in cached:
        cells, beyond = _between(fine, steps)
        places = _around(coarse, cells)
        weights = corner_weights(beyond, None, places, renormalise)
        # Of two cells an axis, those of one reach as far beyond it as it is wide.
        most = prod(2 * s for s in steps)
        weights, places = sync.complete((weights, places))
        cached[key_of_blend] = Blend(weights, places, len(coarse), most)
    return SparseTensor.of(x.manager, key, cached[key_of_blend](x.feats))


class Blend:
    """Weighted sums of rows by a (Q, K) table, with each at most ``most`` times."""

    def __init__(
        self, weights: mx.array, places: mx.array, rows: int, most: int | None = None
    ):
        self.weights, self.places, self._order = weights, places, None
        self._named = rows, most
        sync.start((weights, places))

    def __call__(self, feats: mx.array) -> mx.array:
        """Return the sums of (rows, C) features."""
        return weighted(feats, self.weights, self.places, self.order)

    def order(self) -> tuple[mx.array, ...]:
        """Return ``Reductions.order`` of the places."""
        if self._order is None:
            order = registry.reductions().order(self.places, *self._named)
            self._order = sync.complete(order)
        return self._order


def blend_at(
    x: SparseTensor, points: mx.array, cells: mx.array, size: tuple[int, ...]
) -> Blend:
    """Return ``interpolate(renormalise=True)`` at (P, D) points in cells of stride 1.

    Nothing is read. ``cells`` are theirs in the tensor's lattice, of stride ``size``.
    """
    coordinate_set = x.coordinate_set
    places = _around(coordinate_set, BoxedRows(cells, None))
    return Blend(
        corner_weights(points, cells, places, True, size), places, len(coordinate_set)
    )


def _between(fine: CoordinateSet, steps: tuple[int, ...]) -> tuple[BoxedRows, mx.array]:
    """Return the lowest cell around each fine row, and how far beyond it that lies."""
    columns, parts = [fine.coords[:, 0]], []
    low, high = ([bound[0]] for bound in fine.box)
    for axis, step in enumerate(steps, 1):
        at = fine.coords[:, axis]
        cell = floor_divide(at, step)
        # Twice the steps beyond the middle of the cell: exact in integers.
        beyond = 2 * (at - cell * step) + 1 - step
        below = beyond < 0
        columns.append(cell - below.astype(mx.int32))
        parts.append(beyond.astype(mx.float32) / (2 * step) + below)
        low.append(fine.box[0][axis] // step - 1)
        high.append(fine.box[1][axis] // step)
    cells = BoxedRows(mx.stack(columns, axis=1), (tuple(low), tuple(high)))
    return cells, mx.stack(parts, axis=1)


def devoxelize(x: SparseTensor | mx.array, inverse: mx.array) -> mx.array:
    """Give each point the features of the voxel it went to.

    Args:
        x: tensor, or its (N, C) features.
        inverse: (P,) integers: the row of each point's voxel, as ``voxelize`` returns
            it, or -1.

    Returns:
        (P, C) in the features' dtype; 0 where ``inverse`` is -1.

    Raises:
        ValueError: ``inverse`` is not a vector of integers.
        RuntimeError: it names a row that is not there, on the CPU with the compiled
            extension when it is computed; elsewhere such a point has zeros.
    """
    feats, inverse = features_of(x), array_of(inverse, "inverse")
    if inverse.ndim != 1 or not mx.issubdtype(inverse.dtype, mx.integer):
        raise ValueError(
            f"inverse must be (P,) integers, one a point; got {tuple(inverse.shape)} "
            f"of {inverse.dtype}"
        )
    if feats.ndim != 2:
        raise ValueError(f"features must have shape (N, C); got {tuple(feats.shape)}")
    n = len(feats)
    if inverse.dtype != mx.int32:
        inverse = inverse.astype(mx.int64)
    # What is no row is no place of memory either: kernels of the CPU say so when it is
    # computed, those of GPUs could not.
    if devices.current().backend == devices.CPU:
        rows = mx.where(inverse < n, mx.maximum(inverse, -1), n)
    else:
        unsigned = mx.uint32 if inverse.dtype == mx.int32 else mx.uint64
        rows = mx.where(inverse.view(unsigned) < n, inverse, -1)
    rows = rows.astype(mx.int32)
    return gathered(feats, rows[:, None])


GRID_MODES = ("trilinear", "nearest")
UNITS = ("voxel", "normalised")


def grid_sample_3d(
    x: SparseTensor,
    points: mx.array,
    *,
    mode: str = "trilinear",
    units: str = "voxel",
    align_corners: bool = False,
    renormalise: bool = False,
) -> mx.array:
    """Sample a tensor at a grid of points, as PyTorch's ``grid_sample`` does.

    The last axis of ``points`` goes with the tensor's axes in their own order (that of
    PyTorch counts them backwards). What lies outside, or is not active, is 0.
    Differentiable in the features and, for "trilinear", in the points.

    Args:
        x: tensor of 3 spatial axes.
        points: (B, ..., 3); the first axis is the batch element. Integers, and
            float64 of NumPy or of a list, are exact; float32 up to 2^24.
        mode: "trilinear", or "nearest"; half-way points go up.
        units: "voxel": cell i spans [i, i + 1) and its value sits at i + 0.5, as in
            FlexGEMM; "normalised": -1 to 1 over the tensor's ``spatial_shape``.
        align_corners: whether -1 and 1 are the centres of the outermost cells rather
            than their outer faces; for "normalised".
        renormalise: divide by the weight of the active cells, see ``interpolate``.

    Returns:
        (B, ..., C) in the features' dtype, added in float32.

    Raises:
        ValueError: shapes, mode or units do not fit, "normalised" without a
            ``spatial_shape``, or a point is not finite or beyond int32.
    """
    expect_tensor(x)
    if x.dims != 3:
        raise ValueError(f"grid_sample_3d got a tensor with {x.dims} spatial axes")
    if mode not in GRID_MODES:
        raise ValueError(f"mode must be one of {GRID_MODES}; got {mode!r}")
    if units not in UNITS:
        raise ValueError(f"units must be one of {UNITS}; got {units!r}")
    points = positions_of(points, "points")
    if points.ndim < 2 or points.shape[-1] != 3:
        raise ValueError(
            f"points must have shape (B, ..., 3); got {tuple(points.shape)}"
        )
    if points.ndim == 2 and len(points) > max(1, x.batch_size):
        raise ValueError(
            f"points must have shape (B, ..., 3), the first axis the batch element; "
            f"got {tuple(points.shape)}, and x has {x.batch_size}: points of one "
            "element are points[None]"
        )
    if units == "normalised" and x.spatial_shape is None:
        raise ValueError(
            "normalised points need a tensor with a spatial_shape; give it one, or use "
            'units="voxel"'
        )
    if mx.issubdtype(points.dtype, mx.integer):  # float64 holds all of int32
        with mx.stream(mx.cpu):
            points = points.astype(mx.float64)
    at = single_or_double(points)
    grid = points.shape[:-1]
    each = prod(grid[1:])
    with stream_of(at):
        if units == "voxel":
            at = at - 0.5
        else:
            extent = mx.array(x.spatial_shape, dtype=at.dtype)
            if align_corners:
                at = (at + 1) * (extent - 1) / 2
            else:
                at = ((at + 1) * extent - 1) / 2
        batch = mx.repeat(mx.arange(grid[0], dtype=at.dtype), each)[:, None]
        rows = mx.concatenate([batch, at.reshape(grid[0] * each, 3)], axis=1)
    mode = "linear" if mode == "trilinear" else mode
    sampled = interpolate(x, rows, mode=mode, renormalise=renormalise)
    return sampled.reshape(*grid, x.channels)

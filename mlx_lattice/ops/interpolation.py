"""Features of a tensor at continuous points, and of voxels at the points they hold."""

from __future__ import annotations

import itertools

import mlx.core as mx

from ..axes import functions
from ..geometry.keys import INT32_LIMIT, Bounds, bounds_of
from ..geometry.lattice import floor_divide
from ..geometry.rows import BoxedRows
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import gathered, weighted
from ..tensor import SparseTensor, expect_tensor, features_of
from .relations import Coordinates, finer_key

__all__ = [
    "devoxelize", "interpolate", "upsample_linear1d", "upsample_linear2d",
    "upsample_linear3d", "upsample_linear4d",
]  # fmt: skip

MODES = ("linear", "nearest")


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
        points: (Q, 1 + D) float rows (batch, x, y, ...), in cells of the tensor's own
            lattice; float32 holds cells up to 2^24.
        mode: "linear" weighs the 2^D cells around a point; "nearest" takes the cell
            ``floor(point + 0.5)``.
        renormalise: divide by the weight of the cells that are active, instead of
            counting the others as zeros.

    Returns:
        (Q, C) in the features' dtype, added in float32; 0 where no cell is active.

    Raises:
        ValueError: shapes or modes do not fit, or a point is not finite or beyond
            int32.
    """
    expect_tensor(x)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}; got {mode!r}")
    points = points if isinstance(points, mx.array) else mx.array(points)
    if points.ndim != 2 or points.shape[1] != 1 + x.dims:
        raise ValueError(
            f"points must have shape (Q, {1 + x.dims}): a batch index and {x.dims} "
            f"coordinates a row; got {tuple(points.shape)}"
        )
    points = points.astype(mx.float32)
    shift = 0.5 if mode == "nearest" else 0.0
    at = mx.floor(mx.stop_gradient(points) + mx.array([0.0] + [shift] * x.dims))
    cells, bounds = _cells(at)
    held = x.manager[x.key]
    if mode == "nearest":
        return gathered(x.feats, held.index.find(cells, bounds)[:, None])
    part = (points - at)[:, 1:]
    return _blended(x, BoxedRows(cells, bounds), part, renormalise)


def _blended(
    x: SparseTensor, cells: BoxedRows, part: mx.array, renormalise: bool
) -> mx.array:
    """Weigh the 2^D cells from each of ``cells`` on; ``part`` is how far beyond it."""
    corners = list(itertools.product((0, 1), repeat=x.dims))
    places = x.manager[x.key].index.table(cells, corners, (1,) * x.dims)
    # A cell's weight is a product over the axes; absent cells have none.
    weights = mx.ones(places.shape)
    for axis in range(x.dims):
        share = part[:, axis : axis + 1]
        upper = mx.array([corner[axis] for corner in corners]) == 1
        weights = weights * mx.where(upper, share, 1 - share)
    weights = mx.where(places >= 0, weights, 0)
    if renormalise:
        total = weights.sum(axis=1, keepdims=True)
        weights = mx.where(total > 0, weights / mx.where(total > 0, total, 1), 0)
    return weighted(x.feats, weights, places)


def _cells(at: mx.array) -> tuple[mx.array, Bounds]:
    """Return whole float rows as int32 with their bounds. Reads the bounds."""
    low, high = bounds_of(at)
    limit = INT32_LIMIT
    if not all(-limit <= v < limit for v in (*low, *high)):
        raise ValueError(
            f"points must be finite and within int32; got cells {low} to {high}"
        )
    low, high = (tuple(int(v) for v in bound) for bound in (low, high))
    return at.astype(mx.int32), (low, high)


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
    fine = x.manager[key]
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
    feats = _blended(x, cells, mx.stack(parts, axis=1), renormalise)
    return SparseTensor.of(x.manager, key, feats)


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
    """
    feats = features_of(x)
    if inverse.ndim != 1 or not mx.issubdtype(inverse.dtype, mx.integer):
        raise ValueError(
            f"inverse must be (P,) integers, one a point; got {tuple(inverse.shape)} "
            f"of {inverse.dtype}"
        )
    return gathered(feats, inverse.astype(mx.int32)[:, None])


(
    upsample_linear1d,
    upsample_linear2d,
    upsample_linear3d,
    upsample_linear4d,
) = functions(upsample_linear)

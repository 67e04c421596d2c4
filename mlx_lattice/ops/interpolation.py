"""Features of a tensor at continuous points, and of voxels at the points they hold."""

from __future__ import annotations

import itertools
from math import prod

import mlx.core as mx

from ..axes import functions
from ..backends import registry
from ..coordinate_set import CoordinateSet, OfPairs
from ..geometry import sync
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
    at = mx.stop_gradient(points)
    at = mx.floor(at + mx.array([0.0] + [0.5] * x.dims) if mode == "nearest" else at)
    cells, bounds = _cells(at)
    held = x.manager[x.key]
    if mode == "nearest":
        return gathered(x.feats, held.index.find(cells, bounds)[:, None])
    part = (points - at)[:, 1:]
    weights, places = _around(held, BoxedRows(cells, bounds), part, renormalise)
    return weighted(x.feats, weights, places)


def _around(
    held: CoordinateSet, cells: BoxedRows, part: mx.array, renormalise: bool
) -> tuple[mx.array, mx.array]:
    """Return the weights of the 2^D cells from each of ``cells`` on, and their rows.

    ``part``: (Q, D), how far beyond it.
    """
    dims = part.shape[1]
    corners = list(itertools.product((0, 1), repeat=dims))
    places = held.index.table(cells, corners, (1,) * dims)
    # A share is that of the upper cell, or what it leaves to the lower one.
    upper = mx.array(corners, dtype=mx.float32)
    shares = part[:, None] * (2 * upper - 1) + (1 - upper)
    # A cell's weight is a product over the axes; absent cells have none.
    weights = mx.where(places >= 0, shares[..., 0], 0)
    for axis in range(1, dims):
        weights = weights * shares[..., axis]
    if renormalise:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / mx.where(total > 0, total, 1)
    return weights, places


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
    held, fine = x.manager[x.key], x.manager[key]
    known, made = _blends.of(held, fine), (steps, renormalise)
    if made not in known:
        known[made] = _Blend(held, fine, steps, renormalise)
    return SparseTensor.of(x.manager, key, known[made](x.feats))


class _Blend:
    """Finer rows between the cells around them; places and weights are kept.

    Args:
        held: the cells.
        fine: the finer rows.
        steps: of them in a cell, on each axis.
        renormalise: as of ``upsample_linear``.
    """

    def __init__(
        self,
        held: CoordinateSet,
        fine: CoordinateSet,
        steps: tuple[int, ...],
        renormalise: bool,
    ):
        cells, part = _between(fine, steps)
        self.weights, self.places = _around(held, cells, part, renormalise)
        # Of two cells an axis, those of one reach as far beyond it as it is wide.
        self.rows, self.most, self._order = len(held), prod(2 * s for s in steps), None
        sync.start((self.weights, self.places))

    def __call__(self, feats: mx.array) -> mx.array:
        """Return the features of the finer rows."""
        return gathered(feats, self.places, self.order, self.weights)

    def order(self) -> tuple[mx.array, ...]:
        """Return ``Reductions.order`` of the places."""
        if self._order is None:
            given = self.places, self.rows, self.most
            self._order = registry.reductions().order(*given)
            sync.start(self._order)
        return self._order


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

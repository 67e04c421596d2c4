"""Continuous points: features of a tensor at them, and the rows near them.

Neighbours: points are put into the cells of a lattice, whose look-up is that of every
relation, and candidates of a query come from the 3^D cells around it. They become one
row of 64-bit keys (distance, row), so that one sort gives the order that is promised.
Queries go in blocks of a bounded number of keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import mlx.core as mx

from .. import devices, registry, sync
from ..checks import (
    AXES,
    FLOATS,
    INT32_LIMIT,
    array_of,
    positions_of,
    real,
    single,
    single_or_double,
    stream_of,
    whole,
)
from ..coordinate_set import CoordinateSet, OfPairs, check_coords
from ..geometry.lattice import (
    bounds_of,
    floor_divide,
    join,
    running_sums,
    true_positions,
)
from ..geometry.points import (
    NO_CELL,
    Numbers,
    cells_of,
    corner_weights,
    corners_of,
    in_cells,
    majority,
    segment_counts,
)
from ..geometry.tables import BoxedRows
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import gathered, padded, weighted
from ..relation import Relation
from ..tensor import SparseTensor, expect_tensor, features_of
from .convolution import Coordinates, finer_key

__all__ = [
    "NearestRows", "NeighbourLists", "devoxelize", "grid_sample_3d", "interpolate",
    "knn", "majority", "radius_neighbours",
]  # fmt: skip


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

    Values sit at integer coordinates, as in MinkowskiEngine. Subtract 0.5 from the
    points if values sit at the centres of cells. Differentiable in the features and,
    for "linear", in the points.

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

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> ops.interpolate(x, mx.array([[0.0, 0.25], [0.0, 1.0]])).tolist()
        [[1.25], [2.0]]
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
    If all cells of a grid are active, this is PyTorch's trilinear interpolation with
    ``align_corners=False``.

    Args:
        x: input.
        scale: fine cells in a coarse one, int or one per axis.
        coordinates: the finer rows; by default the set that an earlier strided pooling
            or convolution read.
        renormalise: divide by the weight of the cells that are active, instead of
            counting the others as zeros.

    Returns:
        Features on exactly those rows, added in float32; 0 where no cell is active.

    Raises:
        ValueError: dimensions do not fit, or no target is known.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> fine = mx.array([[0, 0], [0, 1], [0, 2], [0, 3]])
        >>> ops.upsample_linear1d(x, coordinates=fine).feats[:, 0].tolist()
        [1.0, 1.25, 1.75, 2.0]
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
        self.weights: mx.array = weights
        self.places: mx.array = places
        self._order = None
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
    """Give each point the features of its voxel.

    Args:
        x: tensor, or its (N, C) features.
        inverse: (P,) integers: the row of each point's voxel, as ``voxelize`` returns
            it, or -1.

    Returns:
        (P, C) in the features' dtype; 0 where ``inverse`` is -1.

    Raises:
        ValueError: ``inverse`` is not a vector of integers.
        RuntimeError: ``inverse`` names a row that does not exist. Raised on the CPU
            with the compiled extension, when the result is computed; on other devices
            such a point gets zeros.

    Examples:
        >>> voxels = mx.array([[1.0], [2.0]])
        >>> inverse = mx.array([1, 0, 1])  # the voxel of each point
        >>> ops.devoxelize(voxels, inverse).tolist()
        [[2.0], [1.0], [2.0]]
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
    if feats.dtype not in FLOATS:  # labels and flags, which have no gradient
        return padded(feats)[mx.where(rows < n, rows, -1)]
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

    The last axis of ``points`` has the axes of the tensor in their own order; PyTorch's
    has them in reverse. Points outside, and inactive cells, count as 0. Differentiable
    in the features and, for "trilinear", in the points.

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

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.grid_sample_3d(x, mx.array([[[1.5, 1.5, 1.5]]])).shape
        (1, 1, 8)
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


# Neighbours


# Candidates that are looked at together, and queries whose cells are looked up at once.
SLOTS = 1 << 20
QUERIES = 1 << 17
# Points that may share a place on average: each is a candidate of all others there.
MOST_EQUAL = 1024
# A key that no pair has: it sorts behind all.
NONE = (1 << 63) - 1
# Rounding of float32 cells and faces, as a part of the points' extent.
SLACK = 2.0**-20


class Space:
    """Points in float32, whose distances compare by their bits, and their cells."""

    def __init__(self, points: mx.array, limit: float):
        self.points = points
        low, high = sync.read(points[:, 1:].min(axis=0), points[:, 1:].max(axis=0))
        self._spans = [b - a for a, b in zip(low, high, strict=True)]
        self._corner = mx.array(low)
        self.extent: float = max(self._spans)
        self.bits: int = points.shape[0].bit_length()  # of a row in a key
        self._limit = limit
        self.most: mx.array = self._bits(mx.array(limit)) - 1
        # The least edge of a cell, and one that needs no cells but those around.
        self.least: float = max(self.extent * SLACK, 1e-30)
        self.enough: float = min(limit, self.extent + self.least) + self.least

    def _last(self, size: float) -> mx.array:
        return mx.floor(mx.array(self._spans) / size)

    def cells(self, rows: mx.array, size: float) -> mx.array:
        """Return (M, 1 + D) int32 cells; those of far rows are the outermost ones."""
        at = mx.floor((rows[:, 1:] - self._corner) / size)
        at = mx.clip(at, 0, self._last(size))
        return mx.concatenate([rows[:, :1], at], axis=1).astype(mx.int32)

    def covered(self, queries: mx.array, cells: mx.array, size: float) -> mx.array:
        """Return (Q,) int64 bits of distances that points of other cells exceed."""
        at, cell = queries[:, 1:] - self._corner, cells[:, 1:].astype(mx.float32)
        below = mx.where(cell > 1, at - (cell - 1) * size, math.inf)
        above = mx.where(cell + 1 < self._last(size), (cell + 2) * size - at, math.inf)
        least = mx.minimum(below, above).min(axis=1)
        least = least * (1 - SLACK) - self.extent * SLACK
        return self._bits(mx.maximum(least, 0))

    def measured(
        self, points: mx.array, queries: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the int64 bits of distances, and whether they count."""
        apart = points[..., 1:] - queries[..., 1:]
        far = mx.sqrt((apart * apart).sum(axis=-1))
        return self._bits(far), far <= self._limit

    @staticmethod
    def _bits(distances: mx.array) -> mx.array:
        return distances.view(mx.int32).astype(mx.int64)

    def distances(self, measured: mx.array) -> mx.array:
        """Return float32 distances of what ``measured`` returned."""
        return measured.astype(mx.int32).view(mx.float32)


class CellGrid:
    """Points by the cells of one edge length."""

    def __init__(self, space: Space, size: float):
        self.space: Space = space
        self.size: float = size
        points = space.points
        geometry = registry.geometry()
        unique = geometry.unique_rows(space.cells(points, size))
        self.counts: mx.array = segment_counts(unique.inverse, unique.rows.shape[0])
        self.starts: mx.array = running_sums(self.counts) - self.counts
        n = points.shape[0]
        order = mx.argsort(
            unique.inverse.astype(mx.int64) * n + mx.arange(n, dtype=mx.int64)
        )
        self.rows: mx.array = order.astype(mx.int32)
        self.points: mx.array = points[order]
        self.index: Any = geometry.index(unique.rows, geometry.bounds(unique.rows))
        self._inverse = unique.inverse

    def crowd(self) -> float:
        """Return how many points share a point's cell, on average. Reads it."""
        shared = self.counts[self._inverse].astype(mx.float32)
        return sync.read(shared.mean())[0]

    def keys(self, queries: mx.array) -> Iterator[tuple[mx.array, mx.array]]:
        """Yield (B,) int32 places among the queries with (B, M) int64 sorted keys."""
        for first in range(0, queries.shape[0], QUERIES):
            yield from self._keys(queries[first : first + QUERIES], first)

    def _keys(self, queries: mx.array, first: int):
        geometry, n = registry.geometry(), queries.shape[0]
        cells = geometry.unique_rows(self.space.cells(queries, self.size))
        around = list(itertools.product((-1, 0, 1), repeat=queries.shape[1] - 1))
        out = BoxedRows(cells.rows, geometry.bounds(cells.rows))
        table = self.index.table(out, around, (1,) * len(around[0]))
        sizes = mx.where(table >= 0, self.counts[mx.maximum(table, 0)], 0)
        total = sizes.sum(axis=1)[cells.inverse]
        # Queries of equal numbers of candidates, up to the next power of two.
        powers = mx.array([1 << j for j in range(31)], mx.int32)
        level = mx.searchsorted(powers, total).astype(mx.int64)
        keyed = mx.sort(level * n + mx.arange(n, dtype=mx.int64))
        order = (keyed % n).astype(mx.int32)
        ends = sync.read(mx.searchsorted(keyed // n, mx.arange(1, 33)))[0]
        start = 0
        for exponent, end in enumerate(ends):
            step = max(1, SLOTS >> exponent)
            for at in range(start, end, step):
                places = order[at : min(at + step, end)]
                cell = cells.inverse[places]
                keys = self._sorted(queries[places], table[cell], sizes[cell], exponent)
                mx.eval(keys)
                yield places + first, keys
            start = end

    def _sorted(self, queries, cells, sizes, exponent: int) -> mx.array:
        """Return the (B, 2^exponent) sorted keys of queries from their (B, K) cells."""
        b, width = queries.shape[0], 1 << exponent
        begins = running_sums(sizes, axis=1) - sizes
        begins = (begins + mx.arange(b, dtype=mx.int32)[:, None] * width).flatten()
        slots = mx.arange(b * width, dtype=mx.int32)
        segment = mx.searchsorted(begins, slots, side="right").astype(mx.int32) - 1
        within = slots - begins[segment]
        exists = within < sizes.flatten()[segment]
        cell = mx.maximum(cells.flatten()[segment], 0)
        place = mx.where(exists, self.starts[cell] + within, 0).reshape(b, width)
        bits, near = self.space.measured(self.points[place], queries[:, None])
        keys = (bits << self.space.bits) | self.rows[place].astype(mx.int64)
        keys = mx.where(exists.reshape(b, width) & near, keys, NONE)
        return mx.sort(keys, axis=1)


@dataclass(frozen=True, eq=False)
class NearestRows:
    """Hold a fixed number of neighbours of each query, the nearest first.

    Attributes:
        rows: (Q, K) int32 rows of the points, -1 if a query has fewer neighbours.
        distances: (Q, K) float32, infinity if a query has fewer neighbours.
        n_points: number of points.

    Examples:
        >>> points = mx.array([[0.0, 0.0], [0.0, 1.0], [0.0, 5.0]])  # batch, x
        >>> near = ops.knn(points, k=2, radius=2.0)
        >>> near.rows.tolist()
        [[0, 1], [1, 0], [2, -1]]
    """

    rows: mx.array
    distances: mx.array
    n_points: int

    def lists(self) -> NeighbourLists:
        """Return the same neighbours without gaps. Reads one size."""
        exists = self.rows >= 0
        ends = running_sums(exists.sum(axis=1).astype(mx.int32))
        starts = mx.concatenate([mx.zeros((1,), mx.int32), ends])
        at = true_positions(exists.flatten())
        return NeighbourLists(
            starts, self.rows.flatten()[at], self.distances.flatten()[at], self.n_points
        )

    def relation(self, *, by_rank: bool = False) -> Relation:
        """Return the edges from points to queries; see ``NeighbourLists.relation``."""
        return self.lists().relation(by_rank=by_rank, ranks=self.rows.shape[1])


@dataclass(frozen=True, eq=False)
class NeighbourLists:
    """Hold any number of neighbours of each query, the nearest first.

    The neighbours of query q are ``rows[starts[q] : starts[q + 1]]``.

    Attributes:
        starts: (Q + 1,) int32.
        rows: (E,) int32 rows of the points.
        distances: (E,) float32.
        n_points: number of points.

    Examples:
        >>> points = mx.array([[0.0, 0.0], [0.0, 1.0], [0.0, 5.0]])  # batch, x
        >>> near = ops.radius_neighbours(points, radius=2.0)
        >>> near.starts.tolist(), near.rows.tolist()
        ([0, 2, 4, 5], [0, 1, 1, 0, 2])
    """

    starts: mx.array
    rows: mx.array
    distances: mx.array
    n_points: int

    @property
    def counts(self) -> mx.array:
        """(Q,) int32: the number of neighbours of each query."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def queries(self) -> mx.array:
        """(E,) int32: the query of each neighbour."""
        places = mx.arange(self.rows.size, dtype=mx.int32)
        at = mx.searchsorted(self.starts, places, side="right")
        return at.astype(mx.int32) - 1

    def padded(self, width: int | None = None) -> NearestRows:
        """Return the nearest ``width`` of each query, by default all. Reads one size.

        Raises:
            ValueError: ``width`` is negative.
        """
        counts = self.counts
        if width is None:
            width = sync.read(counts.max())[0] if counts.size else 0
        width = whole(width, "width")
        if not self.rows.size or not width:
            shape = (counts.size, width)
            return NearestRows(
                mx.full(shape, -1, dtype=mx.int32),
                mx.full(shape, math.inf),
                self.n_points,
            )
        rank = mx.arange(width, dtype=mx.int32)
        exists = rank < counts[:, None]
        at = mx.where(exists, self.starts[:-1][:, None] + rank, 0)
        return NearestRows(
            mx.where(exists, self.rows[at], -1),
            mx.where(exists, self.distances[at], math.inf),
            self.n_points,
        )

    def relation(self, *, by_rank: bool = False, ranks: int | None = None) -> Relation:
        """Return the edges from points to queries, for ``ops.sparse_conv``.

        Args:
            by_rank: whether the nearest neighbour of each query goes through offset
                0, the next through 1, and so on; otherwise all go through one.
            ranks: number of offsets by rank; by default the longest list.
        """
        queries = self.queries
        offsets, volume = mx.zeros_like(self.rows), 1
        if by_rank:
            offsets = mx.arange(self.rows.size, dtype=mx.int32) - self.starts[queries]
            longest = sync.read(self.counts.max())[0] if self.counts.size else 0
            volume = max(1, longest if ranks is None else whole(ranks, "ranks"))
            if volume < longest:
                raise ValueError(
                    f"ranks must be at least {longest}, the longest list; got {ranks}"
                )
        return Relation.from_edges(
            self.rows, queries, offsets, self.n_points, self.counts.size, volume
        )


def knn(
    points: SparseTensor | mx.array,
    k: int,
    queries: SparseTensor | mx.array | None = None,
    *,
    radius: float = math.inf,
) -> NearestRows:
    """Find the k nearest points of each query within its batch element.

    The result is exact. Neighbours are sorted by distance, and equally distant ones by
    row. A query that is one of the points finds itself too.

    Points are sorted into cells. If a query may have neighbours beyond the 3^D cells
    around it, it is searched again among larger cells. The search runs on the device in
    blocks of bounded memory, and reads some sizes. It is not differentiable.

    Args:
        points: a tensor, whose coordinates are used, or (N, 1 + D) rows (batch, x, y,
            ...), D from 1 to 4, integers or floats. Distances are in float32. A common
            origin is first subtracted from integers, and from float64 of NumPy or of a
            list.
        k: the number of neighbours.
        queries: a tensor or rows of the same kind; by default the points.
        radius: the greatest distance of a neighbour.

    Raises:
        ValueError: shapes or kinds do not fit, a position is not finite, integers span
            2^24 cells, or on average over 1024 points lie in the same place.

    Examples:
        >>> points = mx.array([[0.0, 0.0], [0.0, 1.0], [0.0, 5.0]])  # batch, x
        >>> near = ops.knn(points, k=2)
        >>> near.rows.tolist(), near.distances.tolist()
        ([[0, 1], [1, 0], [2, 1]], [[0.0, 1.0], [0.0, 1.0], [0.0, 4.0]])
    """
    points, queries = _positions(points, queries)
    k = whole(k, "k", 1)
    if not (isinstance(radius, float) and radius == math.inf):
        radius = real(radius, "radius", 0.0)
    n, q = points.shape[0], queries.shape[0]
    if not n or not q:
        shape = (q, k)
        return NearestRows(
            mx.full(shape, -1, dtype=mx.int32), mx.full(shape, math.inf), n
        )
    space = Space(points, radius)
    results, places = [], []
    open_queries = mx.arange(q, dtype=mx.int32)
    grid = _first_grid(space, k)
    while open_queries.size:
        some, parts, is_done = queries[open_queries], [], []
        for at, keys in grid.keys(some):
            keys = _first(keys, k)
            cells = space.cells(some[at], grid.size)
            covered = space.covered(some[at], cells, grid.size)
            # Nothing beyond the cells is as near, or all beyond them is too far.
            done = (keys[:, -1] >> space.bits < covered) | (covered > space.most)
            mx.eval(keys, done)
            parts.append((open_queries[at], keys))
            is_done.append(done)
        at, keys = (mx.concatenate(each) for each in zip(*parts, strict=True))
        done = mx.concatenate(is_done) | (grid.size >= space.enough)
        settled = true_positions(done)
        results.append(keys[settled])
        places.append(at[settled])
        open_queries = mx.sort(at[true_positions(~done)])
        if open_queries.size:
            # Twice the size would be eight times the candidates.
            size = min(1.5 * grid.size, space.enough)
            grid = CellGrid(space, max(size, space.least))
    keys = mx.concatenate(results)[mx.argsort(mx.concatenate(places))]
    return NearestRows(*_decoded(keys, space), n)


def radius_neighbours(
    points: SparseTensor | mx.array,
    radius: float,
    queries: SparseTensor | mx.array | None = None,
) -> NeighbourLists:
    """Find all points within a radius of each query and in its batch element.

    Distances up to and including the radius count. Neighbours are sorted by distance,
    and equally distant ones by row. The other arguments and the method are those of
    ``knn``; ``knn(points, k, radius=radius)`` finds at most k neighbours.

    Raises:
        ValueError: as for ``knn``, or there are 2^31 neighbours or more.

    Examples:
        >>> points = mx.array([[0.0, 0.0], [0.0, 1.0], [0.0, 5.0]])  # batch, x
        >>> near = ops.radius_neighbours(points, radius=2.0)
        >>> near.counts.tolist(), near.rows.tolist()
        ([2, 2, 1], [0, 1, 1, 0, 2])
    """
    points, queries = _positions(points, queries)
    radius = real(radius, "radius", 0.0)
    n, q = points.shape[0], queries.shape[0]
    if not n or not q:
        nothing = mx.zeros((0,), mx.int32)
        starts = mx.zeros((q + 1,), mx.int32)
        return NeighbourLists(starts, nothing, mx.zeros((0,)), n)
    space = Space(points, radius)
    parts, places, counts, total = [], [], [], 0
    for at, keys in CellGrid(space, space.enough).keys(queries):
        is_pair = keys != NONE
        part = keys.flatten()[true_positions(is_pair.flatten())]
        count = is_pair.sum(axis=1).astype(mx.int32)
        mx.eval(part, count)
        total += part.size
        if total >= INT32_LIMIT:
            raise ValueError(
                f"there are 2^31 neighbours or more within {radius} of {q} queries; "
                "take a smaller radius, or some queries at a time"
            )
        parts.append(part)
        places.append(at)
        counts.append(count)
    at, count = mx.concatenate(places), mx.concatenate(counts)
    came = running_sums(count) - count  # where the list of each begins, as they came
    back = mx.argsort(at)
    starts = mx.concatenate([mx.zeros((1,), mx.int32), running_sums(count[back])])
    rows, distances = mx.zeros((0,), mx.int32), mx.zeros((0,))
    if total:
        slots = mx.arange(total, dtype=mx.int32)
        query = mx.searchsorted(starts, slots, side="right").astype(mx.int32) - 1
        source = came[back][query] + slots - starts[query]
        rows, distances = _decoded(mx.concatenate(parts)[source], space)
    return NeighbourLists(starts, rows, distances, n)


def _first_grid(space: Space, k: int) -> CellGrid:
    """Return a grid of few points a cell, where the points lie densest too."""
    n, dims = space.points.shape[0], space.points.shape[1] - 1
    begin = space.extent * (k / n) ** (1 / dims) if n > k else space.enough
    grid = CellGrid(space, min(max(begin, space.least), space.enough))
    while (crowd := grid.crowd()) > max(2.0, k / 4) and grid.size > space.least:
        grid = CellGrid(space, max(grid.size / 2, space.least))
    if crowd > MOST_EQUAL:
        raise ValueError(
            f"{crowd:.0f} points lie in a point's place on average, and no more than "
            f"{MOST_EQUAL} may: keep one of equal points, such as returns at the origin"
        )
    return grid


def _first(keys: mx.array, k: int) -> mx.array:
    """Return (B, k) keys: the first of each row, and none where there are fewer."""
    missing = k - keys.shape[1]
    if missing <= 0:
        return keys[:, :k] + 0  # a copy, so that the whole is freed
    none = mx.full((keys.shape[0], missing), NONE, dtype=mx.int64)
    return mx.concatenate([keys, none], axis=1)


def _decoded(keys: mx.array, space: Space) -> tuple[mx.array, mx.array]:
    """Return rows and distances of keys; -1 and infinity of none."""
    is_pair = keys != NONE
    rows = (keys & ((1 << space.bits) - 1)).astype(mx.int32)
    distances = space.distances(mx.where(is_pair, keys >> space.bits, 0))
    return mx.where(is_pair, rows, -1), mx.where(is_pair, distances, math.inf)


# What is given


def _positions(points, queries) -> tuple[mx.array, mx.array]:
    of_points = _rows(points, "points")
    if queries is None:
        (of_points,) = _near(of_points)
        return of_points, of_points
    strides = [getattr(each, "stride", None) for each in (points, queries)]
    if None not in strides and strides[0] != strides[1]:
        raise ValueError(
            "points and queries must be of one lattice; got strides "
            f"{strides[0]} and {strides[1]}"
        )
    of_queries = _rows(queries, "queries")
    if of_points.shape[1] != of_queries.shape[1]:
        raise ValueError(
            f"points and queries must have as many columns; got "
            f"{of_points.shape[1]} and {of_queries.shape[1]}"
        )
    floats = [
        mx.issubdtype(each.dtype, mx.floating) for each in (of_points, of_queries)
    ]
    if floats[0] != floats[1]:
        raise ValueError(
            "points and queries must both be integers or both floats; got "
            f"{of_points.dtype} and {of_queries.dtype}"
        )
    return _near(of_points, of_queries)


def _rows(rows, name: str) -> mx.array:
    if isinstance(rows, SparseTensor):
        return rows.coordinate_set.coords
    if not hasattr(rows, "__array__") and not isinstance(rows, mx.array | list | tuple):
        raise TypeError(
            f"{name} must be a tensor or an array (N, 1 + D); got {type(rows).__name__}"
        )
    rows = positions_of(rows, name)
    if rows.ndim != 2 or rows.shape[1] - 1 not in AXES:
        raise ValueError(
            f"{name} must have shape (N, 1 + D): a batch index and 1 to 4 coordinates "
            f"a row; got {tuple(rows.shape)}"
        )
    if not mx.issubdtype(rows.dtype, mx.floating):
        return check_coords(rows)
    with stream_of(rows):
        rows = mx.stop_gradient(rows)
    rows = single_or_double(rows)
    if not rows.size:
        return rows
    with stream_of(rows):
        # Squares of what is beyond would not be finite.
        right = mx.all(mx.abs(rows) < 1e18), mx.all(rows[:, 0] == mx.floor(rows[:, 0]))
    is_finite, is_whole = sync.read(*right)
    if not is_finite:
        raise ValueError(f"{name} must be finite, and below 1e18; some are not")
    if not is_whole:
        raise ValueError(FRACTIONAL.format(name))
    return rows


def _near(*rows: mx.array) -> list[mx.array]:
    """Return rows as float32, integers and float64 from near the first ones on."""
    if mx.issubdtype(rows[0].dtype, mx.integer):
        low, high = reduce(join, map(registry.geometry().bounds, rows))
        span = max(b - a for a, b in zip(low[1:], high[1:], strict=True))
        if span >= 1 << 24:
            raise ValueError(
                "integer positions must span less than 2^24 cells, which float32 "
                f"holds; got {span} cells: search among parts of them"
            )
        origin = mx.array([0, *low[1:]], dtype=mx.int64)
        return [(each.astype(mx.int64) - origin).astype(mx.float32) for each in rows]
    if all(each.dtype != mx.float64 for each in rows):
        return list(rows)
    with mx.stream(mx.cpu):
        wide = [each.astype(mx.float64) for each in rows]
        if wide[0].size:
            cells = wide[0][:, 1:]
            middle = (cells.min(axis=0) + cells.max(axis=0)) / 2
            middle = mx.concatenate([mx.zeros_like(middle[:1]), middle])
            wide = [each - middle for each in wide]
        return [each.astype(mx.float32) for each in wide]

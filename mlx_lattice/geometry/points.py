"""Points among cells: the cell that each lies in, and weights of those around it."""

from __future__ import annotations

import itertools

import mlx.core as mx

from ..arrays import stream_of
from ..backends import registry
from ..backends.gpu_points import Numbers
from ..transformations import Function
from .keys import INT32_LIMIT

NO_CELL = -INT32_LIMIT  # stands where a cell is not finite, or beyond int32


def cells_of(
    points: mx.array,
    batch: mx.array | None = None,
    origin: Numbers = None,
    size: Numbers = None,
) -> mx.array:
    """Return (P, 1 + D) int32 ``floor((points - origin) / size)``; no derivative.

    What int32 does not hold becomes ``NO_CELL``.

    Args:
        points: (P, 1 + D) float32 with the batch index first, or (P, D); or float64,
            of which nothing is rounded to float32.
        batch: (P,) int32: the batch index of (P, D) points.
        origin, size: one a column of the points; 0 and 1 where there are none.
    """
    kernels = registry.points()
    if kernels is not None and points.size and points.dtype == mx.float32:
        return kernels.cells(mx.stop_gradient(points), batch, origin, size)
    with stream_of(points):
        points = mx.stop_gradient(points)
        at = mx.floor(in_cells(points, origin, size))
        held = (at >= -INT32_LIMIT) & (at < INT32_LIMIT)
        # What is not held is not converted either: that has no one result.
        cells = mx.where(held, mx.where(held, at, 0).astype(mx.int32), NO_CELL)
    return cells if batch is None else mx.concatenate([batch[:, None], cells], axis=1)


def in_cells(points: mx.array, origin: Numbers, size: Numbers) -> mx.array:
    """Return ``(points - origin) / size``; arguments and dtype as of ``cells_of``."""
    if origin is not None:
        points = points - mx.array(origin, dtype=points.dtype)
    return points if size is None else points / mx.array(size, dtype=points.dtype)


def corners_of(dims: int) -> list[tuple[int, ...]]:
    """Return the offsets of the 2^D cells from a point's own on, last axis fastest."""
    return list(itertools.product((0, 1), repeat=dims))


def corner_weights(
    points: mx.array,
    cells: mx.array | None,
    table: mx.array,
    renormalise: bool,
    size: Numbers = None,
) -> mx.array:
    """Return the (P, 2^D) float32 weights of the cells around points.

    A cell's weight is a product over the axes, of which D are the last columns of
    ``points``; cells that are not there have none. Differentiable in the points.

    Args:
        points: (P, 1 + D) or (P, D) float32.
        cells: (P, 1 + D) int32, of each point; None where ``points`` say how far beyond
            theirs they lie.
        table: (P, 2^D) int32: the rows of these cells, or -1.
        renormalise: whether the weights of a point are divided by their sum.
        size: one a column of the points: of a cell, in their units.
    """

    def composed(points: mx.array) -> mx.array:
        return _composed(points, cells, table, renormalise, size)

    kernels = registry.points()
    if kernels is None or not table.size:
        return composed(points)
    function = Function(
        lambda points: kernels.corner_weights(points, size, cells, table, renormalise)
    )
    function.vjp(lambda points, dy, _: mx.vjp(composed, [points], [dy])[1][0])
    function.jvp(lambda points, dx: mx.jvp(composed, [points], [dx])[1][0])
    return function(points)


def _composed(points, cells, table, renormalise, size) -> mx.array:
    """Return ``corner_weights`` in MLX operations."""
    dims = table.shape[1].bit_length() - 1
    beyond = in_cells(points, None, size)[:, -dims:]
    if cells is not None:
        beyond = beyond - cells[:, 1:].astype(mx.float32)
    # Of each axis what it leaves to the lower cell, and the share of the upper one.
    shares = mx.stack([1 - beyond, beyond], axis=2)
    weights = (table >= 0).astype(mx.float32).reshape(-1, *(2,) * dims)
    for axis in range(dims):
        shape = [-1, *(2 if a == axis else 1 for a in range(dims))]
        weights = weights * shares[:, axis].reshape(shape)
    weights = weights.reshape(table.shape)
    if renormalise:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / mx.where(total > 0, total, 1)
    return weights

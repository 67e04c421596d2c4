"""Triangles of a flexible dual grid: a vertex a voxel, a quad a crossed edge.

The surface of TRELLIS.2's shapes (Xiang et al., "Native and Compact Structured Latents
for 3D Generation", 2025). An edge of the lattice that crosses the surface joins the
vertices of the four voxels around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..checks import array_of, real_axes
from ..geometry.lattice import running_sums, true_positions
from ..reductions import weighted
from ..tensor import SparseTensor, align, expect_tensor

__all__ = ["DualGrid", "DualGridMesh", "dual_grid_mesh"]

# The voxels around an edge along x, y and z, from the one that has its flag.
AROUND = (
    ((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)),
    ((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1)),
    ((0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)),
)
OTHERS = tuple(sorted({at for quad in AROUND for at in quad} - {(0, 0, 0)}))
CELLS = ((0, 0, 0), *OTHERS)
# The corners of a quad in its two triangles, cut from 0 to 2 and from 1 to 3; and in
# four triangles around a fifth vertex.
CUT_02, CUT_13 = (0, 1, 2, 0, 2, 3), (0, 1, 3, 3, 1, 2)
FAN = (0, 1, 4, 1, 2, 4, 2, 3, 4, 3, 0, 4)


class DualGrid(NamedTuple):
    """Hold a flexible dual grid, on the rows of ``vertices``.

    Attributes:
        vertices: (N, 3) float: the vertex of a voxel, from its lower corner, in voxels.
        intersected: (N, 3) bool, or logits that are above 0: whether the surface
            crosses the voxel's edge along x, y, z, the one farthest from its lower
            corner.
        split: (N, 1) positive weights. A quad is cut along the diagonal whose ends have
            the greater product; for equal products, along the diagonal that avoids the
            quad's own voxel. With None every quad is cut from its own voxel to the
            opposite one.

    Examples:
        >>> vertices = ml.SparseTensor.from_dense(mx.full((1, 2, 2, 2, 3), 0.5))
        >>> grid = ops.DualGrid(vertices, mx.ones((8, 3), dtype=mx.bool_))
        >>> grid.vertices.shape, grid.split is None
        ((8, 3), True)
    """

    vertices: SparseTensor
    intersected: SparseTensor | mx.array
    split: SparseTensor | mx.array | None = None


class DualGridMesh(NamedTuple):
    """Hold triangles over the rows of a dual grid.

    Attributes:
        vertices: (V, 3) float32.
        faces: (F, 3) int32 rows of ``vertices``, in order of the quads' rows and axes.
            The winding does not tell inside from outside.
        batch: (V,) int32: the batch element of each vertex.

    Examples:
        >>> vertices = ml.SparseTensor.from_dense(mx.full((1, 2, 2, 2, 3), 0.5))
        >>> grid = ops.DualGrid(vertices, mx.ones((8, 3), dtype=mx.bool_))
        >>> points, faces = ops.dual_grid_mesh(grid).element(0)
        >>> points.shape, faces.shape
        ((8, 3), (12, 3))
    """

    vertices: mx.array
    faces: mx.array
    batch: mx.array

    def element(self, index: int) -> tuple[mx.array, mx.array]:
        """Return the vertices and faces of one batch element, numbered from 0."""
        inside = self.batch == index
        place = running_sums(inside.astype(mx.int32)) - 1
        faces = true_positions(inside[self.faces[:, 0]])
        return self.vertices[true_positions(inside)], place[self.faces[faces]]


def dual_grid_mesh(
    grid: DualGrid,
    *,
    voxel_size: float | Sequence[float] = 1.0,
    origin: float | Sequence[float] = 0.0,
    train: bool = False,
) -> DualGridMesh:
    """Return the triangles of a flexible dual grid.

    The faces are those of TRELLIS.2's ``flexible_dual_grid_to_mesh``; without weights
    both take the first diagonal. A quad needs all its four voxels; if one is not active
    the surface stays open. Differentiable in ``grid.vertices`` and, with ``train``, in
    ``grid.split``.

    Args:
        grid: the dual grid, such as ``models.dual_grid`` returns.
        voxel_size: edge of a voxel, a number or one an axis.
        origin: where the lower corner of voxel (0, 0, 0) lies; TRELLIS.2 has
            ``voxel_size=1 / resolution, origin=-0.5``.
        train: put a vertex into each quad, between the middles of its diagonals by
            their weights, and make four triangles around it.

    Returns:
        ``DualGridMesh``: a vertex for each row of the grid, in order, then for
        ``train`` one for each quad; no faces at all is legal. Reads one size.

    Raises:
        ValueError: shapes do not fit, coordinates repeat, or ``train`` without weights.
        TypeError: an argument is not a tensor.

    Examples:
        >>> vertices = ml.SparseTensor.from_dense(mx.full((1, 2, 2, 2, 3), 0.5))
        >>> grid = ops.DualGrid(vertices, mx.ones((8, 3), dtype=mx.bool_))
        >>> mesh = ops.dual_grid_mesh(grid)
        >>> mesh.vertices.shape, mesh.faces.shape
        ((8, 3), (12, 3))
    """
    x, flags, split = _checked(grid, train)
    scale, low = (
        mx.array(real_axes(value, 3, name), dtype=mx.float32)
        for value, name in ((voxel_size, "voxel_size"), (origin, "origin"))
    )
    coords = x.coordinate_set.coords
    vertices = (coords[:, 1:].astype(mx.float32) + x.feats.astype(mx.float32)) * scale
    vertices, batch = vertices + low, coords[:, 0]
    if not len(x):
        return DualGridMesh(vertices, mx.zeros((0, 3), dtype=mx.int32), batch)
    quads = _quads(x, flags)
    if not train:
        return DualGridMesh(vertices, _cut(quads, split).reshape(-1, 3), batch)
    if not quads.shape[0]:
        return DualGridMesh(vertices, mx.zeros((0, 3), dtype=mx.int32), batch)
    # Sums over rows of a table: their gradients are added in a fixed order.
    diagonals = [quads[:, 0::2], quads[:, 1::2]]
    one = mx.ones(diagonals[0].shape)
    middles = [weighted(vertices, one / 2, ends) for ends in diagonals]
    ends = [weighted(split, one[:, :1], quads[:, at : at + 1]) for at in range(4)]
    first, second = ends[0] * ends[2], ends[1] * ends[3]
    middle = (first * middles[0] + second * middles[1]) / (first + second)
    fifth = len(x) + mx.arange(quads.shape[0], dtype=mx.int32)
    faces = mx.concatenate([quads, fifth[:, None]], axis=1)[:, mx.array(FAN)]
    return DualGridMesh(
        mx.concatenate([vertices, middle]),
        faces.reshape(-1, 3),
        mx.concatenate([batch, batch[quads[:, 0]]]),
    )


def _checked(
    grid: DualGrid, train: bool
) -> tuple[SparseTensor, mx.array, mx.array | None]:
    if not isinstance(grid, DualGrid):
        raise TypeError(
            "grid must be a DualGrid, such as models.dual_grid returns; got "
            f"{type(grid).__name__}"
        )
    x = grid.vertices
    expect_tensor(x, "grid.vertices")
    if x.dims != 3 or x.channels != 3:
        raise ValueError(
            "grid.vertices must have 3 spatial axes and 3 channels; got "
            f"{x.dims} and {x.channels}"
        )
    if grid.split is None and train:
        raise ValueError("train=True places vertices by grid.split; it is None")
    flags = _rows(grid.intersected, x, "intersected", 3)
    if flags.dtype != mx.bool_:
        flags = flags > 0
    split = grid.split
    if split is not None:
        split = _rows(split, x, "split", 1).astype(mx.float32)
    return x, flags, split


def _rows(
    value: SparseTensor | mx.array, x: SparseTensor, name: str, channels: int
) -> mx.array:
    if isinstance(value, SparseTensor):
        values = align(value, x).feats
    else:
        values = array_of(value, f"grid.{name}")
    shape = len(x), channels
    if tuple(values.shape) != shape:
        raise ValueError(
            f"grid.{name} must have shape {shape}; got {tuple(values.shape)}"
        )
    return values


def _quads(x: SparseTensor, flags: mx.array) -> mx.array:
    """Return the (Q, 4) int32 rows around crossed edges, where all four are active."""
    coordinate_set = x.coordinate_set
    itself = mx.arange(len(x), dtype=mx.int32)[:, None]
    table = coordinate_set.index.table(coordinate_set, OTHERS, (1, 1, 1))
    table = mx.concatenate([itself, table], axis=1)
    columns = [[CELLS.index(at) for at in quad] for quad in AROUND]
    whole = [
        mx.all(table[:, mx.array(quad[1:])] >= 0, axis=1, keepdims=True)
        for quad in columns
    ]
    at = true_positions((flags & mx.concatenate(whole, axis=1)).reshape(-1))
    rows, axis = (at // 3).astype(mx.int64)[:, None], at % 3
    return mx.take(table.reshape(-1), rows * len(CELLS) + mx.array(columns)[axis])


def _cut(quads: mx.array, split: mx.array | None) -> mx.array:
    """Return the (Q, 6) rows of two triangles a quad."""
    first = quads[:, mx.array(CUT_02)]
    if split is None:
        return first
    weights = split.reshape(-1)[quads]
    wins = weights[:, 0] * weights[:, 2] > weights[:, 1] * weights[:, 3]
    return mx.where(wins[:, None], first, quads[:, mx.array(CUT_13)])

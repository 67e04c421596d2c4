"""Triangles on the host, and the clean-up of the raw mesh of a dual grid.

Areas, volumes and normals are trimesh's, components are SciPy's, and decimation is
fast-simplification's (Garland and Heckbert's quadrics).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import fast_simplification
import numpy as np
import trimesh
from trimesh.graph import connected_component_labels

from ..checks import whole
from ..ops import dual_grid_mesh
from ..ops.dual_grid import DualGrid

LOW = -0.5  # the corner of TRELLIS.2's unit box
LEAST_FACES = 4  # of a simplified surface: a tetrahedron's
EDGES = ((0, 1), (1, 2), (2, 0))
Report = Callable[[str], None]


@dataclass(frozen=True)
class Surface:
    """Triangles.

    Attributes:
        vertices: (V, 3) float64.
        faces: (F, 3) int64 rows of ``vertices``.
    """

    vertices: np.ndarray
    faces: np.ndarray

    def __post_init__(self):
        """Check shapes and indices, and settle the dtypes."""
        vertices = np.asarray(self.vertices, np.float64)
        faces = np.asarray(self.faces, np.int64)
        for name, array in (("vertices", vertices), ("faces", faces)):
            if array.ndim != 2 or array.shape[1] != 3:
                raise ValueError(f"{name} must be (N, 3); got {array.shape}")
        if not np.isfinite(vertices).all():
            raise ValueError("vertices must be finite")
        if faces.size and not 0 <= faces.min() <= faces.max() < len(vertices):
            raise ValueError(
                f"faces must name vertices 0 to {len(vertices) - 1}; got "
                f"{faces.min()} to {faces.max()}"
            )
        object.__setattr__(self, "vertices", vertices)
        object.__setattr__(self, "faces", faces)

    @cached_property
    def mesh(self) -> trimesh.Trimesh:
        """The same triangles as a mesh of trimesh."""
        return trimesh.Trimesh(self.vertices, self.faces, process=False)

    @property
    def is_closed(self) -> bool:
        """Whether every edge has two triangles."""
        return bool(self.mesh.is_watertight)

    @property
    def is_oriented(self) -> bool:
        """Whether two triangles never pass their edge in the same direction."""
        return not self._neighbours[2].any()

    @property
    def normals(self) -> np.ndarray:
        """(F, 3) normals of the faces, each twice as long as the face's area."""
        return self.mesh.triangles_cross

    @property
    def area(self) -> float:
        """The area of all triangles."""
        return float(self.mesh.area)

    @property
    def volume(self) -> float:
        """The volume that a closed surface encloses; positive if normals point out."""
        return float(self._volumes.sum())

    @cached_property
    def _volumes(self) -> np.ndarray:
        """(F,) volumes of the tetrahedra between the faces and the mean vertex."""
        middle = self.vertices.mean(axis=0) if len(self.vertices) else 0.0
        corners = self.vertices[self.faces[:, 0]] - middle
        return np.einsum("fd,fd->f", corners, self.normals) / 6

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(3 F,) the edge of each side, (E,) sides of each edge, (3 F,) directions."""
        sides = self.faces[:, EDGES].reshape(-1, 2)
        low, high = sides.min(axis=1), sides.max(axis=1)
        keys = low * len(self.vertices) + high
        _, edges, counts = np.unique(keys, return_inverse=True, return_counts=True)
        return edges, counts, sides[:, 0] == low

    @cached_property
    def _neighbours(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs of faces at an edge of two faces, and whether both pass it alike."""
        edges, counts, upward = self._edges
        order = np.argsort(edges, kind="stable")
        one, two = order[counts[edges[order]] == 2].reshape(-1, 2).T
        return one // 3, two // 3, upward[one] == upward[two]

    @cached_property
    def components(self) -> np.ndarray:
        """(F,) the connected component of each face, over edges of two faces."""
        pairs = np.stack(self._neighbours[:2], axis=1)
        return connected_component_labels(pairs, len(self.faces))

    def replace(self, keep: np.ndarray) -> Surface:
        """Return some of the faces, and the vertices that they use, in order."""
        faces = self.faces[keep]
        used = np.zeros(len(self.vertices), bool)
        used[faces] = True
        return Surface(self.vertices[used], (np.cumsum(used) - 1)[faces])

    def cleaned(self) -> Surface:
        """Return it without degenerate or repeated triangles and unused vertices."""
        proper = np.flatnonzero(self.normals.any(axis=1))
        corners = np.sort(self.faces[proper], axis=1)
        _, first = np.unique(corners, axis=0, return_index=True)
        return self.replace(proper[np.sort(first)])

    def without_floaters(self, share: float = 0.01) -> Surface:
        """Return it without components below a share of the largest one's area."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1; got {share}")
        if not len(self.faces):
            return self
        areas = np.bincount(self.components, self.mesh.area_faces)
        return self.replace((areas >= share * areas.max())[self.components])

    def oriented(self) -> Surface:
        """Return it with all triangles of a component wound alike, normals outwards.

        A component with one side (a Moebius strip) stays as it is.
        """
        one, two, same = self._neighbours
        n = len(self.faces)
        # Each face twice, as it is and turned; an edge links the copies that fit.
        links = [(one, two + n * same), (one + n, two + n * ~same)]
        pairs = np.concatenate([np.stack(link, axis=1) for link in links])
        sides = connected_component_labels(pairs, 2 * n)
        turned = sides[:n] > sides[n:]
        signs = np.where(turned, -1.0, 1.0)
        volumes = np.bincount(self.components, self._volumes * signs)
        turned ^= volumes[self.components] < 0
        turned &= sides[:n] != sides[n:]
        faces = np.where(turned[:, None], self.faces[:, ::-1], self.faces)
        return Surface(self.vertices, faces)

    def filled(self, sides: int = 200) -> Surface:
        """Return it with its holes closed by fans around their middles.

        Call ``oriented`` first: a fan is wound as the triangles around its hole are. A
        hole stays if boundaries meet in one of its vertices.

        Args:
            sides: the most sides of a hole that is closed.
        """
        edges, counts, _ = self._edges
        # A hole's boundary runs against the triangles that it touches.
        ends = self.faces[:, EDGES].reshape(-1, 2)[counts[edges] == 1][:, ::-1]
        n = len(self.vertices)
        loop = connected_component_labels(ends, n)[ends[:, 0]]
        length = np.bincount(loop, minlength=n)
        leaving, arriving = (np.bincount(side, minlength=n) for side in ends.T)
        simple = (leaving[ends[:, 0]] == 1) & (arriving[ends[:, 0]] == 1)
        broken = np.bincount(loop, ~simple, minlength=n) > 0
        keep = (length[loop] <= sides) & ~broken[loop]
        if not keep.any():
            return self
        ends = ends[keep]
        _, loop, size = np.unique(loop[keep], return_inverse=True, return_counts=True)
        middles = np.zeros((len(size), 3))
        np.add.at(middles, loop, self.vertices[ends[:, 0]])
        fans = np.column_stack([ends, n + loop])
        return Surface(
            np.concatenate([self.vertices, middles / size[:, None]]),
            np.concatenate([self.faces, fans]),
        )

    def simplified(self, faces: int) -> Surface:
        """Return it with about so many faces, or itself if it has no more."""
        whole(faces, "faces", LEAST_FACES)
        if len(self.faces) <= faces:
            return self
        # The decimation works in float32: around the middle, in units of the whole.
        low, high = self.vertices.min(axis=0), self.vertices.max(axis=0)
        middle, size = (low + high) / 2, float((high - low).max()) or 1.0
        points, triangles = fast_simplification.simplify(
            ((self.vertices - middle) / size).astype(np.float32),
            self.faces.astype(np.int32),
            target_count=faces,
        )
        return Surface(points.astype(np.float64) * size + middle, triangles).cleaned()

    def vertex_normals(self) -> np.ndarray:
        """Return (V, 3) unit normals: means over the faces, weighted by their areas."""
        total = np.zeros_like(self.vertices)
        for corner in self.faces.T:
            np.add.at(total, corner, self.normals)
        length = np.linalg.norm(total, axis=1, keepdims=True)
        return total / np.where(length > 0, length, 1)


def surface_of(
    grid: DualGrid,
    resolution: int,
    *,
    faces: int | None = 200_000,
    floaters: float = 0.01,
    holes: int = 200,
    report: Report | None = None,
) -> Surface:
    """Return the clean surface of a dual grid with one batch element, in the unit box.

    Args:
        grid: the dual grid.
        resolution: voxels along the box, which reaches from -0.5 to 0.5.
        faces: the most triangles; None for all.
        floaters: components below this share of the largest one's area are dropped.
        holes: the most sides of a hole that is closed.
        report: called with a line for each step.

    Raises:
        ValueError: no triangles are left, there are several batch elements, or a size
            is too small.
    """
    whole(resolution, "resolution", 1)
    report = report or (lambda line: None)
    mesh = dual_grid_mesh(grid, voxel_size=1 / resolution, origin=LOW)
    if (count := grid.vertices.batch_size) > 1:
        raise ValueError(
            f"a surface is of one batch element; got {count}: take models.dual_grid of "
            "each tensor of ops.unbatch"
        )
    vertices, triangles = np.array(mesh.vertices), np.array(mesh.faces)
    if not len(triangles):
        raise ValueError(
            "the dual grid has no triangles: no edge of its voxels is crossed with all "
            "four voxels around it active"
        )
    surface = Surface(vertices, triangles).cleaned()
    report(f"{len(surface.faces):,} triangles")
    surface = surface.without_floaters(floaters).oriented().filled(holes)
    report(f"{len(surface.faces):,} without floaters and holes")
    if faces is not None and len(surface.faces) > faces:
        # Decimation joins vertices, so winding and holes are repaired again.
        surface = surface.simplified(faces).oriented().filled(holes)
        surface = surface.simplified(faces)  # closed holes added triangles
        report(f"{len(surface.faces):,} simplified")
    if not len(surface.faces):
        raise ValueError(
            f"none of {len(triangles):,} triangles is left: they have no area, or "
            f"{faces} faces are too few for the surface"
        )
    return surface

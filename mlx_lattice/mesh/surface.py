"""Surface: triangles on the host, and the clean-up of raw meshes.

Orientation and components come from SciPy's graphs, decimation from
fast-simplification (Garland and Heckbert's quadrics).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..checks import whole

LEAST_FACES = 4  # of what is simplified: a tetrahedron's
EDGES = ((0, 1), (1, 2), (2, 0))


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
    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The undirected edges of the faces' sides, in order of face, then side.

        (3 F,) places among them, (E,) sides of each edge, and (3 F,) whether a side
        runs from its lower vertex to its higher.
        """
        sides = self.faces[:, EDGES].reshape(-1, 2)
        low, high = sides.min(axis=1), sides.max(axis=1)
        keys = low * len(self.vertices) + high
        _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
        return places, counts, sides[:, 0] == low

    @property
    def is_closed(self) -> bool:
        """Whether every edge has two triangles."""
        return bool((self._edges[1] == 2).all())

    @property
    def is_oriented(self) -> bool:
        """Whether two triangles never pass their edge in the same direction."""
        _, ends, same = self._neighbours
        return len(ends) == 0 or not same.any()

    @cached_property
    def normals(self) -> np.ndarray:
        """(F, 3) of the faces, as long as twice their area."""
        a, b, c = (self.vertices[self.faces[:, at]] for at in range(3))
        return np.cross(b - a, c - a)

    @property
    def area(self) -> float:
        """Of all triangles."""
        return float(np.linalg.norm(self.normals, axis=1).sum() / 2)

    @property
    def volume(self) -> float:
        """Enclosed by a closed surface; positive where normals point outwards."""
        return float(self._volumes.sum())

    @property
    def _volumes(self) -> np.ndarray:
        """(F,) of the tetrahedra over the faces, from the middle of the vertices."""
        middle = self.vertices.mean(axis=0) if len(self.vertices) else 0.0
        corner = self.vertices[self.faces[:, 0]] - middle
        return np.einsum("fd,fd->f", corner, self.normals) / 6

    @cached_property
    def _neighbours(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs of faces over an edge of just two, and whether they pass it alike."""
        places, counts, upward = self._edges
        order = np.argsort(places, kind="stable")
        order = order[counts[places[order]] == 2].reshape(-1, 2)
        one, two = order.T
        return one // 3, two // 3, upward[one] == upward[two]

    @cached_property
    def components(self) -> np.ndarray:
        """(F,) the connected component of each face, over edges of two faces."""
        one, two, _ = self._neighbours
        return _components(one, two, len(self.faces))

    def replace(self, keep: np.ndarray) -> Surface:
        """Return some of the faces, and the vertices that they use, in order."""
        faces = self.faces[keep]
        used = np.zeros(len(self.vertices), bool)
        used[faces] = True
        return Surface(self.vertices[used], (np.cumsum(used) - 1)[faces])

    def cleaned(self) -> Surface:
        """Return it without degenerate or repeated triangles and unused vertices."""
        a, b, c = self.faces.T
        proper = (a != b) & (b != c) & (c != a)
        proper &= np.linalg.norm(self.normals, axis=1) > 0
        places = np.flatnonzero(proper)
        _, first = np.unique(
            np.sort(self.faces[places], axis=1), axis=0, return_index=True
        )
        return self.replace(places[np.sort(first)])

    def without_floaters(self, share: float = 0.01) -> Surface:
        """Return it without connected components of little area."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1; got {share}")
        if not len(self.faces):
            return self
        areas = np.bincount(self.components, np.linalg.norm(self.normals, axis=1))
        return self.replace((areas >= share * areas.max())[self.components])

    def oriented(self) -> Surface:
        """Return it with all triangles of a component wound alike, normals outwards.

        A component that has no two sides (a Moebius strip) stays as it is.
        """
        one, two, same = self._neighbours
        n = len(self.faces)
        # Each face twice, as it is and turned: what fits together hangs together.
        first = np.concatenate([one, one + n])
        second = np.concatenate([two + n * same, two + n * ~same])
        half = _components(first, second, 2 * n)
        turned = half[:n] > half[n:]
        signs = np.where(turned, -1.0, 1.0)
        volumes = np.bincount(self.components, self._volumes * signs)
        inside_out = volumes[self.components] < 0
        turned = np.where(half[:n] == half[n:], False, turned ^ inside_out)
        faces = np.where(turned[:, None], self.faces[:, ::-1], self.faces)
        return Surface(self.vertices, faces)

    def filled(self, sides: int = 200) -> Surface:
        """Return it with its holes closed by fans around their middles.

        Args:
            sides: of a hole, at most: larger ones are meant to be open.

        Orient it before: fans are wound as the triangles around a hole are. Where
        boundaries meet in a vertex the hole stays.
        """
        places, counts, _ = self._edges
        # A hole runs against the triangles that it touches.
        ends = self.faces[:, EDGES].reshape(-1, 2)[counts[places] == 1][:, ::-1]
        n = len(self.vertices)
        loop = _components(*ends.T, n)[ends[:, 0]]
        length, leaving = np.bincount(loop, minlength=n), np.bincount(ends[:, 0])
        arriving = np.bincount(ends[:, 1], minlength=n)
        simple = (leaving[ends[:, 0]] == 1) & (arriving[ends[:, 0]] == 1)
        broken = np.bincount(loop, ~simple, minlength=n) > 0
        ends = ends[(length[loop] <= sides) & ~broken[loop]]
        if not len(ends):
            return self
        loop = _components(*ends.T, n)[ends[:, 0]]
        _, loop = np.unique(loop, return_inverse=True)
        size = np.bincount(loop)
        middles = np.stack(
            [np.bincount(loop, self.vertices[ends[:, 0], d]) / size for d in range(3)],
            axis=1,
        )
        fans = np.column_stack([ends, n + loop])
        return Surface(
            np.concatenate([self.vertices, middles]),
            np.concatenate([self.faces, fans]),
        )

    def simplified(self, faces: int) -> Surface:
        """Return it with about so many faces, or itself if it has no more."""
        whole(faces, "faces", LEAST_FACES)
        if len(self.faces) <= faces:
            return self
        import fast_simplification

        # It works in float32: around the middle, in units of the whole.
        low, high = self.vertices.min(axis=0), self.vertices.max(axis=0)
        middle, size = (low + high) / 2, float((high - low).max()) or 1.0
        points, triangles = fast_simplification.simplify(
            ((self.vertices - middle) / size).astype(np.float32),
            self.faces.astype(np.int32),
            target_count=faces,
        )
        return Surface(points.astype(np.float64) * size + middle, triangles).cleaned()

    def vertex_normals(self) -> np.ndarray:
        """Return (V, 3) unit normals: of the faces around, weighed by their areas."""
        total = np.zeros_like(self.vertices)
        for d in range(3):
            values = np.repeat(self.normals[:, d], 3)
            total[:, d] = np.bincount(
                self.faces.reshape(-1), values, minlength=len(total)
            )
        length = np.linalg.norm(total, axis=1, keepdims=True)
        return total / np.where(length > 0, length, 1)


def _components(one: np.ndarray, two: np.ndarray, n: int) -> np.ndarray:
    """Return (n,) components of a graph, numbered by their first node."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(one), bool), (one, two)), shape=(n, n))
    return connected_components(links, directed=False)[1]

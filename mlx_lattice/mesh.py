"""Meshes on the host: clean-up, atlas and texture, files and pictures.

For the triangles of ``ops.dual_grid_mesh``. Needs the extra ``mesh``: areas, volumes,
normals and files are trimesh's, components are SciPy's, decimation is
fast-simplification's (Garland and Heckbert's quadrics), the atlas is xatlas's (Young).
Texels beyond its charts take the nearest texel's colour, so that filtering at a seam
finds no background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .cache_files import atomic_write
from .checks import whole
from .distribution import install
from .ops import dual_grid_mesh, grid_sample_3d
from .ops.dual_grid import DualGrid
from .tensor import SparseTensor, expect_tensor

try:
    import fast_simplification
    import numpy as np
    import trimesh
    import xatlas
    from PIL import Image
    from scipy.ndimage import distance_transform_edt
    from scipy.spatial import cKDTree
    from trimesh.graph import connected_component_labels
    from trimesh.visual import ColorVisuals, TextureVisuals
    from trimesh.visual.material import PBRMaterial, SimpleMaterial
except ModuleNotFoundError as error:
    raise ImportError(
        f"mlx_lattice.mesh needs {error.name}; {install('mesh')}"
    ) from error

__all__ = ["Surface", "Texture", "bake", "contact_sheet", "rendered", "save"]

LOW = -0.5  # the corner of TRELLIS.2's unit box
LEAST_FACES = 4  # of a simplified surface: a tetrahedron's
EDGES = ((0, 1), (1, 2), (2, 0))
Report = Callable[[str], None]


@dataclass(frozen=True)
class Surface:
    """Hold the triangles of a surface.

    Attributes:
        vertices: (V, 3) float64.
        faces: (F, 3) int64 rows of ``vertices``.
    """

    vertices: np.ndarray
    faces: np.ndarray

    def __post_init__(self) -> None:
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
        """Return a surface of some faces, with the vertices that they use, in order."""
        faces = self.faces[keep]
        used = np.zeros(len(self.vertices), bool)
        used[faces] = True
        return Surface(self.vertices[used], (np.cumsum(used) - 1)[faces])

    def cleaned(self) -> Surface:
        """Return the surface without degenerate or repeated triangles."""
        proper = np.flatnonzero(self.normals.any(axis=1))
        corners = np.sort(self.faces[proper], axis=1)
        _, first = np.unique(corners, axis=0, return_index=True)
        return self.replace(proper[np.sort(first)])

    def without_floaters(self, share: float = 0.01) -> Surface:
        """Drop components with less than ``share`` of the largest one's area."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1; got {share}")
        if not len(self.faces):
            return self
        areas = np.bincount(self.components, self.mesh.area_faces)
        return self.replace((areas >= share * areas.max())[self.components])

    def oriented(self) -> Surface:
        """Return the surface with normals outwards and equal winding in each component.

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
        """Return the surface with its holes closed by fans around their middles.

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
        """Reduce the surface to about ``faces`` faces, if it has more."""
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
        """Return (V, 3) unit normals: means over the faces around a vertex."""
        return self.mesh.vertex_normals


def surface_of(
    grid: DualGrid,
    resolution: int,
    *,
    faces: int | None = 200_000,
    floaters: float = 0.01,
    holes: int = 200,
    report: Report | None = None,
) -> Surface:
    """Return the clean surface of a dual grid, in the unit box."""
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


# Textures

PIECE = 1000  # faces in one piece of the atlas
SAMPLES = 500_000  # places that are sampled at once

# Called with (P, 3) float64 places on the surface; returns (P, 6) from 0 to 1: base
# colour (3), metallic, roughness, alpha.
Materials = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Texture:
    """Hold the materials of a surface, as images over an atlas.

    Attributes:
        vertices: (U,) the surface's vertex at each corner of the atlas: seams cut
            vertices in two.
        faces: (F, 3) rows of ``vertices``, in the order of the surface's faces.
        places: (U, 2) positions in the unit square, with the origin at the lower left.
        colour: (S, S, 4) uint8: red, green, blue, alpha; the first row on top.
        surface: (S, S, 2) uint8: roughness and metallic.
    """

    vertices: np.ndarray
    faces: np.ndarray
    places: np.ndarray
    colour: np.ndarray
    surface: np.ndarray

    def colours_at(self, places: np.ndarray) -> np.ndarray:
        """Return (P, 4) uint8 colours at (P, 2) places in the unit square."""
        size = len(self.colour)
        column, row = np.clip(_texels(places, size), 0, size - 1).T
        return self.colour[row.astype(int), column.astype(int)]

    @property
    def is_clear(self) -> bool:
        """Whether any texel is transparent."""
        return bool((self.colour[..., 3] < 255).any())


def _texels(places: np.ndarray, size: int) -> np.ndarray:
    """Return places in the unit square as columns and rows of an image."""
    return (places * (1, -1) + (0, 1)) * size


def materials_of(x: SparseTensor, resolution: int) -> Materials:
    """Return a function that samples voxels of materials at places of the box."""
    expect_tensor(x)
    if x.channels != 6 or not len(x):
        raise ValueError(
            "materials are 6 channels of one voxel or more; got "
            f"{len(x)} of {x.channels}"
        )
    active = mx.ones((len(x), 1), x.dtype)
    voxels = x.replace(mx.concatenate([x.feats, active], axis=1))
    tree = cKDTree(np.array(x.coords)[:, 1:] + 0.5)

    def sample(places: np.ndarray) -> np.ndarray:
        parts = [np.zeros((0, 6))]
        for at in range(0, len(places), SAMPLES):
            points = (places[at : at + SAMPLES] - LOW) * resolution
            points32 = mx.array(points.astype(np.float32))[None]
            values = grid_sample_3d(voxels, points32, renormalise=True)[0]
            values = np.array(values.astype(mx.float32))
            far = np.flatnonzero(values[:, 6] == 0)
            if len(far):
                rows = mx.array(tree.query(points[far])[1])
                values[far, :6] = np.array(x.feats[rows].astype(mx.float32))
            parts.append(values[:, :6])
        return np.concatenate(parts)

    return sample


def check_asset(resolution: int | None, faces: int | None, texture_size: int) -> None:
    """Check the sizes of an asset, before the work that leads to one."""
    if resolution is not None:
        whole(resolution, "resolution", 1)
    if faces is not None:
        whole(faces, "faces", LEAST_FACES)
    if not 16 <= texture_size <= 16384:
        raise ValueError(f"size must be from 16 to 16384; got {texture_size}")


def asset_of(
    grid: DualGrid,
    materials: SparseTensor | None,
    resolution: int,
    *,
    texture_size: int = 2048,
    report: Report | None = None,
    **options: Any,
) -> tuple[Surface, Texture | None]:
    """Return the surface of a dual grid and, if there are materials, its texture."""
    check_asset(resolution, options.get("faces"), texture_size)
    surface = surface_of(grid, resolution, report=report, **options)
    if materials is None:
        return surface, None
    return surface, bake(surface, materials_of(materials, resolution), texture_size)


def bake(surface: Surface, materials: Materials, size: int = 2048) -> Texture:
    """Cut an atlas and fill its texels with the materials at their places.

    Args:
        surface: a surface with at least one triangle.
        materials: the materials at places of the surface.
        size: the number of texels along a side of the atlas.

    Raises:
        ValueError: the surface has no triangles, or the size is below 16 or above
            16384.
    """
    check_asset(None, None, size)
    if not len(surface.faces):
        raise ValueError("a surface without triangles has no texture")
    vertices, faces, places = atlas(surface, size)
    values, filled = np.zeros((size * size, 6)), np.zeros(size * size, bool)
    for part in covered(_texels(places, size)[faces], size, size):
        corners = surface.vertices[vertices[faces[part.face]]]
        points = np.einsum("pk,pkd->pd", part.weights, corners)
        values[part.pixel] = materials(points)
        filled[part.pixel] = True
    image = spread(values.reshape(size, size, 6), filled.reshape(size, size))
    image = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
    return Texture(
        vertices, faces, places, image[..., [0, 1, 2, 5]], image[..., [4, 3]]
    )


def atlas(surface: Surface, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the (U,) vertices, (F, 3) faces and (U, 2) places of an atlas."""
    result, faces = xatlas.Atlas(), surface.faces
    # A chart's cost grows faster than its faces, so the surface is cut into pieces.
    pieces = cut(surface.vertices[faces].mean(axis=1), PIECE)
    used = []
    for piece in pieces:
        vertices, corners = np.unique(faces[piece], return_inverse=True)
        points = surface.vertices[vertices].astype(np.float32)
        result.add_mesh(points, corners.reshape(-1, 3).astype(np.uint32))
        used.append(vertices)
    packing = xatlas.PackOptions()
    packing.resolution, packing.padding, packing.bilinear = size, 2, True
    result.generate(pack_options=packing)
    vertices, places, corners, count = [], [], np.zeros_like(faces), 0
    for at, piece in enumerate(pieces):
        rows, chart, flat = result[at]
        vertices.append(used[at][rows.astype(np.int64)])
        places.append(flat)
        corners[piece] = chart.astype(np.int64) + count
        count += len(rows)
    return np.concatenate(vertices), corners, np.concatenate(places)


def cut(points: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the rows of points in boxes of at most so many, halved at medians."""
    pending, boxes = [np.arange(len(points))], []
    while pending:
        rows = pending.pop()
        if len(rows) <= most:
            boxes.append(rows)
            continue
        axis = np.ptp(points[rows], axis=0).argmax()
        rows = rows[np.argsort(points[rows, axis], kind="stable")]
        pending += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return boxes


def spread(image: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Return (H, W, C) with the value of the nearest filled pixel in the others."""
    if not filled.any():
        return image
    rows, columns = distance_transform_edt(
        ~filled, return_distances=False, return_indices=True
    )
    return image[rows, columns]


# Files

SUFFIXES = (".glb", ".ply", ".obj")


def check_suffix(path: str | Path) -> str:
    """Return a path's suffix; raise unless a surface can be written so."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    return suffix


def save(path: str | Path, surface: Surface, texture: Texture | None = None) -> None:
    """Write a surface in the format of the path's suffix.

    ``.glb`` is glTF 2.0 with y upwards (the surface's z), and base colour, metallic,
    roughness and alpha as textures. ``.obj`` comes with a material file and the
    colours. ``.ply`` is binary, with a texture's colours at the vertices.

    Args:
        path: the file.
        surface: z upwards.
        texture: the texture of the surface, or None for plain grey.

    Raises:
        ValueError: the path has another suffix.
    """
    path, suffix = Path(path), check_suffix(path)
    points, faces = surface.vertices, surface.faces
    normals, visual = surface.vertex_normals(), None
    if texture is not None:
        rows, faces = texture.vertices, texture.faces
        points, normals = points[rows], normals[rows]
        visual = _visual(texture, suffix, path.stem)
    if suffix == ".glb":
        turn = np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0]])
        points, normals = points @ turn.T, normals @ turn.T
    mesh = trimesh.Trimesh(
        points, faces, vertex_normals=normals, visual=visual, process=False
    )
    options = {} if suffix == ".ply" else {"include_normals": True}
    if suffix == ".obj":  # its material file and picture are named after it
        options["mtl_name"] = f"{path.stem}.mtl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        mesh.export(draft, **options)


def _visual(texture: Texture, suffix: str, name: str) -> ColorVisuals | TextureVisuals:
    if suffix == ".ply":
        return ColorVisuals(vertex_colors=texture.colours_at(texture.places))
    colour = Image.fromarray(
        texture.colour if texture.is_clear else texture.colour[..., :3]
    )
    if suffix == ".obj":
        material = SimpleMaterial(image=colour.convert("RGB"), name=name)
        return TextureVisuals(uv=texture.places, material=material)
    # glTF reads roughness from green and metallic from blue.
    packed = np.pad(texture.surface, ((0, 0), (0, 0), (1, 0)))
    material = PBRMaterial(
        baseColorTexture=colour,
        metallicRoughnessTexture=Image.fromarray(packed),
        baseColorFactor=[255, 255, 255, 255],
        metallicFactor=1.0,
        roughnessFactor=1.0,
        alphaMode="BLEND" if texture.is_clear else "OPAQUE",
        doubleSided=True,
    )
    return TextureVisuals(uv=texture.places, material=material)


# Pictures

SIDES = ((-60.0, 25.0), (30.0, 25.0), (120.0, 25.0), (-60.0, 80.0))
GREY = 0.72


def rendered(
    surface: Surface,
    texture: Texture | None = None,
    azimuth: float = -60.0,
    elevation: float = 25.0,
    size: int = 512,
) -> np.ndarray:
    """Return a (size, size, 3) uint8 picture in parallel view, lit from the eye.

    The surface's z is upwards; without a texture it is grey. ``azimuth`` and
    ``elevation`` of the eye are in degrees.
    """
    image = np.ones((size * size, 3))
    if len(surface.faces):
        a, e = np.radians((azimuth, elevation))
        right = np.array([-np.sin(a), np.cos(a), 0])
        eye = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
        down = -np.cross(eye, right)
        low, high = surface.vertices.min(axis=0), surface.vertices.max(axis=0)
        scale = 0.9 * size / (np.linalg.norm(high - low) or 1.0)
        centred = (surface.vertices - (low + high) / 2) * scale
        flat = centred @ np.stack([right, down], axis=1) + size / 2
        _paint(image, surface, texture, flat, centred @ eye, eye)
    return (image.reshape(size, size, 3) * 255 + 0.5).astype(np.uint8)


def _paint(image, surface, texture, flat, depth, eye) -> None:
    """Write the nearest triangle's shaded colour into each pixel that one covers."""
    size = round(len(image) ** 0.5)
    length = np.linalg.norm(surface.normals, axis=1)
    facing = np.abs(surface.normals @ eye) / np.where(length > 0, length, 1)
    nearest = np.full(len(image), -np.inf)
    for part in covered(flat[surface.faces], size, size):
        depths = np.einsum("pk,pk->p", part.weights, depth[surface.faces[part.face]])
        # Of several triangles on a pixel the nearest one is written last.
        order = np.argsort(depths, kind="stable")
        order = order[depths[order] > nearest[part.pixel[order]]]
        pixel, face = part.pixel[order], part.face[order]
        nearest[pixel] = depths[order]
        colours = np.full((len(face), 3), GREY)
        if texture is not None:
            corners = texture.places[texture.faces[face]]
            places = np.einsum("pk,pkd->pd", part.weights[order], corners)
            values = texture.colours_at(places) / 255
            colours = values[:, :3] * values[:, 3:] + 1 - values[:, 3:]
        image[pixel] = colours * (0.25 + 0.75 * facing[face, None])


def contact_sheet(
    path: str | Path, surface: Surface, texture: Texture | None = None, size: int = 512
) -> None:
    """Write a picture of a surface from four sides."""
    views = [rendered(surface, texture, *side, size=size) for side in SIDES]
    with atomic_write(path) as draft:
        Image.fromarray(np.concatenate(views, axis=1)).save(draft)


# Pixels of triangles

CHUNK = 4_000_000  # candidate pixels at once


class Covered(NamedTuple):
    """Pixels whose centres triangles cover."""

    pixel: np.ndarray
    face: np.ndarray
    weights: np.ndarray


def covered(corners: np.ndarray, height: int, width: int) -> Iterator[Covered]:
    """Yield the pixels of triangles of any winding, some triangles at a time."""
    limit = np.array([width, height]) - 1
    low = np.clip(np.ceil(corners.min(axis=1) - 0.5), 0, None).astype(np.int64)
    high = np.floor(corners.max(axis=1) - 0.5).astype(np.int64)
    size = np.maximum(np.minimum(high, limit) - low + 1, 0)
    a, b, c = (corners[:, at] for at in range(3))
    twice = _cross(b - a, c - a)
    counts = np.where(twice != 0, size.prod(axis=1), 0)
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + CHUNK, side="right")))
        face = np.repeat(np.arange(begin, end), counts[begin:end])
        first = ends[begin:end] - counts[begin:end] - before
        at = np.arange(len(face)) - np.repeat(first, counts[begin:end])
        column = low[face, 0] + at % size[face, 0]
        row = low[face, 1] + at // size[face, 0]
        centre = np.stack([column, row], axis=1) + 0.5
        to_a, to_b, to_c = (side[face] - centre for side in (a, b, c))
        areas = [_cross(to_b, to_c), _cross(to_c, to_a), _cross(to_a, to_b)]
        weights = np.stack(areas, axis=1) / twice[face, None]
        inside = (weights >= 0).all(axis=1)
        yield Covered((row * width + column)[inside], face[inside], weights[inside])
        begin = end


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]

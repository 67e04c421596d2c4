"""From a dual grid and its materials to a textured surface, and to its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..checks import whole
from ..kept_files import atomic_write
from ..ops import dual_grid_mesh, grid_sample_3d
from ..ops.dual_grid import DualGrid
from ..tensor import SparseTensor, expect_tensor
from .surface import LEAST_FACES, Surface
from .texture import Materials, Texture, bake, check_size

LOW = -0.5  # the corner of TRELLIS.2's unit box
SAMPLES = 500_000  # places that are sampled at a time
Report = Callable[[str], None]


def check_asset(resolution: int | None, faces: int | None, texture_size: int) -> None:
    """Check the sizes of an asset, before the work that leads to one."""
    for value, name, least in (
        (resolution, "resolution", 1),
        (faces, "faces", LEAST_FACES),
    ):
        if value is not None:
            whole(value, name, least)
    check_size(texture_size)


def surface_of(
    grid: DualGrid,
    resolution: int,
    *,
    faces: int | None = 200_000,
    floaters: float = 0.01,
    holes: int = 200,
    report: Report | None = None,
) -> Surface:
    """Return the clean surface of a dual grid's only batch element, in the unit box.

    Triangles without area go, then components below ``floaters`` of the largest one's
    area; the rest is wound outwards, holes of up to ``holes`` sides are closed, and it
    is simplified to ``faces``. ``resolution`` are voxels along the box, from -0.5 to
    0.5; ``report`` is called with a line a step.

    Raises:
        ValueError: no triangles are left, there are several batch elements, or a size
            is too small.
    """
    whole(resolution, "resolution", 1)
    say = report or (lambda line: None)
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
    say(f"{len(surface.faces):,} triangles")
    surface = surface.without_floaters(floaters).oriented().filled(holes)
    say(f"{len(surface.faces):,} without floaters and holes")
    if faces is not None and len(surface.faces) > faces:
        # Simplifying joins vertices: what it leaves behind is put right again.
        surface = surface.simplified(faces).oriented().filled(holes)
        surface = surface.simplified(faces)  # what closed holes added
        say(f"{len(surface.faces):,} simplified")
    if not len(surface.faces):
        raise ValueError(
            f"none of {len(triangles):,} triangles is left: they have no area, or "
            f"{faces} faces are too few for the surface"
        )
    return surface


def materials_of(x: SparseTensor, resolution: int) -> Materials:
    """Return a function that samples the texture decoder's voxels at places of the box.

    It is trilinear over the active voxels around a place, as TRELLIS.2's
    ``grid_sample_3d``; without any it takes the nearest voxel. ``x`` is (N, 6) from 0
    to 1: base colour, metallic, roughness, alpha.
    """
    expect_tensor(x)
    if x.channels != 6 or not len(x):
        raise ValueError(
            "materials are 6 channels of one voxel or more; got "
            f"{len(x)} of {x.channels}"
        )
    both = x.replace(mx.concatenate([x.feats, mx.ones((len(x), 1), x.dtype)], axis=1))
    nearest = None

    def sample(places: np.ndarray) -> np.ndarray:
        nonlocal nearest
        found = np.zeros((len(places), 6))
        for at in range(0, len(places), SAMPLES):
            part = slice(at, at + SAMPLES)
            points = (places[part] - LOW) * resolution
            given = mx.array(points.astype(np.float32))[None]
            values = grid_sample_3d(both, given, renormalise=True)[0]
            values = np.array(values.astype(mx.float32))
            found[part] = values[:, :6]
            far = np.flatnonzero(values[:, 6] == 0)
            if len(far):
                if nearest is None:
                    from scipy.spatial import cKDTree

                    nearest = cKDTree(np.array(x.coords)[:, 1:] + 0.5)
                rows = mx.array(nearest.query(points[far])[1])
                found[at + far] = np.array(x.feats[rows].astype(mx.float32))
        return found

    return sample


def asset_of(
    grid: DualGrid,
    materials: SparseTensor | None,
    resolution: int,
    *,
    texture_size: int = 2048,
    report: Report | None = None,
    **options,
) -> tuple[Surface, Texture | None]:
    """Return the surface of a dual grid and, if there are materials, its texture."""
    check_asset(resolution, options.get("faces"), texture_size)
    surface = surface_of(grid, resolution, report=report, **options)
    if materials is None:
        return surface, None
    texture = bake(surface, materials_of(materials, resolution), texture_size)
    return surface, texture


# Files

SUFFIXES = (".glb", ".ply", ".obj")


def check_suffix(path: str | Path) -> str:
    """Return a path's suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    return suffix


def save(path: str | Path, surface: Surface, texture: Texture | None = None) -> None:
    """Write a surface; the suffix says how.

    ``.glb``: glTF 2.0, y upwards (the surface's z), with base colour, metallic,
    roughness and alpha as textures. ``.obj``: with a material file and the colours
    beside it. ``.ply``: binary; a texture's colours are the vertices'.

    Args:
        path: the file.
        surface: z upwards.
        texture: of that surface, or None for plain grey.

    Raises:
        ValueError: another suffix.
    """
    import trimesh

    suffix = check_suffix(path)
    points, faces = surface.vertices, surface.faces
    normals, visual = surface.vertex_normals(), None
    if texture is not None:
        at, places = texture.vertices, texture.places
        points, faces, normals = points[at], texture.faces, normals[at]
        visual = _visual(texture, suffix, Path(path).stem)
        if suffix == ".ply":
            colours = texture.colours_at(places)
            visual = trimesh.visual.ColorVisuals(vertex_colors=colours)
    if suffix == ".glb":
        turn = np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0]])
        points, normals = points @ turn.T, normals @ turn.T
    mesh = trimesh.Trimesh(
        points, faces, vertex_normals=normals, visual=visual, process=False
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    options = {} if suffix == ".ply" else {"include_normals": True}
    if suffix == ".obj":  # its material file and picture are named after it
        options["mtl_name"] = f"{Path(path).stem}.mtl"
    with atomic_write(path) as draft:
        mesh.export(draft, **options)


def _visual(texture: Texture, suffix: str, name: str):
    from PIL import Image
    from trimesh.visual import TextureVisuals
    from trimesh.visual.material import PBRMaterial, SimpleMaterial

    colour = Image.fromarray(
        texture.colour if texture.is_clear else texture.colour[..., :3]
    )
    if suffix == ".obj":
        material = SimpleMaterial(image=colour.convert("RGB"), name=name)
        return TextureVisuals(uv=texture.places, material=material)
    # glTF reads roughness from green and metallic from blue.
    packed = np.zeros((*texture.surface.shape[:2], 3), np.uint8)
    packed[..., 1:] = texture.surface
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

"""Files of surfaces: GLB with a PBR material, PLY and OBJ, by trimesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..atomic_write import atomic_write
from .surface import Surface
from .texture import Texture

SUFFIXES = (".glb", ".ply", ".obj")


def check_suffix(path: str | Path) -> str:
    """Return a path's suffix.

    Raises:
        ValueError: it is none of ``SUFFIXES``.
    """
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
            size = len(texture.colour)
            column, row = np.clip((places * (1, -1) + (0, 1)) * size, 0, size - 1).T
            colours = texture.colour[row.astype(int), column.astype(int)]
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

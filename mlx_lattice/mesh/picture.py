"""A picture of a surface from several sides, without a graphics card."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..atomic_write import atomic_write
from .raster import covered
from .surface import Surface
from .texture import Texture

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

    Args:
        surface: z upwards.
        texture: its colours, or None for grey.
        azimuth, elevation: of the eye, in degrees.
        size: pixels of the sides.
    """
    image = np.ones((size * size, 3))
    if not len(surface.faces):
        return (image.reshape(size, size, 3) * 255).astype(np.uint8)
    a, e = np.radians((azimuth, elevation))
    right = np.array([-np.sin(a), np.cos(a), 0])
    eye = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    down = -np.cross(eye, right)
    low, high = surface.vertices.min(axis=0), surface.vertices.max(axis=0)
    scale = 0.9 * size / (np.linalg.norm(high - low) or 1.0)
    centred = (surface.vertices - (low + high) / 2) * scale
    flat = centred @ np.stack([right, down], axis=1) + size / 2
    depth = centred @ eye
    nearest = np.full(size * size, -np.inf)
    shade = _shades(surface, eye)
    for part in covered(flat[surface.faces], size, size):
        corners = surface.faces[part.face]
        far = np.einsum("pk,pk->p", part.weights, depth[corners])
        # Of several triangles on a pixel the nearest one, written last.
        order = np.argsort(far, kind="stable")
        order = order[far[order] > nearest[part.pixel[order]]]
        pixel, face = part.pixel[order], part.face[order]
        nearest[pixel] = far[order]
        image[pixel] = _colours(texture, face, part.weights[order]) * shade[face, None]
    return (image.reshape(size, size, 3) * 255 + 0.5).astype(np.uint8)


def _shades(surface: Surface, eye: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(surface.normals, axis=1)
    facing = np.abs(surface.normals @ eye) / np.where(length > 0, length, 1)
    return 0.25 + 0.75 * facing


def _colours(texture: Texture | None, face, weights) -> np.ndarray:
    if texture is None:
        return np.full((len(face), 3), GREY)
    at = np.einsum("pk,pkd->pd", weights, texture.places[texture.faces[face]])
    size = len(texture.colour)
    column, row = np.clip((at * (1, -1) + (0, 1)) * size, 0, size - 1).T.astype(int)
    found = texture.colour[row, column] / 255
    return found[:, :3] * found[:, 3:] + 1 - found[:, 3:]


def contact_sheet(
    path: str | Path, surface: Surface, texture: Texture | None = None, size: int = 512
) -> None:
    """Write a picture of a surface from four sides."""
    from PIL import Image

    views = [rendered(surface, texture, *side, size=size) for side in SIDES]
    with atomic_write(path) as draft:
        Image.fromarray(np.concatenate(views, axis=1)).save(draft)

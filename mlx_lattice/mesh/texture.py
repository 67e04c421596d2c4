"""Textures over an atlas of a surface, and pictures of it without a graphics card.

The atlas is xatlas's (Young); texels beyond its charts take the nearest one's colour,
so that filtering at seams finds no background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..kept_files import atomic_write
from .surface import Surface

CHANNELS = ("red", "green", "blue", "metallic", "roughness", "alpha")

PIECE = 1000  # faces that are laid out at a time

# Called with (P, 3) float64 places on the surface; returns (P, 6) from 0 to 1, as
# CHANNELS.
Materials = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Texture:
    """Materials of a surface, as images over an atlas.

    Attributes:
        vertices: (U,) the surface's vertex of each corner of the atlas: seams cut
            vertices in two.
        faces: (F, 3) rows of ``vertices``, as the surface's faces.
        places: (U, 2) in the unit square, the origin at the lower left.
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
        column, row = np.clip((places * (1, -1) + (0, 1)) * size, 0, size - 1).T
        return self.colour[row.astype(int), column.astype(int)]

    @property
    def is_clear(self) -> bool:
        """Whether anything can be seen through."""
        return bool((self.colour[..., 3] < 255).any())


def check_size(size: int) -> None:
    """Raise a ValueError unless an atlas may have sides of so many texels."""
    if not 16 <= size <= 16384:
        raise ValueError(f"size must be from 16 to 16384; got {size}")


def bake(surface: Surface, materials: Materials, size: int = 2048) -> Texture:
    """Cut an atlas and fill its texels with the materials of their places.

    Args:
        surface: with at least one triangle.
        materials: at places on the surface.
        size: texels of the atlas's sides.

    Raises:
        ValueError: no triangles, or a size below 16 or above 16384.
    """
    check_size(size)
    if not len(surface.faces):
        raise ValueError("a surface without triangles has no texture")
    vertices, faces, places = atlas(surface, size)
    values, filled = np.zeros((size * size, 6)), np.zeros(size * size, bool)
    corners = (places * (1, -1) + (0, 1)) * size
    for part in covered(corners[faces], size, size):
        ends = surface.vertices[vertices[faces[part.face]]]
        where = np.einsum("pk,pkd->pd", part.weights, ends)
        values[part.pixel] = materials(where)
        filled[part.pixel] = True
    image = spread(values.reshape(size, size, 6), filled.reshape(size, size))
    image = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
    return Texture(
        vertices, faces, places, image[..., [0, 1, 2, 5]], image[..., [4, 3]]
    )


def atlas(surface: Surface, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the (U,) vertices, (F, 3) faces and (U, 2) places of an atlas."""
    import xatlas

    whole, faces = xatlas.Atlas(), surface.faces
    # A chart's cost grows faster than its faces: the surface is cut in space before.
    pieces = cut(surface.vertices[faces].mean(axis=1), PIECE)
    given = [np.unique(faces[piece], return_inverse=True) for piece in pieces]
    for used, corners in given:
        points = surface.vertices[used].astype(np.float32)
        whole.add_mesh(points, corners.reshape(-1, 3).astype(np.uint32))
    packing = xatlas.PackOptions()
    packing.resolution, packing.padding, packing.bilinear = size, 2, True
    whole.generate(pack_options=packing)
    vertices, places, made, before = [], [], np.zeros_like(faces), 0
    for at, (piece, (used, _)) in enumerate(zip(pieces, given, strict=True)):
        rows, corners, flat = whole[at]
        vertices.append(used[rows.astype(np.int64)])
        places.append(flat)
        made[piece] = corners.astype(np.int64) + before
        before += len(rows)
    return np.concatenate(vertices), made, np.concatenate(places)


def cut(points: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the places of points in boxes of at most so many, halved at medians."""
    open_, done = [np.arange(len(points))], []
    while open_:
        at = open_.pop()
        if len(at) <= most:
            done.append(at)
            continue
        axis = np.ptp(points[at], axis=0).argmax()
        order = at[np.argsort(points[at, axis], kind="stable")]
        open_ += [order[: len(at) // 2], order[len(at) // 2 :]]
    return done


def spread(image: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """Return (H, W, C) with the value of the nearest filled pixel in the others."""
    from scipy.ndimage import distance_transform_edt

    if not filled.any():
        return image
    rows, columns = distance_transform_edt(
        ~filled, return_distances=False, return_indices=True
    )
    return image[rows, columns]


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
    found = texture.colours_at(at) / 255
    return found[:, :3] * found[:, 3:] + 1 - found[:, 3:]


def contact_sheet(
    path: str | Path, surface: Surface, texture: Texture | None = None, size: int = 512
) -> None:
    """Write a picture of a surface from four sides."""
    from PIL import Image

    views = [rendered(surface, texture, *side, size=size) for side in SIDES]
    with atomic_write(path) as draft:
        Image.fromarray(np.concatenate(views, axis=1)).save(draft)


# Pixels of triangles

CHUNK = 4_000_000  # candidate pixels at a time


class Covered(NamedTuple):
    """Pixels whose centres triangles cover.

    Attributes:
        pixel: (P,) row * width + column.
        face: (P,) the triangle.
        weights: (P, 3) barycentric, of its corners.
    """

    pixel: np.ndarray
    face: np.ndarray
    weights: np.ndarray


def covered(corners: np.ndarray, height: int, width: int) -> Iterator[Covered]:
    """Yield the pixels of triangles of any winding, some triangles at a time.

    Args:
        corners: (F, 3, 2) positions (column, row) in pixels; the centre of the first
            pixel lies at (0.5, 0.5).
        height, width: of the picture.
    """
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
        at = np.arange(len(face)) - np.repeat(
            ends[begin:end] - counts[begin:end] - before, counts[begin:end]
        )
        column = low[face, 0] + at % size[face, 0]
        row = low[face, 1] + at // size[face, 0]
        centre = np.stack([column, row], axis=1) + 0.5
        sides = (
            _cross(b[face] - centre, c[face] - centre),
            _cross(c[face] - centre, a[face] - centre),
            _cross(a[face] - centre, b[face] - centre),
        )
        weights = np.stack(sides, axis=1) / twice[face, None]
        inside = (weights >= 0).all(axis=1)
        yield Covered((row * width + column)[inside], face[inside], weights[inside])
        begin = end


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]

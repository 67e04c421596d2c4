"""Texture: an atlas over a surface, with the materials that a function gives.

The atlas is xatlas's (Young); texels beyond its charts take the nearest one's colour,
so that filtering at seams finds no background.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .raster import covered
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
    """Return the (U,) vertices, (F, 3) faces and (U, 2) places of an atlas.

    Args:
        surface: to lay out flat.
        size: texels of the atlas's sides, for the distance between charts.
    """
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

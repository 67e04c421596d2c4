"""Which triangle covers which pixel: for baking textures, and for pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

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

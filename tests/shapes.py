"""Dual grids of solids by their definition."""

import numpy as np


def surface(f, n: int):
    """The dual grid of a signed distance on the corners of n cells an axis.

    Vertices are the mean of the crossed edges, as the definition has them. Also the
    sign at the lower end of each flagged edge, by row and axis.
    """
    corners = f(*np.meshgrid(*[np.arange(n + 1)] * 3, indexing="ij"))
    inside = corners < 0
    cells, points = np.zeros((n, n, n)), np.zeros((n, n, n, 3))
    flags, lower = np.zeros((n, n, n, 3), bool), np.zeros((n, n, n, 3), bool)
    for axis in range(3):
        two = [d for d in range(3) if d != axis]
        for near in np.ndindex(2, 2):
            low, high = [slice(None)] * 3, [slice(None)] * 3
            low[axis], high[axis] = slice(0, n), slice(1, n + 1)
            for d, at in zip(two, near, strict=True):
                low[d] = high[d] = slice(at, n + at)
            a, b = corners[tuple(low)], corners[tuple(high)]
            crossed = inside[tuple(low)] != inside[tuple(high)]
            at = np.zeros((n, n, n, 3))
            at[..., axis] = a / np.where(crossed, a - b, 1)
            for d, offset in zip(two, near, strict=True):
                at[..., d] = offset
            cells += crossed
            points += at * crossed[..., None]
            if near == (1, 1):  # the edge farthest from the lower corner
                flags[..., axis], lower[..., axis] = crossed, inside[tuple(low)]
    active = np.argwhere(cells)
    at = tuple(active.T)
    coords = np.concatenate([np.zeros((len(active), 1)), active], 1).astype(np.int32)
    return coords, points[at] / cells[at][:, None], flags[at], lower[at]


def ball(n, radius):
    centre = (n + 0.3) / 2
    return lambda *p: np.sqrt(sum((v - centre) ** 2 for v in p)) - radius


def torus(n, large, small):
    centre = (n + 0.3) / 2

    def f(x, y, z):
        ring = np.sqrt((x - centre) ** 2 + (y - centre) ** 2) - large
        return np.sqrt(ring**2 + (z - centre) ** 2) - small

    return f

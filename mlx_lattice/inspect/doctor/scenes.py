"""Voxels that the doctor times layers on: the same on every machine, to the last one.

All arithmetic is on integers, so that two reports speak of the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx

BITS = 10
UNIT = 1 << BITS  # fractions of a cell
MOST_CELLS = 1 << 23  # of a sphere's box at a time
# Waves of the sheet, by share of the grid's side: (height, periods on x, on y, phase).
WAVES = ((0.055, 3, 2, 0.16), (0.035, 5, 4, 0.61), (0.02, 9, 7, 0.35))
# Spheres: centre and radius, by share of the side.
SPHERES = ((0.3, 0.35, 0.55, 0.16), (0.7, 0.6, 0.62, 0.2), (0.55, 0.25, 0.75, 0.1))
# Fractions of a cell from the surface: about 17 edges a row as a scan has, and 10.
THICK, THIN = 1150, 600


def shell(resolution: int) -> mx.array:
    """Return the (N, 4) int32 voxels of a hollow sphere in a grid of that side.

    The shells of mtlgemm's benchmark: d = |(i, j, k) - resolution / 2 + 0.5| is at
    least resolution / 2 - 1.25 and at most resolution / 2. Rows are sorted.
    """
    axis = 2 * mx.arange(resolution, dtype=mx.int32) - resolution + 1
    square = axis * axis
    # 16 d^2, of cells four times as fine: integers throughout.
    d = 4 * (square[:, None, None] + square[:, None] + square)
    return _rows((d >= (2 * resolution - 5) ** 2) & (d <= 4 * resolution**2))


def surface(rows: int) -> mx.array:
    """Return about ``rows`` (N, 4) int32 voxels of a scan: a wavy sheet and spheres.

    About 17 edges a row in a 3x3x3 submanifold kernel. Rows are sorted.
    """
    return _surface(max(8, round(math.sqrt(rows / 4.4))), THICK)


def thin_surface(rows: int) -> mx.array:
    """Return the same surface in a layer of one cell: about 10 edges a row."""
    return _surface(max(8, round(math.sqrt(rows / 2.4))), THIN)


def _surface(side: int, thick: int) -> mx.array:
    """Return the voxels of a sheet and spheres, never a whole grid at a time."""
    parts = [_sheet(side, thick)]
    for sphere in SPHERES:
        parts += _sphere(side, thick / UNIT, *sphere)
    places = mx.sort(mx.concatenate(parts))
    first = mx.concatenate([mx.array([True]), places[1:] != places[:-1]])
    return _voxels(_chosen(first, places), side)


def _sheet(side: int, thick: int) -> mx.array:
    """Return the places of the cells whose centre is near the sheet's height."""
    height = mx.full((side, side), int(0.3 * side * UNIT), dtype=mx.int32)
    for share, on_x, on_y, phase in WAVES:
        x, y = _wave(side, on_x, phase), _wave(side, on_y, 2 * phase)
        # Shifts round down everywhere; what a division does depends on the backend.
        wave = mx.right_shift(x[:, None] * y, BITS)
        height = height + mx.right_shift(int(share * side * UNIT) * wave, BITS)
    lowest = mx.right_shift(height - thick + UNIT - 1, BITS)
    highest = mx.right_shift(height + thick, BITS)
    z = lowest[:, :, None] + mx.arange(2 + 2 * thick // UNIT, dtype=mx.int32)
    column = mx.arange(side * side, dtype=mx.int32).reshape(side, side, 1) * side
    return _chosen((z <= highest[:, :, None]) & (z < side), column + z)


def _sphere(
    side: int, thick: float, x: float, y: float, z: float, radius: float
) -> Iterator[mx.array]:
    """Yield the places of the cells near a sphere, from some layers at a time."""
    centre, r = [int(share * side) for share in (x, y, z)], radius * side
    inner, outer = int((r - thick) * (r - thick)), int((r + thick) * (r + thick))
    reach = int(r + thick) + 1
    axes = [(max(0, c - reach), min(side, c + reach + 1)) for c in centre]
    layers = max(1, MOST_CELLS // ((2 * reach + 1) ** 2))
    for start in range(*axes[0], layers):
        ends = (start, min(axes[0][1], start + layers)), *axes[1:]
        a, b, c = (mx.arange(*end, dtype=mx.int32) for end in ends)
        squares = ((v - at) * (v - at) for v, at in zip((a, b, c), centre, strict=True))
        p, q, s = squares
        d = p[:, None, None] + q[:, None] + s
        place = ((a[:, None, None] * side) + b[:, None]) * side + c
        found = _chosen((d >= inner) & (d <= outer), place)
        mx.eval(found)
        yield found


def _wave(side: int, periods: int, phase: float) -> mx.array:
    turn = 2 * math.pi * periods / side
    values = (round(UNIT * math.sin(turn * (at + phase * side))) for at in range(side))
    return mx.array(list(values), dtype=mx.int32)


def _chosen(mask: mx.array, values: mx.array) -> mx.array:
    """Return the values where a mask is set, in order."""
    mask, values = mask.flatten(), values.flatten()
    place = mx.cumsum(mask.astype(mx.int32)) - 1
    count = int(place[-1].item()) + 1
    # What is not chosen goes to one more place, which is cut off.
    found = mx.zeros((count + 1,), dtype=mx.int32)
    found[mx.where(mask, place, count)] = values
    return found[:count]


def _rows(filled: mx.array) -> mx.array:
    """Return the (N, 4) voxels of a grid's filled cells, in lexicographic order."""
    places = mx.arange(filled.size, dtype=mx.int32)
    return _voxels(_chosen(filled, places), filled.shape[0])


def _voxels(places: mx.array, side: int) -> mx.array:
    """Return (N, 4) voxels of places in a grid."""
    x, rest = places // (side * side), places % (side * side)
    return mx.stack([mx.zeros_like(x), x, rest // side, rest % side], axis=1)

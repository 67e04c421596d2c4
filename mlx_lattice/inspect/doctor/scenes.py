"""Voxels that the doctor times layers on: the same on every machine, to the last one.

All arithmetic is on integers, so that two reports speak of the same rows.
"""

from __future__ import annotations

import math

import mlx.core as mx

UNIT = 1024  # fractions of a cell
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
    step = mx.arange(side, dtype=mx.int32)
    height = mx.full((side, side), int(0.3 * side * UNIT), dtype=mx.int32)
    for share, on_x, on_y, phase in WAVES:
        x, y = _wave(side, on_x, phase), _wave(side, on_y, 2 * phase)
        # Products of two tables of UNIT fractions.
        wave = (x[:, None] * y) // UNIT
        height = height + (int(1000 * share * side) * wave) // 1000
    near = mx.abs(step * UNIT - height[:, :, None]) <= thick
    for x, y, z, radius in SPHERES:
        centre = [int(share * side) for share in (x, y, z)]
        a, b, c = ((step - at) * (step - at) for at in centre)
        d = a[:, None, None] + b[:, None] + c
        inner, outer = radius * side - thick / UNIT, radius * side + thick / UNIT
        near = near | ((d >= int(inner * inner)) & (d <= int(outer * outer)))
    return _rows(near)


def _wave(side: int, periods: int, phase: float) -> mx.array:
    turn = 2 * math.pi * periods / side
    values = (round(UNIT * math.sin(turn * (at + phase * side))) for at in range(side))
    return mx.array(list(values), dtype=mx.int32)


def _rows(filled: mx.array) -> mx.array:
    """Return the (N, 4) places of a grid's filled cells, in lexicographic order."""
    side, flat = filled.shape[0], filled.flatten().astype(mx.int32)
    place = mx.cumsum(flat) - 1
    count = int(place[-1].item()) + 1
    # What is not filled goes to one more row, which is cut off.
    place = mx.where(flat == 1, place, count)
    at = mx.zeros((count + 1,), dtype=mx.int32)
    at[place] = mx.arange(len(flat), dtype=mx.int32)
    at = at[:count]
    x, rest = at // (side * side), at % (side * side)
    return mx.stack([mx.zeros_like(at), x, rest // side, rest % side], axis=1)

"""Scenes that benchmarks run on: exactly N voxels each, by a fixed seed."""

import importlib.util
from pathlib import Path

import numpy as np

# The generator that the peers' figures were taken on, where it lies beside this.
_SHARED = Path(__file__).resolve().parents[2] / "shared" / "scenes" / "cpu_scenes.py"


def surface(n, seed=11):
    """Return (N, 4) int32 sorted voxels of a terrain and sphere shells."""
    if _SHARED.exists():
        spec = importlib.util.spec_from_file_location("cpu_scenes", _SHARED)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.surface_coords(n, seed)
    return own_surface(n, seed)


def scattered(n, seed=11):
    """Return (N, 4) int32 sorted random voxels: about 1.3 edges a row at 3x3x3."""
    side = max(2, round((26 * n / 0.3) ** (1 / 3)))
    flat = np.random.default_rng(seed).choice(side**3, n, replace=False)
    rows = np.stack(np.unravel_index(np.sort(flat), (side,) * 3), axis=1)
    return np.insert(rows, 0, 0, axis=1).astype(np.int32)


def scan(n, seed=11):
    """Return a surface; of more than half a million voxels sheets, without its grid."""
    return own_surface(n, seed) if n <= 500_000 else sheets(n, seed)


def sheets(n, seed=11):
    """Return (n, 4) int32 sorted voxels of wavy watertight sheets above each other."""
    side = 2 * int((n / 24) ** 0.5) + 2
    while True:
        axis = np.arange(side + 1) / side
        wave = np.sin(9 * axis[:, None] + seed) * np.cos(7 * axis)
        rough = 0.4 * np.sin(1.7 * np.arange(side + 1))[:, None]
        levels = side * (0.2 + 0.3 * np.arange(3) + 0.08 * wave[..., None])
        cells = np.floor(levels + rough[..., None]).astype(np.int64)
        corners = cells[:-1, :-1], cells[1:, :-1], cells[:-1, 1:], cells[1:, 1:]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
        counts = (high - low + 1).reshape(-1)  # a column of each sheet is watertight
        if counts.sum() >= n:
            break
        side = int(side * 1.05) + 2
    column = np.repeat(np.arange(len(counts)), counts)
    z = np.arange(len(column)) - np.repeat(np.cumsum(counts) - counts, counts)
    z += low.reshape(-1)[column]
    x, y = np.divmod(column // 3, side)
    return np.stack([0 * x, x, y, z], axis=1)[:n].astype(np.int32)


def source():
    """Return which generator ``surface`` uses."""
    return "peers" if _SHARED.exists() else "own"


def own_surface(n, seed=11):
    """Return a like surface: its n nearest voxels, on the least grid that has n."""
    side = 32
    while True:
        distance = _distance(side, seed)
        near = np.argwhere(distance < 0.5 / side)
        if len(near) >= n:
            break
        side = max(side + 1, int(side * np.sqrt(n / max(1, len(near)))))
    order = np.argsort(distance[tuple(near.T)], kind="stable")
    rows = near[np.sort(order[:n])]
    return np.insert(rows, 0, 0, axis=1).astype(np.int32)


def _distance(side, seed):
    """Distances of a grid's cells to a wavy sheet and six spheres, in grid sides."""
    rng = np.random.default_rng(seed)
    axis = (np.arange(side, dtype=np.float32) + 0.5) / side
    x, y, z = np.meshgrid(axis, axis, axis, indexing="ij", sparse=True)
    height = 0.3
    for fx, fy, px, py, size in rng.random((5, 5)):
        wave = np.sin(2 * np.pi * (1 + 4 * fx) * x + 7 * px)
        wave = wave * np.cos(2 * np.pi * (1 + 4 * fy) * y + 7 * py)
        height = height + (0.01 + 0.04 * size) * wave
    distance = np.abs(z - height)
    for cx, cy, cz, size in rng.random((6, 4)):
        centre = (0.15 + 0.7 * v for v in (cx, cy, cz))
        squares = sum((a - c) ** 2 for a, c in zip((x, y, z), centre, strict=True))
        shell = np.abs(np.sqrt(squares) - (0.06 + 0.14 * size))
        distance = np.minimum(distance, shell)
    return distance

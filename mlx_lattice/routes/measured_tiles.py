"""Tiles that were measured as this machine's fastest: ``ml.tune()`` plans with them."""

from __future__ import annotations

from ..devices import Device
from ..problem import FORWARD, Problem
from . import measure
from .choice import Own
from .kept_entries import KeptEntries
from .thresholds import TileShape

# Raise it when a shape or a height comes to mean another kernel.
VERSION = 1
# Shapes of simdgroup matrices, and heights of TensorOps' simdgroups, that are tried.
SHAPES = {
    "four of 32 x 32": TileShape(4, 32, 64, 1),
    "two of 64 x 32": TileShape(2, 32, 64, 1),
    "four of 64 x 16": TileShape(4, 16, 64, 1),
    "steps of 32 bytes": TileShape(4, 32, 32, 1),
    "two buffers of them": TileShape(4, 32, 32, 2),
}
HEIGHTS = 64, 32, 16
# The route that has each, by its name in the file.
ROUTES = {"shape": "sorted_implicit_gemm", "height": "tensor_ops"}


def own(problem: Problem, device: Device) -> Own:
    """Return the tiles that were kept for a problem, by route; none for most."""
    if problem.pass_ != FORWARD or not (held := _FILE.load()):
        return ()
    found = {w: held.get(_key(problem, device, w), {}).get(w) for w in ROUTES}
    shape, height = found["shape"], found["height"]
    tiles = shape and TileShape(*shape), height
    pairs = zip(ROUTES.values(), tiles, strict=True)
    return tuple((route, tile) for route, tile in pairs if tile)


def keep(
    problem: Problem, device: Device, what: str, times: dict[object, float | None]
) -> TileShape | int | None:
    """Keep the fastest tile for a problem, and for similar ones.

    Args:
        problem: the facts of a forward pass.
        device: the profile that MLX runs on now.
        what: "shape" or "height".
        times: milliseconds by shape, or by height; None where the result was wrong.

    Returns:
        What was kept; None, and nothing is, where no result was right.
    """
    right = {tile: ms for tile, ms in times.items() if ms is not None}
    if not right:
        return None
    fastest = min(right, key=right.__getitem__)
    held = list(fastest) if what == "shape" else fastest
    _FILE.store(_key(problem, device, what), {what: held})
    return fastest


def _key(problem: Problem, device: Device, what: str) -> str:
    """Return the key of a tile: shapes depend on how weights stand, too."""
    read = " across" if what == "shape" and problem.rows_are_summed else ""
    return f"{what}: {measure.key(problem, device)}{read}"


def _is_entry(entry: object) -> bool:
    """Whether it names a tile that kernels have."""
    if not isinstance(entry, dict) or len(entry) != 1:
        return False
    ((what, tile),) = entry.items()
    known = {"shape": [list(s) for s in SHAPES.values()], "height": list(HEIGHTS)}
    return type(tile) in (int, list) and tile in known.get(what, ())


_FILE = KeptEntries("tiles.json", VERSION, _is_entry, "a tile that kernels have")

"""flex_gemm.ops.grid_sample: features of a sparse tensor at points."""

from __future__ import annotations

import torch

from ....ops import grid_sample_3d as _sample
from ....tensor import SparseTensor
from ... import bridge
from .spconv import inserted

__all__ = ["grid_sample_3d", "grid_sample_3d_torch", "set_hashmap_ratio"]

HASHMAP_RATIO = 2.0


def set_hashmap_ratio(ratio: float) -> None:
    """Store the ratio, which has no effect."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


def grid_sample_3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: torch.Size,
    grid: torch.Tensor,
    mode: str = "trilinear",
) -> torch.Tensor:
    """Return features at points; cell i spans [i, i + 1) and has its value at i + 0.5.

    Args:
        feats: (N, C).
        coords: (N, 4) integers: batch index, x, y, z.
        shape: (B, C, X, Y, Z).
        grid: (B, L, 3) points in cells; no gradient flows into them.
        mode: "trilinear" divides by the weight of the cells that are there; "nearest"
            takes the cell that a point lies in.

    Returns:
        (B, L, C); 0 where no cell is.

    Raises:
        AssertionError: shapes or the mode do not fit.
        ValueError: coordinates repeat or lie outside of the shape.
    """
    if mode not in ("nearest", "trilinear"):
        raise AssertionError(f"mode must be 'nearest' or 'trilinear'; got {mode!r}")
    if feats.ndim != 2 or len(feats) != len(coords):
        raise AssertionError(
            f"feats must be (N, C) with N = {len(coords)}, the rows of coords; got "
            f"{tuple(feats.shape)}"
        )
    if grid.ndim != 3 or grid.shape[2] != 3:
        raise AssertionError(f"grid must be (B, L, 3); got {tuple(grid.shape)}")
    bridge.device_of(feats, coords, grid)
    manager, key = inserted(coords.int(), shape)
    (points,) = bridge.to_mlx(grid.float(), copy=True)

    def function(x):
        tensor = SparseTensor.of(manager, key, x)
        return _sample(tensor, points, mode=mode, renormalise=mode == "trilinear")

    return bridge.call(function, feats)


grid_sample_3d_torch = grid_sample_3d

"""Sampling a tensor on a grid of points, and pruning by predicted logits."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from ..arrays import array_of, positions_of, single_or_double, stream_of
from ..checks import real
from ..tensor import SparseTensor, expect_tensor
from .coordinates import align, lookup, prune
from .interpolation import interpolate

__all__ = ["grid_sample_3d", "prune_by_logits"]

MODES = ("trilinear", "nearest")
UNITS = ("voxel", "normalised")


def grid_sample_3d(
    x: SparseTensor,
    points: mx.array,
    *,
    mode: str = "trilinear",
    units: str = "voxel",
    align_corners: bool = False,
    renormalise: bool = False,
) -> mx.array:
    """Sample a tensor at a grid of points, as PyTorch's ``grid_sample`` does.

    The last axis of ``points`` goes with the tensor's axes in their own order (that of
    PyTorch counts them backwards). What lies outside, or is not active, is 0.
    Differentiable in the features and, for "trilinear", in the points.

    Args:
        x: tensor of 3 spatial axes.
        points: (B, ..., 3); the first axis is the batch element. Integers, and
            float64 of NumPy or of a list, are exact; float32 up to 2^24.
        mode: "trilinear", or "nearest"; half-way points go up.
        units: "voxel": cell i spans [i, i + 1) and its value sits at i + 0.5, as in
            FlexGEMM; "normalised": -1 to 1 over the tensor's ``spatial_shape``.
        align_corners: whether -1 and 1 are the centres of the outermost cells rather
            than their outer faces; for "normalised".
        renormalise: divide by the weight of the active cells, see ``interpolate``.

    Returns:
        (B, ..., C) in the features' dtype, added in float32.

    Raises:
        ValueError: shapes, mode or units do not fit, "normalised" without a
            ``spatial_shape``, or a point is not finite or beyond int32.
    """
    expect_tensor(x)
    if x.dims != 3:
        raise ValueError(f"grid_sample_3d got a tensor with {x.dims} spatial axes")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}; got {mode!r}")
    if units not in UNITS:
        raise ValueError(f"units must be one of {UNITS}; got {units!r}")
    points = positions_of(points, "points")
    if points.ndim < 2 or points.shape[-1] != 3:
        raise ValueError(
            f"points must have shape (B, ..., 3); got {tuple(points.shape)}"
        )
    if points.ndim == 2 and len(points) > max(1, x.batch_size):
        raise ValueError(
            f"points must have shape (B, ..., 3), the first axis the batch element; "
            f"got {tuple(points.shape)}, and x has {x.batch_size}: points of one "
            "element are points[None]"
        )
    if units == "normalised" and x.spatial_shape is None:
        raise ValueError(
            "normalised points need a tensor with a spatial_shape; give it one, or use "
            'units="voxel"'
        )
    if mx.issubdtype(points.dtype, mx.integer):  # float64 holds all of int32
        with mx.stream(mx.cpu):
            points = points.astype(mx.float64)
    at = single_or_double(points)
    grid = points.shape[:-1]
    each = prod(grid[1:])
    with stream_of(at):
        if units == "voxel":
            at = at - 0.5
        else:
            extent = mx.array(x.spatial_shape, dtype=at.dtype)
            if align_corners:
                at = (at + 1) * (extent - 1) / 2
            else:
                at = ((at + 1) * extent - 1) / 2
        batch = mx.repeat(mx.arange(grid[0], dtype=at.dtype), each)[:, None]
        rows = mx.concatenate([batch, at.reshape(grid[0] * each, 3)], axis=1)
    mode = "linear" if mode == "trilinear" else mode
    sampled = interpolate(x, rows, mode=mode, renormalise=renormalise)
    return sampled.reshape(*grid, x.channels)


def prune_by_logits(
    x: SparseTensor,
    logits: SparseTensor | mx.array,
    threshold: float = 0.0,
    keep: SparseTensor | mx.array | None = None,
) -> SparseTensor:
    """Keep the rows whose logit is above a threshold, in their order.

    What generative nets do after each up-sampling. No gradient reaches the logits: a
    loss on them trains the choice.

    Args:
        x: input.
        logits: one number a row: (N,), (N, 1), or a tensor of one channel on the same
            rows in any order. NaN counts as below.
        threshold: 0 is a probability of one half.
        keep: rows to keep besides: (N,) bool, or a tensor whose rows are kept where
            ``x`` has them (the true ones, while training).

    Returns:
        The remaining rows; none at all is legal.

    Raises:
        ValueError: shapes do not fit.
    """
    expect_tensor(x)
    if isinstance(logits, SparseTensor):
        logits = align(logits, x).feats
    logits = array_of(logits, "logits")
    if logits.size != len(x) or logits.ndim > 2:
        raise ValueError(
            f"logits must be ({len(x)},) or ({len(x)}, 1), one a row; got "
            f"{tuple(logits.shape)}"
        )
    least = real(threshold, "threshold")
    chosen = mx.stop_gradient(logits).reshape(len(x)) > least
    if keep is None:
        return prune(x, chosen)
    if isinstance(keep, SparseTensor):
        keep = lookup(keep, x.coordinate_set.coords) >= 0
        return prune(x, chosen | keep)
    keep = array_of(keep, "keep")
    if tuple(keep.shape) != (len(x),) or keep.dtype != mx.bool_:
        raise ValueError(
            f"keep must be ({len(x)},) bool, one value a row; got "
            f"{tuple(keep.shape)} of {keep.dtype}"
        )
    return prune(x, chosen | keep)

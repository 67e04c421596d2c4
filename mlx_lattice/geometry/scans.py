"""Running sums in MLX operations."""

from __future__ import annotations

import mlx.core as mx


def running_sums(values: mx.array, axis: int = 0) -> mx.array:
    """Return the sums of integers up to and with each of an axis, in their dtype.

    Args:
        values: of any shape.
        axis: along which they add up.
    """
    # MLX's GPU kernels take the stride of an axis of one element for its columns:
    # of a row out of a matrix they read and write past the end.
    return values if values.shape[axis] == 1 else mx.cumsum(values, axis=axis)

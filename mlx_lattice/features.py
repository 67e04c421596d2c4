"""What can be the features of a tensor, or be added to them."""

from __future__ import annotations

from numbers import Number

import mlx.core as mx

from .arrays import array_of, as_mlx_reads
from .dtypes import FLOATS


def check_feats(feats: mx.array, rows: int) -> mx.array:
    """Return features as an (N, C) array, or raise with what was wrong.

    Raises:
        TypeError: they are not an array, or neither floating nor bool.
        ValueError: they are not (rows, C).
    """
    if not isinstance(feats, mx.array):
        feats = _as_array(feats)
    if feats.ndim != 2 or feats.shape[0] != rows:
        raise ValueError(
            f"feats must have shape (N, C) with N = {rows}, the rows of coords; got "
            f"{tuple(feats.shape)}"
        )
    if feats.dtype not in (*FLOATS, mx.bool_):
        raise TypeError(
            "feats must be float32, float16 or bfloat16; got "
            f"{str(feats.dtype).rpartition('.')[2]}. Cast with .astype(mx.float32)"
        )
    return feats


def _as_array(feats: object) -> mx.array:
    if hasattr(feats, "feats"):
        raise TypeError(
            "feats must be an array (N, C); got a tensor. Give its features, in the "
            "order of these rows: ops.align(other, x).feats"
        )
    return array_of(feats, "feats")


def operand_of(other: object) -> object:
    """Return what features can be added to; raise a TypeError where they cannot."""
    if not isinstance(other, (mx.array, Number)) and not hasattr(other, "__array__"):
        raise TypeError(
            "a SparseTensor is added to or multiplied by another one, an array that "
            f"fits its features, or a number; got {type(other).__name__}"
        )
    return as_mlx_reads(other)


def expect_fitting(feats: mx.array, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless an array of this shape can be added to features."""
    n, width = feats.shape
    rows, channels = (1, 1, *shape)[-2:]
    fits = rows in (1, n) and (channels == width or 1 in (channels, width))
    if len(shape) > 2 or not fits:
        raise ValueError(
            f"features of shape {(n, width)} are added to or multiplied by a number, "
            f"or by values of shape ({width},), ({n}, 1) or ({n}, {width}); got "
            f"{tuple(shape)}. ops.cat joins channels; values of batch elements, one "
            "line each, are spread to the rows by values[x.coords[:, 0]]"
        )

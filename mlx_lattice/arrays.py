"""What callers give for arrays: MLX's and NumPy's, and lists; points as wide as they.

MLX makes float32 of NumPy's float64 and of Python's numbers, which is too coarse for
coordinates of a map. Points of these stay float64, which MLX's CPU computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx


def array_of(value: object, name: str, dtype: mx.Dtype | None = None) -> mx.array:
    """Return an MLX array of an array of MLX or NumPy, or of a list.

    Raises a TypeError that names the argument for anything else.
    """
    if isinstance(value, mx.array):
        return value
    if not hasattr(value, "__array__") and not isinstance(value, list | tuple):
        raise TypeError(
            f"{name} must be an array of MLX or NumPy, or a list of numbers; got "
            f"{type(value).__name__}"
        )
    try:
        return mx.array(as_mlx_reads(value), dtype=dtype)
    except (RuntimeError, TypeError, ValueError):
        kind = getattr(value, "dtype", None)
        what = (
            f"one of {kind}" if kind is not None else "rows of other lengths, or else"
        )
        raise TypeError(
            f"{name} must be an array of numbers that MLX has; got "
            f"{type(value).__name__}, {what}"
        ) from None


def as_mlx_reads(value: object) -> object:
    """Return what it is; of NumPy's flips, and of other byte orders, a plain copy."""
    strides, dtype = (getattr(value, name, None) for name in ("strides", "dtype"))
    flipped = isinstance(strides, tuple) and min(strides, default=0) < 0
    if flipped or getattr(dtype, "isnative", True) is False:
        return value.astype(dtype.newbyteorder("="), order="C")
    return value


def arrays_of(**given: object) -> list[mx.array | None]:
    """Return ``array_of`` of each argument, by name; None of one that is None."""
    return [
        value if value is None or type(value) is mx.array else array_of(value, name)
        for name, value in given.items()
    ]


def positions_of(value: object, name: str) -> mx.array:
    """Return ``array_of``, but float64 where NumPy or a list has doubles."""
    kind = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if kind == "float64":
        return array_of(value, name, mx.float64)
    array = array_of(value, name)
    if isinstance(value, list | tuple) and array.dtype == mx.float32:
        return array_of(value, name, mx.float64)
    return array


def stream_of(array: mx.array) -> AbstractContextManager:
    """Compute on the CPU what is float64: no other device has that."""
    return mx.stream(mx.cpu) if array.dtype == mx.float64 else nullcontext()


def single(array: mx.array) -> mx.array:
    """Return a floating array, or one of integers, as float32."""
    with stream_of(array):
        return array.astype(mx.float32)


def single_or_double(array: mx.array) -> mx.array:
    """Return an array as float32; float64 stays."""
    return array if array.dtype == mx.float64 else single(array)

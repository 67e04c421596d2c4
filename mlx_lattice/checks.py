"""Numbers that callers give, checked: each error is a sentence with what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import TYPE_CHECKING, Any, Union

import mlx.core as mx

if TYPE_CHECKING:
    import numpy as np

INT32_LIMIT = 1 << 31
AXES = (1, 2, 3, 4)  # how many spatial axes there may be
# What ``array_of`` takes.
ArrayLike = Union[mx.array, "np.ndarray", list[Any], tuple[Any, ...]]


class LatticeWarning(UserWarning):
    """Category of every warning of this package.

    Examples:
        Silence them all::

            import warnings
            import mlx_lattice as ml

            warnings.simplefilter("ignore", ml.LatticeWarning)
    """


def whole(value: object, name: str, least: int = 0, kind: str = "an int") -> int:
    """Return an int, of Python or NumPy, of at least ``least``, or raise."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be {kind}; got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be {least} or more; got {number}")
    return number


def spatial_axes(dims: object) -> int:
    """Return how many spatial axes there are, 1 to 4, or raise a ValueError."""
    if isinstance(dims, bool) or not hasattr(dims, "__index__") or dims not in AXES:
        raise ValueError(
            f"dims must be 1, 2, 3 or 4, the number of spatial axes; got {dims!r}"
        )
    return index(dims)


def one_of(value: str, known: Sequence[str], name: str) -> str:
    """Return a value that is one of some, or raise a ValueError."""
    if value not in known:
        raise ValueError(f"{name} must be one of {tuple(known)}; got {value!r}")
    return value


def heads_of(channels: int, num_heads: object) -> int:
    """Return the number of heads of an attention over so many channels, or raise."""
    heads = whole(num_heads, "num_heads", 1)
    if channels % heads:
        raise ValueError(
            f"The number of heads ({heads}) must divide the channels ({channels})"
        )
    return heads


def real(value: object, name: str, least: float = -math.inf) -> float:
    """Return a finite number, of Python, NumPy or MLX, of at least ``least``."""
    if type(value) is float and least <= value < math.inf:
        return value
    number = value
    if not isinstance(value, int | float) and hasattr(value, "tolist"):
        number = value.tolist()
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise TypeError(f"{name} must be a number; got {value!r}")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite; got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be {least:g} or more; got {number}")
    return float(number)


def each_axis(value: object, dims: int) -> tuple[Any, ...]:
    """Return one value, or one for each axis, as a tuple of Python's, unchecked."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if several else (value,) * dims


def real_axes(value: object, dims: int, name: str) -> tuple[float, ...]:
    """Return a finite number for each axis, of one or of ``dims``, or raise."""
    axes = each_axis(value, dims)
    axes = [v.tolist() if hasattr(v, "tolist") else v for v in axes]
    right = [isinstance(v, int | float) and not isinstance(v, bool) for v in axes]
    if len(axes) != dims or not all(right):
        raise ValueError(f"{name} must be one number or {dims}; got {value!r}")
    if not all(map(math.isfinite, axes)):
        raise ValueError(f"{name} must be finite; got {value!r}")
    return tuple(map(float, axes))


def flag(value: object, name: str) -> bool:
    """Return a bool, or an int of 0 or 1; raise a TypeError for anything else."""
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(
            f"{name} must be True or False; got {type(value).__name__}. Values are set "
            "afterwards, as layer.update({...}) or layer.bias = ... does"
        )
    return bool(value)


def array_of(value: object, name: str, dtype: mx.Dtype | None = None) -> mx.array:
    """Return an MLX array of an array of MLX or NumPy, or of a list, or raise."""
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
    """Convert each named argument by ``array_of``; None stays None."""
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


def stream_of(array: mx.array) -> AbstractContextManager[object]:
    """Compute on the CPU what is float64: no other device has that."""
    return mx.stream(mx.cpu) if array.dtype == mx.float64 else nullcontext()


def single(array: mx.array) -> mx.array:
    """Return a floating array, or one of integers, as float32."""
    with stream_of(array):
        return array.astype(mx.float32)


def single_or_double(array: mx.array) -> mx.array:
    """Return an array as float32; float64 stays."""
    return array if array.dtype == mx.float64 else single(array)


DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}

FLOATS = tuple(DTYPES.values())


def dtype_text(array: mx.array) -> str:
    """Return the name of an array's dtype, such as "int32"."""
    return str(array.dtype).rpartition(".")[2]


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: mx.Dtype | str) -> str:
    """Return "float32", "float16" or "bfloat16", or raise for any other dtype."""
    name = _NAMES.get(dtype) or str(dtype).rpartition(".")[2]
    if name not in DTYPES:
        raise TypeError(
            f"features and weights must be float32, float16 or bfloat16; got {name}"
        )
    return name

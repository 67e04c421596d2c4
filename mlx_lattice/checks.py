"""Numbers that callers give, checked: each error is a sentence with what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index

AXES = (1, 2, 3, 4)  # how many spatial axes there may be


def whole(value: object, name: str, least: int = 0, kind: str = "an int") -> int:
    """Return an int, of Python or NumPy, of at least ``least``, or raise.

    ``kind`` says what it must be.
    """
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


def each_axis(value: object, dims: int) -> tuple:
    """Return one value, or one for each axis, as a tuple of what there is, unchecked.

    Numbers and arrays of NumPy and MLX come as Python's.
    """
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

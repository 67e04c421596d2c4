"""Rotary positions: queries and keys turned by their coordinates."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import mlx.core as mx

from ..arrays import array_of, arrays_of
from ..checks import real
from ..coordinate_set import CoordinateSet
from ..dtypes import dtype_name
from ..geometry import sync
from ..tensor import SparseTensor, expect_tensor
from .heads import turned_head

__all__ = ["rotary"]

PAIRS = ("neighbours", "halves")

_rotated: WeakKeyDictionary[CoordinateSet, dict[tuple, tuple]] = WeakKeyDictionary()


def rotary(
    x: mx.array,
    like: SparseTensor,
    *,
    base: float = 10000.0,
    frequency: float = 1.0,
    positions: mx.array | None = None,
    pairs: str = "neighbours",
) -> mx.array:
    """Rotate queries or keys by their coordinates: scores see differences alone.

    RoPE for each axis (Su et al., 2021): of the D / 2 pairs of channels the first
    ``D // 2 // dims`` rotate with the first axis, and so on; pair j of an axis rotates
    by ``frequency * base ** (-j / pairs)`` a cell, pairs that are left over not at
    all. Cells count from the set's least coordinates, so a scene far from the origin
    loses no precision.

    Args:
        x: (N, heads, D) queries or keys.
        like: the tensor whose N rows these are.
        base: ratio of the fastest to (nearly) the slowest rotation.
        frequency: radians a cell of the fastest.
        positions: (N, dims) float32: rotate by these instead of the cells.
        pairs: which channels are a pair: "neighbours", (2 p, 2 p + 1) as in TRELLIS.2,
            or "halves", of an axis' n channels (j, j + n / 2) as in Utonia.

    Returns:
        The same shape and dtype; rotated in float32.

    Raises:
        TypeError: x is not floating.
        ValueError: D is odd or has no pair for each axis, is for "halves" no multiple
            of twice the axes, shapes do not fit, or the base is not positive.
    """
    expect_tensor(like, "like", flags=True)
    x, (positions,) = array_of(x, "x"), arrays_of(positions=positions)
    dtype_name(x.dtype)
    base, frequency = real(base, "base"), real(frequency, "frequency")
    if pairs not in PAIRS:
        raise ValueError(f"pairs must be one of {PAIRS}; got {pairs!r}")
    if x.ndim != 3 or x.shape[0] != len(like):
        raise ValueError(
            f"x must have shape ({len(like)}, heads, D); got {tuple(x.shape)}"
        )
    dim, dims = x.shape[-1], like.dims
    if positions is not None and tuple(positions.shape) != (len(like), dims):
        raise ValueError(
            f"positions must have shape ({len(like)}, {dims}); got "
            f"{tuple(positions.shape)}"
        )
    check_rotary(dim, dims, base)
    if pairs == "halves" and dim % (2 * dims):
        raise ValueError(
            f"pairs of halves need a multiple of {2 * dims} channels a head for "
            f"{dims} axes; got {dim}"
        )
    cos, sin = angles(like, dim, base, frequency, positions)
    if pairs == "neighbours":
        return turned_head(x, angles=(cos, sin))
    parts = x.astype(mx.float32).reshape(*x.shape[:2], dims, 2, dim // 2 // dims)
    cos, sin = (a.reshape(len(x), 1, *parts.shape[2::2]) for a in (cos, sin))
    a, b = parts[..., 0, :], parts[..., 1, :]
    rotated = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-2)
    return rotated.reshape(x.shape).astype(x.dtype)


def check_rotary(dim: int, dims: int, base: float) -> None:
    """Raise unless heads of ``dim`` channels can be turned by so many axes."""
    if base <= 0:
        raise ValueError(f"base must be above 0; got {base}")
    if dim % 2 or dim < 2 * dims:
        raise ValueError(
            f"rotary needs an even head dimension of at least {2 * dims} for "
            f"{dims} axes; got {dim}"
        )


def angles(
    like: SparseTensor, dim: int, base: float, frequency: float, positions=None
) -> tuple[mx.array, mx.array]:
    """Return the (N, 1, D / 2) float32 cosine and sine of every rotation."""
    if positions is not None:
        return _turns(positions.astype(mx.float32), dim, base, frequency)
    held, made = like.coordinate_set, (dim, base, frequency)
    known = _rotated.setdefault(held, {})
    if made not in known:
        low = mx.array(held.bounds[0][1:], dtype=mx.int64)
        cells = (held.coords[:, 1:].astype(mx.int64) - low).astype(mx.float32)
        known[made] = sync.complete(_turns(cells, dim, base, frequency))
    return known[made]


def _turns(places: mx.array, dim: int, base: float, frequency: float):
    """Return what ``angles`` does for (N, dims) places."""
    count, dims = places.shape
    each = dim // 2 // dims
    speed = [frequency * base ** (-j / each) for j in range(each)]
    angle = (places[:, :, None] * mx.array(speed)).reshape(count, dims * each)
    angle = mx.pad(angle, [(0, 0), (0, dim // 2 - dims * each)])[:, None]
    return mx.cos(angle), mx.sin(angle)

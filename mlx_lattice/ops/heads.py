"""Heads of attention: checks, RMS norms, and rotations by coordinates.

On devices with a kernel for it, one launch normalises and rotates queries, keys and
values that are in one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .. import registry
from ..backends.gpu.attention import GpuHeads
from ..channel_kernels import column_sums
from ..checks import array_of, arrays_of, dtype_name, real
from ..tensor import SparseTensor, expect_tensor
from ..transformations import Function, of_kernels

__all__ = ["rotary"]


def heads_fit(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the last two axes of each, (heads, D), go together.

    There are heads of some channels; keys have as many channels as queries, and as many
    heads as values, which divide those of queries.
    """
    heads, channels = q.shape[-2:]
    held = k.shape[-2]
    if min(heads, channels, held) == 0 or channels != k.shape[-1]:
        return False
    return held == v.shape[-2] and heads % held == 0


def check_dtypes(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raise TypeError unless all are of one floating dtype."""
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    dtype_name(q.dtype)


EPS = 1e-12  # added to the mean square

Angles = Sequence[mx.array]  # the cosine and the sine of every pair, or nothing
Given = tuple[mx.array, mx.array | None, mx.array | None]


def turned_heads(
    qkv: mx.array, scales: Sequence[mx.array] = (), angles: Angles = ()
) -> Given:
    """Return queries, keys and values as ``full_attention`` takes them.

    Args:
        qkv: (N, 3, heads, D).
        scales: (heads, D) of queries and of keys, which are normalised first; or none.
        angles: (N, 1, D / 2) float32 cosine and sine, or none.

    Raises:
        ValueError: a scale has another shape.
    """
    _expect_scales(qkv, scales)
    kernel = registry.heads()
    if kernel is not None and kernel.takes(qkv):
        return _by_kernel(kernel, qkv, 2, scales, angles), None, None
    q, k, v = (a.squeeze(1) for a in mx.split(qkv, 3, axis=1))
    of_q, of_k = scales if scales else (None, None)
    return _composed(q, of_q, angles), _composed(k, of_k, angles), v


def turned_head(
    x: mx.array, scale: mx.array | None = None, angles: Angles = ()
) -> mx.array:
    """Return (N, heads, D) queries, or keys; arguments are as of ``turned_heads``."""
    scales = () if scale is None else (scale,)
    _expect_scales(x, scales)
    kernel, part = registry.heads(), x[:, None]
    if kernel is None or not kernel.takes(part):
        return _composed(x, scale, angles)
    return _by_kernel(kernel, part, 1, scales, angles).squeeze(1)


def _expect_scales(x: mx.array, scales: Sequence[mx.array]) -> None:
    """Raise unless scales are of these heads: a kernel would read beyond them."""
    heads = x.shape[-2:]
    for scale in scales:
        if scale.shape != heads:
            raise ValueError(
                f"the scale of {heads[0]} heads of {heads[1]} channels must have shape "
                f"{heads}; got {scale.shape}"
            )


def _composed(x: mx.array, scale: mx.array | None, angles: Angles) -> mx.array:
    if not x.size:  # of which MLX's CUDA kernels cannot be launched
        return x
    y = x.astype(mx.float32)
    if scale is not None:
        y = mx.fast.rms_norm(y, None, EPS) * scale
    if angles:
        cos, sin = angles
        pairs = y.reshape(*x.shape[:2], x.shape[2] // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        y = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return y.astype(x.dtype)


def _by_kernel(
    kernel: GpuHeads,
    x: mx.array,
    turned: int,
    scales: Sequence[mx.array],
    angles: Angles,
) -> mx.array:
    kinds = {a.dtype for a in scales}
    if len(kinds) > 1:
        scales = [a.astype(mx.float32) for a in scales]
    function = _function(kernel, turned, len(scales), bool(angles))
    return function(x, *scales, *angles)


@lru_cache(maxsize=64)
def _function(kernel: GpuHeads, turned: int, scaled: int, turns: bool) -> Function:
    """Return a function of heads, scales and angles; those have no gradient."""

    def cut(rest: Sequence[mx.array]) -> tuple[Sequence[mx.array], Sequence[mx.array]]:
        return rest[:scaled], rest[scaled:]

    def composed(x, *rest):
        scales, angles = cut(rest)
        parts = [a.squeeze(1) for a in mx.split(x, x.shape[1], axis=1)]
        for i in range(turned):
            parts[i] = _composed(parts[i], scales[i] if scaled else None, angles)
        return mx.stack(parts, axis=1)

    def forward(x, *rest):
        return kernel.turned(mx.contiguous(x), turned, *cut(rest))

    def back(dy, x, *rest):
        scales, angles = cut(rest)
        dy, x = mx.contiguous(dy), mx.contiguous(x)
        dx, lines = kernel.gradient(dy, x, turned, scales, angles)
        found = []
        if scaled:
            total = column_sums(lines, scales[0]).reshape(turned, *x.shape[2:])
            found = [a.squeeze(0) for a in mx.split(total, turned)]
        return dx, *found, *[mx.zeros_like(a) for a in angles]

    return of_kernels(forward, back, composed, 1 + scaled + 2 * turns)


PAIRS = ("neighbours", "halves")


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
    held = like.coordinate_set

    def build() -> tuple[mx.array, mx.array]:
        low = mx.array(held.bounds[0][1:], dtype=mx.int64)
        cells = (held.coords[:, 1:].astype(mx.int64) - low).astype(mx.float32)
        return _turns(cells, dim, base, frequency)

    return held.view(("angles", dim, base, frequency), build)


def _turns(places: mx.array, dim: int, base: float, frequency: float):
    """Return what ``angles`` does for (N, dims) places."""
    count, dims = places.shape
    each = dim // 2 // dims
    speed = [frequency * base ** (-j / each) for j in range(each)]
    angle = (places[:, :, None] * mx.array(speed)).reshape(count, dims * each)
    angle = mx.pad(angle, [(0, 0), (0, dim // 2 - dims * each)])[:, None]
    return mx.cos(angle), mx.sin(angle)

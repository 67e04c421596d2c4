"""Attention by one kernel: MLX's, or the CPU's.

On Metal MLX's kernel takes few widths of heads, and none in training; on CUDA its
gradient takes whole tiles of queries. In all other cases MLX composes two products and
a softmax, whose scores pass through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import mlx.core as mx

from .. import devices, sync
from ..availability import extension
from ..devices import CUDA, METAL, Device
from ..transformations import Function, Gradient
from ..transformations import filled as filled_tangents
from .observed import Tell

# Channels of a head that MLX's kernel on Metal takes with more than so many queries
# (mlx/backend/metal/scaled_dot_product_attention.cpp, 0.32).
WIDTHS, FEW_QUERIES, FEW_WIDTHS = (64, 72, 80, 96, 128), 8, (64, 96, 128, 256)
# Queries of a tile of MLX's gradient on CUDA (mlx/backend/cuda/
# scaled_dot_product_attention.cpp, 0.32), and from how many on filling one is worth it,
# timed on an H200.
TILE, TILED_QUERIES = 128, 32


class Call(NamedTuple):
    """One call of ``mx.fast.scaled_dot_product_attention``.

    Attributes:
        groups: that are attended side by side.
        heads, kv_heads: of the queries, and of keys and values.
        queries, keys: of a group.
        channels, values: of a head's queries and keys, and of its values.
        dtype: of all.
        masked: whether there is a mask of keys.
    """

    groups: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int
    values: int
    dtype: mx.Dtype
    masked: bool

    @property
    def fused(self) -> bool:
        """Whether MLX has a fused kernel for it on this machine, here and now."""
        on_mac = devices.current().backend == METAL and not devices.metal_on_host()
        if on_mac and sync.is_known_to_differentiate():
            return False  # in training MLX composes attention on Metal
        return not devices.metal_on_host() and self.fused_on(devices.current())

    def fused_on(self, device: Device) -> bool:
        """Whether MLX has a fused kernel for it on a GPU, outside of training."""
        same = self.channels == self.values
        if device.backend == CUDA:
            most = max(self.channels, self.values)
            whole = self.channels % 8 == 0 == self.values % 8
            return self.dtype != mx.float32 and whole and most <= 128
        if device.backend != METAL:
            return False
        if self.queries > FEW_QUERIES:
            return same and self.channels in WIDTHS
        shared = self.queries * self.heads // self.kv_heads
        fits = self.queries <= self.keys and shared <= 32
        return same and fits and self.channels in FEW_WIDTHS

    def of_whole_tiles(self) -> Call:
        """Return the call with whole tiles of queries if CUDA may differentiate it."""
        if self.queries % TILE == 0 or self.queries < TILED_QUERIES:
            return self
        device = devices.current()
        if device.backend != CUDA or not self.fused_on(device):
            return self
        if not sync.is_differentiating():
            return self
        return self._replace(queries=-(-self.queries // TILE) * TILE)


def attend(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Return (groups, heads, queries, D_v), by MLX's fused kernel if possible.

    Args:
        q: (groups, heads, queries, D).
        k: (groups, kv_heads, keys, D).
        v: (groups, kv_heads, keys, D_v).
        scale: of the scores.
        mask: (groups, 1, 1, keys) bool, or None.
    """
    groups, heads, queries, channels = q.shape
    sizes = groups, heads, k.shape[1], queries, k.shape[2], channels, v.shape[3]
    call = Call(*sizes, q.dtype, mask is not None)
    rows = call.of_whole_tiles().queries
    run = mx.fast.scaled_dot_product_attention
    if mask is not None and devices.current().backend == CUDA:
        # Of a mask of bools MLX makes a score for each query there.
        mask = mx.where(mask, mx.array(0, q.dtype), mx.array(-mx.inf, q.dtype))
    if rows == call.queries:
        return run(q, k, v, scale=scale, mask=mask)
    # The results of the zeros are dropped.
    q = mx.pad(q, ((0, 0), (0, 0), (0, rows - call.queries), (0, 0)))
    return run(q, k, v, scale=scale, mask=mask)[:, :, : call.queries]


def holds_no_scores(
    device: Device, channels: int, values: int, dtype: mx.Dtype
) -> bool:
    """Whether calls of any size hold no scores on a device, in training too.

    Elsewhere scores of calls are bounded, which bounds the time of a launch, too.
    """
    whole = Call(1, 1, 1, TILE, TILE, channels, values, dtype, False)
    return device.backend == CUDA and whole.fused_on(device)


def pieces(
    x: mx.array, length: int, axis: int, total: int | None = None
) -> list[mx.array]:
    """Return the parts of an array along an axis, of one length but for the last.

    Not slices: the gradient of each of those fills the whole with zeros.
    """
    size = x.shape[axis]
    total = size if total is None else total
    cuts = [*range(length, total, length), *[total] * (total < size)]
    if not cuts:
        return [x]
    return mx.split(x, cuts, axis=axis)[: -(-total // length)]


Forms = tuple[tuple[int, Call], ...]


def told(calls: Iterable[tuple[int, Call]]) -> tuple[int, int, Forms]:
    """Return how many calls there are, how many of them are fused, and their forms."""
    forms = tuple(calls)
    fused = sum(count for count, call in forms if call.fused)
    return sum(count for count, _ in forms), fused, forms


def by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lists: tuple[mx.array, ...],
    scale: float,
    *,
    gather: Callable[[mx.array], mx.array],
    again: Callable[..., mx.array],
    tell: Tell,
) -> mx.array:
    """Attend by the kernel; derivatives of the gradient are MLX operations'.

    Args:
        q, k, v: (N, heads, D), (N, kv_heads, D), (N, kv_heads, D_v) of one dtype.
        lists: (S,) int32 rows, group after group; (G + 1,) where each begins; (G,)
            how many of its first rows are queries. Every row is in one group. With two
            more, (N,) rows of q and (G,) where each group's begin, those are its
            queries, and k and v may have other rows than q; no keys give 0.
        scale: factor of the scores.
        gather: from (S, C), what is by place in the groups' rows, to the rows of k.
        again: the same attention of (q, k, v) in MLX operations.
        tell: told of each pass.
    """

    def forward(q, k, v):
        return extension.attention(q, k, v, *lists, scale=scale)

    def back(dy, q, y, sums, k, v):
        given = dy, q, k, v, y, sums, *lists
        dq, *rest = extension.attention_gradient(*given, scale=scale)
        # A row may be a key of two groups.
        flat = (gather(a.reshape(len(a), a[0].size)) for a in rest)
        return dq, *(a.reshape(b.shape) for a, b in zip(flat, (k, v), strict=True))

    def vjp(primals, cotangents, outputs):
        tell("backward", 1, 1)
        q, k, v = primals
        return Gradient(back, again, 2)(cotangents[0], q, *outputs, k, v)

    def jvp(at, by):
        (moved,) = mx.jvp(again, list(at), filled_tangents(at, by))[1]
        return moved, mx.zeros(moved.shape[:2])

    tell("forward", 1, 1)
    function = Function(forward)
    function.vjp(vjp)
    function.jvp(jvp)
    return function(q, k, v)[0]

"""Calls of attention: groups of rows in buckets, and the kernels that attend.

Groups are sorted into buckets of like length. A bucket is one call of
``mx.fast.scaled_dot_product_attention``: its groups are padded to the longest one. The
buckets of a coordinate set are cut once, as few as keep the padding to an eighth of the
useful query-key pairs, or to what takes less time than a call.

MLX has a fused kernel for some calls alone. On Metal it takes few widths of heads, and
none in training; on CUDA its gradient takes whole tiles of queries. In all other cases
MLX composes two products and a softmax, whose scores pass through memory. The CPU's own
kernel takes groups of any length and holds no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from .. import devices, sync
from ..channel_kernels import Observers, norm_observers
from ..checks import INT32_LIMIT, dtype_name
from ..coordinate_set import CoordinateSet
from ..devices import CPU, CUDA, METAL, Device, extension
from ..geometry.lattice import first_of_equals, running_sums, true_positions
from ..geometry.points import segment_counts
from ..reductions import gathered, move_rows, sum_over
from ..routes import launch
from ..transformations import Function, Gradient
from ..transformations import filled as filled_tangents

SDPA, COMPOSED = "scaled_dot_product_attention", "composed"
# Widths of heads that MLX's kernel on Metal takes with more than FEW_QUERIES, and with
# fewer (mlx/backend/metal/scaled_dot_product_attention.cpp, 0.32).
WIDTHS, FEW_QUERIES, FEW_WIDTHS = (64, 72, 80, 96, 128), 8, (64, 96, 128, 256)
# Queries of a tile of MLX's gradient on CUDA (mlx/backend/cuda/
# scaled_dot_product_attention.cpp, 0.32), and the least queries for which filling a
# tile is worth it, timed on an H200.
TILE, TILED_QUERIES = 128, 32
# Scores of one call: bounds its memory and its time on the device.
SCORES, BIASED_SCORES = 1 << 27, 1 << 24


# Observers


@dataclass(frozen=True)
class Attended:
    """One attention as it ran."""

    scope: object  # the layer that called it, or None
    pass_: str
    rule: str  # "full", "window", "patches" or "cross"
    backend: str
    kernel: str  # "composed" if scores have a bias
    calls: int
    rows: int
    groups: int  # of rows that attend to each other
    heads: int
    channels: int  # of a head
    pairs: int  # of queries and keys, in one head
    padded_pairs: int  # those that are computed; not queries that fill CUDA's tiles
    dtype: str
    fused: int = 0  # calls that are one kernel
    forms: tuple[Any, ...] = field(
        default=(), repr=False
    )  # (count, Call) of MLX's attention

    @property
    def padding(self) -> float:
        """Pairs that are computed over useful ones."""
        return self.padded_pairs / max(1, self.pairs)

    def __str__(self) -> str:
        """As "window: 40 groups, 3 calls of KERNEL, 1.04 times the useful pairs"."""
        groups = "1 group" if self.groups == 1 else f"{self.groups:,} groups"
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return (
            f"{self.rule}: {groups}, {calls} of {self.kernel}{self.form}, "
            f"{self.padding:.3g} times the useful pairs"
        )

    @property
    def form(self) -> str:
        """How MLX computes its calls, after a comma; "" for another kernel."""
        if self.kernel != SDPA:
            return ""
        if not self.fused:
            return ", composed by MLX"
        some = "" if self.fused == self.calls else f" in {self.fused}"
        return f", fused{some}"


attention_observers: Observers[Attended] = Observers("attention")


def inside(layer: object) -> AbstractContextManager[object]:
    """Return a block whose norms and attention are reported with this layer."""
    return (
        launch.scope(layer) if norm_observers or attention_observers else nullcontext()
    )


def attention_record(
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    rule: str,
    groups: int,
    pairs: tuple[int, int],
    backend: str,
    kernel: str,
) -> Attended | None:
    """Return the record of a forward pass in one call; None without observers.

    ``shape``: of queries. ``pairs``: without and with padding.
    """
    if not attention_observers:
        return None
    rows, *heads = shape
    facts = rule, backend, kernel, 1, rows, groups, *heads, *pairs, dtype_name(dtype), 1
    return Attended(launch.current_scope(), "forward", *facts)


# Calls of MLX's attention


class Call(NamedTuple):
    """One call of ``mx.fast.scaled_dot_product_attention``."""

    groups: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int
    values: int
    dtype: str
    masked: bool

    @property
    def fused(self) -> bool:
        """Whether MLX computes it by a fused kernel on this machine now."""
        if devices.metal_on_host():
            return False
        device = devices.current()
        # In training MLX composes attention on Metal.
        composes = device.backend == METAL and sync.is_known_to_differentiate()
        return not composes and self.fused_on(device)

    def fused_on(self, device: Device) -> bool:
        """Whether MLX has a fused kernel for it on a GPU, outside of training."""
        same = self.channels == self.values
        if device.backend == CUDA:
            most = max(self.channels, self.values)
            whole = self.channels % 8 == 0 == self.values % 8
            return self.dtype != "float32" and whole and most <= 128
        if device.backend != METAL:
            return False
        if self.queries > FEW_QUERIES:
            return same and self.channels in WIDTHS
        shared = self.queries * self.heads // self.kv_heads
        fits = self.queries <= self.keys and shared <= 32
        return same and fits and self.channels in FEW_WIDTHS

    @property
    def tiled_queries(self) -> int:
        """The queries, in whole tiles if CUDA may differentiate the call."""
        if self.queries % TILE == 0 or self.queries < TILED_QUERIES:
            return self.queries
        device = devices.current()
        if device.backend != CUDA or not self.fused_on(device):
            return self.queries
        if not sync.is_differentiating():
            return self.queries
        return -(-self.queries // TILE) * TILE


def attend(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Return (groups, heads, queries, D_v), by MLX's fused kernel if possible."""
    groups, heads, queries, channels = q.shape
    sizes = groups, heads, k.shape[1], queries, k.shape[2], channels, v.shape[3]
    rows = Call(*sizes, dtype_name(q.dtype), mask is not None).tiled_queries
    sdpa = mx.fast.scaled_dot_product_attention
    if mask is not None and devices.current().backend == CUDA:
        # MLX would make a score for each query of a mask of bools there.
        mask = mx.where(mask, mx.array(0, q.dtype), mx.array(-mx.inf, q.dtype))
    if rows == queries:
        return sdpa(q, k, v, scale=scale, mask=mask)
    # The results of the zeros are dropped.
    q = mx.pad(q, ((0, 0), (0, 0), (0, rows - queries), (0, 0)))
    return sdpa(q, k, v, scale=scale, mask=mask)[:, :, :queries]


class Heads(NamedTuple):
    """The heads of queries, and of keys and values; the channels of each."""

    queries: int
    keys: int
    channels: int
    values: int

    @classmethod
    def of(cls, arrays: Sequence[mx.array]) -> Heads:
        """Return the heads of (..., heads, D) queries, keys and values."""
        q, k, v = (a.shape[-2:] for a in (arrays if len(arrays) == 3 else 3 * arrays))
        return cls(q[0], k[0], q[1], v[1])


class Bucket(NamedTuple):
    """Groups that are attended together."""

    groups: int
    queries: int  # of each, padded
    length: int  # keys of each, padded
    full: bool  # whether all have that many keys


def call_sizes(
    bucket: Bucket, heads: Heads, dtype: str, biased: bool = False
) -> tuple[int, int]:
    """Return how many groups, and how many queries of each, one call takes.

    MLX's fused kernel on CUDA holds no scores; else scores of a call are bounded.
    """
    whole = Call(1, 1, 1, TILE, TILE, heads.channels, heads.values, dtype, False)
    device = launch.device()
    if not biased and device.backend == CUDA and whole.fused_on(device):
        return bucket.groups, bucket.queries
    most = (BIASED_SCORES if biased else SCORES) // (heads.queries * bucket.length)
    queries = max(1, min(bucket.queries, most))
    return max(1, min(bucket.groups, most // bucket.queries)), queries


def attend_bucket(
    bucket: Bucket,
    arrays: Sequence[mx.array],
    mask: mx.array | None,
    scale: float,
    bias: Callable[[slice, slice], mx.array] | None = None,
) -> Iterator[mx.array]:
    """Yield (results, heads * D_v) of a bucket, in calls of bounded scores."""
    heads, dtype = Heads.of(arrays), dtype_name(arrays[0].dtype)
    step, rows = call_sizes(bucket, heads, dtype, bias is not None)
    parts = [_pieces(array.transpose(0, 2, 1, 3), step, 0) for array in arrays]
    parts.append([None] * len(parts[0]) if mask is None else _pieces(mask, step, 0))
    for i, (q, k, v, keys) in enumerate(zip(*parts, strict=True)):
        groups, results = slice(i * step, (i + 1) * step), []
        for j, some in enumerate(_pieces(q, rows, 2, bucket.queries)):
            if bias is None:
                results.append(attend(some, k, v, scale, keys))
                continue
            queries = slice(j * rows, j * rows + some.shape[2])
            results.append(_biased(some, k, v, scale, keys, bias(groups, queries)))
        y = joined(results, axis=2)
        yield y.transpose(0, 2, 1, 3).reshape(-1, heads.queries * heads.values)


def joined(parts: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Concatenate arrays; a single one is not copied."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _pieces(
    x: mx.array, length: int, axis: int, total: int | None = None
) -> list[mx.array]:
    """Return the parts of an array along an axis, of one length but for the last."""
    # Not slices: the gradient of each would fill the whole with zeros.
    size = x.shape[axis]
    total = size if total is None else total
    cuts = [*range(length, total, length), *[total] * (total < size)]
    if not cuts:
        return [x]
    return mx.split(x, cuts, axis=axis)[: -(-total // length)]


def _biased(q, k, v, scale: float, mask: mx.array | None, bias: mx.array) -> mx.array:
    """Attend with a bias of the scores, which has a gradient too; float32 inside."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (mx.repeat(a, repeats, axis=1) for a in (k, v))
    wide = q.astype(mx.float32) * scale
    scores = wide @ k.astype(mx.float32).swapaxes(-1, -2) + bias
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    return mx.softmax(scores, axis=-1).astype(v.dtype) @ v


def report_calls(
    record: Attended | None,
    buckets: Iterable[Bucket],
    heads: Heads,
    masks: Iterable[mx.array | None],
) -> None:
    """Report calls of attention to observers, and which of them MLX fuses."""
    if record is None:
        return
    forms, biased = [], record.kernel == COMPOSED
    for bucket, mask in zip(buckets, masks, strict=True):
        step, rows = call_sizes(bucket, heads, record.dtype, biased)
        count = -(-bucket.groups // step) * -(-bucket.queries // rows)
        sizes = step, heads.queries, heads.keys, rows, bucket.length
        channels = heads.channels, heads.values
        call = Call(*sizes, *channels, record.dtype, mask is not None)
        forms.append((count, call))
    calls = sum(count for count, _ in forms)
    if biased:
        return attention_observers.tell(replace(record, calls=calls))
    fused = sum(count for count, call in forms if call.fused)
    attention_observers.tell(
        replace(record, calls=calls, fused=fused, forms=tuple(forms))
    )


# The CPU's kernel


def by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lists: tuple[mx.array, ...],
    scale: float,
    *,
    gather: Callable[[mx.array], mx.array],
    again: Callable[..., mx.array],
    record: Attended | None,
) -> mx.array:
    """Attend by the CPU's kernel; derivatives of the gradient are those of ``again``.

    ``lists``: (S,) rows of keys, group after group; (G + 1,) where each group begins;
    (G,) the number of its queries, which are its first rows. With two more, (N,) rows
    of q and (G,) where each group's begin, queries are those. ``gather`` takes (S, C)
    to the rows of k, and ``again`` is the same in MLX operations.
    """

    def forward(q, k, v):
        return extension.attention(q, k, v, *lists, scale=scale)

    def back(dy, q, y, sums, k, v):
        arrays = dy, q, k, v, y, sums, *lists
        dq, *rest = extension.attention_gradient(*arrays, scale=scale)
        # A row may be a key of two groups.
        flat = (gather(a.reshape(len(a), a[0].size)) for a in rest)
        return dq, *(a.reshape(b.shape) for a, b in zip(flat, (k, v), strict=True))

    def vjp(primals, cotangents, outputs):
        if record is not None:
            attention_observers.tell(replace(record, pass_="backward"))
        q, k, v = primals
        return Gradient(back, again, 2)(cotangents[0], q, *outputs, k, v)

    def jvp(at, by):
        (moved,) = mx.jvp(again, list(at), filled_tangents(at, by))[1]
        return moved, mx.zeros(moved.shape[:2])

    if record is not None:
        attention_observers.tell(record)
    return Function(forward, vjp=vjp, jvp=jvp)(q, k, v)[0]


# Groups of rows


class Padding(NamedTuple):
    """How groups are padded on a device."""

    free: int  # pairs that take less time than a call
    call: int  # the most pairs of padding in a bucket: more take longer than a call
    tile: int  # queries of filled patches are a multiple of it
    grain: int  # rows that take as long as any fewer

    def budget(self, pairs: int) -> int:
        """Return the most padding of groups of so many pairs."""
        return max(pairs // SHARE, self.free) if self.call else 0

    def pairs(self, queries: int, keys: int | None = None) -> int:
        """Return what a group costs, as pairs; by default its rows are its keys."""
        rows = -(-queries // self.grain) * self.grain
        return rows * (rows if keys is None else keys)


SHARE = 8  # padding is at most an eighth of the useful pairs, or free
# CUDA was timed on an H200, where MLX's fused gradient takes whole tiles of queries;
# Metal was not timed.
PADDING = {
    CPU: Padding(1 << 13, 1 << 17, 1, 1),
    METAL: Padding(1 << 13, 1 << 17, 1, 1),
    CUDA: Padding(1 << 20, 1 << 22, TILE, 64),
}
EXACT = Padding(0, 0, 1, 1)  # for kernels that need no padding


class Groups(NamedTuple):
    """The rows of every group, padded: bucket after bucket, group after group.

    The first rows of a group are its queries, and all are its keys. A row is a query
    of one group, and may be a key of a second one. ``row`` is None if the rows stand
    in their slots already; all other arrays are then None too.
    """

    buckets: tuple[Bucket, ...]
    pairs: int  # of queries and keys, without padding
    row: mx.array | None = None  # (S,) int32: the row in each slot of keys, or -1
    slot: mx.array | None = None  # (N,) int32: the slot of each row where it is a query
    again: mx.array | None = None  # (N,) int32: its second slot, or -1
    own: mx.array | None = None  # (Q,) int32: the row of each result, or -1
    place: mx.array | None = None  # (N,) int32: the result of each row
    # For the CPU's kernel: the first slot of each group, (G + 1,) int32, and its
    # queries without padding, (G,) int32.
    starts: mx.array | None = None
    queries: mx.array | None = None
    members: mx.array | None = None  # (G,) int32: which group of the given ones each is
    # For each bucket which of its slots hold a row, (groups, 1, 1, length) bool, or
    # None if all do.
    masks: tuple[mx.array | None, ...] = (None,)

    @classmethod
    def standing(cls, count: int, length: int) -> Groups:
        """Return groups of one length whose rows stand in a line already."""
        return cls((Bucket(count, length, length, True),), count * length * length)

    def masked(self) -> Groups:
        """Return the groups with their ``masks``."""
        masks, start = [], 0
        for groups, _, length, full in self.buckets:
            end = start + groups * length
            rows = None if full else self.row[start:end].reshape(groups, 1, 1, length)
            masks.append(None if full else rows >= 0)
            start = end
        return self._replace(masks=tuple(masks))

    @property
    def padded_pairs(self) -> int:
        """Pairs of queries and keys that are computed."""
        return sum(b.groups * b.queries * b.length for b in self.buckets)

    def slots(self, x: mx.array) -> list[mx.array]:
        """Return the slots of each bucket, (groups, length, ...) of (N, ...)."""
        tail = x.shape[1:]
        rows = x.reshape(len(x), prod(tail))
        if self.again is not None:
            rows = sum_over(rows, self.row[:, None], lambda: self._both)
        elif self.row is not None:
            rows = move_rows(rows, self.row, self.slot)
        ends = [*accumulate(b.groups * b.length for b in self.buckets)]
        parts = mx.split(rows, ends[:-1]) if len(ends) > 1 else [rows]
        shapes = ((b.groups, b.length, *tail) for b in self.buckets)
        return [a.reshape(s) for a, s in zip(parts, shapes, strict=True)]

    def gather(self, y: mx.array) -> mx.array:
        """Return (N, C) sums of the (S, C) rows in each row's slots."""
        if self.again is None:
            return move_rows(y, self.slot, self.row, whole=True)
        seen = self.row[:, None]
        return sum_over(y, self._both, lambda: seen)

    def collect(self, results: Sequence[mx.array]) -> mx.array:
        """Return the (N, C) rows of (Q, C) results, which come in parts."""
        y = joined(results)
        if self.row is None:
            return y
        return move_rows(y, self.place, self.own, whole=True)

    @property
    def _both(self) -> mx.array:
        return mx.stack([self.slot, self.again], axis=1)


def composed(
    arrays: tuple[mx.array, ...],
    groups: Groups,
    scale: float,
    bias: Bias | None = None,
) -> mx.array:
    """Attend a bucket at a time, in MLX operations that differentiate to any order."""
    results, start, q = [], 0, arrays[0]
    slots = zip(*(groups.slots(a) for a in arrays), strict=True)
    for bucket, mask, parts in zip(groups.buckets, groups.masks, slots, strict=True):
        of_scores = None if bias is None else bias(start, bucket)
        parts = separate(parts, 2)
        results += attend_bucket(bucket, parts, mask, scale, of_scores)
        start += bucket.groups * bucket.length
    return groups.collect(results).reshape(len(q), q.shape[-2], -1)


def separate(arrays: Sequence[mx.array], axis: int) -> Sequence[mx.array]:
    """Return queries, keys and values; one array has them along an axis."""
    if len(arrays) == 3:
        return arrays
    return [a.squeeze(axis) for a in mx.split(arrays[0], 3, axis=axis)]


def cut(
    sizes: Sequence[tuple[int, int]],
    pairs: Callable[[int], int],
    budget: int,
    call: int | None = None,
) -> list[int]:
    """Return the largest size of each of few buckets of groups, ascending.

    ``sizes`` are ascending (size, number of groups), ``pairs`` returns those of a
    group, and ``budget`` and ``call`` bound the padding of all and of one bucket.
    """
    most = budget if call is None else min(budget, call)
    while True:
        ends, padding, here = [], 0, 0
        for size, count in reversed(sizes):
            more = count * (pairs(ends[-1]) - pairs(size)) if ends else 0
            if not ends or here + more > most:
                ends.append(size)
                here = more = 0
            here, padding = here + more, padding + more
        if padding <= budget:
            return ends[::-1]
        most = most * 7 // 8


def groups_of(
    group: mx.array, count: int, order: mx.array | None, padding: Padding
) -> Groups:
    """Return the rows of each group, which attend to each other. Reads the sizes."""
    n = group.shape[0]
    if order is None:
        keys = group.astype(mx.int64) * n + mx.arange(n, dtype=mx.int64)
        order = mx.argsort(keys).astype(mx.int32)
    sizes = segment_counts(group, count)
    by_size = mx.argsort(sizes).astype(mx.int32)
    ordered = sizes[by_size]
    at = true_positions(first_of_equals(ordered))
    at, lengths = sync.read(at, ordered[at])
    numbers = [b - a for a, b in zip(at, [*at[1:], count], strict=True)]
    counted_sizes = [pair for pair in zip(lengths, numbers, strict=True) if pair[0]]
    cost = sum(number * padding.pairs(length) for length, number in counted_sizes)
    ends = cut(counted_sizes, padding.pairs, padding.budget(cost), padding.call)
    buckets, first, base = [], [count - sum(n for _, n in counted_sizes)], [0]
    for low, length in zip([0, *ends], ends, strict=False):
        some = [number for size, number in counted_sizes if low < size <= length]
        buckets.append(Bucket(sum(some), length, length, len(some) == 1))
        first.append(first[-1] + sum(some))
        base.append(base[-1] + sum(some) * length)
    # The first slot of each group, in the order of their sizes; empty ones have none.
    number = mx.arange(count, dtype=mx.int32)
    bucket = mx.searchsorted(mx.array(first[1:], dtype=mx.int32), number, "right")
    long = mx.array([b.length for b in buckets], dtype=mx.int32)[bucket]
    begin = number - mx.array(first[:-1], dtype=mx.int32)[bucket]
    starts = mx.array(base[:-1], dtype=mx.int32)[bucket] + mx.maximum(begin, 0) * long
    of = mx.zeros((count,), dtype=mx.int32)
    of[by_size] = starts - (running_sums(sizes) - sizes)[by_size]
    slot = mx.zeros((n,), dtype=mx.int32)
    slot[order] = of[group[order]] + mx.arange(n, dtype=mx.int32)
    row = mx.full((base[-1],), -1, dtype=mx.int32)
    row[slot] = mx.arange(n, dtype=mx.int32)
    starts = mx.concatenate([starts, mx.array(base[-1:], dtype=mx.int32)])
    pairs = sum(number * length * length for length, number in counted_sizes)
    lists = row, slot, None, row, slot, starts, ordered, by_size[first[0] :]
    return Groups(tuple(buckets), pairs, *lists).masked()


# Biases of the scores


def biases(table: mx.array, apart: mx.array) -> mx.array:
    """Return the (..., heads) sums of a table's entries for (..., axes) differences."""
    axes, heads = apart.shape[-1], table.shape[1]
    entries = table.shape[0] // axes
    bound = entries // 2
    entry = mx.clip(apart, -bound, bound) + bound + mx.arange(axes) * entries
    flat = entry.reshape(-1, axes).astype(mx.int32)
    return gathered(table, flat).reshape(*apart.shape[:-1], heads)


# From the first slot of a bucket and the bucket to a function of groups and queries.
Bias = Callable[[int, Bucket], Callable[[slice, slice], mx.array]]


def relative_bias(table: mx.array, rows: CoordinateSet, groups: Groups) -> Bias:
    """Return the float32 (groups, heads, queries, keys) biases of scores by a table."""
    table, coords, (low, high) = table.astype(mx.float32), rows.coords, rows.bounds
    if any(b - a > INT32_LIMIT for a, b in zip(low, high, strict=True)):
        coords = coords.astype(mx.int64)
    cells = coords[mx.maximum(groups.row, 0), 1:]

    def of_bucket(start: int, bucket: Bucket) -> Callable[[slice, slice], mx.array]:
        end = start + bucket.groups * bucket.length
        inside = cells[start:end].reshape(bucket.groups, bucket.length, -1)

        def bias(groups: slice, queries: slice) -> mx.array:
            apart = inside[groups, queries, None] - inside[groups, None]
            return biases(table, apart).transpose(0, 3, 1, 2)

        return bias

    return of_bucket

"""Attention of rows to sequences, one a batch element, of any lengths.

The CPU's kernel takes elements and sequences of any length as they are. Elsewhere rows
are put into slots once for each coordinate set: elements of like size share a bucket,
which is padded to its largest and attended in one call of
``mx.fast.scaled_dot_product_attention``; a batch of one, or of elements of equal size,
is neither moved nor padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..arrays import arrays_of
from ..backends import registry
from ..backends.cpu_attention import KERNEL
from ..checks import real
from ..coordinate_set import CoordinateSet
from ..devices import CPU
from ..geometry import sync
from ..geometry.unique import running_sums
from ..reductions import inverted, move_rows
from ..routes import launch
from ..tensor import SparseTensor, expect_tensor
from ..transformations import zeros_of
from .fused_attention import Call, attend, by_kernel, holds_no_scores, pieces
from .fused_attention import told as fused
from .groups import SCORES, SHARE, Bucket, Groups, cut
from .heads import check_dtypes, heads_fit
from .observed import SDPA, attention_teller
from .pool import BatchRows, batch_rows

__all__ = ["cross_attention", "to_sequences"]

RULE = "cross"  # as a trace has it
# Padding that takes less time than a call.
FREE_ROWS = 16


class Elements(NamedTuple):
    """The rows of batch elements in slots, and whose slots these are."""

    groups: Groups
    element: tuple[mx.array | None, ...]  # of each bucket: its elements, None for all


_elements: WeakKeyDictionary[CoordinateSet, Elements] = WeakKeyDictionary()


def cross_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    like: SparseTensor | None = None,
    *,
    lengths: mx.array | None = None,
    scale: float | None = None,
) -> mx.array:
    """Attend from each row to the sequence of its batch element.

    Args:
        q: (N, heads, D) queries of the rows of ``like``; without it (B, L, heads, D).
        k: (B, M, kv_heads, D) keys, a sequence a batch element; ``kv_heads`` divides
            ``heads``.
        v: (B, M, kv_heads, D_v) values.
        like: the tensor whose N rows the queries are; its features do not matter. The
            sizes of its elements are read once a coordinate set.
        lengths: (B,) integers: how many of the M there are of each sequence; by
            default all. What is behind them is not looked at. Those of an array of
            MLX are not waited for: more than M count as M, and less than 0 as 0.
        scale: factor of the scores; by default ``D ** -0.5``.

    Returns:
        q's shape with D_v for D, in the dtype of ``q``; the softmax is float32. Where a
        sequence has no entries it is 0.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit, or there are more batch elements than sequences.
    """
    is_known = lengths is not None and not isinstance(lengths, mx.array)
    q, k, v, lengths = arrays_of(q=q, k=k, v=v, lengths=lengths)
    _check(q, k, v, like, lengths)
    if is_known and lengths.size:
        low, high = lengths.min().item(), lengths.max().item()
        if low < 0 or high > k.shape[1]:
            raise ValueError(
                f"lengths must lie from 0 to {k.shape[1]}, the sequences' own; got "
                f"{low} to {high}"
            )
    shape = (*q.shape[:-1], v.shape[-1])
    if 0 in shape or k.shape[1] == 0:
        return zeros_of([q, k, v], shape, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else real(scale, "scale")
    if registry.serving() == CPU:
        y = _by_kernel(q, k, v, like, lengths, scale)
    else:
        y = _composed(q, k, v, like, lengths, scale, registry.MLX)
    return y.reshape(shape)


def to_sequences(
    x: SparseTensor | mx.array, lengths: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the rows of each batch element as a sequence.

    Args:
        x: a tensor, or (T, C) rows of all elements, one element after another.
        lengths: (B,) integers, for an array: the number of rows of each element. The
            lengths are read.

    Returns:
        (B, L, C) features, each element's rows in their order and zeros behind them,
        and the (B,) int32 number of them; L is that of the largest element. Sizes are
        read once a coordinate set.

    Raises:
        ValueError: the lengths do not add up to the rows of the array.
    """
    if not isinstance(x, SparseTensor) and lengths is not None:
        return _unpacked(x, lengths)
    expect_tensor(x, flags=True)
    rows = batch_rows(x)
    sizes = _sizes(rows)
    length = max(sizes, default=0)
    lengths = mx.array(sizes, dtype=mx.int32)
    shape = rows.size, length, x.channels
    if 0 in shape:
        return zeros_of([x.feats], shape, x.dtype), lengths
    if rows.order is None and min(sizes) == length:
        return x.feats.reshape(shape), lengths
    row = _slots(rows, range(rows.size), length)
    return move_rows(x.feats, row, inverted(row, len(x))).reshape(shape), lengths


def _unpacked(x: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    """Return packed rows as sequences; see ``to_sequences``."""
    x, lengths = arrays_of(x=x, lengths=lengths)
    sizes = lengths.tolist() if lengths.ndim == 1 else None
    whole = mx.issubdtype(lengths.dtype, mx.integer)
    if x.ndim != 2 or not whole or sizes is None or min(sizes, default=0) < 0:
        raise ValueError(
            "packed rows must have shape (T, C), and their lengths must be (B,) "
            f"integers of 0 or more; got {tuple(x.shape)}, and {lengths}"
        )
    if sum(sizes) != x.shape[0]:
        raise ValueError(
            f"the lengths of packed rows must add up to the {x.shape[0]} rows; got "
            f"{sum(sizes)}"
        )
    lengths = lengths.astype(mx.int32)
    length, ends = max(sizes, default=0), running_sums(lengths)
    shape = len(sizes), length, x.shape[1]
    if 0 in shape:
        return zeros_of([x], shape, x.dtype), lengths
    row = (ends - lengths)[:, None] + mx.arange(length, dtype=mx.int32)
    row = mx.where(row < ends[:, None], row, -1).flatten()
    feats = move_rows(x, row, inverted(row, x.shape[0]))
    return feats.reshape(shape), lengths


def _by_kernel(q, k, v, like, lengths: mx.array | None, scale: float) -> mx.array:
    """Attend by the CPU's kernel, which pads nothing and holds no scores."""
    batches, most = k.shape[:2]
    count, total = q.size // (q.shape[-1] * q.shape[-2]), batches * most
    if like is None:
        begins, order = list(range(0, count + 1, q.shape[1])), None
    else:
        held = batch_rows(like)
        begins, order = [*held.starts], held.order
    begins += [count] * (batches + 2 - len(begins))
    sizes = [b - a for a, b in zip(begins, begins[1:], strict=False)]
    places = mx.arange(total, dtype=mx.int32)
    if lengths is None:
        rows, back, starts = places, None, mx.arange(batches + 1, dtype=mx.int32) * most
        begins, sizes = begins[:-1], sizes[:-1]
    else:
        # What is behind the sequences is a group of its own, without queries.
        lengths = mx.clip(lengths.astype(mx.int32), 0, most)
        behind = places % most >= lengths[places // most]
        rows = mx.argsort(behind.astype(mx.int32) * total + places).astype(mx.int32)
        back = mx.argsort(rows).astype(mx.int32)
        ends = running_sums(lengths)
        starts = mx.concatenate([0 * ends[:1], ends, mx.full_like(ends[:1], total)])
    asked = mx.arange(count, dtype=mx.int32) if order is None else order
    numbers = (mx.array(a, dtype=mx.int32) for a in (sizes, begins[: len(sizes)]))
    queries, begins = numbers

    def again(q, k, v):
        k, v = (a.reshape(batches, most, *a.shape[1:]) for a in (k, v))
        shape = q.shape[:-1]
        q = q if like is not None else q.reshape(batches, -1, *q.shape[1:])
        return _composed(q, k, v, like, lengths, scale).reshape(*shape, v.shape[-1])

    flat = [a.reshape(-1, *a.shape[-2:]) for a in (q, k, v)]
    pairs, shape = (count * most, count * most), flat[0].shape
    return by_kernel(
        *flat,
        (rows, starts, queries, asked, begins),
        scale,
        gather=lambda a: a if back is None else a[back],
        again=again,
        tell=attention_teller(shape, q.dtype, RULE, batches, pairs, CPU, KERNEL),
    )


def _composed(
    q, k, v, like, lengths: mx.array | None, scale: float, told: str = ""
) -> mx.array:
    """Attend a bucket at a time; observers are told of it as of a backend's."""
    mask, most = None, k.shape[1]
    if lengths is not None:
        # An empty sequence sees its first entry, which is there to be finite.
        places = mx.arange(most, dtype=mx.int32)
        inside = places < mx.maximum(lengths.astype(mx.int32), 1)[:, None]
        mask = inside[:, None, None]
        v = mx.where((lengths > 0)[:, None, None, None], v, mx.zeros_like(v))
    k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
    if like is None:
        held, slots = Elements(Groups.standing(*q.shape[:2]), (None,)), [q]
    else:
        held = _elements_of(like)
        slots = held.groups.slots(q)
    buckets = held.groups.buckets
    if told:
        groups = sum(b.groups for b in buckets)
        rows = sum(b.groups * b.queries for b in buckets)
        asked = prod(q.shape[:-2]), *q.shape[-2:]
        pairs = asked[0] * most, rows * most
        tell = attention_teller(asked, q.dtype, RULE, groups, pairs, told, SDPA)
        tell("forward", *fused(_calls(buckets, q, k, v, mask is not None)))
    results = []
    for bucket, element, queries in zip(buckets, held.element, slots, strict=True):
        some = slice(bucket.groups) if element is None else element
        chosen = [None if a is None else a[some] for a in (k, v, mask)]
        y = _scaled(bucket, queries, *chosen, scale)
        results.append(y.reshape(bucket.groups * bucket.queries, -1))
    y = results[0] if len(results) == 1 else mx.concatenate(results)
    return held.groups.collect(y)


def _calls(buckets, q, k, v, masked: bool) -> Iterator[tuple[int, Call]]:
    """Yield how many calls each bucket has, and the first of them."""
    heads, keys = q.shape[-2], k.shape[2]
    for bucket in buckets:
        rows = _rows(bucket, heads, k, v)
        sizes = bucket.groups, heads, k.shape[1], min(rows, bucket.queries), keys
        calls = -(-bucket.queries // rows)
        yield calls, Call(*sizes, k.shape[3], v.shape[3], q.dtype, masked)


def _rows(bucket: Bucket, heads: int, k: mx.array, v: mx.array) -> int:
    """Return the queries of a call."""
    if holds_no_scores(launch.device(), k.shape[3], v.shape[3], k.dtype):
        return bucket.queries
    return max(1, SCORES // (bucket.groups * heads * k.shape[2]))


def _scaled(bucket: Bucket, q, k, v, mask: mx.array | None, scale: float) -> mx.array:
    """Return (B, L, heads, D_v), a bounded part of the queries at a time."""
    parts = pieces(q.transpose(0, 2, 1, 3), _rows(bucket, q.shape[2], k, v), 2)
    parts = [attend(part, k, v, scale, mask) for part in parts]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return y.transpose(0, 2, 1, 3)


def _check(q, k, v, like: SparseTensor | None, lengths: mx.array | None) -> None:
    for a in (q, k, v):
        if a is None:
            raise TypeError("q, k and v must be arrays; got None")
    if like is None:
        rows, batches = "B, L", None
        fits = q.ndim == 4 and k.shape[:1] == q.shape[:1]
    else:
        expect_tensor(like, "like", flags=True)
        rows, batches = len(like), like.batch_size
        fits = q.ndim == 3 and q.shape[0] == len(like)
    fits = fits and k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    if not fits or not heads_fit(q, k, v):
        raise ValueError(
            f"q, k and v must have shapes ({rows}, heads, D), (B, M, kv_heads, D) and "
            "(B, M, kv_heads, D_v), kv_heads a divisor of heads; got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if batches is not None and batches > k.shape[0]:
        raise ValueError(
            f"the tensor has {batches} batch elements, and there are sequences for "
            f"{k.shape[0]}"
        )
    if lengths is not None:
        whole = mx.issubdtype(lengths.dtype, mx.integer)
        if tuple(lengths.shape) != (k.shape[0],) or not whole:
            raise ValueError(
                f"lengths must have shape ({k.shape[0]},), integers, one each; got "
                f"{tuple(lengths.shape)} of {lengths.dtype}"
            )
    check_dtypes(q, k, v)


def _sizes(rows: BatchRows) -> list[int]:
    return [b - a for a, b in zip(rows.starts, rows.starts[1:], strict=False)]


def _elements_of(like: SparseTensor) -> Elements:
    held = like.coordinate_set
    if held not in _elements:
        _elements[held] = _grouped(batch_rows(like), len(held))
    return _elements[held]


def _grouped(rows: BatchRows, n: int) -> Elements:
    """Return elements in few buckets, padded by an eighth of the rows at most."""
    sizes = _sizes(rows)
    if rows.order is None and len(set(sizes)) == 1:
        return Elements(Groups.standing(len(sizes), sizes[0]), (None,))
    counts = sorted((size, n) for size, n in Counter(sizes).items() if size)
    buckets, element, parts, low = [], [], [], 0
    for length in cut(counts, lambda size: size, max(n // SHARE, FREE_ROWS)):
        some = [b for b, size in enumerate(sizes) if low < size <= length]
        full = all(sizes[b] == length for b in some)
        buckets.append(Bucket(len(some), length, length, full))
        element.append(mx.array(some, dtype=mx.int32))
        parts.append(_slots(rows, some, length))
        low = length
    row = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    groups = Groups(tuple(buckets), n, row, slot := inverted(row, n), None, row, slot)
    sync.complete((row, groups.slot, element))
    return Elements(groups, tuple(element))


def _slots(rows: BatchRows, some: Sequence[int], length: int) -> mx.array:
    """Return the row in each of an element's ``length`` slots, or -1; all in a line."""
    starts = mx.array(rows.starts, dtype=mx.int32)
    element = mx.array(list(some), dtype=mx.int32)[:, None]
    row = starts[element] + mx.arange(length, dtype=mx.int32)
    inside = row < starts[element + 1]
    if rows.order is not None:
        row = rows.order[mx.where(inside, row, 0)]
    return mx.where(inside, row, -1).flatten()

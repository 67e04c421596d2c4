"""Attention: among rows in windows, along a curve or of whole batch elements; and to
sequences, one a batch element.

Rows are grouped once for each coordinate set. The CPU's kernel takes groups of any
length as they are. Elsewhere groups of like size are padded to the largest of them and
attended in one call of ``mx.fast.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .. import registry, sync
from ..checks import INT32_LIMIT, arrays_of, dtype_name, real, whole
from ..devices import CPU
from ..geometry import lattice
from ..geometry.curves import check_curve
from ..geometry.lattice import running_sums
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import inverted, move_rows
from ..routes import launch
from ..tensor import SparseTensor, expect_tensor
from ..transformations import zeros_of
from . import observed
from .fused_attention import Call, attend, by_kernel, holds_no_scores, pieces, told
from .groups import (
    EXACT,
    PADDING,
    SCORES,
    SHARE,
    Bucket,
    Groups,
    Padding,
    RelativeBias,
    check_table,
    cut,
    filled,
    of_groups,
    patches,
)
from .heads import check_dtypes, heads_fit
from .observed import COMPOSED, SDPA, Tell, attention_teller
from .pool import BatchRows, batch_rows

__all__ = [
    "cross_attention", "full_attention", "serialized_attention", "to_sequences",
    "window_attention",
]  # fmt: skip


LAST_PATCHES = ("short", "fill")
RULES = {"serialized": "patches", "filled": "patches"}  # as a trace has them
BIASED_SCORES = 1 << 24  # of a call with a bias, as SCORES


def full_attention(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    like: SparseTensor,
    *,
    scale: float | None = None,
) -> mx.array:
    """Attend among all rows of each batch element.

    Arguments, result and errors are those of ``window_attention``.
    """
    return _attend(q, k, v, like, ("full",), scale)


def window_attention(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    like: SparseTensor,
    window: IntOrTuple,
    *,
    shift: IntOrTuple = 0,
    scale: float | None = None,
) -> mx.array:
    """Attend among the rows of one window ``floor((coordinate + shift) / window)``.

    No row sees another batch element or another window. The windows of a coordinate
    set are worked out once and live as long as the set; only that reads sizes. Where
    the CPU's kernel serves, a row's bits depend on its window alone; elsewhere windows
    of like size share a call, padded (``ops.observed.Attended`` counts how much).

    Args:
        q: (N, heads, D) queries; or (N, 3, heads, D), queries, keys and values, with
            None for ``k`` and ``v``: what is moved is then moved at once, and so is
            its gradient.
        k: (N, kv_heads, D) keys; ``kv_heads`` divides ``heads``.
        v: (N, kv_heads, D_v) values.
        like: the tensor whose N rows these are; its features do not matter.
        window: extent of a window in cells, int or one per axis.
        shift: cells by which the windows are moved (Swin's shifted windows).
        scale: factor of the scores; by default ``D ** -0.5``.

    Returns:
        (N, heads, D_v) in the dtype of ``q``; the softmax is float32. A row that is
        alone in its window gets its own value.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit.
    """
    expect_tensor(like, "like", flags=True)
    window = per_axis(window, like.dims, "window")
    shift = per_axis(shift, like.dims, "shift", least=-INT32_LIMIT)
    return _attend(q, k, v, like, ("window", window, shift), scale)


def serialized_attention(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    like: SparseTensor,
    patch: int,
    *,
    order: str = "hilbert",
    shift: int = 0,
    scale: float | None = None,
    last_patch: str = "short",
    bits: int | None = None,
    table: mx.array | None = None,
) -> mx.array:
    """Attend among ``patch`` rows that follow each other along a curve.

    Each batch element is cut on its own. Other arguments, result and errors are those
    of ``window_attention``.

    Args:
        q, k, v, like, scale: as there.
        patch: rows of a patch.
        order: the curve, as for ``curve_order``.
        shift: the first patch has this many rows fewer.
        last_patch: what becomes of an element's last r rows, fewer than a patch:
            "short", they attend among themselves; "fill", they see what is in slots r
            to ``patch - 1`` of the patch before too (Point Transformer V3). An element
            of fewer rows than a patch is one short patch in either case.
        bits: of the curve, as for ``curve_order``.
        table: (axes * (2 * bound + 1), heads) floating, added to the scores: of each
            axis the entry of the query's cell minus the key's, from ``-bound`` on and
            no further than the bound (Point Transformer V3's relative positions). Such
            scores are computed by MLX operations and held, float32, a part at a time.
    """
    expect_tensor(like, "like", flags=True)
    check_curve(order, like.dims)
    if last_patch not in LAST_PATCHES:
        raise ValueError(
            f"last_patch must be one of {LAST_PATCHES}; got {last_patch!r}"
        )
    patch = whole(patch, "patch", 1, "an int of rows")
    shift = whole(shift, "shift")
    if shift >= patch or patch >= INT32_LIMIT:
        raise ValueError(
            f"patch must be below 2^31 and shift below patch; got {patch} and {shift}"
        )
    if last_patch == "short":
        rule = "serialized", patch, order, bits, shift
    elif shift:
        raise ValueError(f"filled patches have no shift; got shift={shift}")
    else:
        rule = "filled", patch, order, bits
    return _attend(q, k, v, like, rule, scale, table)


def _attend(
    q, k, v, like: SparseTensor, rule: tuple, scale: float | None, table=None
) -> mx.array:
    q, k, v, table = arrays_of(q=q, k=k, v=v, table=table)
    given = (q,) if k is None and v is None else (q, k, v)
    _check(given, like)
    heads = Heads.of(given)
    if table is not None:
        check_table(table, like.dims, heads.queries)
    if len(like) == 0:
        return zeros_of(given, (0, heads.queries, heads.values), q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else real(scale, "scale")
    if table is not None:
        groups = _groups(like, rule, PADDING[launch.device().backend])
        bias = RelativeBias(table, like.coordinate_set, groups)
        tell = _teller(heads, given, rule, groups, registry.MLX, COMPOSED)
        calls = (_calls(b, heads, q.dtype, True) for b in groups.buckets)
        tell("forward", sum(calls))
        return composed(given, groups, scale, bias)
    if registry.serving() == CPU:
        groups = _groups(like, rule, EXACT)
        return by_kernel(
            *_apart(given, 1),
            (groups.row, groups.starts, groups.queries),
            scale,
            gather=groups.gather,
            again=lambda *arrays: composed(arrays, groups, scale),
            tell=_teller(heads, given, rule, groups, CPU, "attention"),
        )
    groups = _groups(like, rule, PADDING[launch.device().backend])
    tell = _teller(heads, given, rule, groups, registry.MLX, SDPA)
    _tell(tell, heads, given, groups)
    return composed(given, groups, scale)


class Heads(NamedTuple):
    """The heads of queries, and of keys and values; the channels of each."""

    queries: int
    keys: int
    channels: int
    values: int

    @classmethod
    def of(cls, given: tuple[mx.array, ...]) -> Heads:
        """Describe what ``composed`` takes."""
        q, k, v = (a.shape[-2:] for a in (given if len(given) == 3 else 3 * given))
        return cls(q[0], k[0], q[1], v[1])


def _apart(given: tuple[mx.array, ...], axis: int) -> Sequence[mx.array]:
    """Return queries, keys and values of what ``composed`` takes."""
    if len(given) == 3:
        return given
    return [a.squeeze(axis) for a in mx.split(given[0], 3, axis=axis)]


def _tell(tell: Tell, heads: Heads, given, groups: Groups) -> None:
    """Tell observers of a forward pass, and which of its calls MLX fuses."""
    if not observed.attention:
        return
    forms = []
    for bucket in groups.buckets:
        step, rows = _steps(bucket, heads, given[0].dtype)
        sizes = min(step, bucket.groups), *heads[:2], min(rows, bucket.queries)
        channels = bucket.length, *heads[2:]
        call = Call(*sizes, *channels, given[0].dtype, not bucket.full)
        forms.append((_calls(bucket, heads, given[0].dtype), call))
    tell("forward", *told(forms))


def _teller(
    heads: Heads, given, rule: tuple, groups: Groups, backend: str, kernel: str
) -> Tell:
    name, count = RULES.get(rule[0], rule[0]), sum(b.groups for b in groups.buckets)
    pairs, shape = (groups.pairs, groups.padded_pairs), (len(given[0]), heads.queries)
    shape = *shape, heads.channels
    return attention_teller(shape, given[0].dtype, name, count, pairs, backend, kernel)


def composed(
    given: tuple[mx.array, ...],
    groups: Groups,
    scale: float,
    bias: RelativeBias | None = None,
) -> mx.array:
    """Attend a bucket at a time, in MLX operations that differentiate to any order.

    ``given``: (N, heads, D) queries, keys, values; or all in one (N, 3, heads, D).
    """
    outputs, start, q = [], 0, given[0]
    slots = zip(*(groups.slots(a) for a in given), strict=True)
    for bucket, mask, parts in zip(groups.buckets, groups.masks, slots, strict=True):
        end = start + bucket.groups * bucket.length
        shape = bucket.groups, bucket.length
        some = None if bias is None else bias.between(start, end, shape)
        outputs += _scaled(bucket, _apart(parts, 2), mask, scale, some)
        start = end
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return groups.collect(y).reshape(len(q), q.shape[-2], -1)


def _steps(
    bucket: Bucket, heads: Heads, dtype: mx.Dtype, biased: bool = False
) -> tuple[int, int]:
    if not biased and holds_no_scores(
        launch.device(), heads.channels, heads.values, dtype
    ):
        return bucket.groups, bucket.queries
    most, count = BIASED_SCORES if biased else SCORES, heads.queries
    rows = max(1, min(bucket.queries, most // (count * bucket.length)))
    return max(1, most // (count * bucket.queries * bucket.length)), rows


def _calls(bucket: Bucket, heads: Heads, dtype: mx.Dtype, biased: bool = False) -> int:
    step, rows = _steps(bucket, heads, dtype, biased)
    return -(-bucket.groups // step) * -(-bucket.queries // rows)


def _scaled(
    bucket: Bucket,
    parts: Sequence[mx.array],
    mask: mx.array | None,
    scale: float,
    bias: Callable[[slice, slice], mx.array] | None,
):
    """Yield (results, heads * D_v) of a bucket, a bounded part at a time."""
    step, rows = _steps(bucket, Heads.of(parts), parts[0].dtype, bias is not None)
    cut = [pieces(part.transpose(0, 2, 1, 3), step, 0) for part in parts]
    cut.append([None] * len(cut[0]) if mask is None else pieces(mask, step, 0))
    for i, (q, k, v, keys) in enumerate(zip(*cut, strict=True)):
        some, made = slice(i * step, (i + 1) * step), []
        for at, own in enumerate(pieces(q, rows, 2, bucket.queries)):
            if bias is None:
                made.append(attend(own, k, v, scale, keys))
                continue
            asked = slice(at * rows, at * rows + own.shape[2])
            made.append(_biased(own, k, v, scale, keys, bias(some, asked)))
        y = made[0] if len(made) == 1 else mx.concatenate(made, axis=2)
        yield y.transpose(0, 2, 1, 3).reshape(-1, y.shape[1] * y.shape[3])


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


def _check(given: tuple[mx.array, ...], like: SparseTensor) -> None:
    expect_tensor(like, "like", flags=True)
    for a in given:
        if a is None:
            raise TypeError(
                "q, k and v must be arrays, or q one of all three and k and v None; "
                "got None"
            )
    n = len(like)
    if len(given) == 1:
        (q,) = given
        if q.ndim != 4 or q.shape[:2] != (n, 3) or not min(q.shape[2:]):
            raise ValueError(
                f"queries, keys and values in one array must have shape ({n}, 3, "
                f"heads, D); got {tuple(q.shape)}"
            )
        dtype_name(q.dtype)
        return
    q, k, v = given
    fits = all(a.ndim == 3 and a.shape[0] == n for a in given)
    if not fits or not heads_fit(q, k, v):
        raise ValueError(
            f"q, k and v must have shapes ({n}, heads, D), ({n}, kv_heads, D) and "
            f"({n}, kv_heads, D_v), kv_heads a divisor of heads; got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    check_dtypes(q, k, v)


def _groups(like: SparseTensor, rule: tuple, padding: Padding) -> Groups:
    held = like.coordinate_set

    def build() -> Groups:
        held.index  # noqa: B018 (checks the rows before they are used)
        kind, *rest = rule
        if kind == "window":
            return of_groups(*_windows(held.coords, *rest), None, padding)
        if kind == "filled":
            return filled(like, *rest, padding)
        if kind == "serialized":
            return of_groups(*patches(like, *rest), padding)
        return _element_groups(like, padding)

    return held.view(("groups", rule, padding), build)


def _element_groups(like: SparseTensor, padding: Padding) -> Groups:
    rows = batch_rows(like)
    sizes = set(rows.sizes)
    if padding is not EXACT and rows.order is None and len(sizes) == 1:
        return Groups.standing(rows.size, *sizes)
    return of_groups(rows.batch, rows.size, rows.order, padding)


def _windows(coords: mx.array, window, shift) -> tuple[mx.array, int]:
    cells = lattice.cells(lattice.shifted(coords, shift), window)
    unique = registry.geometry().unique_rows(lattice.as_int32(cells, "the windows"))
    return unique.inverse, unique.rows.shape[0]


RULE = "cross"  # as a trace has it
# Padding that takes less time than a call.
FREE_ROWS = 16


class Elements(NamedTuple):
    """The rows of batch elements in slots, and whose slots these are."""

    groups: Groups
    element: tuple[mx.array | None, ...]  # of each bucket: its elements, None for all


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
    _check_sequences(q, k, v, like, lengths)
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
        y = _cross_by_kernel(q, k, v, like, lengths, scale)
    else:
        y = _cross_composed(q, k, v, like, lengths, scale, registry.MLX)
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
    sizes = rows.sizes
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


def _cross_by_kernel(q, k, v, like, lengths: mx.array | None, scale: float) -> mx.array:
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
        return _cross_composed(q, k, v, like, lengths, scale).reshape(
            *shape, v.shape[-1]
        )

    flat = [a.reshape(-1, *a.shape[-2:]) for a in (q, k, v)]
    pairs, shape = (count * most, count * most), flat[0].shape
    return by_kernel(
        *flat,
        (rows, starts, queries, asked, begins),
        scale,
        gather=lambda a: a if back is None else a[back],
        again=again,
        tell=attention_teller(shape, q.dtype, RULE, batches, pairs, CPU, "attention"),
    )


def _cross_composed(
    q, k, v, like, lengths: mx.array | None, scale: float, backend: str = ""
) -> mx.array:
    """Attend a bucket at a time; with a ``backend`` report the calls."""
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
        rows, n = batch_rows(like), len(like)
        held = like.coordinate_set.view("elements", lambda: _grouped(rows, n))
        slots = held.groups.slots(q)
    buckets = held.groups.buckets
    if backend:
        groups = sum(b.groups for b in buckets)
        rows = sum(b.groups * b.queries for b in buckets)
        asked = prod(q.shape[:-2]), *q.shape[-2:]
        pairs = asked[0] * most, rows * most
        tell = attention_teller(asked, q.dtype, RULE, groups, pairs, backend, SDPA)
        tell("forward", *told(_cross_calls(buckets, q, k, v, mask is not None)))
    results = []
    for bucket, element, queries in zip(buckets, held.element, slots, strict=True):
        some = slice(bucket.groups) if element is None else element
        chosen = [None if a is None else a[some] for a in (k, v, mask)]
        y = _attended_parts(bucket, queries, *chosen, scale)
        results.append(y.reshape(bucket.groups * bucket.queries, -1))
    y = results[0] if len(results) == 1 else mx.concatenate(results)
    return held.groups.collect(y)


def _cross_calls(buckets, q, k, v, masked: bool) -> Iterator[tuple[int, Call]]:
    heads, keys = q.shape[-2], k.shape[2]
    for bucket in buckets:
        rows = _queries_of_a_call(bucket, heads, k, v)
        sizes = bucket.groups, heads, k.shape[1], min(rows, bucket.queries), keys
        calls = -(-bucket.queries // rows)
        yield calls, Call(*sizes, k.shape[3], v.shape[3], q.dtype, masked)


def _queries_of_a_call(bucket: Bucket, heads: int, k: mx.array, v: mx.array) -> int:
    if holds_no_scores(launch.device(), k.shape[3], v.shape[3], k.dtype):
        return bucket.queries
    return max(1, SCORES // (bucket.groups * heads * k.shape[2]))


def _attended_parts(
    bucket: Bucket, q, k, v, mask: mx.array | None, scale: float
) -> mx.array:
    """Return (B, L, heads, D_v), a bounded part of the queries at a time."""
    parts = pieces(
        q.transpose(0, 2, 1, 3), _queries_of_a_call(bucket, q.shape[2], k, v), 2
    )
    parts = [attend(part, k, v, scale, mask) for part in parts]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return y.transpose(0, 2, 1, 3)


def _check_sequences(
    q, k, v, like: SparseTensor | None, lengths: mx.array | None
) -> None:
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


def _grouped(rows: BatchRows, n: int) -> Elements:
    """Return elements in few buckets, padded by an eighth of the rows at most."""
    sizes = rows.sizes
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

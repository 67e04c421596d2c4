"""Self-attention among rows: in windows, along a curve, or of whole batch elements.

Rows are grouped once for each coordinate set. The CPU's kernel takes groups of any
length as they are; elsewhere groups of like size are padded to the largest of them and
attended in one call of ``mx.fast.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..arrays import arrays_of
from ..backends import registry
from ..backends.cpu_attention import KERNEL
from ..checks import real, whole
from ..coordinate_set import CoordinateSet
from ..devices import CPU
from ..dtypes import dtype_name
from ..geometry import lattice, sync
from ..geometry.curves import check_curve
from ..geometry.keys import INT32_LIMIT
from ..kernel_spec import IntOrTuple, per_axis
from ..routes import launch
from ..tensor import SparseTensor, expect_tensor
from ..transformations import zeros_of
from . import observed
from .fused_attention import Call, attend, by_kernel, holds_no_scores, pieces, told
from .groups import (
    EXACT,
    PADDING,
    SCORES,
    Bucket,
    Groups,
    Padding,
    RelativeBias,
    check_table,
    filled,
    of_groups,
    patches,
)
from .heads import check_dtypes, heads_fit
from .observed import COMPOSED, SDPA, Tell, attention_teller
from .pool import batch_rows

__all__ = ["full_attention", "serialized_attention", "window_attention"]

LAST_PATCHES = ("short", "fill")
RULES = {"serialized": "patches", "filled": "patches"}  # as a trace has them
BIASED_SCORES = 1 << 24  # of a call with a bias, as SCORES

_plans: WeakKeyDictionary[CoordinateSet, dict[tuple, Groups]] = WeakKeyDictionary()


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
            tell=_teller(heads, given, rule, groups, CPU, KERNEL),
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
    """Return what tells observers of a pass, and the kernel's calls in it."""
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

    Args:
        given: (N, heads, D) queries, keys, values; or all three in one (N, 3, heads,
            D).
        groups: of the rows.
        scale: of the scores.
        bias: added to them, or None.
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
    """Return the groups and the queries of one call."""
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
    """Return the groups of a coordinate set; worked out once."""
    held = like.coordinate_set
    known = _plans.setdefault(held, {})
    if (rule, padding) not in known:
        held.index  # noqa: B018 (checks the rows before they are used)
        kind, *rest = rule
        if kind == "window":
            groups = of_groups(*_windows(held.coords, *rest), None, padding)
        elif kind == "filled":
            groups = filled(like, *rest, padding)
        elif kind == "serialized":
            groups = of_groups(*patches(like, *rest), padding)
        else:
            groups = _elements(like, padding)
        known[rule, padding] = sync.complete(groups)
    return known[rule, padding]


def _elements(like: SparseTensor, padding: Padding) -> Groups:
    """Return the rows of each batch element."""
    rows = batch_rows(like)
    sizes = {b - a for a, b in zip(rows.starts, rows.starts[1:], strict=False)}
    if padding is not EXACT and rows.order is None and len(sizes) == 1:
        return Groups.standing(rows.size, *sizes)
    return of_groups(rows.batch, rows.size, rows.order, padding)


def _windows(coords: mx.array, window, shift) -> tuple[mx.array, int]:
    """Return (N,) the window of each row, and how many there are."""
    cells = lattice.cells(lattice.shifted(coords, shift), window)
    unique = registry.geometry().unique_rows(lattice.as_int32(cells, "the windows"))
    return unique.inverse, unique.rows.shape[0]

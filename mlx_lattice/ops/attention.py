"""Self-attention among rows: in windows, along a curve, or of whole batch elements.

Rows are grouped once for each coordinate set. The CPU's kernel takes groups of any
length as they are; elsewhere groups of like size are padded to the largest of them and
attended in one call of ``mx.fast.scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..backends import registry
from ..backends.cpu_attention import KERNEL
from ..coordinate_set import CoordinateSet
from ..devices import CPU
from ..geometry import lattice, sync
from ..geometry.curves import check_curve
from ..geometry.keys import INT32_LIMIT
from ..kernel_spec import IntOrTuple, per_axis
from ..problem import dtype_name
from ..tensor import SparseTensor, expect_tensor
from .attended import COMPOSED, SDPA, Tell, observers, teller
from .blocked_attention import by_kernel
from .fused_attention import Call, attend, told
from .groups import SCORES, Bucket, Groups, of_groups
from .patches import filled, patches
from .relative import RelativeBias, check_table

__all__ = ["full_attention", "serialized_attention", "window_attention"]

LAST_PATCHES = ("short", "fill")
RULES = {"serialized": "patches", "filled": "patches"}  # as a trace has them
BIASED_SCORES = 1 << 24  # of a call with a bias, as SCORES

_plans: WeakKeyDictionary[CoordinateSet, dict[tuple, Groups]] = WeakKeyDictionary()


def full_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
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
    k: mx.array,
    v: mx.array,
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
    of like size share a call, padded (``ops.attended.Attended`` counts how much).

    Args:
        q: (N, heads, D) queries.
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
    expect_tensor(like, "like")
    window = per_axis(window, like.dims, "window")
    shift = per_axis(shift, like.dims, "shift", least=-INT32_LIMIT)
    return _attend(q, k, v, like, ("window", window, shift), scale)


def serialized_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
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
    expect_tensor(like, "like")
    check_curve(order, like.dims)
    if last_patch not in LAST_PATCHES:
        raise ValueError(
            f"last_patch must be one of {LAST_PATCHES}; got {last_patch!r}"
        )
    ints = isinstance(patch, int) and isinstance(shift, int)
    if not ints or patch < 1 or not 0 <= shift < patch:
        raise ValueError(
            "patch must be an int of 1 or more and shift from 0 to patch - 1; got "
            f"{patch!r} and {shift!r}"
        )
    if last_patch == "short":
        rule = "serialized", patch, order, bits, shift
    elif shift:
        raise ValueError(f"filled patches have no shift; got shift={shift}")
    else:
        rule = "filled", patch, order, bits
    if table is not None:
        check_table(table, like.dims, q)
    return _attend(q, k, v, like, rule, scale, table)


def _attend(
    q, k, v, like: SparseTensor, rule: tuple, scale: float | None, table=None
) -> mx.array:
    _check(q, k, v, like)
    shape = len(like), q.shape[1], v.shape[2]
    if len(like) == 0:
        return mx.zeros(shape, dtype=q.dtype)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if table is not None:
        groups = _groups(like, rule)
        bias = RelativeBias(table, like.manager[like.key], groups)
        tell = _teller(q, rule, groups, registry.MLX, COMPOSED)
        tell("forward", sum(_calls(b, q.shape[1], bias) for b in groups.buckets))
        return composed(q, k, v, groups, scale, bias)
    if registry.serving() == CPU:
        groups = _groups(like, rule, exact=True)
        return by_kernel(
            q,
            k,
            v,
            (groups.row, groups.starts, groups.queries),
            scale,
            gather=groups.gather,
            again=lambda q, k, v: composed(q, k, v, groups, scale),
            tell=_teller(q, rule, groups, CPU, KERNEL),
        )
    groups = _groups(like, rule)
    tell = _teller(q, rule, groups, registry.MLX, SDPA)
    _tell(tell, q, k, v, groups)
    return composed(q, k, v, groups, scale)


def _tell(tell: Tell, q, k, v, groups: Groups) -> None:
    """Tell observers of a forward pass, and which of its calls MLX fuses."""
    if not observers:
        return
    heads, forms = (q.shape[1], k.shape[1]), []
    for bucket in groups.buckets:
        step, rows = _steps(bucket, heads[0])
        sizes = min(step, bucket.groups), *heads, min(rows, bucket.queries)
        channels = bucket.length, q.shape[2], v.shape[2]
        call = Call(*sizes, *channels, q.dtype, not bucket.full)
        forms.append((_calls(bucket, heads[0]), call))
    tell("forward", *told(forms))


def _teller(q: mx.array, rule: tuple, groups: Groups, backend: str, kernel: str):
    """Return what tells observers of a pass, and the kernel's calls in it."""
    name, count = RULES.get(rule[0], rule[0]), sum(b.groups for b in groups.buckets)
    pairs = groups.pairs, groups.padded_pairs
    return teller(q, name, count, pairs, backend, kernel)


def composed(
    q, k, v, groups: Groups, scale: float, bias: RelativeBias | None = None
) -> mx.array:
    """Attend a bucket at a time, in MLX operations that differentiate to any order."""
    slots = []
    for a in (q, k, v):
        flat = a.reshape(len(a), a.shape[1] * a.shape[2])
        slots.append(groups.spread(flat).reshape(-1, *a.shape[1:]))
    outputs, start = [], 0
    for bucket in groups.buckets:
        end = start + bucket.groups * bucket.length
        shape = bucket.groups, bucket.length
        parts = [a[start:end].reshape(*shape, *a.shape[1:]) for a in slots]
        mask = None
        if not bucket.full:
            here = groups.row[start:end] >= 0
            mask = here.reshape(bucket.groups, 1, 1, bucket.length)
        some = None if bias is None else bias.between(start, end, shape)
        outputs += _scaled(bucket, parts, mask, scale, some)
        start = end
    y = groups.collect(mx.concatenate(outputs))
    return y.reshape(len(q), q.shape[1], v.shape[2])


def _steps(bucket: Bucket, heads: int, bias: object = None) -> tuple[int, int]:
    """Return the groups and the queries of one call."""
    most = SCORES if bias is None else BIASED_SCORES
    rows = max(1, min(bucket.queries, most // (heads * bucket.length)))
    return max(1, most // (heads * bucket.queries * bucket.length)), rows


def _calls(bucket: Bucket, heads: int, bias: object = None) -> int:
    step, rows = _steps(bucket, heads, bias)
    return -(-bucket.groups // step) * -(-bucket.queries // rows)


def _scaled(
    bucket: Bucket,
    parts: list[mx.array],
    mask: mx.array | None,
    scale: float,
    bias: Callable[[slice, slice], mx.array] | None,
):
    """Yield (results, heads * D_v) of a bucket, a bounded part at a time."""
    q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
    step, rows = _steps(bucket, q.shape[1], bias)
    for first in range(0, bucket.groups, step):
        some, queries = slice(first, first + step), []
        here = None if mask is None else mask[some]
        for at in range(0, bucket.queries, rows):
            asked = slice(at, min(at + rows, bucket.queries))
            given = q[some, :, asked], k[some], v[some]
            if bias is None:
                y = attend(*given, scale, here)
            else:
                y = _biased(*given, scale, here, bias(some, asked))
            queries.append(y)
        y = queries[0] if len(queries) == 1 else mx.concatenate(queries, axis=2)
        yield y.transpose(0, 2, 1, 3).reshape(-1, q.shape[1] * v.shape[-1])


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


def _check(q, k, v, like: SparseTensor) -> None:
    expect_tensor(like, "like")
    for a in (q, k, v):
        if not isinstance(a, mx.array):
            raise TypeError(f"q, k and v must be arrays; got {type(a).__name__}")
    n = len(like)
    fits = all(a.ndim == 3 and a.shape[0] == n for a in (q, k, v))
    fits = fits and min(*q.shape[1:], *k.shape[1:]) > 0
    if (
        not fits
        or q.shape[2] != k.shape[2]
        or k.shape[1] != v.shape[1]
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"q, k and v must have shapes ({n}, heads, D), ({n}, kv_heads, D) and "
            f"({n}, kv_heads, D_v), kv_heads a divisor of heads; got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    dtype_name(q.dtype)


def _groups(like: SparseTensor, rule: tuple, exact: bool = False) -> Groups:
    """Return the groups of a coordinate set; worked out once."""
    held = like.manager[like.key]
    known = _plans.setdefault(held, {})
    if (rule, exact) not in known:
        held.index  # noqa: B018 (checks the rows before they are used)
        kind, *rest = rule
        if kind == "window":
            groups = of_groups(*_windows(held.coords, *rest), None, exact)
        elif kind == "filled":
            groups = filled(like, *rest, exact)
        elif kind == "serialized":
            groups = of_groups(*patches(like, *rest), exact)
        else:
            groups = of_groups(held.coords[:, 0], held.batch_size, None, exact)
        sync.start(tuple(groups), at_once=True)
        known[rule, exact] = groups
    return known[rule, exact]


def _windows(coords: mx.array, window, shift) -> tuple[mx.array, int]:
    """Return (N,) the window of each row, and how many there are."""
    cells = lattice.cells(lattice.shifted(coords, shift), window)
    unique = registry.geometry().unique_rows(lattice.as_int32(cells, "the windows"))
    return unique.inverse, unique.rows.shape[0]

"""Self-attention among rows: in windows, along a curve, or of whole batch elements.

Rows are grouped once for each coordinate set. Groups of like size are padded to the
largest of them and attended in one call, so that padding costs little and a crowded
window does not widen the others.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import mlx.core as mx

from ..backends import registry
from ..coordinate_set import CoordinateSet
from ..geometry import lattice, sync
from ..geometry.curves import check_curve
from ..geometry.keys import INT32_LIMIT
from ..geometry.segments import segment_counts
from ..kernel_spec import IntOrTuple, per_axis
from ..problem import dtype_name
from ..tensor import SparseTensor, expect_tensor
from .patches import Bucket, Groups, filled, patches

__all__ = ["full_attention", "rotary", "serialized_attention", "window_attention"]

LAST_PATCHES = ("short", "fill")
PAIRS = ("neighbours", "halves")
# Groups of at most this many rows are padded to a common length.
SMALLEST = 16
# Scores of one call: bounds its memory and its time on the device.
SCORES = 1 << 27

_plans: WeakKeyDictionary[CoordinateSet, dict[tuple, object]] = WeakKeyDictionary()


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
    set are worked out once and live as long as the set; only that reads sizes.

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
    return _attend(q, k, v, like, rule, scale)


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
    expect_tensor(like, "like")
    dtype_name(x.dtype)
    if base <= 0:
        raise ValueError(f"base must be above 0; got {base}")
    if pairs not in PAIRS:
        raise ValueError(f"pairs must be one of {PAIRS}; got {pairs!r}")
    dim, dims = x.shape[-1], like.dims
    if x.ndim != 3 or x.shape[0] != len(like):
        raise ValueError(
            f"x must have shape ({len(like)}, heads, D); got {tuple(x.shape)}"
        )
    if positions is not None and tuple(positions.shape) != (len(like), dims):
        raise ValueError(
            f"positions must have shape ({len(like)}, {dims}); got "
            f"{tuple(positions.shape)}"
        )
    if dim % 2 or dim < 2 * dims:
        raise ValueError(
            f"rotary needs an even head dimension of at least {2 * dims} for "
            f"{dims} axes; got {dim}"
        )
    if pairs == "halves" and dim % (2 * dims):
        raise ValueError(
            f"pairs of halves need a multiple of {2 * dims} channels a head for "
            f"{dims} axes; got {dim}"
        )
    cos, sin = _rotations(like, dim, base, frequency, positions)
    exact = x.astype(mx.float32)
    if pairs == "halves":
        parts = exact.reshape(*x.shape[:2], dims, 2, dim // 2 // dims)
        cos, sin = (a.reshape(len(x), 1, *parts.shape[2::2]) for a in (cos, sin))
        a, b, axis = parts[..., 0, :], parts[..., 1, :], -2
    else:
        parts = exact.reshape(*x.shape[:2], dim // 2, 2)
        a, b, axis = parts[..., 0], parts[..., 1], -1
    rotated = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=axis)
    return rotated.reshape(x.shape).astype(x.dtype)


def _rotations(like: SparseTensor, dim: int, base: float, frequency: float, positions):
    """Return the (N, 1, D / 2) float32 cosine and sine of every rotation."""
    if positions is not None:
        return _turns(positions.astype(mx.float32), dim, base, frequency)
    held, made = like.manager[like.key], ("rotary", dim, base, frequency)
    known = _plans.setdefault(held, {})
    if made not in known:
        low = mx.array(held.bounds[0][1:], dtype=mx.int64)
        cells = (held.coords[:, 1:].astype(mx.int64) - low).astype(mx.float32)
        known[made] = _turns(cells, dim, base, frequency)
        sync.start(known[made], at_once=True)
    return known[made]


def _turns(places: mx.array, dim: int, base: float, frequency: float):
    """Return what ``_rotations`` does for (N, dims) places."""
    count, dims = places.shape
    each = dim // 2 // dims
    speed = [frequency * base ** (-j / each) for j in range(each)]
    angle = (places[:, :, None] * mx.array(speed)).reshape(count, dims * each)
    angle = mx.pad(angle, [(0, 0), (0, dim // 2 - dims * each)])[:, None]
    return mx.cos(angle), mx.sin(angle)


def _attend(q, k, v, like: SparseTensor, rule: tuple, scale: float | None) -> mx.array:
    _check(q, k, v, like)
    shape = len(like), q.shape[1], v.shape[2]
    if len(like) == 0:
        return mx.zeros(shape, dtype=q.dtype)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    groups = _groups(like, rule)
    slots = []
    for a in (q, k, v):
        flat = a.reshape(len(like), a.shape[1] * a.shape[2])
        slots.append(groups.spread(flat).reshape(-1, *a.shape[1:]))
    outputs, start = [], 0
    for bucket in groups.buckets:
        end = start + bucket.groups * bucket.length
        parts = [
            a[start:end].reshape(bucket.groups, bucket.length, *a.shape[1:])
            for a in slots
        ]
        here = (groups.row[start:end] >= 0).reshape(bucket.groups, 1, 1, bucket.length)
        outputs += _scaled(parts, None if bucket.full else here, scale)
        start = end
    y = mx.concatenate(outputs)
    return groups.collect(y).reshape(shape)


def _scaled(parts: list[mx.array], mask: mx.array | None, scale: float):
    """Yield (slots, heads * D_v) results of a bucket, a bounded part at a time."""
    q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
    count, heads, length, _ = q.shape
    rows = max(1, min(length, SCORES // (heads * length)))
    step = max(1, SCORES // (heads * length * length))
    for first in range(0, count, step):
        some = slice(first, first + step)
        queries = [
            mx.fast.scaled_dot_product_attention(
                q[some, :, at : at + rows],
                k[some],
                v[some],
                scale=scale,
                mask=None if mask is None else mask[some],
            )
            for at in range(0, length, rows)
        ]
        y = queries[0] if len(queries) == 1 else mx.concatenate(queries, axis=2)
        yield y.transpose(0, 2, 1, 3).reshape(-1, heads * v.shape[-1])


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


def _groups(like: SparseTensor, rule: tuple) -> Groups:
    held = like.manager[like.key]
    known = _plans.setdefault(held, {})
    if rule not in known:
        held.index  # noqa: B018 (checks the rows before they are used)
        kind, *rest = rule
        if kind == "window":
            groups = _padded(*_windows(held.coords, *rest), None)
        elif kind == "filled":
            groups = filled(like, *rest)
        elif kind == "serialized":
            groups = _padded(*patches(like, *rest))
        else:
            groups = _padded(held.coords[:, 0], held.batch_size, None)
        sync.start(tuple(groups), at_once=True)
        known[rule] = groups
    return known[rule]


def _windows(coords: mx.array, window, shift) -> tuple[mx.array, int]:
    """Return (N,) the window of each row, and how many there are."""
    cells = lattice.cells(lattice.shifted(coords, shift), window)
    unique = registry.geometry().unique_rows(lattice.as_int32(cells, "the windows"))
    return unique.inverse, unique.rows.shape[0]


def _padded(group: mx.array, count: int, order: mx.array | None) -> Groups:
    """Return the padded rows of each group. Reads the sizes of a few buckets."""
    n = group.shape[0]
    if order is None:
        keys = group.astype(mx.int64) * n + mx.arange(n, dtype=mx.int64)
        order = mx.argsort(keys).astype(mx.int32)
    sizes = segment_counts(group, count)
    starts = mx.cumsum(sizes) - sizes
    by_size = mx.argsort(sizes).astype(mx.int32)
    ordered = sizes[by_size]
    limits = [0, SMALLEST]
    largest = ordered[-1].item()
    while limits[-1] < largest:
        limits.append(2 * limits[-1])
    cuts = mx.searchsorted(ordered, mx.array(limits, dtype=mx.int32), side="right")
    cuts = cuts.astype(mx.int32)
    least, most = ordered[mx.minimum(cuts, count - 1)], ordered[mx.maximum(cuts, 1) - 1]
    cuts, least, most = mx.stack([cuts, least, most]).tolist()
    buckets, rows = [], []
    for at in range(len(limits) - 1):
        a, b, length = cuts[at], cuts[at + 1], most[at + 1]
        if a == b:
            continue
        buckets.append(Bucket(b - a, length, least[at] == length))
        some, place = by_size[a:b, None], mx.arange(length, dtype=mx.int32)
        inside = place < sizes[some]
        taken = order[mx.where(inside, starts[some] + place, 0)]
        rows.append(mx.where(inside, taken, -1).flatten())
    row = mx.concatenate(rows)
    slot = mx.zeros((n + 1,), dtype=mx.int32)
    slot[mx.where(row >= 0, row, n)] = mx.arange(row.size, dtype=mx.int32)
    return Groups(tuple(buckets), row, slot[:n])

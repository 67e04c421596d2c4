"""Attention: among rows in windows, along a curve or of whole batch elements; and to
sequences, one for each batch element.

Rows are grouped once for each coordinate set. ``attention_calls`` has the groups and
the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod

import mlx.core as mx

from .. import registry
from ..backends.gpu.attention import GpuHeads, extents_of
from ..channel_kernels import column_sums
from ..checks import INT32_LIMIT, array_of, arrays_of, dtype_name, real, whole
from ..devices import CPU
from ..geometry import lattice
from ..geometry.lattice import running_sums
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import inverted, move_rows
from ..routes import launch
from ..tensor import SparseTensor, expect_tensor
from ..transformations import ByKernels, zeros_of
from .attention_calls import (
    COMPOSED,
    EXACT,
    PADDING,
    SDPA,
    Attended,
    Bucket,
    Groups,
    Heads,
    Padding,
    attend_bucket,
    attention_record,
    by_kernel,
    composed,
    cut,
    groups_of,
    relative_bias,
    report_calls,
    separate,
)
from .pool import BatchRows, batch_rows

__all__ = [
    "cross_attention", "curve_code", "curve_order", "full_attention", "rotary",
    "serialized_attention", "to_sequences", "window_attention",
]  # fmt: skip


LAST_PATCHES = ("short", "fill")
RULES = {"serialized": "patches", "filled": "patches"}  # names in a trace
PAIRS = ("neighbours", "halves")
EPS = 1e-12  # added to the mean square of a head


# Attention among rows


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

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> q = k = v = mx.random.normal((len(x), 2, 4))  # 2 heads of 4 channels
        >>> ops.full_attention(q, k, v, x).shape
        (64, 2, 4)
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

    A row only sees rows of its batch element and window. The windows of a coordinate
    set are computed once and live as long as the set; only that reads sizes. With the
    CPU's kernel the bits of a row depend only on its window. Elsewhere windows of
    similar size share a padded call; ``ml.trace`` counts the padding.

    Args:
        q: (N, heads, D) queries; or (N, 3, heads, D) queries, keys and values together,
            with None for ``k`` and ``v``, which moves them and their gradient at once.
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

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> q = k = v = mx.random.normal((len(x), 2, 4))
        >>> ops.window_attention(q, k, v, x, window=2).shape
        (64, 2, 4)
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

    Each batch element is cut into patches separately. The other arguments, the result
    and errors are those of ``window_attention``.

    Args:
        q, k, v, like, scale: as for ``window_attention``.
        patch: the number of rows in a patch.
        order: the curve, as for ``curve_order``.
        shift: the first patch has this many rows fewer.
        last_patch: how to treat an element's last r rows, fewer than a patch. "short":
            they attend among themselves. "fill": they also see the rows in slots r to
            ``patch - 1`` of the previous patch (Point Transformer V3). An element of
            fewer rows than a patch is always one short patch.
        bits: bits of the curve, as for ``curve_order``.
        table: (axes * (2 * bound + 1), heads) floating, added to the scores: for each
            axis the entry at the difference of the query's cell and the key's, clipped
            to the bound (relative positions of Point Transformer V3). Such scores are
            computed in float32 by MLX operations, a part at a time.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> q = k = v = mx.random.normal((len(x), 2, 4))
        >>> ops.serialized_attention(q, k, v, x, patch=16, order="z").shape
        (64, 2, 4)
    """
    expect_tensor(like, "like", flags=True)
    lattice.check_curve(order, like.dims)
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
    arrays = (q,) if k is None and v is None else (q, k, v)
    _check(arrays, like)
    heads = Heads.of(arrays)
    if table is not None:
        _check_table(table, like.dims, heads.queries)
    if len(like) == 0:
        return zeros_of(arrays, (0, heads.queries, heads.values), q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else real(scale, "scale")
    on_cpu = table is None and registry.serving() == CPU
    padding = EXACT if on_cpu else PADDING[launch.device().backend]
    groups = _groups(like, rule, padding)
    kernel = "attention" if on_cpu else SDPA if table is None else COMPOSED
    record = attention_record(
        (len(like), heads.queries, heads.channels),
        q.dtype,
        RULES.get(rule[0], rule[0]),
        sum(bucket.groups for bucket in groups.buckets),
        (groups.pairs, groups.padded_pairs),
        CPU if on_cpu else registry.MLX,
        kernel,
    )
    if on_cpu:
        return by_kernel(
            *separate(arrays, 1),
            (groups.row, groups.starts, groups.queries),
            scale,
            gather=groups.gather,
            again=lambda *arrays: composed(arrays, groups, scale),
            record=record,
        )
    report_calls(record, groups.buckets, heads, groups.masks)
    if table is None:
        return composed(arrays, groups, scale)
    bias = relative_bias(table, like.coordinate_set, groups)
    return composed(arrays, groups, scale, bias)


def _check(arrays: tuple[mx.array, ...], like: SparseTensor) -> None:
    expect_tensor(like, "like", flags=True)
    if any(a is None for a in arrays):
        raise TypeError(
            "q, k and v must be arrays, or q one of all three and k and v None; "
            "got None"
        )
    n = len(like)
    if len(arrays) == 1:
        (q,) = arrays
        if q.ndim != 4 or q.shape[:2] != (n, 3) or not min(q.shape[2:]):
            raise ValueError(
                f"queries, keys and values in one array must have shape ({n}, 3, "
                f"heads, D); got {tuple(q.shape)}"
            )
        dtype_name(q.dtype)
        return
    fits = all(a.ndim == 3 and a.shape[0] == n for a in arrays)
    _check_heads(
        arrays, fits, f"({n}, heads, D), ({n}, kv_heads, D) and ({n}, kv_heads, D_v)"
    )


def _check_heads(arrays: Sequence[mx.array], fits: bool, shapes: str) -> None:
    """Raise unless queries, keys and values fit, are floating and of one dtype."""
    q, k, v = arrays
    if fits:
        heads = Heads.of(arrays)
        fits = min(heads[:3]) > 0 and heads.queries % heads.keys == 0
        fits = fits and k.shape[-1] == heads.channels and v.shape[-2] == heads.keys
    if not fits:
        raise ValueError(
            f"q, k and v must have shapes {shapes}, kv_heads a divisor of heads; got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    dtype_name(q.dtype)


def _check_table(table: mx.array, axes: int, heads: int) -> None:
    """Raise unless a table fits the axes and the heads of queries."""
    entries = table.shape[0] // axes if table.ndim == 2 else 0
    if not (entries % 2 and table.shape == (axes * entries, heads)):
        raise ValueError(
            f"table must have shape ({axes} * (2 * bound + 1), {heads}) for queries of "
            f"{heads} heads; got {tuple(table.shape)}"
        )
    dtype_name(table.dtype)


# Windows and patches


def _groups(like: SparseTensor, rule: tuple, padding: Padding) -> Groups:
    """Return the groups of a rule, built once for each coordinate set."""
    coordinate_set = like.coordinate_set

    def build() -> Groups:
        coordinate_set.index  # noqa: B018 (checks the rows before they are used)
        kind, *rest = rule
        if kind == "window":
            cells = lattice.shifted(coordinate_set.coords, rest[1])
            cells = lattice.as_int32(lattice.cells(cells, rest[0]), "the windows")
            unique = registry.geometry().unique_rows(cells)
            return groups_of(unique.inverse, unique.rows.shape[0], None, padding)
        if kind == "filled":
            return filled_patches(like, *rest, padding)
        if kind == "serialized":
            return groups_of(*_patches(like, *rest), padding)
        rows = batch_rows(like)
        sizes = set(rows.sizes)
        if padding is not EXACT and rows.order is None and len(sizes) == 1:
            return Groups.standing(rows.size, *sizes)
        return groups_of(rows.batch, rows.size, rows.order, padding)

    return coordinate_set.view(("groups", rule, padding), build)


def curve_order(
    x: SparseTensor, order: str = "hilbert", *, bits: int | None = None
) -> mx.array:
    """Return the (N,) int32 rows by batch element, then along a curve.

    Args:
        x: the tensor whose rows are ordered; its features do not matter.
        order: "hilbert" (Skilling, "Programming the Hilbert curve", 2004), or "z", also
            called "morton", with the first axis leading. The ending "-trans" swaps the
            first two axes, as in Point Transformer V3.
        bits: bits of an axis. Cells are then the coordinates themselves, from 0 to ``2
            ** bits - 1``; Hilbert curves with different bits differ. By default cells
            count from the least coordinates, with as many bits as the widest axis
            needs.

    Raises:
        ValueError: there is no such curve, or a coordinate does not fit the bits.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 2, 2, 1)))
        >>> rows = ops.curve_order(x, "hilbert")
        >>> x.coords[rows, 1:].tolist()
        [[0, 0], [0, 1], [1, 1], [1, 0]]
    """
    curve = _curve(x, order, bits)
    if len(x) == 0:
        return mx.zeros((0,), dtype=mx.int32)
    return registry.geometry().curve_order(x.coordinate_set.coords, curve)


def curve_code(
    x: SparseTensor, order: str = "hilbert", *, bits: int | None = None
) -> mx.array:
    """Return the (N,) int64 place of each row on the curve of its batch element.

    Arguments are those of ``curve_order``. The code does not contain the batch index.

    Raises:
        ValueError: as for ``curve_order``, or a code has more than 62 bits.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 2, 2, 1)))
        >>> ops.curve_code(x, "z").tolist()
        [0, 1, 2, 3]
    """
    curve = _curve(x, order, bits)
    if len(x) == 0:
        return mx.zeros((0,), dtype=mx.int64)
    return lattice.curve_codes(x.coordinate_set.coords, curve)


def _curve(x: SparseTensor, order: str, bits: int | None) -> lattice.Curve:
    expect_tensor(x)
    return lattice.curve_of(order, x.coordinate_set.bounds, bits)


def _patches(
    like: SparseTensor, patch: int, curve: str, bits: int | None, shift: int
) -> tuple[mx.array, int, mx.array]:
    """Return (N,) the patch of each row, how many there are, and the curve's order."""
    order, rows = curve_order(like, curve, bits=bits), batch_rows(like)
    batch = like.coordinate_set.coords[:, 0][order]
    rank = mx.arange(len(like), dtype=mx.int32) - mx.array(rows.starts)[batch]
    first = [0, *accumulate(-(-(size + shift) // patch) for size in rows.sizes)]
    along = mx.array(first)[batch] + (rank + shift) // patch
    group = mx.zeros((len(like),), dtype=mx.int32)
    group[order] = along.astype(mx.int32)
    return group, first[-1], order


class FilledLayout:
    """Where the groups of filled patches begin, in slots of keys and in results."""

    def __init__(self, rows: BatchRows, patch: int, padding: Padding):
        sizes = rows.sizes
        whole = [n // patch * patch for n in sizes]
        rests = {b: n % patch for b, n in enumerate(sizes) if n > patch and n % patch}
        shorts = {b: n for b, n in enumerate(sizes) if 0 < n < patch}
        self.is_filling: bool = bool(rests)
        self.pairs: int = patch * (sum(whole) + sum(rests.values()))
        self.pairs += sum(n * n for n in shorts.values())
        self.buckets: list[Bucket] = []
        self.starts: list[int] = []
        self.queries: list[int] = []  # of each group
        self.slots: int = 0
        self.results: int = 0
        # On the curve: where queries begin, how many, and rows before them that fill
        # the patch; and what these take of slots and of results.
        self.pieces: list[tuple[int, int, int, int, int]] = []
        # Of each element as the kernel takes it: where it begins, its rows in whole
        # patches, the first slot of these, those of the rest, and its sizes.
        self.elements: list[list[int]] = [
            [begin, rows, 0, 0, 0, size, patch, 0]
            for begin, rows, size in zip(rows.starts, whole, sizes, strict=False)
        ]
        # Half of the padding may be queries of last patches, half short elements.
        budget, most = padding.budget(self.pairs) // 2, padding.call
        counts = Counter(rests.values())
        if any(whole):
            counts[patch] = sum(whole) // patch
        pairs = partial(padding.pairs, keys=patch)
        for some, end in _cut(rests, counts, pairs, budget, most)[::-1]:
            before = len(self.starts)
            if end == patch:  # the first bucket
                for element in self.elements:
                    begin, rows, *_ = element
                    element[2] = self.slots
                    self.starts += range(self.slots, self.slots + rows, patch)
                    self.queries += [patch] * (rows // patch)
                    self._add(begin, rows, 0, rows, rows)
            end = min(patch, -(-end // padding.tile) * padding.tile)
            for b in some:
                self._add_last(b, rests[b], patch, end)
            self.buckets.append(Bucket(len(self.starts) - before, end, patch, True))
        counts = Counter(shorts.values())
        for some, end in _cut(shorts, counts, padding.pairs, budget, most):
            for b in some:
                self._add_last(b, shorts[b], end, end)
            full = all(shorts[b] == end for b in some)
            self.buckets.append(Bucket(len(some), end, end, full))

    def _add_last(self, element: int, queries: int, keys: int, results: int) -> None:
        begin, rows, *_ = self.elements[element]
        self.elements[element][3:5] = self.slots, self.results
        self.starts.append(self.slots)
        self.queries.append(queries)
        fill = keys - queries if rows else 0
        self._add(begin + rows, queries, fill, keys, results)

    def _add(self, *piece: int) -> None:
        self.pieces.append(piece)
        self.slots += piece[3]
        self.results += piece[4]

    def composed(self, order: mx.array) -> tuple[mx.array | None, ...]:
        """Return what the kernel does, in MLX operations."""
        parts = [], [], []
        for first, count, fill, keys, results in self.pieces:
            rows, before = order[first : first + count], order[first - fill : first]
            missing = mx.full((max(keys, results),), -1, dtype=mx.int32)
            parts[0].extend((rows, before, missing[count + fill : keys]))
            parts[1].extend((rows, missing[count:results]))
            parts[2].extend((rows, missing[count:keys]))
        row, own, queries = map(mx.concatenate, parts)
        slot, place = (inverted(each, len(order)) for each in (queries, own))
        if not self.is_filling:
            return row, own, slot, place, None
        filling = mx.where(queries < 0, row, -1)
        return row, own, slot, place, inverted(filling, len(order))


def _cut(
    sizes: dict[int, int], counts: Counter[int], pairs: Callable, budget: int, most: int
) -> list[tuple[list[int], int]]:
    """Return the elements of each bucket, and the largest of their sizes."""
    ends = cut(sorted(counts.items()), pairs, budget, most)
    return [
        ([b for b, n in sizes.items() if low < n <= end], end)
        for low, end in zip([0, *ends], ends, strict=False)
    ]


def filled_patches(
    like: SparseTensor, patch: int, curve: str, bits: int | None, padding: Padding
) -> Groups:
    """Return patches of which the last of an element is filled from the one before.

    Its queries are the element's last rows alone. A short element is one patch.
    """
    order = curve_order(like, curve, bits=bits)
    layout, kernels = FilledLayout(batch_rows(like), patch, padding), registry.patches()
    if kernels is not None and kernels.takes(len(like)):
        elements = mx.array(layout.elements, dtype=mx.int32)
        ends = layout.slots, layout.results
        lists = kernels.filled(
            order, elements, extents_of(*ends), ends, layout.is_filling
        )
    else:
        lists = layout.composed(order)
    row, own, slot, place, again = (*lists, None)[:5]
    starts = mx.array([*layout.starts, layout.slots], dtype=mx.int32)
    queries = mx.array(layout.queries, dtype=mx.int32)
    lists = row, slot, again, own, place, starts, queries
    return Groups(tuple(layout.buckets), layout.pairs, *lists).masked()


# Attention to sequences


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
        q: (N, heads, D) queries of the rows of ``like``; without ``like`` (B, L, heads,
            D).
        k: (B, M, kv_heads, D) keys, a sequence for each batch element; ``kv_heads``
            divides ``heads``.
        v: (B, M, kv_heads, D_v) values.
        like: the tensor whose N rows the queries are; its features do not matter. The
            sizes of its elements are read once for each coordinate set.
        lengths: (B,) integers: the number of entries that count in each sequence; by
            default all M. The lengths are not read: more than M count as M, and less
            than 0 as 0.
        scale: factor of the scores; by default ``D ** -0.5``.

    Returns:
        The shape of ``q`` with D_v for D, in the dtype of ``q``; the softmax is in
            float32. Rows whose sequence is empty get 0.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit, or there are more batch elements than sequences.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> q = mx.random.normal((len(x), 2, 4))
        >>> k = v = mx.random.normal((1, 5, 2, 4))  # 5 tokens for the one batch element
        >>> ops.cross_attention(q, k, v, x).shape
        (64, 2, 4)
    """
    q, k, v, lengths = arrays_of(q=q, k=k, v=v, lengths=lengths)
    _check_sequences((q, k, v), like, lengths)
    shape = (*q.shape[:-1], v.shape[-1])
    if 0 in shape or k.shape[1] == 0:
        return zeros_of([q, k, v], shape, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else real(scale, "scale")
    on_cpu = registry.serving() == CPU
    attend = _cross_by_kernel if on_cpu else _cross_composed
    return attend((q, k, v), like, lengths, scale).reshape(shape)


def _check_sequences(
    arrays: tuple, like: SparseTensor | None, lengths: mx.array | None
) -> None:
    if any(a is None for a in arrays):
        raise TypeError("q, k and v must be arrays; got None")
    q, k, v = arrays
    rows = "B, L"
    if like is None:
        fits = q.ndim == 4 and k.shape[:1] == q.shape[:1]
    else:
        expect_tensor(like, "like", flags=True)
        rows = len(like)
        fits = q.ndim == 3 and q.shape[0] == rows
    fits = fits and k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    keys = "(B, M, kv_heads, D) and (B, M, kv_heads, D_v)"
    _check_heads(arrays, fits, f"({rows}, heads, D), {keys}")
    if like is not None and like.batch_size > k.shape[0]:
        raise ValueError(
            f"the tensor has {like.batch_size} batch elements, and there are sequences "
            f"for {k.shape[0]}"
        )
    if lengths is not None:
        whole = mx.issubdtype(lengths.dtype, mx.integer)
        if tuple(lengths.shape) != (k.shape[0],) or not whole:
            raise ValueError(
                f"lengths must have shape ({k.shape[0]},), integers, one each; got "
                f"{tuple(lengths.shape)} of {lengths.dtype}"
            )


def _cross_by_kernel(arrays, like, lengths: mx.array | None, scale: float) -> mx.array:
    """Attend by the CPU's kernel, which pads nothing and holds no scores."""
    q, k, _ = arrays
    batches, most = k.shape[:2]
    count, total = prod(q.shape[:-2]), batches * most
    if like is None:
        begins, order = list(range(0, count + 1, q.shape[1])), None
    else:
        rows = batch_rows(like)
        begins, order = [*rows.starts], rows.order
    begins += [count] * (batches + 2 - len(begins))
    sizes = [b - a for a, b in zip(begins, begins[1:], strict=False)]
    places = mx.arange(total, dtype=mx.int32)
    # Entries behind the sequences are a group of their own, without queries.
    ends = mx.full((batches,), most, dtype=mx.int32)
    if lengths is not None:
        ends = mx.clip(lengths.astype(mx.int32), 0, most)
    behind = places % most >= ends[places // most]
    rows = mx.argsort(behind.astype(mx.int32) * total + places).astype(mx.int32)
    back = mx.argsort(rows).astype(mx.int32)
    ends = running_sums(ends)
    starts = mx.concatenate([0 * ends[:1], ends, mx.full_like(ends[:1], total)])
    queries = mx.arange(count, dtype=mx.int32) if order is None else order
    sizes, begins = (mx.array(a, dtype=mx.int32) for a in (sizes, begins[:-1]))

    def again(*flat):
        shaped = [a.reshape(b.shape) for a, b in zip(flat, arrays, strict=True)]
        y = _cross_composed(shaped, like, lengths, scale, reports=False)
        return y.reshape(count, -1, y.shape[-1] // q.shape[-2])

    return by_kernel(
        *(a.reshape(-1, *a.shape[-2:]) for a in arrays),
        (rows, starts, sizes, queries, begins),
        scale,
        gather=lambda a: a[back],
        again=again,
        record=_cross_record(q, batches, 2 * (count * most,), CPU, "attention"),
    )


def _cross_composed(
    arrays, like, lengths: mx.array | None, scale: float, reports: bool = True
) -> mx.array:
    """Attend a bucket at a time, in MLX operations."""
    q, k, v = arrays
    mask, most = None, k.shape[1]
    if lengths is not None:
        # An empty sequence sees its first entry, so that its softmax is finite.
        places = mx.arange(most, dtype=mx.int32)
        inside = places < mx.maximum(lengths.astype(mx.int32), 1)[:, None]
        mask = inside[:, None, None]
        v = mx.where((lengths > 0)[:, None, None, None], v, mx.zeros_like(v))
    if like is None:
        groups, slots = Groups.standing(*q.shape[:2]), [q]
    else:
        groups = _groups(like, ("full",), PADDING[launch.device().backend])
        slots = groups.slots(q)
    buckets = [bucket._replace(length=most) for bucket in groups.buckets]
    if reports:
        count = sum(bucket.groups for bucket in buckets)
        padded = sum(bucket.groups * bucket.queries for bucket in buckets)
        pairs = prod(q.shape[:-2]) * most, padded * most
        record = _cross_record(q, count, pairs, registry.MLX, SDPA)
        report_calls(record, buckets, Heads.of(arrays), [mask] * len(buckets))
    results, first = [], 0
    for bucket, queries in zip(buckets, slots, strict=True):
        some = slice(first, first := first + bucket.groups)
        if groups.members is not None:
            some = groups.members[some]
        keys, values, inside = (a if a is None else a[some] for a in (k, v, mask))
        results += attend_bucket(bucket, (queries, keys, values), inside, scale)
    return groups.collect(results)


def _cross_record(
    q: mx.array, groups: int, pairs: tuple[int, int], backend: str, kernel: str
) -> Attended | None:
    shape = prod(q.shape[:-2]), *q.shape[-2:]
    return attention_record(shape, q.dtype, "cross", groups, pairs, backend, kernel)


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
        read once for each coordinate set.

    Raises:
        ValueError: the lengths do not add up to the rows of the array.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1], [1, 7]]), mx.ones((3, 8)))
        >>> sequences, lengths = ops.to_sequences(x)
        >>> sequences.shape, lengths.tolist()
        ((2, 2, 8), [2, 1])
    """
    if isinstance(x, SparseTensor) or lengths is None:
        expect_tensor(x, flags=True)
        rows, feats = batch_rows(x), x.feats
    else:
        feats, lengths = arrays_of(x=x, lengths=lengths)
        rows = _packed(feats, lengths)
    sizes, n = rows.sizes, feats.shape[0]
    shape = rows.size, max(sizes, default=0), feats.shape[1]
    lengths = mx.array(sizes, dtype=mx.int32)
    if 0 in shape:
        return zeros_of([feats], shape, feats.dtype), lengths
    if rows.order is None and min(sizes) == shape[1]:
        return feats.reshape(shape), lengths
    starts = mx.array(rows.starts, dtype=mx.int32)[:, None]
    row = starts[:-1] + mx.arange(shape[1], dtype=mx.int32)
    inside = row < starts[1:]
    if rows.order is not None:
        row = rows.order[mx.where(inside, row, 0)]
    row = mx.where(inside, row, -1).flatten()
    return move_rows(feats, row, inverted(row, n)).reshape(shape), lengths


def _packed(x: mx.array, lengths: mx.array) -> BatchRows:
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
    return BatchRows(None, (0, *accumulate(sizes)), None)


# Heads: RMS norms, and rotations by coordinates


Angles = Sequence[mx.array]  # the cosine and the sine of every pair, or nothing


def turned_heads(
    qkv: mx.array, scales: Sequence[mx.array] = (), angles: Angles = ()
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Return (N, 3, heads, D) normalised and rotated, as ``full_attention`` takes it.

    By (heads, D) scales of queries and keys, and (N, 1, D / 2) cosine and sine.
    """
    _expect_scales(qkv, scales)
    kernel = registry.heads()
    if kernel is not None and kernel.takes(qkv):
        return _turned_by_kernel(kernel, qkv, 2, scales, angles), None, None
    q, k, v = (a.squeeze(1) for a in mx.split(qkv, 3, axis=1))
    of_q, of_k = scales if scales else (None, None)
    return _turned(q, of_q, angles), _turned(k, of_k, angles), v


def turned_head(
    x: mx.array, scale: mx.array | None = None, angles: Angles = ()
) -> mx.array:
    """Return (N, heads, D) queries, or keys; arguments are as of ``turned_heads``."""
    scales = () if scale is None else (scale,)
    _expect_scales(x, scales)
    kernel, part = registry.heads(), x[:, None]
    if kernel is None or not kernel.takes(part):
        return _turned(x, scale, angles)
    return _turned_by_kernel(kernel, part, 1, scales, angles).squeeze(1)


def _expect_scales(x: mx.array, scales: Sequence[mx.array]) -> None:
    """Raise unless scales are of these heads: a kernel would read beyond them."""
    heads = x.shape[-2:]
    for scale in scales:
        if scale.shape != heads:
            raise ValueError(
                f"the scale of {heads[0]} heads of {heads[1]} channels must have shape "
                f"{heads}; got {scale.shape}"
            )


def _turned(x: mx.array, scale: mx.array | None, angles: Angles) -> mx.array:
    """Normalise and rotate (N, heads, D) in MLX operations."""
    if not x.size:  # MLX's CUDA kernels cannot be launched for no elements
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


def _turned_by_kernel(
    kernel: GpuHeads, x: mx.array, turned: int, scales: Sequence[mx.array], angles
) -> mx.array:
    """Normalise and rotate the first parts of (N, parts, heads, D) in one launch."""
    if len({a.dtype for a in scales}) > 1:
        scales = [a.astype(mx.float32) for a in scales]
    scaled = len(scales)

    def by_operations(x, *rest):
        parts = [a.squeeze(1) for a in mx.split(x, x.shape[1], axis=1)]
        for i in range(turned):
            parts[i] = _turned(parts[i], rest[i] if scaled else None, rest[scaled:])
        return mx.stack(parts, axis=1)

    def forward(x, *rest):
        return kernel.turned(mx.contiguous(x), turned, rest[:scaled], rest[scaled:])

    def back(dy, x, *rest):
        scales, angles = rest[:scaled], rest[scaled:]
        dy, x = mx.contiguous(dy), mx.contiguous(x)
        dx, lines = kernel.gradient(dy, x, turned, scales, angles)
        of_scales = []
        if scaled:
            total = column_sums(lines, scales[0]).reshape(turned, *x.shape[2:])
            of_scales = [a.squeeze(0) for a in mx.split(total, turned)]
        return dx, *of_scales, *[mx.zeros_like(a) for a in angles]

    return ByKernels(forward, back, by_operations)(x, *scales, *angles)


def rotary(
    x: mx.array,
    like: SparseTensor,
    *,
    base: float = 10000.0,
    frequency: float = 1.0,
    positions: mx.array | None = None,
    pairs: str = "neighbours",
) -> mx.array:
    """Rotate queries or keys by their coordinates (rotary position embedding, RoPE).

    Scores then depend on differences of coordinates alone. Each axis has a RoPE of its
    own (Su et al., 2021). The first ``D // 2 // dims`` of the D / 2 pairs of channels
    rotate with the first axis, and so on. Pair j of an axis rotates by
    ``frequency * base ** (-j / pairs)`` radians a cell; the pairs that are left over do
    not rotate. Cells count from the set's least coordinates, so a scene far from the
    origin loses no precision.

    Args:
        x: (N, heads, D) queries or keys.
        like: the tensor whose N rows these are.
        base: ratio of the fastest to (nearly) the slowest rotation.
        frequency: radians a cell of the fastest.
        positions: (N, dims) float32: rotate by these instead of the cells.
        pairs: which channels form a pair: "neighbours", (2 p, 2 p + 1) as in TRELLIS.2,
            or "halves", (j, j + n / 2) of the n channels of an axis, as in Utonia.

    Returns:
        The same shape and dtype; rotated in float32.

    Raises:
        TypeError: x is not floating.
        ValueError: D is odd or too small for a pair on each axis, shapes do not fit, or
            the base is not positive; for "halves", D is not a multiple of twice the
            axes.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> q = mx.random.normal((len(x), 2, 12))
        >>> ops.rotary(q, x).shape
        (64, 2, 12)
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
    like: SparseTensor,
    dim: int,
    base: float,
    frequency: float,
    positions: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the (N, 1, D / 2) float32 cosine and sine of every rotation."""
    if positions is not None:
        return _turns(positions.astype(mx.float32), dim, base, frequency)
    coordinate_set = like.coordinate_set

    def build() -> tuple[mx.array, mx.array]:
        low = mx.array(coordinate_set.bounds[0][1:], dtype=mx.int64)
        cells = (coordinate_set.coords[:, 1:].astype(mx.int64) - low).astype(mx.float32)
        return _turns(cells, dim, base, frequency)

    return coordinate_set.view(("angles", dim, base, frequency), build)


def _turns(places: mx.array, dim: int, base: float, frequency: float):
    """Return what ``angles`` does for (N, dims) places."""
    count, dims = places.shape
    each = dim // 2 // dims
    speed = [frequency * base ** (-j / each) for j in range(each)]
    angle = (places[:, :, None] * mx.array(speed)).reshape(count, dims * each)
    angle = mx.pad(angle, [(0, 0), (0, dim // 2 - dims * each)])[:, None]
    return mx.cos(angle), mx.sin(angle)

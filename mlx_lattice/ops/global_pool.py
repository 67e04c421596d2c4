"""Batch elements as segments of rows: their sums, and global pooling.

Each element's rows are reduced as one slice, so results are the same bits on every
run; where rows are not batch-contiguous they are put in order first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, chain, islice
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..backends import registry
from ..backends.mlx_reductions import BLOCK, segment_sum
from ..backends.norms_protocol import NONE, Fit, RowSegments, from_host
from ..channel_kernels import standard
from ..coordinate_set import CoordinateSet
from ..geometry import sync
from ..reductions import greatest, linear
from ..tensor import SparseTensor, expect_tensor

__all__ = ["global_avg_pool", "global_max_pool", "global_sum_pool"]


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The rows of each batch element: ``order[starts[b]:starts[b + 1]]``."""

    batch: mx.array  # (N,) int32, contiguous: the element of each row
    starts: tuple[int, ...]  # (batch_size + 1,)
    order: mx.array | None  # (N,) int32, or None where the rows are contiguous
    make_begins: Callable[[], mx.array] | None = None  # of ``RowSegments``

    @property
    def size(self) -> int:
        """Number of batch elements."""
        return len(self.starts) - 1

    @cached_property
    def _block_starts(self) -> tuple[int, ...]:
        """The first block of each element, and the number of blocks."""
        sizes = (b - a for a, b in zip(self.starts, self.starts[1:], strict=False))
        return tuple(accumulate((-(-n // BLOCK) for n in sizes), initial=0))

    @cached_property
    def block_batch(self) -> mx.array:
        """(B, 1) int32: the element of each block of at most 1024 of its rows."""
        first = mx.array(self._block_starts[1:], dtype=mx.int32)
        places = mx.arange(self._block_starts[-1], dtype=mx.int32)
        found = mx.searchsorted(first, places, "right").astype(mx.int32)
        return sync.complete(found[:, None])

    @cached_property
    def blocks(self) -> mx.array:
        """(N, 1) int32: the block of each row."""
        place = mx.arange(self.batch.shape[0], dtype=mx.int32)
        if self.order is not None:
            place = mx.argsort(self.order).astype(mx.int32)
        starts = mx.array(self.starts, dtype=mx.int32)
        first = mx.array(self._block_starts, dtype=mx.int32)
        inside = (place - starts[self.batch]) // BLOCK
        return sync.complete((first[self.batch] + inside)[:, None])

    @cached_property
    def segments(self) -> RowSegments:
        """The same for norms."""
        return RowSegments(self.starts, self.batch, self.order, self.make_begins)

    @property
    def counts(self) -> mx.array:
        """(batch_size, 1) float32: rows of each element, at least 1."""
        return self.segments.counts


_batch_rows: WeakKeyDictionary[CoordinateSet, BatchRows] = WeakKeyDictionary()


def batch_rows(x: SparseTensor) -> BatchRows:
    """Return the rows of each batch element; of several read once a set.

    With them those of all levels that are there below the set, which a net asks next.
    """
    expect_tensor(x, flags=True)
    held = x.coordinate_set
    if held not in _batch_rows:
        held.index  # noqa: B018 (checks the batch column before it is used)
        if held.batch_size > 1 and len(held):
            sets = x.manager.levels(held)
            _learn([each for each in sets if each not in _batch_rows])
        else:
            starts = (0, *[len(held)] * held.batch_size)
            batch = sync.complete(_batch_of(held))
            _batch_rows[held] = BatchRows(batch, starts, None)
    return _batch_rows[held]


def _batch_of(held: CoordinateSet) -> mx.array:
    return mx.contiguous(held.coords[:, 0])  # each launch would copy a view


def _learn(sets: Sequence[CoordinateSet]) -> None:
    """Find the rows of several elements in each set. Reads where elements start."""
    batches = [_batch_of(each) for each in sets]
    wanted, counts = [], []
    for held, batch in zip(sets, batches, strict=True):
        numbers = _starts(batch, held.batch_size)
        if not held.is_sorted:
            numbers.append((batch[1:] < batch[:-1]).any().reshape(1))
        wanted += numbers
        counts.append(len(numbers))
    values = iter(sync.read(*wanted))
    found = []
    for held, batch, count in zip(sets, batches, counts, strict=True):
        parts = list(islice(values, count))
        scattered = not held.is_sorted and parts.pop()[0]
        order = None
        if scattered:
            order, parts = _ordered(batch, held.batch_size)
        starts = 0, *chain.from_iterable(parts), len(held)
        sync.complete((batch, order))  # they were, for the starts
        found.append((batch, starts, order))
    begins = cache(partial(from_host, *[starts for _, starts, _ in found]))
    for at, (held, facts) in enumerate(zip(sets, found, strict=True)):
        _batch_rows[held] = BatchRows(*facts, lambda at=at: begins()[at])


def _starts(batch: mx.array, size: int) -> list[mx.array]:
    """Return where sorted elements start but for the first; as ``sync.read`` likes."""
    step = 2 if size <= 9 else size
    return [
        mx.searchsorted(batch, mx.arange(at, min(at + step, size), dtype=mx.int32))
        for at in range(1, size, step)
    ]


def _ordered(batch: mx.array, size: int) -> tuple[mx.array, list]:
    """Return the order of rows that sorts them by element, and ``_starts``, read."""
    n = len(batch)
    kind = mx.int32 if size * n < 2**31 else mx.int64
    keys = batch.astype(kind) * n + mx.arange(n, dtype=kind)
    order = mx.argsort(keys).astype(mx.int32)
    return order, sync.read(*_starts(batch[order], size))


def batch_sum(x: mx.array, rows: BatchRows) -> mx.array:
    """Return the (batch_size, C) sums of float32 (N, C) over each batch element.

    By the kernels of norms, as ``batch_mean``.
    """
    transpose, itself = partial(batch_spread, rows=rows), partial(batch_sum, rows=rows)
    kernels = registry.norms() if x.size else None
    if kernels is None:
        return linear(partial(segment_sum, rows=rows), transpose, itself)(x)
    mean, var, _ = standard(x.shape[1], lines=rows.size)
    fit = Fit(mean, var, None, None, 0.0, NONE, rows.segments)

    def forward(x: mx.array) -> mx.array:
        return kernels.gradient_sums(x, x, fit)[3]

    return linear(forward, transpose, itself)(x)


def batch_spread(y: mx.array, rows: BatchRows) -> mx.array:
    """Return (N, C): the row of (batch_size, C) that belongs to each row's element."""
    run = partial(registry.reductions().gather_sum, table=rows.batch[:, None])
    transpose, itself = partial(batch_sum, rows=rows), partial(batch_spread, rows=rows)
    return linear(run, transpose, itself)(y)


def batch_mean(x: mx.array, rows: BatchRows) -> mx.array:
    """Return the (batch_size, C) float32 means of (N, C) over each batch element.

    By the kernels of norms, where there are any: blocks of rows are summed side by
    side, in two launches, where a sum of segments has one thread for many rows.
    """
    kernels = registry.norms() if x.size else None
    if kernels is None:
        return batch_sum(x.astype(mx.float32), rows) / rows.counts
    dtype = x.dtype  # rules that held x would keep its memory

    def forward(x: mx.array) -> mx.array:
        return kernels.moments(x, rows.segments)[0]

    def transpose(dy: mx.array) -> mx.array:
        return batch_spread(dy / rows.counts, rows).astype(dtype)

    return linear(forward, transpose, partial(batch_mean, rows=rows))(x)


def global_max_pool(x: SparseTensor) -> mx.array:
    """Return the (batch_size, C) greatest features of each batch element.

    Ties, and so gradients, go to the first row; an empty element is 0. Reads the
    sizes of the elements once a coordinate set.
    """
    expect_tensor(x)
    rows = batch_rows(x)
    find = partial(registry.reductions().segment_max, rows=rows)
    return greatest(x.feats, find, lambda: rows.batch[:, None])[0]


def global_sum_pool(x: SparseTensor) -> mx.array:
    """Return the (batch_size, C) sums over each batch element, added in float32.

    An empty element is 0. Reads the sizes of the elements once a coordinate set.
    """
    expect_tensor(x)
    rows = batch_rows(x)
    return batch_sum(x.feats.astype(mx.float32), rows).astype(x.dtype)


def global_avg_pool(x: SparseTensor) -> mx.array:
    """Return the (batch_size, C) means over each batch element, made in float32.

    An empty element is 0. Reads the sizes of the elements once a coordinate set.
    """
    expect_tensor(x)
    rows = batch_rows(x)
    return batch_mean(x.feats, rows).astype(x.dtype)

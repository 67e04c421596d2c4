"""Pooling over the cells under a kernel and over batch elements, with transposes.

Sums accumulate in float32 and are the same bits on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Literal, overload

import mlx.core as mx

from .. import reductions, registry, sync
from ..backends.mlx import BLOCK, segment_sum
from ..checks import array_of
from ..kernel_spec import IntOrTuple, per_axis
from ..reductions import greatest, linear
from ..registry import Fit, RowSegments, standard
from ..relation import Relation, expect_relation
from ..tensor import SparseTensor, expect_tensor
from .convolution import Coordinates, forward_relation, transposed_relation

__all__ = [
    "PoolIndices",
    "global_avg_pool",
    "global_max_pool",
    "global_sum_pool",
    "max_unpool",
    "sparse_pool",
]


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The rows of each batch element: ``order[starts[b]:starts[b + 1]]``."""

    batch: mx.array  # (N,) int32, contiguous: the element of each row
    starts: tuple[int, ...]  # (batch_size + 1,)
    order: mx.array | None  # (N,) int32, or None where the rows are contiguous

    @property
    def size(self) -> int:
        """Number of batch elements."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each element."""
        return [b - a for a, b in pairwise(self.starts)]

    @cached_property
    def _block_starts(self) -> tuple[int, ...]:
        return tuple(accumulate((-(-n // BLOCK) for n in self.sizes), initial=0))

    @cached_property
    def block_batch(self) -> mx.array:
        """(B, 1) int32: the element of each block of at most 1024 of its rows."""
        first = mx.array(self._block_starts[1:], dtype=mx.int32)
        places = mx.arange(self._block_starts[-1], dtype=mx.int32)
        batch = mx.searchsorted(first, places, "right").astype(mx.int32)
        return sync.complete(batch[:, None])

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
        return RowSegments(self.starts, self.batch, self.order)

    @property
    def counts(self) -> mx.array:
        """(batch_size, 1) float32: rows of each element, at least 1."""
        return self.segments.counts


def batch_rows(x: SparseTensor) -> BatchRows:
    """Return the rows of each batch element."""
    expect_tensor(x, flags=True)
    coordinate_set = x.coordinate_set

    def build() -> BatchRows:
        coordinate_set.index  # noqa: B018 (checks the batch column before it is used)
        size, n = coordinate_set.batch_size, len(coordinate_set)
        # Each launch would copy a view.
        batch = mx.contiguous(coordinate_set.coords[:, 0])
        starts, order = (0, *[n] * size), None
        if size > 1 and n:
            starts, order = _read_starts(batch, size, coordinate_set.is_sorted)
        sync.complete((batch, order))
        return BatchRows(batch, starts, order)

    return coordinate_set.view("batch_rows", build)


def _read_starts(
    batch: mx.array, size: int, is_sorted: bool
) -> tuple[tuple[int, ...], mx.array | None]:
    """Return where elements start, and the order that sorts rows by element.

    The order is None if the rows are sorted already.
    """
    n, elements, order = len(batch), mx.arange(1, size, dtype=mx.int32), None
    starts = mx.searchsorted(batch, elements)
    if is_sorted:
        (starts,) = sync.read(starts)
    else:
        starts, is_mixed = sync.read(starts, (batch[1:] < batch[:-1]).any())
        if is_mixed:
            kind = mx.int32 if size * n < 2**31 else mx.int64
            keys = batch.astype(kind) * n + mx.arange(n, dtype=kind)
            order = mx.argsort(keys).astype(mx.int32)
            (starts,) = sync.read(mx.searchsorted(batch[order], elements))
    return (0, *starts, n), order


def batch_sum(x: mx.array, rows: BatchRows) -> mx.array:
    """Return the (batch_size, C) sums of float32 (N, C) over each batch element."""
    transpose, itself = partial(batch_spread, rows=rows), partial(batch_sum, rows=rows)
    kernels = registry.norms() if x.size else None
    if kernels is None:
        return linear(partial(segment_sum, rows=rows), transpose, itself)(x)
    fit = Fit(*standard(x.shape[1], rows.size), segments=rows.segments)

    def forward(x: mx.array) -> mx.array:
        return kernels.gradient_sums(x, x, fit)[3]

    return linear(forward, transpose, itself)(x)


def batch_spread(y: mx.array, rows: BatchRows) -> mx.array:
    """Return (N, C): the row of (batch_size, C) that belongs to each row's element."""
    gather = partial(registry.reductions().gather_sum, table=rows.batch[:, None])
    transpose, itself = partial(batch_sum, rows=rows), partial(batch_spread, rows=rows)
    return linear(gather, transpose, itself)(y)


def global_max_pool(x: SparseTensor) -> mx.array:
    """Return the (batch_size, C) greatest features of each batch element.

    If several rows have the maximum, the gradient goes to the first. An empty element
    is 0. The sizes of the elements are read once for each coordinate set.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0]], [[3.0], [2.0]]]))
        >>> ops.global_max_pool(x).tolist()  # a line for each batch element
        [[5.0], [3.0]]
    """
    expect_tensor(x)
    rows = batch_rows(x)
    find = partial(registry.reductions().segment_max, rows=rows)
    return greatest(x.feats, find, lambda: rows.batch[:, None])[0]


def global_sum_pool(x: SparseTensor) -> mx.array:
    """Return the (batch_size, C) sums over each batch element, added in float32.

    An empty element is 0. The sizes of the elements are read once for each coordinate
    set.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0]], [[3.0], [2.0]]]))
        >>> ops.global_sum_pool(x).tolist()
        [[6.0], [5.0]]
    """
    expect_tensor(x)
    rows = batch_rows(x)
    return batch_sum(x.feats.astype(mx.float32), rows).astype(x.dtype)


def global_avg_pool(x: SparseTensor) -> mx.array:
    """Return the (batch_size, C) means over each batch element, made in float32.

    An empty element is 0. The sizes of the elements are read once for each coordinate
    set.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0]], [[3.0], [2.0]]]))
        >>> ops.global_avg_pool(x).tolist()
        [[3.0], [2.5]]
    """
    expect_tensor(x)
    rows = batch_rows(x)
    sums = batch_sum(x.feats.astype(mx.float32), rows)
    return (sums / rows.counts).astype(x.dtype)


# Of a table of sums, where rows could name the one cell that they lie in: tables of
# cells of 2 or 3 serve convolutions too.
MOST_OFFSETS = 32
POOLS = ("max", "sum", "avg")
COUNTS = ("active", "volume")


@dataclass(frozen=True)
class PoolIndices:
    """Hold the row of each maximum, for ``max_unpool``.

    Attributes:
        rows: (N_out, C) int32: the input row of each maximum, or -1.
        relation: the edges that were pooled over.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [2.0]]]))
        >>> y, indices = ops.max_pool1d(x, return_indices=True)
        >>> indices.rows.tolist()
        [[1], [2]]
    """

    rows: mx.array
    relation: Relation

    @property
    def offsets(self) -> mx.array:
        """(N_out, C) int32: the first kernel offset of each maximum's edge, or -1."""
        table, offsets = self.relation.out_in, mx.full(self.rows.shape, -1, mx.int32)
        for k in reversed(range(self.relation.volume)):
            here = (table[:, k : k + 1] == self.rows) & (self.rows >= 0)
            offsets = mx.where(here, k, offsets)
        return offsets


def _by_cells(relation: Relation) -> bool:
    """Whether rows name their cells, for which tables would have too many offsets."""
    return relation.volume > MOST_OFFSETS and relation.fills_cells


def _sum(x: mx.array, relation: Relation) -> mx.array:
    if _by_cells(relation):
        if not relation.is_to_cells:
            return reductions.gathered(x, relation.cells, relation.cell_order)
        arguments = relation.cells, relation.n_out, relation.cell_order
        return reductions.scattered(x, *arguments)
    return reductions.sum_over(x, relation.out_in, lambda: relation.in_out)


def _mean(x: mx.array, relation: Relation, count: str) -> mx.array:
    if not _by_cells(relation):
        divide_by = {"active": _edges, "volume": _volumes}[count]
        divisors = relation.view(f"{count} places", lambda: divide_by(relation))
        table = relation.out_in
        return reductions.mean_over(x, table, divisors, lambda: relation.in_out)
    if count == "volume":
        total = _sum(x.astype(mx.float32), relation)
        return (total / relation.volume).astype(x.dtype)
    if not relation.is_to_cells:  # a row names one cell
        return _sum(x, relation)
    arguments = relation.cells, relation.n_out, relation.cell_order
    return reductions.averaged(x, *arguments)


def _edges(relation: Relation) -> mx.array:
    """Return (N_out,) int32: the edges of each output row, by no kernel of features."""
    return (relation.out_in >= 0).sum(axis=1).astype(mx.int32)


def _volumes(relation: Relation) -> mx.array:
    return mx.full((relation.n_out,), relation.volume, dtype=mx.int32)


def _max(x: mx.array, relation: Relation) -> tuple[mx.array, mx.array]:
    def find(x):
        return registry.reductions().gather_max(x, relation.out_in)

    return reductions.greatest(x, find, lambda: _reached(relation))


def _reached(relation: Relation) -> mx.array:
    """Return (N_in, K) int32: the output rows that each input reaches, once each."""
    if _by_cells(relation) and relation.is_to_cells:
        return relation.cells
    if relation.spec is not None:  # distinct offsets reach distinct rows
        return relation.in_out

    def build() -> mx.array:
        table = mx.sort(relation.in_out, axis=1)
        again = table[:, 1:] == table[:, :-1]
        rest = mx.where(again, -1, table[:, 1:])
        return mx.concatenate([table[:, :1], rest], axis=1)

    return relation.view("reached", build)


def sparse_pool(
    feats: mx.array, relation: Relation, mode: str = "max", *, count: str = "active"
) -> mx.array:
    """Pool features over any relation that has a neighbour table.

    Only active inputs count: a maximum never starts from zero. The gradient of a
    maximum goes to one input, the first by offset order. An output row with no edge
    is 0 and gives no gradient.

    Args:
        feats: (N_in, C) float32, float16 or bfloat16.
        relation: the edges.
        mode: "max", "sum" or "avg".
        count: what "avg" divides by: "active", the edges of the row, or "volume", K.

    Returns:
        (N_out, C) in the same dtype, accumulated in float32.

    Raises:
        ValueError: shapes do not fit the relation, or it has no table.

    Examples:
        >>> relation = ml.Relation.from_edges([0, 1, 1], [0, 0, 1], [0, 1, 0], 2, 2, 2)
        >>> ops.sparse_pool(mx.array([[1.0], [5.0]]), relation, "avg").tolist()
        [[3.0], [5.0]]
    """
    if mode not in POOLS:
        raise ValueError(f"mode must be one of {POOLS}; got {mode!r}")
    if count not in COUNTS:
        raise ValueError(f"count must be one of {COUNTS}; got {count!r}")
    expect_relation(relation)
    feats = array_of(feats, "features")
    if feats.ndim != 2 or feats.shape[0] != relation.n_in:
        raise ValueError(
            f"features must have shape (N, C) with N = {relation.n_in}, the rows of "
            f"the relation; got {tuple(feats.shape)}"
        )
    if mode == "max":
        return _max(feats, relation)[0]
    if mode == "sum":
        return _sum(feats, relation)
    return _mean(feats, relation, count)


# Pooling of tensors; ``ops/__init__.py`` names it for each number of axes


def _kernel(x: SparseTensor, kernel_size, stride, padding, dilation) -> dict:
    """Return the kernel's arguments; by default a pooling strides by its size."""
    size = per_axis(kernel_size, x.dims, "kernel_size")
    stride = size if stride is None else stride
    return dict(kernel_size=size, stride=stride, padding=padding, dilation=dilation)


@overload
def max_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: Coordinates = None,
    *,
    return_indices: Literal[False] = False,
) -> SparseTensor: ...


@overload
def max_pool(
    x: SparseTensor, *geometry: Any, return_indices: bool, **named: Any
) -> tuple[SparseTensor, PoolIndices]: ...


def max_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: Coordinates = None,
    *,
    return_indices: bool = False,
) -> SparseTensor | tuple[SparseTensor, PoolIndices]:
    """Take the greatest active input of each channel under the kernel.

    Args:
        x: input.
        kernel_size, stride, padding, dilation, support, coordinates: the geometry, as
            for ``conv3d``; ``stride`` is ``kernel_size`` by default.
        return_indices: also return the ``PoolIndices`` that ``max_unpool`` needs.

    Returns:
        Features on the rows of a convolution with the same kernel, in the same order; 0
            if no input is active. Of equal inputs the first by offset order gets the
            gradient.

    Raises:
        ValueError: dimensions, kernel or coordinates do not fit.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> ops.max_pool3d(x, kernel_size=2).shape
        (8, 8)
    """
    kernel = _kernel(x, kernel_size, stride, padding, dilation)
    relation = forward_relation(x, coordinates, support, **kernel)
    feats, rows = _max(x.feats, relation)
    y = SparseTensor.of(x.manager, relation.out_key, feats)
    return (y, PoolIndices(rows, relation)) if return_indices else y


def avg_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: Coordinates = None,
    *,
    count: str = "active",
) -> SparseTensor:
    """Average the active inputs under the kernel, in float32.

    ``count="active"`` divides by the number of active inputs, ``"volume"`` by the size
    of the kernel, as dense pooling does. The other arguments, row order and errors are
    those of ``max_pool3d``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [0.0], [2.0]]]))
        >>> ops.avg_pool1d(x).feats.tolist()  # cell 2 is not active
        [[3.0], [2.0]]
    """
    kernel = _kernel(x, kernel_size, stride, padding, dilation)
    relation = forward_relation(x, coordinates, support, **kernel)
    feats = sparse_pool(x.feats, relation, "avg", count=count)
    return SparseTensor.of(x.manager, relation.out_key, feats)


def sum_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Add up the active inputs under the kernel, in float32.

    Arguments, row order and errors are those of ``max_pool3d``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [0.0], [2.0]]]))
        >>> ops.sum_pool1d(x).feats.tolist()
        [[6.0], [2.0]]
    """
    kernel = _kernel(x, kernel_size, stride, padding, dilation)
    relation = forward_relation(x, coordinates, support, **kernel)
    feats = sparse_pool(x.feats, relation, "sum")
    return SparseTensor.of(x.manager, relation.out_key, feats)


def sum_pool_transpose(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Add up the inputs of each finer row over ``out = in * stride + offset_k``.

    Args:
        x: input.
        kernel_size, stride, padding, dilation: the kernel of the pooling that this
            transposes; ``stride`` is ``kernel_size`` by default.
        coordinates: the output rows; by default the finer set that an earlier strided
            pooling or convolution read.

    Returns:
        Features on exactly those rows; 0 where no input reaches one.

    Raises:
        ValueError: dimensions do not fit, or no target is known.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> coarse = ops.sum_pool3d(x)
        >>> ops.sum_pool_transpose3d(coarse, coordinates=x).feats[0, 0].item()
        8.0
    """
    kernel = _kernel(x, kernel_size, stride, padding, dilation)
    relation = transposed_relation(x, coordinates, **kernel)
    feats = sparse_pool(x.feats, relation, "sum")
    return SparseTensor.of(x.manager, relation.out_key, feats)


def avg_pool_transpose(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Average the active inputs of each finer row, over the same edges.

    Arguments, rows and errors are those of ``sum_pool_transpose3d``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> coarse = ops.avg_pool3d(x)
        >>> ops.avg_pool_transpose3d(coarse, coordinates=x).feats[0, 0].item()
        1.0
    """
    kernel = _kernel(x, kernel_size, stride, padding, dilation)
    relation = transposed_relation(x, coordinates, **kernel)
    feats = sparse_pool(x.feats, relation, "avg")
    return SparseTensor.of(x.manager, relation.out_key, feats)


def upsample_nearest(
    x: SparseTensor, scale: IntOrTuple = 2, coordinates: Coordinates = None
) -> SparseTensor:
    """Give every finer row the features of its cell, ``floor(out / scale)``.

    Args:
        x: input.
        scale: fine cells in a coarse one, int or one per axis.
        coordinates: the finer rows; by default the set that an earlier strided pooling
            or convolution read.

    Returns:
        Features on exactly those rows; 0 where the cell is not active.

    Raises:
        ValueError: dimensions do not fit, or no target is known.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 0], [0, 1]]), mx.array([[1.0], [2.0]]))
        >>> fine = mx.array([[0, 0], [0, 1], [0, 2], [0, 3]])
        >>> ops.upsample_nearest1d(x, coordinates=fine).feats[:, 0].tolist()
        [1.0, 1.0, 2.0, 2.0]
    """
    return sum_pool_transpose(x, scale, padding=0, coordinates=coordinates)


def max_unpool(x: SparseTensor, indices: PoolIndices) -> SparseTensor:
    """Put features back on the rows and channels that ``max_pool`` took them from.

    Args:
        x: features on the rows that the pooling made.
        indices: what ``max_pool(..., return_indices=True)`` returned.

    Returns:
        Features on the rows that were pooled; 0 on rows that were no maximum. A row
            that was the maximum of several windows gets their sum.

    Raises:
        ValueError: ``x`` is not on the pooled rows, or its channels differ.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.array([[[1.0], [5.0], [2.0]]]))
        >>> y, indices = ops.max_pool1d(x, return_indices=True)
        >>> ops.max_unpool(y, indices).feats[:, 0].tolist()
        [0.0, 5.0, 2.0]
    """
    expect_tensor(x)
    if not isinstance(indices, PoolIndices):
        raise TypeError(
            f"indices must be what max_pool(..., return_indices=True) returned; got "
            f"{type(indices).__name__}"
        )
    source, pooled = indices.relation.keys
    if x.key != pooled:
        raise ValueError(
            f"max_unpool needs features on the pooled rows {pooled!r}; got {x.key!r}"
        )
    if x.channels != indices.rows.shape[1]:
        raise ValueError(
            f"the pooled tensor had {indices.rows.shape[1]} channels; got {x.channels}"
        )
    back = _reached(indices.relation)
    feats = reductions.scatter_selected(x.feats, indices.rows, back)
    return SparseTensor.of(x.manager, source, feats)

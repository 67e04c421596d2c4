"""Pooling over the active cells under a kernel, and its transposes.

Everything here is a gather over a neighbour table, one offset at a time: no atomics,
no (N, K, C) array, the same bits on every run. Sums accumulate in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ..coordinate_set import CoordinateKey
from ..kernel import IntOrTuple, per_axis
from ..relation import Relation
from ..tensor import SparseTensor
from .conv import _target

POOLS = ("max", "sum", "avg")
COUNTS = ("active", "volume")


@dataclass(frozen=True)
class PoolIndices:
    """Where each maximum came from; what ``max_unpool`` needs.

    Attributes:
        offsets: (N_out, C) int32: the kernel offset of the winning edge, or -1.
        relation: the edges that were pooled over.
    """

    offsets: mx.array
    relation: Relation

    @property
    def rows(self) -> mx.array:
        """(N_out, C) int32: the input row of each maximum, or -1."""
        rows = _winning_rows(self.offsets, self.relation)
        return mx.where(self.offsets >= 0, rows, -1)


# Linear maps over a relation. Each is the other's (or its own) transpose, so that
# derivatives of every order are again one of them.


def linear(forward, transpose, itself):
    """Wrap a linear function of one array with its derivatives."""
    # Forward mode would descend into operations that have no jvp.
    function = mx.custom_function(lambda x: forward(mx.stop_gradient(x)))
    function.vjp(lambda x, dy, y: transpose(dy))
    function.jvp(lambda x, dx: itself(dx))
    return function


def spare_row(x: mx.array, value: float = 0) -> mx.array:
    """Append one row, which index -1 reads."""
    return mx.concatenate([x, mx.full((1, x.shape[1]), value, dtype=x.dtype)])


def _sum(x: mx.array, relation: Relation) -> mx.array:
    """Return ``y[o] = sum over edges of x[i]``."""

    def forward(x):
        padded, table = spare_row(x), relation.out_in
        y = mx.zeros((relation.n_out, x.shape[1]), dtype=x.dtype)
        for k in range(relation.volume):
            y = y + padded[table[:, k]]
        return y

    transpose = partial(_sum, relation=relation.T)
    return linear(forward, transpose, partial(_sum, relation=relation))(x)


def _winners(x: mx.array, relation: Relation) -> mx.array:
    """Return the (N_out, C) int32 offset of the first greatest input, or -1.

    A NaN counts as infinity, so that it is not lost.
    """
    x, table = mx.stop_gradient(x), relation.out_in
    if relation.n_out == 0:
        return mx.zeros((0, x.shape[1]), dtype=mx.int32)
    padded = spare_row(mx.where(mx.isnan(x), mx.inf, x), -mx.inf)
    # Rows start at their first edge, which wins where every input is -inf.
    first = mx.argmax(table >= 0, axis=1, keepdims=True).astype(mx.int32)
    first = mx.where(mx.any(table >= 0, axis=1, keepdims=True), first, -1)
    shape = relation.n_out, x.shape[1]
    winner, best = mx.broadcast_to(first, shape), mx.full(shape, -mx.inf, x.dtype)
    for k in range(relation.volume):
        value = padded[table[:, k]]
        winner = mx.where(value > best, k, winner)
        best = mx.maximum(value, best)
    return winner


def _winning_rows(winner: mx.array, relation: Relation) -> mx.array:
    """Return (N_out, C) input rows; the spare row where there is no winner."""
    rows = mx.take_along_axis(relation.out_in, mx.maximum(winner, 0), axis=1)
    return mx.where(winner >= 0, rows, relation.n_in)


def _select(x: mx.array, winner: mx.array, relation: Relation) -> mx.array:
    """Return each channel of the input row that the winning edge comes from."""

    def forward(x):
        rows = _winning_rows(winner, relation)
        return mx.take_along_axis(spare_row(x), rows, axis=0)

    transpose = partial(_spread, winner=winner, relation=relation)
    itself = partial(_select, winner=winner, relation=relation)
    return linear(forward, transpose, itself)(x)


def _spread(y: mx.array, winner: mx.array, relation: Relation) -> mx.array:
    """Return ``x[i] = sum of y[o]`` over the edges that won: the transpose."""

    def forward(y):
        padded, won, table = spare_row(y), spare_row(winner, -1), relation.in_out
        x = mx.zeros((relation.n_in, y.shape[1]), dtype=y.dtype)
        for k in range(relation.volume):
            row = table[:, k]
            x = x + mx.where(won[row] == k, padded[row], 0)
        return x

    transpose = partial(_select, winner=winner, relation=relation)
    itself = partial(_spread, winner=winner, relation=relation)
    return linear(forward, transpose, itself)(y)


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
    """
    if mode not in POOLS:
        raise ValueError(f"mode must be one of {POOLS}; got {mode!r}")
    if count not in COUNTS:
        raise ValueError(f"count must be one of {COUNTS}; got {count!r}")
    if feats.ndim != 2 or feats.shape[0] != relation.n_in:
        raise ValueError(
            f"features must have shape (N, C) with N = {relation.n_in}, the rows of "
            f"the relation; got {tuple(feats.shape)}"
        )
    if mode == "max":
        return _max(feats, _winners(feats, relation), relation)
    total = _sum(feats.astype(mx.float32), relation)
    if mode == "avg" and count == "volume":
        total = total / relation.volume
    elif mode == "avg":
        edges = (relation.out_in >= 0).sum(axis=1, keepdims=True)
        total = total / mx.maximum(edges, 1)
    return total.astype(feats.dtype)


def _max(feats: mx.array, winner: mx.array, relation: Relation) -> mx.array:
    # Selecting in float32 loses nothing and makes its gradient add up in float32.
    return _select(feats.astype(mx.float32), winner, relation).astype(feats.dtype)


# Pooling of tensors


def _check_dims(x: SparseTensor, dims: int) -> None:
    if x.dims != dims:
        raise ValueError(
            f"a {dims}D pooling got a tensor with {x.dims} spatial axes; use the "
            f"{x.dims}d name"
        )


def _pooled(x, kernel_size, stride, padding, dilation, support, coordinates, dims):
    """Return the forward relation that a convolution of this kernel would have."""
    _check_dims(x, dims)
    size = per_axis(kernel_size, dims, "kernel_size")
    kernel = dict(
        kernel_size=size,
        stride=size if stride is None else stride,
        padding=padding,
        dilation=dilation,
    )
    if coordinates is None:
        return x.manager.kernel_relation(x.key, support=support, **kernel)
    target = _target(x, coordinates, kernel["stride"], finer=False)
    return x.manager.target_kernel_relation(x.key, target, **kernel)


def max_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    *,
    return_indices: bool = False,
    dims: int,
) -> SparseTensor | tuple[SparseTensor, PoolIndices]:
    """Take the greatest active input of each channel under the kernel.

    Args:
        x: input.
        kernel_size, stride, padding, dilation, support, coordinates: the geometry, as
            for ``conv``; ``stride`` is ``kernel_size`` by default.
        return_indices: also return what ``max_unpool`` needs.
        dims: spatial axes; the 1d to 4d names set it.

    Returns:
        Features on the rows that a convolution of the same kernel would have, in the
        same order; 0 where no input is active. Ties and gradients go to the first
        input by offset order.

    Raises:
        ValueError: dimensions, kernel or coordinates do not fit.
    """
    relation = _pooled(
        x, kernel_size, stride, padding, dilation, support, coordinates, dims
    )
    winner = _winners(x.feats, relation)
    feats = _max(x.feats, winner, relation)
    y = SparseTensor.of(x.manager, relation.keys[1], feats)
    return (y, PoolIndices(winner, relation)) if return_indices else y


def sum_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    *,
    dims: int,
) -> SparseTensor:
    """Add up the active inputs under the kernel, in float32.

    Arguments, row order and errors are those of ``max_pool``.
    """
    relation = _pooled(
        x, kernel_size, stride, padding, dilation, support, coordinates, dims
    )
    feats = sparse_pool(x.feats, relation, "sum")
    return SparseTensor.of(x.manager, relation.keys[1], feats)


def avg_pool(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    support: str = "cell",
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    *,
    count: str = "active",
    dims: int,
) -> SparseTensor:
    """Average the active inputs under the kernel, in float32.

    ``count="active"`` divides by their number, ``"volume"`` by the kernel's, as dense
    pooling does. The other arguments, row order and errors are those of ``max_pool``.
    """
    relation = _pooled(
        x, kernel_size, stride, padding, dilation, support, coordinates, dims
    )
    feats = sparse_pool(x.feats, relation, "avg", count=count)
    return SparseTensor.of(x.manager, relation.keys[1], feats)


def _pool_transpose(
    x: SparseTensor,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple | None = None,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    *,
    mode: str,
    dims: int,
) -> SparseTensor:
    """Pool over ``out = in * stride + offset_k``, onto the finer rows.

    Args:
        x: input.
        kernel_size, stride, padding, dilation: the kernel of the pooling that this
            transposes; ``stride`` is ``kernel_size`` by default.
        coordinates: the output rows; by default the finer set that an earlier strided
            pooling or convolution consumed.
        mode: "sum", or "avg" over the active inputs; the names set it.
        dims: spatial axes; the 1d to 4d names set it.

    Returns:
        Features on exactly those rows; 0 where no input reaches one.

    Raises:
        ValueError: dimensions do not fit, or no target is known.
    """
    _check_dims(x, dims)
    size = per_axis(kernel_size, dims, "kernel_size")
    stride = size if stride is None else stride
    relation = x.manager.transposed_kernel_relation(
        x.key,
        _target(x, coordinates, stride, finer=True),
        kernel_size=size,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    feats = sparse_pool(x.feats, relation, mode)
    return SparseTensor.of(x.manager, relation.keys[1], feats)


def upsample_nearest(
    x: SparseTensor,
    scale: IntOrTuple = 2,
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    *,
    dims: int,
) -> SparseTensor:
    """Give every finer row the features of its cell, ``floor(out / scale)``.

    Args:
        x: input.
        scale: fine cells in a coarse one, int or one per axis.
        coordinates: the finer rows; by default the set that an earlier strided
            pooling or convolution consumed.
        dims: spatial axes; the 1d to 4d names set it.

    Returns:
        Features on exactly those rows; 0 where the cell is not active.

    Raises:
        ValueError: dimensions do not fit, or no target is known.
    """
    return _pool_transpose(
        x, scale, padding=0, coordinates=coordinates, mode="sum", dims=dims
    )


def max_unpool(x: SparseTensor, indices: PoolIndices) -> SparseTensor:
    """Put features back on the rows and channels that won a ``max_pool``.

    Args:
        x: features on the rows that the pooling made.
        indices: what ``max_pool(..., return_indices=True)`` returned.

    Returns:
        Features on the rows that were pooled; 0 on rows that did not win. A row that
        won in several windows gets their sum.

    Raises:
        ValueError: ``x`` is not on the pooled rows, or its channels differ.
    """
    source, pooled = indices.relation.keys
    if x.key != pooled:
        raise ValueError(
            f"max_unpool needs features on the pooled rows {pooled!r}; got {x.key!r}"
        )
    if x.channels != indices.offsets.shape[1]:
        raise ValueError(
            f"the pooled tensor had {indices.offsets.shape[1]} channels; got "
            f"{x.channels}"
        )
    feats = _spread(x.feats.astype(mx.float32), indices.offsets, indices.relation)
    return SparseTensor.of(x.manager, source, feats.astype(x.dtype))


def _family(function, name: str, **fixed) -> list[partial]:
    family = []
    for dims in range(1, 5):
        named = partial(function, dims=dims, **fixed)
        named.__name__ = f"{name}{dims}d"
        named.__doc__ = function.__doc__
        family.append(named)
    return family


max_pool1d, max_pool2d, max_pool3d, max_pool4d = _family(max_pool, "max_pool")
sum_pool1d, sum_pool2d, sum_pool3d, sum_pool4d = _family(sum_pool, "sum_pool")
avg_pool1d, avg_pool2d, avg_pool3d, avg_pool4d = _family(avg_pool, "avg_pool")
(
    sum_pool_transpose1d,
    sum_pool_transpose2d,
    sum_pool_transpose3d,
    sum_pool_transpose4d,
) = _family(_pool_transpose, "sum_pool_transpose", mode="sum")
(
    avg_pool_transpose1d,
    avg_pool_transpose2d,
    avg_pool_transpose3d,
    avg_pool_transpose4d,
) = _family(_pool_transpose, "avg_pool_transpose", mode="avg")
(
    upsample_nearest1d,
    upsample_nearest2d,
    upsample_nearest3d,
    upsample_nearest4d,
) = _family(upsample_nearest, "upsample_nearest")

"""Sparse convolutions as functions: from a tensor and weight to a contraction."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx

from .. import contraction, memory
from ..checks import array_of, arrays_of
from ..coordinate_set import CoordinateKey, coarser, finer, stride_text
from ..epilogue import Epilogue, Moments
from ..kernel_spec import IntOrTuple, explicit_offsets, per_axis
from ..problem import weight_axes
from ..quantized import IntegerWeight, QuantizedWeight
from ..relation import Relation
from ..settings import boundary
from ..tensor import SparseTensor

__all__ = ["sparse_conv"]

Coordinates = SparseTensor | CoordinateKey | mx.array | None
Weight = mx.array | QuantizedWeight | IntegerWeight


# Relations of tensors


def forward_relation(
    x: SparseTensor, coordinates: Coordinates, support: str, **kernel: Any
) -> Relation:
    """Return the forward relation, or the one onto the rows of ``coordinates``."""
    if coordinates is None:
        return x.manager.kernel_relation(x.key, support=support, **kernel)
    target = target_key(x, coordinates, kernel["stride"], is_finer=False)
    return x.manager.target_kernel_relation(x.key, target, **kernel)


def transposed_relation(
    x: SparseTensor, coordinates: Coordinates, generative: bool = False, **kernel: Any
) -> Relation:
    """Return the transposed relation onto ``coordinates``, by default the finer set.

    If ``generative``, the default is all rows that the kernel reaches.
    """
    if generative and coordinates is None:
        return x.manager.generative_relation(x.key, **kernel)
    target = target_key(x, coordinates, kernel["stride"], is_finer=True)
    return x.manager.transposed_kernel_relation(x.key, target, **kernel)


def finer_key(
    x: SparseTensor, coordinates: Coordinates, scale: tuple[int, ...]
) -> CoordinateKey:
    """Return the key of ``coordinates``, by default of the finer set below ``x``."""
    key = target_key(x, coordinates, scale, is_finer=True)
    return x.manager.finer(x.key, scale) if key is None else key


def target_key(
    x: SparseTensor, coordinates: Coordinates, stride: Sequence[int], is_finer: bool
) -> CoordinateKey | None:
    """Return the key of ``coordinates`` in the manager of ``x``; insert an array."""
    if coordinates is None:
        return None
    steps = per_axis(stride, x.dims, "stride")
    expected = finer(x.stride, steps) if is_finer else coarser(x.stride, steps)
    if isinstance(coordinates, SparseTensor) and coordinates.manager is not x.manager:
        other = coordinates.coordinate_set
        facts = other.stride, other.spatial_shape, other.batch_size
        return x.manager.inserted(other.shown, *facts, rows=other.coords).key
    if isinstance(coordinates, SparseTensor | CoordinateKey):
        key = getattr(coordinates, "key", coordinates)
        key = x.manager.key_of(key)
        counts = len(key.stride) == x.dims and len(x.manager[key])
        if counts and key.stride != expected:
            raise ValueError(
                f"coordinates must have stride {stride_text(expected)} for the input "
                f"{x.key!r}; got stride {stride_text(key.stride)}. Pass a tensor or "
                "key of that stride, or an array of rows"
            )
        return key
    coordinates = array_of(coordinates, "coordinates")
    if coordinates.ndim != 2 or coordinates.shape[1] != 1 + x.dims:
        raise ValueError(
            f"coordinates must have shape (M, {1 + x.dims}), a batch index and "
            f"{x.dims} spatial coordinates; got {tuple(coordinates.shape)}"
        )
    return x.manager.inserted(coordinates, expected, batch_size=x.batch_size).key


# Weights, and contractions of tensors


def fitting(
    weight: Weight, dims: int, kernel_size: IntOrTuple | None, offsets: Any = None
) -> Weight:
    """Return a weight, of 4 axes in MLX's layout, checked against the kernel's size."""
    if offsets is not None:
        volume, size = len(explicit_offsets(offsets, dims)), None
    else:
        size = per_axis(kernel_size, dims, "kernel_size")
        volume = prod(size)
    if packed := isinstance(weight, QuantizedWeight | IntegerWeight):
        spatial = weight.kernel or None
    else:
        weight = array_of(weight, "weight")
        # A 1D weight has three axes in both layouts: there it is always MLX's own.
        spatial = tuple(weight.shape[1:-1]) if weight.ndim == dims + 2 else None
    if None not in (spatial, size) and spatial != size:
        raise ValueError(
            f"the weight's spatial shape {spatial} is not kernel_size {size}; expected "
            "(C_out, spatial..., C_in / groups)"
        )
    if len(weight.shape) < 3:
        raise ValueError(
            "a weight must have shape (C_out, spatial..., C_in / groups) or "
            f"(K, C_in / groups, C_out); got {tuple(weight.shape)}"
        )
    if dims == 1 and not packed:
        weight = mx.expand_dims(weight, 2)
    _, offset_count, _, _ = weight_axes(weight.shape)
    if offset_count != volume:
        raise ValueError(
            f"the weight has {offset_count} offsets, the kernel {volume}; expected "
            f"shape (C_out, spatial..., C_in / groups) or ({volume}, C_in / groups, "
            f"C_out), got {tuple(weight.shape)}"
        )
    return weight


def contracted(
    x: SparseTensor,
    w: Weight,
    relation: Relation,
    bias: mx.array | None,
    groups: int,
    epilogue: Epilogue | None = None,
) -> SparseTensor:
    """Contract the features of ``x`` with a checked weight over a relation."""
    if memory.active() is not None:
        after = None if type(epilogue) is Moments else epilogue
        feats = memory.conv(x.feats, w, relation, bias, groups, after)
        boundary(feats)
    else:
        feats = contraction.conv(
            x.feats, w, relation, groups=groups, bias=bias, epilogue=epilogue
        )
    key, coords = relation.out_key, relation.out_coords
    return SparseTensor.trusted(x.manager, key, coords, feats)


# Public functions; ``ops/__init__.py`` names them for each number of axes


def sparse_conv(
    feats: mx.array,
    weight: mx.array | QuantizedWeight,
    relation: Relation,
    bias: mx.array | None = None,
    *,
    groups: int = 1,
) -> mx.array:
    """Contract features with a weight over any relation.

    Args:
        feats: (N_in, C_in).
        weight: (K, C_in / groups, C_out), (C_out, spatial..., C_in / groups), or
            packed.
        relation: the edges.
        bias: (C_out,), added to every output row.
        groups: channel groups.

    Returns:
        (N_out, C_out): ``y[o] = sum over edges (i, o, k) of x[i] @ W[k] + bias``.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit.

    Examples:
        >>> points = mx.random.uniform(shape=(100, 4)) * mx.array([0.0, 1.0, 1.0, 1.0])
        >>> relation = ops.knn(points, k=8).relation(by_rank=True)
        >>> weight = mx.random.normal((8, 3, 16))  # one matrix for each rank
        >>> ops.sparse_conv(points[:, 1:], weight, relation).shape
        (100, 16)
    """
    feats, bias = arrays_of(feats=feats, bias=bias)
    if not isinstance(weight, QuantizedWeight | IntegerWeight):
        weight = array_of(weight, "weight")
    return contraction.conv(feats, weight, relation, groups=groups, bias=bias)


def conv(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 3,
    stride: IntOrTuple = 1,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    offsets: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
    support: str = "cell",
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Apply a sparse convolution: ``y[o] = sum of x[o * stride + offset_k] @ W[k]``.

    Args:
        x: input.
        weight: (C_out, spatial..., C_in / groups) or, in 2 to 4 dimensions, (K,
            C_in / groups, C_out); or a packed weight.
        bias: (C_out,).
        kernel_size, stride, padding, dilation: int or one per axis; ``padding=None``
            centres the kernel, an int is the dense rule of PyTorch.
        offsets: explicit kernel offsets instead of ``kernel_size``.
        groups: channel groups.
        support: "cell" keeps ``floor(in / stride)``; "reach" every row that an input
            reaches, as dense convolution does.
        coordinates: compute exactly these output rows instead, in their order: a
            tensor, a key or (N, 1 + D) int32 rows. If they belong to the manager of
            ``x``, their stride must be that of the convolution's output.

    Returns:
        Features on the output rows; rows that the library makes are sorted.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes, dimensions or coordinates do not fit.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> weight = mx.random.normal((16, 2, 2, 2, 8))
        >>> ops.conv3d(x, weight, kernel_size=2, stride=2).shape
        (8, 16)
    """
    w, (bias,) = fitting(weight, x.dims, kernel_size, offsets), arrays_of(bias=bias)
    relation = forward_relation(
        x,
        coordinates,
        support,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        offsets=offsets,
    )
    return contracted(x, w, relation, bias, groups)


def subm_conv(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 3,
    dilation: IntOrTuple = 1,
    offsets: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
) -> SparseTensor:
    """Apply a submanifold convolution: the output has the rows and key of the input.

    Arguments and errors are those of ``conv3d``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> weight = mx.random.normal((16, 3, 3, 3, 8))
        >>> ops.subm_conv3d(x, weight).shape
        (64, 16)
    """
    w, (bias,) = fitting(weight, x.dims, kernel_size, offsets), arrays_of(bias=bias)
    relation = x.manager.submanifold_kernel_relation(
        x.key, kernel_size=kernel_size, dilation=dilation, offsets=offsets
    )
    return contracted(x, w, relation, bias, groups)


def conv_transpose(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple = 2,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Apply a transposed convolution: ``out = in * stride + offset_k``.

    Output rows are ``coordinates``. By default they are the finer set that an earlier
    strided convolution read. With stride 1 they are the rows of the input. Arguments
    and errors are those of ``conv3d``.

    Examples:
        >>> x = ml.SparseTensor.from_dense(mx.ones((1, 4, 4, 4, 8)))
        >>> weight = mx.random.normal((4, 2, 2, 2, 8))
        >>> coarse = ops.max_pool3d(x)
        >>> ops.conv_transpose3d(coarse, weight, coordinates=x).shape
        (64, 4)
    """
    kernel = kernel_size, stride, padding, dilation
    return _transposed(x, weight, bias, *kernel, groups, coordinates, False)


def generative_conv_transpose(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 2,
    stride: IntOrTuple = 2,
    padding: IntOrTuple | None = None,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    coordinates: Coordinates = None,
) -> SparseTensor:
    """Apply a transposed convolution onto every row that the kernel reaches.

    The rows are sorted and unique. With ``coordinates`` exactly those rows are
    computed, in their order. Arguments and errors are those of ``conv3d``.

    Examples:
        >>> x = ml.SparseTensor(mx.array([[0, 5, 5, 5]]), mx.ones((1, 8)))
        >>> weight = mx.random.normal((4, 2, 2, 2, 8))
        >>> ops.generative_conv_transpose3d(x, weight).shape
        (8, 4)
    """
    kernel = kernel_size, stride, padding, dilation
    return _transposed(x, weight, bias, *kernel, groups, coordinates, True)


def _transposed(
    x, weight, bias, kernel_size, stride, padding, dilation, groups, coordinates,
    generative: bool,
) -> SparseTensor:  # fmt: skip
    w, (bias,) = fitting(weight, x.dims, kernel_size), arrays_of(bias=bias)
    relation = transposed_relation(
        x,
        coordinates,
        generative,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    return contracted(x, w, relation, bias, groups)

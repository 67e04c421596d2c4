"""Sparse convolutions as functions of tensors and weights, in 1 to 4 dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from .. import contraction
from ..coordinate_set import CoordinateKey, exact_ratio
from ..kernel_spec import IntOrTuple, per_axis
from ..quantized import QuantizedWeight
from ..relation import Relation
from ..tensor import SparseTensor, expect_tensor


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
    """
    w = kernel_major(weight)
    return contraction.conv(feats, w, relation, groups=groups, bias=bias)


def kernel_major(weight: mx.array | QuantizedWeight) -> mx.array | QuantizedWeight:
    """Return a weight as (K, C_in / groups, C_out); a view wherever MLX allows one.

    A packed weight has one storage for every layout, and stays as it is.
    """
    if isinstance(weight, QuantizedWeight) or weight.ndim == 3:
        return weight
    if weight.ndim < 3:
        raise ValueError(
            "a weight must have shape (C_out, spatial..., C_in / groups) or "
            f"(K, C_in / groups, C_out); got {tuple(weight.shape)}"
        )
    flat = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return flat.transpose(1, 2, 0)


def _check_kernel(x: SparseTensor, dims: int, weight, kernel_size, offsets=None):
    """Return the weight kernel-major after checking it against the kernel's size."""
    expect_tensor(x)
    if x.dims != dims:
        raise ValueError(
            f"a {dims}D convolution got a tensor with {x.dims} spatial axes; use the "
            f"{x.dims}d name"
        )
    if offsets is not None:
        volume, size = len(offsets), None
    else:
        size = per_axis(kernel_size, dims, "kernel_size")
        volume = 1
        for extent in size:
            volume *= extent
    packed = isinstance(weight, QuantizedWeight)
    if packed:
        spatial = weight.kernel or None
    else:
        # A 1D weight has three axes in both layouts: there it is always MLX's own.
        spatial = tuple(weight.shape[1:-1]) if weight.ndim == dims + 2 else None
    if None not in (spatial, size) and spatial != size:
        raise ValueError(
            f"the weight's spatial shape {spatial} is not kernel_size {size}; expected "
            "(C_out, spatial..., C_in / groups)"
        )
    if dims == 1 and not packed:
        weight = weight.transpose(1, 2, 0)
    w = kernel_major(weight)
    if w.shape[0] != volume:
        raise ValueError(
            f"the weight has {w.shape[0]} offsets, the kernel {volume}; expected shape "
            f"(C_out, spatial..., C_in / groups) or ({volume}, C_in / groups, C_out), "
            f"got {tuple(weight.shape)}"
        )
    return w


def _key(x: SparseTensor, coordinates) -> CoordinateKey | None:
    """Return the key of an explicit target: a tensor, a key or coordinate rows."""
    if coordinates is None:
        return None
    if isinstance(coordinates, SparseTensor):
        if coordinates.manager is x.manager:
            return coordinates.key
        return x.manager.insert(
            coordinates.coords,
            coordinates.stride,
            spatial_shape=coordinates.spatial_shape,
            batch_size=coordinates.batch_size,
        )
    if isinstance(coordinates, CoordinateKey):
        return x.manager.key_of(coordinates)
    return None


def _target(x: SparseTensor, coordinates, stride, finer: bool):
    """Return the target's key, giving bare rows the stride that the step implies."""
    key = _key(x, coordinates)
    if key is not None or coordinates is None:
        return key
    steps = per_axis(stride, x.dims, "stride")
    pairs = zip(x.stride, steps, strict=True)
    target = [exact_ratio(s, t) if finer else s * t for s, t in pairs]
    return x.manager.insert(coordinates, target, batch_size=x.batch_size)


def _apply(x: SparseTensor, w, relation, bias, groups) -> SparseTensor:
    feats = sparse_conv(x.feats, w, relation, bias, groups=groups)
    return SparseTensor.of(x.manager, relation.keys[1], feats)


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
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    dims: int,
) -> SparseTensor:
    """Convolve: ``y[o] = sum of x[o * stride + offset_k] @ W[k]``.

    Args:
        x: input.
        weight: (C_out, spatial..., C_in / groups) or, in 2 to 4 dimensions, (K,
            C_in / groups, C_out); or a packed one.
        bias: (C_out,).
        kernel_size, stride, padding, dilation: int or one per axis; ``padding=None``
            centres the kernel, an int is the dense rule of PyTorch.
        offsets: explicit kernel offsets instead of ``kernel_size``.
        groups: channel groups.
        support: "cell" keeps ``floor(in / stride)``; "reach" every row that an input
            reaches, as dense convolution does.
        coordinates: compute exactly these output rows instead, in their order.
        dims: spatial axes; the 1d to 4d names set it.

    Returns:
        Features on the output rows; rows that the library makes are sorted.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes, dimensions or coordinates do not fit.
    """
    w = _check_kernel(x, dims, weight, kernel_size, offsets)
    kernel = dict(
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        offsets=offsets,
    )
    if coordinates is None:
        relation = x.manager.kernel_relation(x.key, support=support, **kernel)
    else:
        target = _target(x, coordinates, stride, finer=False)
        relation = x.manager.target_kernel_relation(x.key, target, **kernel)
    return _apply(x, w, relation, bias, groups)


def subm_conv(
    x: SparseTensor,
    weight: mx.array | QuantizedWeight,
    bias: mx.array | None = None,
    *,
    kernel_size: IntOrTuple = 3,
    dilation: IntOrTuple = 1,
    offsets: Sequence[Sequence[int]] | None = None,
    groups: int = 1,
    dims: int,
) -> SparseTensor:
    """Convolve on the input's own rows, which keep their order and key.

    Arguments and errors are those of ``conv``.
    """
    w = _check_kernel(x, dims, weight, kernel_size, offsets)
    relation = x.manager.submanifold_kernel_relation(
        x.key, kernel_size=kernel_size, dilation=dilation, offsets=offsets
    )
    return _apply(x, w, relation, bias, groups)


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
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    dims: int,
) -> SparseTensor:
    """Convolve with the roles swapped: ``out = in * stride + offset_k``.

    Output rows are ``coordinates``, or the finer set that an earlier strided
    convolution consumed. Arguments and errors are those of ``conv``.
    """
    w = _check_kernel(x, dims, weight, kernel_size)
    relation = x.manager.transposed_kernel_relation(
        x.key,
        _target(x, coordinates, stride, finer=True),
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    return _apply(x, w, relation, bias, groups)


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
    coordinates: SparseTensor | CoordinateKey | mx.array | None = None,
    dims: int,
) -> SparseTensor:
    """Transposed convolution that makes its own rows: all that the kernel reaches.

    With ``coordinates`` it computes exactly those rows. Arguments and errors are
    those of ``conv``.
    """
    kernel = dict(
        kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
    )
    if coordinates is not None:
        return conv_transpose(
            x,
            weight,
            bias,
            groups=groups,
            coordinates=coordinates,
            dims=dims,
            **kernel,
        )
    w = _check_kernel(x, dims, weight, kernel_size)
    relation = x.manager.generative_relation(x.key, **kernel)
    return _apply(x, w, relation, bias, groups)


def family(function, name: str, **fixed) -> list[partial]:
    """Return the 1d to 4d functions of one that takes ``dims``, named after it."""
    named = [partial(function, dims=dims, **fixed) for dims in range(1, 5)]
    for dims, each in enumerate(named, 1):
        each.__name__, each.__doc__ = f"{name}{dims}d", function.__doc__
    return named


conv1d, conv2d, conv3d, conv4d = family(conv, "conv")
subm_conv1d, subm_conv2d, subm_conv3d, subm_conv4d = family(subm_conv, "subm_conv")
conv_transpose1d, conv_transpose2d, conv_transpose3d, conv_transpose4d = family(
    conv_transpose, "conv_transpose"
)
(
    generative_conv_transpose1d,
    generative_conv_transpose2d,
    generative_conv_transpose3d,
    generative_conv_transpose4d,
) = family(generative_conv_transpose, "generative_conv_transpose")
